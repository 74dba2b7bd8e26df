"""How much a society has done, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of one moment. What was pruned is no longer counted."""

    seq: int
    """The last event that `events` counts."""
    events: Mapping[str, int]
    """By kind, behind the event that was asked for."""
    turns: int
    """That were begun."""
    model_calls: Mapping[str, int]
    """By outcome: `used` or `withdrawn`."""
    tool_calls: Mapping[str, int]
    """By state."""
    withdrawn_plans: int
    waiting: int
    """Messages in mailboxes of agents."""
    fullest: int
    """The longest of those mailboxes."""
    delayed: int
    agents: Mapping[str, int]
    """By state."""


class Counted(Protocol):
    async def statistics(self, after: int) -> Statistics:
        """`after`: only events behind this one are counted."""
        ...
