"""Which process should claim a new turn: the one with the most free capacity.

Every notice of a process reports how many turns it runs and how many it can run; its heartbeats store the same.
`WorkerLoads` collects the reports of the other processes. They are hints: they may be old or missing. If the chosen
process does not claim an agent within `CLAIM_DELAY`, any process may claim it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

OWN_PREFERENCE = 4
"""Turns that a process claims before it looks at others, and how much more free capacity another must have. A turn that
is claimed in the transaction of its message saves a transaction."""
CLAIMS_PER_SHARED_ROUND = 16
"""Agents that one process claims at once while other processes can claim the rest."""
CLAIM_DELAY = timedelta(seconds=1)
"""How long a process leaves ready agents to processes with more free capacity."""


class Load(NamedTuple):
    """Turns that a process runs, and the most that it can run."""

    running: int
    limit: int

    @property
    def free(self) -> int:
        return self.limit - self.running


@dataclass(frozen=True, slots=True)
class _Peer:
    load: Load
    assigned: int = 0
    """Turns that were left to it since its last report."""
    assigned_at: float | None = None
    """When the first of them was left to it, by the monotonic clock."""
    is_new: bool = False
    """It reported its load after the last `replace_all`."""

    @property
    def free(self) -> int:
        return self.load.free - self.assigned

    @property
    def is_responsive(self) -> bool:
        """False if it has reported nothing since turns were left to it: it may hang."""
        return self.assigned_at is None or time.monotonic() - self.assigned_at < CLAIM_DELAY.total_seconds()


class WorkerLoads:
    """The other processes that run turns, as far as this one knows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def update(self, process: str, load: Load) -> None:
        """Store the load that another process reported. A limit of 0: it claims no more turns."""
        with self._lock:
            if load.limit > 0:
                self._peers[process] = _Peer(load, is_new=True)
            else:
                self._peers.pop(process, None)

    def replace_all(self, stored: Mapping[str, Load]) -> None:
        """Replace the processes by the live ones of the database. A load reported meanwhile is newer and stays."""
        with self._lock:
            newer = {process: peer for process, peer in self._peers.items() if peer.is_new and process in stored}
            live = {process: _Peer(load) for process, load in stored.items() if load.limit > 0}
            self._peers = live | {process: replace(peer, is_new=False) for process, peer in newer.items()}

    def __len__(self) -> int:
        return len(self._peers)

    def should_claim(self, own: Load) -> bool:
        """True if this process runs few turns, or no other has clearly more free capacity."""
        if own.running < OWN_PREFERENCE:
            return True
        with self._lock:
            peers = [peer for peer in self._peers.values() if peer.is_responsive]
            return all(own.free + OWN_PREFERENCE >= peer.free for peer in peers)

    def assign(self, turns: int) -> set[str]:
        """Distribute `turns` over the processes with the most free capacity, and return these."""
        chosen = set[str]()
        with self._lock:
            for _ in range(turns):
                free = [name for name, peer in self._peers.items() if peer.free > 0 and peer.is_responsive]
                if not free:
                    break
                process = max(free, key=lambda name: self._peers[name].free)
                peer = self._peers[process]
                self._peers[process] = replace(
                    peer, assigned=peer.assigned + 1, assigned_at=peer.assigned_at or time.monotonic()
                )
                chosen.add(process)
        return chosen
