"""The processes whose agents work: who they are, and what each has done."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from coterie.clock import to_wire


@dataclass(slots=True)
class Tally:
    """What one process has counted since it began."""

    heartbeats: int = 0
    """How often it has told the others that it lives. Where one process owns all, there is nobody to tell."""
    fenced: int = 0
    """Writes that counted for nothing, because another worker had taken the agent over."""
    takeovers: int = 0
    """Turns taken over from a worker that was gone, without having let go of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    id: str | None
    """As agents name it. None: its agents do not work."""
    name: str
    """For people: `host/pid`."""
    since: datetime
    seen_at: datetime
    claims: int
    """Agents it is at work on."""
    heartbeats: int
    fenced: int
    takeovers: int

    def to_wire(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "since": to_wire(self.since),
            "seenAt": to_wire(self.seen_at),
            "claims": self.claims,
            "heartbeats": self.heartbeats,
            "fencedWrites": self.fenced,
            "leaseTakeovers": self.takeovers,
        }


class Staffed(Protocol):
    async def workers(self) -> Sequence[Worker]:
        """Those that live, by name."""
        ...


def name_of(pid: int | None = None) -> str:
    """Of a process on this machine; our own when none is named."""
    return f"{socket.gethostname()}/{os.getpid() if pid is None else pid}"
