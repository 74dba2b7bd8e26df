"""What is being said right now. Nothing of it is stored: a reply exists once its message does.

What is being said in one process is heard in every other one that runs the same society.

Pieces are gathered and whispered, not stored. Whoever comes late, or missed one, asks, and is told the whole again; a
reply that nothing more is heard of has ended with its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Protocol

import msgspec

from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.ids import new_id
from coterie.supervision import supervise
from coterie.text import clean

log = logging.getLogger(__name__)

Outcome = Literal["stored", "withdrawn", "stopped", "failed"]


@dataclass(slots=True, kw_only=True)
class Draft:
    """A reply that a model is in the middle of."""

    id: str
    agent_id: str
    pieces: list[str] = field(default_factory=list)
    length: int = 0
    outcome: Outcome | None = None
    """None: still streaming."""
    messages: Sequence[str] = ()
    """What it was stored as."""

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""


class Listener(Protocol):
    def __call__(self, draft: Draft) -> None: ...


class Live:
    """Keeps the replies under way, and tells listeners when one begins, grows or ends. Listeners must not wait."""

    def __init__(self) -> None:
        self._drafts: dict[str, Draft] = {}
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` from now on, until the function returned is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def drafts(self) -> Sequence[Draft]:
        return tuple(self._drafts.values())

    def say(self, agent_id: str, draft_id: str, text: str) -> None:
        """One more piece of a reply; the first one begins it."""
        draft = self._drafts.get(draft_id)
        if draft is None:
            draft = self._drafts[draft_id] = Draft(id=draft_id, agent_id=agent_id)
        draft.pieces.append(text)
        draft.length += len(text)
        self._tell(draft)

    def end(self, draft_id: str, outcome: Outcome, messages: Sequence[str] = ()) -> None:
        """A reply is over; one that never began is nothing to tell of."""
        draft = self._drafts.pop(draft_id, None)
        if draft is None:
            return
        draft.outcome, draft.messages = outcome, tuple(messages)
        self._tell(draft)

    def _tell(self, draft: Draft) -> None:
        for listener in tuple(self._listeners):
            listener(draft)


GATHER = timedelta(milliseconds=100)
"""How long pieces are gathered before they go out as one."""
SIGN_OF_LIFE = timedelta(seconds=5)
SILENCE = timedelta(seconds=16)
"""A reply of which nothing is heard for so long has ended with its process."""
PIECE = 1_000
"""Characters in a word: six bytes each at most, and a word has to have fewer than 8,000."""
AT_ONCE = 32
"""Words in one round. What does not fit goes with the next, so a flood of text costs the database no more than this."""
NAMED = 50
"""Stored messages that the end of a reply names."""


class Said(msgspec.Struct, frozen=True, tag="said", omit_defaults=True):
    by: str
    draft: str
    agent: str
    start: int
    """How much was said before it."""
    text: str = ""
    outcome: Outcome | None = None
    messages: tuple[str, ...] = ()


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """Please tell everything again."""

    by: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Whoever works for this agent shall end its turn."""

    by: str
    agent: str


Word = Said | Asked | Stop
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Word).decode


class Wire(Protocol):
    heard: Callable[[str], None]

    async def whisper(self, words: Sequence[str]) -> None: ...


@dataclass(slots=True)
class _Foreign:
    """A reply under way elsewhere."""

    by: str
    agent: str
    length: int
    heard_at: float


