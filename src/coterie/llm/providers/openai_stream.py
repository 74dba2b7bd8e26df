"""An answer put together from the pieces in which a chat completion comes.

An answer as it is read off the wire.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

import msgspec

from coterie.ids import new_id
from coterie.llm.providers import errors
from coterie.llm.providers.errors import Asked
from coterie.llm.service import Transient
from coterie.llm.types import Answer, Call, Delta, Usage
from coterie.sse_parser import ServerSentEvent, SseParser
from coterie.text import clean

MAX_CALLS = 64
MAX_DEPTH = 64
_MAX_NAME = 256
_MAX_RAW = 100_000
_USABLE_ID = re.compile(r"[!-~]{1,64}")
_Finish = Literal["stop", "tool_calls", "length", "content_filter"]
_FINISH: dict[str, _Finish] = {
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
    "safety": "content_filter",
}


class Unusable(Exception):
    """The pieces make no answer; the message says why."""


@dataclass(slots=True)
class _Draft:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Assembly:
    """Takes chunks of a stream, or one whole completion, as decoded JSON; tolerant of what servers leave out."""

    def __init__(self, *, taken_ids: Collection[str] = (), names: Mapping[str, str] | None = None) -> None:
        self.begun = False
        self.finish: str | None = None
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._drafts: list[_Draft] = []
        self._by_index: dict[int, _Draft] = {}
        self._usage = Usage()
        self._taken = set(taken_ids)
        self._names = names or {}

    def add(self, chunk: object) -> str:
        """Takes one chunk and gives the text in it."""
        if not isinstance(chunk, dict):
            raise Unusable("a piece of it is no JSON object")
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = _usage(usage)
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return ""
        self.begun = True
        if isinstance(finish := choice.get("finish_reason"), str) and finish:
            self.finish = finish
        if isinstance(whole := choice.get("message"), dict):
            return self._said(whole, whole=True)
        piece = choice.get("delta")
        return self._said(piece) if isinstance(piece, dict) else ""

    def answer(self, service: str) -> Answer:
        if not self.begun:
            raise Unusable("it holds no choices")
        calls = tuple(self._call(draft) for draft in self._drafts)
        text = "".join(self._text) or "".join(self._refusal)
        ended: _Finish = "tool_calls" if calls else "stop"
        finish = _FINISH.get((self.finish or "").lower(), ended)
        return Answer(text=text, calls=calls, usage=self._usage, service=service, finish=finish)

    def _said(self, said: Mapping[str, Any], *, whole: bool = False) -> str:
        if isinstance(refusal := said.get("refusal"), str):
            self._refusal.append(clean(refusal))
        if isinstance(calls := said.get("tool_calls"), list):
            for place, call in enumerate(calls):
                self._take(call, place if whole else None)
        text = clean(_text(said.get("content")))
        if text:
            self._text.append(text)
        return text

    def _take(self, piece: object, place: int | None) -> None:
        if not isinstance(piece, dict):
            raise Unusable("a tool call in it is no object")
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        name, call_id = _string(function.get("name")), _string(piece.get("id"))
        index = piece.get("index") if place is None else place
        draft = self._draft(index if isinstance(index, int) else None, call_id, name)
        draft.id = draft.id or call_id
        draft.name = draft.name or name
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            draft.arguments.append(arguments)
        elif arguments is not None:
            # Some servers give the arguments as the JSON value itself.
            draft.arguments.append(_written(arguments))

    def _draft(self, index: int | None, call_id: str, name: str) -> _Draft:
        """The call a piece belongs to: by its index, though some servers give every call the same one, or none."""
        known = self._last() if index is None else self._by_index.get(index)
        another = index is None or (call_id and known and call_id != known.id)
        if known and not (name and known.name and another):
            return known
        if len(self._drafts) == MAX_CALLS:
            raise Unusable(f"it holds more than {MAX_CALLS} tool calls")
        draft = _Draft()
        self._drafts.append(draft)
        if index is not None:
            self._by_index[index] = draft
        return draft

    def _last(self) -> _Draft | None:
        return self._drafts[-1] if self._drafts else None

    def _call(self, draft: _Draft) -> Call:
        name = clean(draft.name)[:_MAX_NAME]
        if not name:
            raise Unusable("a tool call in it has no name")
        raw = "".join(draft.arguments)
        arguments = _arguments(raw)
        wrong = None if arguments is not None else clean(raw)[:_MAX_RAW]
        return Call(id=self._id(draft), name=self._names.get(name, name), arguments=arguments or {}, raw=wrong)

    def _id(self, draft: _Draft) -> str:
        """The call's own id where it is fit and nobody has it yet; some servers count from zero in every answer."""
        fit = _USABLE_ID.fullmatch(draft.id) and draft.id not in self._taken
        call_id = draft.id if fit else f"call_{new_id()[-24:]}"
        self._taken.add(call_id)
        return call_id


