"""What is being said right now. Nothing of it is stored: a reply exists once its message does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
