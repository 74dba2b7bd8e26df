"""Who can be written to.

What makes one agent different from another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

AgentState = Literal["idle", "ready", "llm", "tools", "wait_approval", "wait_retry", "blocked", "paused", "terminated"]
ACTIVE: frozenset[AgentState] = frozenset({"llm", "tools", "wait_approval", "wait_retry"})
"""At work on a turn: what is sent now is an interjection."""
HELD: frozenset[AgentState] = frozenset({"llm", "tools"})
"""Somebody has claimed it, and nobody else may go on with it."""

ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One agent, or the person, as the store knows it."""

    id: str
    name: str
    kind: Literal["agent", "person"] = "agent"
    state: AgentState = "idle"
    waiting: int = 0
    """Messages delivered and not yet taken."""
    delayed: int = 0
    parent: str | None = None
    """The agent that made it."""
    profile: str = ""
    """What was said when it was made, as JSON; empty for those that the owner's file describes."""
    since: datetime | None = None
    """When it came into this state."""
    why: str | None = None
    """What a blocked or waiting agent waits for, in words."""
    tool: str | None = None
    """The tool that runs, or waits for the person's word."""
    step: tuple[int, int] | None = None
    """Which call of how many that is, counted from 1."""
    worker: str | None = None
    """Who has claimed it and is at work on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    id: str
    name: str = ""
    service: str | None = None
    """The model service it thinks with. None: the first there is."""
    prompt: str = ""
    tools: tuple[str, ...] = ("*",)
    """Names or patterns of the tools it may use, as far as its maker may. Empty: none."""
    services: tuple[str, ...] = ()
    """Ids or patterns of the services that agents it makes may use, besides its own."""
    parent: str | None = None
    """The agent that may end it."""
    maker: str | None = None
    """The agent whose rights are the most it can have. None: the owner made it, and it has the rights written here."""
    role: str | None = None
    """What it was made after, if it was."""
    made_by: str = ""
    """The call that made it: when that runs again, there is nothing more to make."""
