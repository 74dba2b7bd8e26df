"""A conversation with one agent as the command line holds it, wherever the society runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coterie.errors import Refused
from coterie.messages import PERSON, SYSTEM

if TYPE_CHECKING:
    from coterie.messages import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One message, as far as a terminal shows it."""

    id: str
    sender: str
    to: str
    text: str
    state: str
    options: tuple[str, ...] = ()
    """Its quick replies."""
    files: tuple[str, ...] = ()
    in_reply_to: str | None = None
    answered: bool = False
    stopped: bool = False
    """The reply was cut short."""
    wire: Mapping[str, Any]
    """All of it, for programs."""

    @classmethod
    def of(cls, wire: Mapping[str, Any]) -> Line:
        payload = wire["payload"]
        return cls(
            id=wire["id"],
            sender=wire["from"],
            to=wire["to"],
            text=str(payload.get("text", "")),
            state=wire["state"],
            options=tuple(map(str, payload.get("quickReplies") or ())),
            files=tuple(str(item.get("filename", "file")) for item in payload.get("attachments") or ()),
            in_reply_to=wire.get("inReplyTo"),
            answered=bool(wire.get("answer")),
            stopped=bool(wire.get("stopped")),
            wire={key: value for key, value in wire.items() if key != "rendered"},  # that is for pages
        )

    def is_between(self, agent_id: str) -> bool:
        """Whether it belongs to the person's conversation with that agent; notices about the agent do, too."""
        if self.sender == SYSTEM:
            about = self.wire["payload"].get("problem")
            return self.to == PERSON and isinstance(about, dict) and about.get("agent") == agent_id
        return {self.sender, self.to} == {PERSON, agent_id}

    @property
    def is_trouble(self) -> bool:
        """The runtime tells that the agent could not answer."""
        return self.sender == SYSTEM and "problem" in self.wire["payload"]

    @property
    def is_heard(self) -> bool:
        """It has reached the person, from whomever."""
        return self.to == PERSON and self.state in ("pending", "taken")


@dataclass(frozen=True, slots=True)
class Arrived:
    line: Line
    draft: str | None = None
    """The draft that it was until now."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The agent has read these."""

    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Piece:
    """More of a reply that is being said right now."""

    draft: str
    start: int
    text: str


@dataclass(frozen=True, slots=True)
class DraftOver:
    draft: str
    outcome: str


State = Literal["idle", "active", "paused", "blocked", "terminated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stands:
    """What the agent is doing."""

    state: State
    phase: str | None = None
    tool: str | None = None

    @classmethod
    def of(cls, wire: Mapping[str, Any]) -> Stands:
        return cls(state=wire["state"], phase=wire.get("phase"), tool=wire.get("tool"))

    @property
    def words(self) -> str:
        more = f" {self.tool}" if self.phase == "tool" and self.tool else ""
        return f"{self.state}, {self.phase}{more}" if self.phase else self.state


@dataclass(frozen=True, slots=True)
class Over:
    """The society stops: nothing more will be heard."""


News = Arrived | Taken | Piece | DraftOver | Stands | Over


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What the person wants to say."""

    text: str
    delay_ms: float | None = None
    quick_replies: Sequence[str] = ()
    attachments: Sequence[str] = ()
    """Artifacts, by reference."""
    answers: str | None = None
    """The message that asked."""
    option: int | None = None
    """Which of its quick replies this is, counted from 0."""


class Unread:
    """What was said here and not yet read by the agent."""

    def __init__(self, look_up: Callable[[str], Awaitable[Line]]) -> None:
        self._look_up = look_up
        self._ids: set[str] = set()

    def add(self, message_id: str) -> None:
        self._ids.add(message_id)

    async def read_by_now(self) -> frozenset[str]:
        # More may be said while these are looked up.
        states = {message_id: await self._state(message_id) for message_id in tuple(self._ids)}
        self._ids -= {message_id for message_id, state in states.items() if state not in ("pending", "delayed")}
        return frozenset(message_id for message_id, state in states.items() if state == "taken")

    async def _state(self, message_id: str) -> str | None:
        try:
            return (await self._look_up(message_id)).state
        except Refused:
            return None  # the conversation was cleared


class Conversation(Protocol):
    @property
    def agent_id(self) -> str: ...

    async def recent(self, limit: int) -> Sequence[Line]:
        """The end of the conversation, oldest first."""
        ...

    async def line(self, message_id: str) -> Line:
        """One message as it is now."""
        ...

    async def stands(self) -> Stands: ...

    async def attach(self, file: Path) -> str:
        """The file is kept; the reference to send along."""
        ...

    async def say(self, speech: Speech) -> Receipt:
        """Stored durably when this returns."""
        ...

    async def withdraw(self, message_id: str) -> None:
        """`Refused("already_taken")` when the agent has read it."""
        ...

    async def stop_turn(self) -> None:
        """The agent ends what it is doing; nothing happens when it does nothing."""
        ...

    async def read(self, line: Line) -> None:
        """The person has seen the conversation up to that message."""
        ...

    async def news(self) -> News:
        """The next thing that happens, counted from when the conversation was opened. After `Over` nothing does."""
        ...
