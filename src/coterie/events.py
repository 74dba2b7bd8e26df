"""What a watcher sees: durable facts, in the order they became true."""

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
    """Strictly increasing; a watcher that has seen it has seen everything before it."""
    at: datetime
    kind: EventKind
    subject: str
    """The id of the message, agent or artifact it is about; a tool call is `agent/call id`."""
    data: str | None = None
    """What could not be looked up afterwards, as JSON."""
