"""How the processes of a society share the slots of a model service: the port, and the rule of division."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SlotGrant:
    granted: int
    """Number of additional slots."""
    others_wait: bool = False
    """Other processes wait for a slot."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Slots of another process at the same service."""

    held: int
    waiting: int = 0
    urgent: int = 0
    """How many of the waiting requests are for the person."""


class SlotSharing(Protocol):
    """Divides the slots of a service between processes."""

    def subscribe_slots(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop when another process wants or releases a slot."""
        ...

    async def request_slots(self, service: str, limit: int, held: int, waiting: int, urgent: int = 0) -> SlotGrant:
        """Report the held slots and waiting requests of this process; return the additional slots it gets.

        `urgent`: how many waiting requests are for the person. A dead process's slots are free once its lease ends.
        """
        ...


def divide_slots(
    limit: int,
    held: int,
    waiting: int,
    others: Iterable[OtherProcess],
    *,
    urgent: int = 0,
    releases_slot: bool = False,
) -> SlotGrant:
    """Divide the free slots: requests for the person first, then the process with the fewest slots.

    `releases_slot`: this process releases a slot in the same call. Then another process with equally many slots goes
    first. Otherwise the only slot of a service would never leave a process with a long queue.
    """
    others = list(others)
    others_wait = any(process.waiting for process in others)
    free, granted = limit - held - sum(process.held for process in others), 0
    rivals = [[process.held, process.waiting, process.urgent] for process in others]
    while free > 0 and granted < waiting:
        own_rank = (urgent <= granted, held + granted + releases_slot)
        ahead = [rival for rival in rivals if rival[1] > 0 and (rival[2] <= 0, rival[0]) < own_rank]
        if ahead:
            first = min(ahead, key=lambda rival: (rival[2] <= 0, rival[0]))
            first[0], first[1], first[2] = first[0] + 1, first[1] - 1, first[2] - 1
        else:
            granted += 1
        free -= 1
    return SlotGrant(granted, others_wait=others_wait)
