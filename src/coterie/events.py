"""Events of the durable event log, which watchers read in order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

EventKind = Literal[
    "message.created",
    "message.updated",
    "delayed.scheduled",
    "delayed.moved",
    "delayed.delivered",
    "delayed.withdrawn",
    "queue.changed",
    "quick_replies.changed",
    "agent.upsert",
    "agent.removed",
    "agent.state",
    "tool.started",
    "tool.ended",
    "artifact.created",
    "read",
    "problem",
    "thread.cleared",
    "society.state",
]


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    """Position in the log, strictly increasing."""
    at: datetime
    kind: EventKind
    subject: str
    """Id of the message, agent or artifact. For a tool call: `agent/call id`."""
    data: str | None = None
    """JSON with details that cannot be looked up later."""