class Relay:
    def __init__(self, live: Live, wire: Wire, clock: Clock, stop: Callable[[str], object]) -> None:
        """`stop`: end what an agent does here, if it does anything here."""
        self._live, self._wire, self._clock, self._stop = live, wire, clock, stop
        self._me = new_id()
        self._said, self._never = asyncio.Event(), asyncio.Event()
        self._growing: dict[str, Draft] = {}
        self._sent: dict[str, int] = {}
        self._foreign: dict[str, _Foreign] = {}
        self._orders: list[Word] = [Asked(self._me)]
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._wire.heard = self._hear
        self._live.listen(self._follow)
        self._said.set()
        telling = supervise("telling other processes what is being said", self._tell_for_ever, self._clock)
        self._task = asyncio.create_task(telling, name="coterie-relay")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})
            with contextlib.suppress(StoreError):
                await self._tell()  # how the last replies ended

    def stop_elsewhere(self, agent_id: str) -> None:
        self._order(Stop(self._me, agent_id))

    # What is said here

    def _follow(self, draft: Draft) -> None:
        if draft.id in self._foreign:
            return
        if draft.id not in self._sent:
            self._end_others_of(draft.agent_id, self._me)
            self._sent[draft.id] = 0
        self._growing[draft.id] = draft
        self._said.set()

    def _order(self, word: Word) -> None:
        if word not in self._orders:
            self._orders.append(word)
        self._said.set()

    async def _tell_for_ever(self) -> None:
        while True:
            if await self._clock.wait(self._said, SIGN_OF_LIFE):
                await self._clock.wait(self._never, GATHER)
            else:
                self._growing |= {draft.id: draft for draft in self._live.drafts if draft.id in self._sent}
                self._end_the_silent()
            self._said.clear()
            try:
                await self._tell()
            except StoreError as error:
                # Lost: whoever hears the next piece misses this one, and asks.
                log.info("what is being said here is not heard elsewhere for now: %s", error)

    async def _tell(self) -> None:
        orders, self._orders = self._orders, []
        words = [*orders, *self._words()]
        if words:
            await self._wire.whisper([_encode(word).decode() for word in words])

    def _words(self) -> Iterator[Word]:
        growing, self._growing = self._growing, {}
        room = AT_ONCE
        for draft in growing.values():
            pieces = self._pieces(draft)
            for piece in pieces[:room]:
                self._sent[draft.id] = piece.start + len(piece.text)
                yield piece
            if len(pieces) > room:
                self._growing.setdefault(draft.id, draft)
                self._said.set()
            elif draft.outcome is not None:
                del self._sent[draft.id]
            room = max(0, room - len(pieces))

    def _pieces(self, draft: Draft) -> list[Said]:
        sent, text = self._sent[draft.id], clean(draft.text)
        starts = range(sent, len(text), PIECE) or ((sent,) if draft.outcome is None else ())
        pieces = [Said(self._me, draft.id, draft.agent_id, n, text[n : n + PIECE]) for n in starts]
        if draft.outcome is None:
            return pieces
        stored = tuple(draft.messages[:NAMED])
        return [*pieces, Said(self._me, draft.id, draft.agent_id, len(text), "", draft.outcome, stored)]

    # What is said elsewhere

    def _hear(self, word: str) -> None:
        try:
            heard = _decode(word)
        except msgspec.DecodeError:  # of another version
            return
        if heard.by == self._me:
            return
        match heard:
            case Asked():
                self._tell_again()
            case Stop():
                self._stop(heard.agent)
            case Said():
                self._hear_piece(heard)

    def _tell_again(self) -> None:
        for draft in self._live.drafts:
            if draft.id in self._sent:
                self._sent[draft.id] = 0
                self._growing[draft.id] = draft
        self._said.set()

    def _hear_piece(self, piece: Said) -> None:
        # Who takes an agent over says the same reply again, under the same name.
        name = f"{piece.draft}@{piece.by}"
        known = self._foreign.get(name)
        if known is None:
            if piece.start or piece.outcome:
                if not piece.outcome:
                    self._order(Asked(self._me))
                return
            self._end_others_of(piece.agent, piece.by)
            known = self._foreign[name] = _Foreign(piece.by, piece.agent, 0, 0)
        known.heard_at = self._clock.monotonic()
        if piece.start > known.length and not piece.outcome:
            self._order(Asked(self._me))
            return
        news = piece.text[known.length - piece.start :] if piece.start <= known.length else ""
        known.length += len(news)
        if news or not piece.outcome:
            self._live.say(piece.agent, name, news)
        if piece.outcome:
            self._end(name, piece.outcome, piece.messages)

    def _end_others_of(self, agent_id: str, by: str) -> None:
        """Another process works for the agent now."""
        for name, one in [*self._foreign.items()]:
            if one.agent == agent_id and one.by != by:
                self._end(name, "failed")

    def _end_the_silent(self) -> None:
        before = self._clock.monotonic() - SILENCE.total_seconds()
        for name, one in [*self._foreign.items()]:
            if one.heard_at < before:
                self._end(name, "failed")

    def _end(self, name: str, outcome: Outcome, messages: Sequence[str] = ()) -> None:
        self._live.end(name, outcome, messages)
        del self._foreign[name]
