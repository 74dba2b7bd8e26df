"""A turn that runs in this process: what its action has done so far, and how it is cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from coterie.agent.context import TurnPrompt
from coterie.llm.call_metrics import SentRequest
from coterie.llm.service import STOPPED


class TurnSlot(Protocol):
    """The concurrency slot of one turn; `agent/scheduler.py` implements it."""

    async def acquire(self, *, for_person: bool) -> None: ...

    def release(self) -> None: ...


@dataclass(slots=True)
class RunningTurn:
    """State of a turn that runs in this process."""

    task: asyncio.Task[bool] = field(init=False)
    is_cancellable: bool = False
    """An action is being executed and may be cancelled; a write to the store never is."""
    slot: TurnSlot | None = None
    streamed_text: list[str] = field(default_factory=list)
    """Pieces that the model has streamed so far."""
    pending_request: SentRequest | None = None
    """The request that has no answer yet."""
    is_stopping: bool = False
    """A stop was requested."""
    is_queued: bool = False
    """The request waits in the queue of its service and was not sent."""
    is_deferring: bool = False
    """The society was paused while the request was queued."""
    is_cancelling: bool = False
    """`cancel` has cancelled the task, and the action has not ended yet."""
    newest_position: int = 0
    """Position of the newest message from a person, as far as this process knows."""
    cut_after: int | None = None
    """A person's message after this position cuts the model's answer. None: no message does."""
    prompt: TurnPrompt = field(default_factory=TurnPrompt)
    epoch: int = 0
    """Of the claim that it runs under."""
    is_ended: bool = False
    """The turn was ended in the store, with its task or its agent: results of its actions are refused."""
    summaries: int = 0
    """Summaries that the model was asked for in this step."""

    @property
    def is_cut(self) -> bool:
        """True if a message has arrived that the request does not contain and that may cut it."""
        return self.cut_after is not None and self.newest_position > self.cut_after

    def cancel(self) -> None:
        """Cancel the action that is being executed, once."""
        if self.is_cancellable and not self.is_cancelling:
            self.is_cancelling = True
            self.task.cancel(STOPPED if self.is_stopping else None)

    def was_cancelled(self) -> bool:
        """True if only `cancel` cancelled the task; False if another caller cancelled it too."""
        return self.is_cancelling and not self.task.uncancel()

    def end_action(self) -> None:
        self.is_cancellable = self.is_cancelling = self.is_queued = self.is_deferring = False
        self.cut_after = None
