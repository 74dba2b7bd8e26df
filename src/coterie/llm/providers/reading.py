"""An answer as it is read off the wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from datetime import datetime
from typing import Protocol

from coterie.llm.chat import Answer, Delta
from coterie.llm.providers import outcomes
from coterie.llm.providers.assembly import Assembly, Unusable, decode
from coterie.llm.providers.outcomes import Asked
from coterie.llm.providers.stream import EventReader
from coterie.llm.service import Transient

_DONE = b"[DONE]"


class Body(Protocol):
    """Where the bytes come from."""

    async def read(self) -> bytes:
        """The next ones within the deadlines, none at the end; or a ServiceError."""
        ...

    async def finish(self) -> None:
        """Nothing more is wanted."""
        ...


async def read_answer(body: Body, reading: Reading) -> AsyncGenerator[Delta | Answer, None]:
    while not reading.done:
        chunk = await _next(body, reading)
        text = reading.take(chunk) if chunk else reading.end()
        if text:
            yield Delta(text)
        if not chunk:
            break
    answer = reading.answer()
    await body.finish()
    yield answer


async def _next(body: Body, reading: Reading) -> bytes:
    try:
        return await body.read()
    except Transient:
        if reading.complete:
            return b""
        raise


class Reading:
    """Takes the bytes of an answer, a stream of events or one document, and gives the text in them, then the whole.

    It knows nothing of connections and time, so every way an answer can be wrong is tried without either.
    """

    def __init__(self, asked: Asked, assembly: Assembly, now: datetime) -> None:
        self.done = False
        """The server has said that nothing more comes."""
        self._asked, self._assembly, self._now = asked, assembly, now
        self._events = EventReader()
        self._seen = False

    @property
    def complete(self) -> bool:
        """The model has finished; whatever happens to the connection from here on loses nothing."""
        return self.done or self._assembly.finish is not None

    def take(self, chunk: bytes) -> str:
        """The text that `chunk` completes."""
        self._seen = self._seen or not chunk.isspace()
        return self._texts(self._events.feed(chunk))

    def end(self) -> str:
        """The bytes have ended; what they were no events in is one document, or the last words of a broken stream."""
        text = self._texts(event for event in self._events.end() if event == _DONE or _is_json(event))
        rest = self._events.other.strip()
        if rest and not self._assembly.begun:
            text += self._document(rest)
        elif rest and _is_json(rest):
            self._add(decode(rest))
        return text

    def answer(self) -> Answer:
        if not self._seen:
            raise outcomes.empty(self._asked)
        if self._assembly.begun and not self.complete:
            raise outcomes.cut(self._asked)
        try:
            answer = self._assembly.answer(self._asked.service)
        except Unusable as error:
            raise outcomes.malformed(self._asked, str(error)) from None
        if answer.finish == "content_filter" and not answer.text and not answer.calls:
            raise outcomes.filtered(self._asked)
        return answer

    def _texts(self, events: Iterable[bytes]) -> str:
        texts = []
        for event in events:
            if event == _DONE:
                self.done = True
                break
            texts.append(self._add(self._decoded(event)))
        return "".join(texts)

    def _document(self, document: bytes) -> str:
        text = self._add(self._decoded(document))
        self.done = True
        return text

    def _decoded(self, data: bytes) -> object:
        try:
            return decode(data)
        except ValueError:
            raise outcomes.malformed(self._asked, "it is no JSON") from None

    def _add(self, chunk: object) -> str:
        if isinstance(chunk, dict) and chunk.get("error"):
            raise outcomes.failure(self._asked, outcomes.told_in_answer(chunk["error"]), self._now)
        try:
            return self._assembly.add(chunk)
        except Unusable as error:
            raise outcomes.malformed(self._asked, str(error)) from None


def _is_json(data: bytes) -> bool:
    try:
        decode(data)
    except ValueError:
        return False
    return True