def decode(data: bytes | str) -> Any:
    """JSON, or ValueError. What fast and strict msgspec refuses may still be understood: lone surrogates, bad UTF-8."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (ValueError, msgspec.MsgspecError):
        pass
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _arguments(raw: str) -> dict[str, Any] | None:
    """The arguments object, or None where the model wrote something else."""
    if not raw.strip():
        return {}
    try:
        value = _tidy(decode(raw))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _written(value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "(nested too deep)"


def _tidy(value: Any, depth: int = 0) -> Any:
    """`value` as every engine stores it alike; ValueError where none could."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(key): _tidy(item, depth + 1) for key, item in value.items()}
        case list():
            return [_tidy(item, depth + 1) for item in value]
        case float() if not math.isfinite(value):
            raise ValueError("no number")
    return value


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts: Iterable[object] = content if isinstance(content, list) else ()
    return "".join(_string(part.get("text")) for part in parts if isinstance(part, dict))


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _usage(usage: Mapping[str, Any]) -> Usage:
    def count(key: str) -> int:
        value = usage.get(key)
        return value if isinstance(value, int) and 0 <= value < 2**53 else 0

    return Usage(input_tokens=count("prompt_tokens"), output_tokens=count("completion_tokens"))


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
        self._events = SseParser()
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
        text = self._texts(event for event in self._events.end() if event.data == _DONE or _is_json(event.data))
        rest = self._events.other.strip()
        if rest and not self._assembly.begun:
            text += self._document(rest)
        elif rest and _is_json(rest):
            self._add(decode(rest))
        return text

    def answer(self) -> Answer:
        if not self._seen:
            raise errors.empty(self._asked)
        if self._assembly.begun and not self.complete:
            raise errors.cut(self._asked)
        try:
            answer = self._assembly.answer(self._asked.service)
        except Unusable as error:
            raise errors.malformed(self._asked, str(error)) from None
        if answer.finish == "content_filter" and not answer.text and not answer.calls:
            raise errors.filtered(self._asked)
        return answer

    def _texts(self, events: Iterable[ServerSentEvent]) -> str:
        texts = []
        for event in events:
            if event.data == _DONE:
                self.done = True
                break
            texts.append(self._add(self._decoded(event.data)))
        return "".join(texts)

    def _document(self, document: bytes) -> str:
        text = self._add(self._decoded(document))
        self.done = True
        return text

    def _decoded(self, data: bytes) -> object:
        try:
            return decode(data)
        except ValueError:
            raise errors.malformed(self._asked, "it is no JSON") from None

    def _add(self, chunk: object) -> str:
        if isinstance(chunk, dict) and chunk.get("error"):
            raise errors.failure(self._asked, errors.told_in_answer(chunk["error"]), self._now)
        try:
            return self._assembly.add(chunk)
        except Unusable as error:
            raise errors.malformed(self._asked, str(error)) from None


def _is_json(data: bytes) -> bool:
    try:
        decode(data)
    except ValueError:
        return False
    return True
