"""Agents as the store knows them, and their profiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

AgentState = Literal["idle", "ready", "llm", "tools", "wait_approval", "wait_retry", "blocked", "paused", "terminated"]
ACTIVE_STATES: frozenset[AgentState] = frozenset({"llm", "tools", "wait_approval", "wait_retry"})
"""The agent is working on a turn; a message sent now interrupts it."""
CLAIMED_STATES: frozenset[AgentState] = frozenset({"llm", "tools"})
"""A worker has claimed the agent; no other worker may continue its turn."""

AGENT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent, or the person, as the store knows it."""

    id: str
    name: str
    kind: Literal["agent", "person"] = "agent"
    state: AgentState = "idle"
    waiting: int = 0
    """Number of messages delivered and not yet taken."""
    delayed: int = 0
    """Number of delayed messages to it."""
    parent: str | None = None
    """The agent that created it."""
    profile: str = ""
    """Its `Profile` as JSON; empty for agents of coterie.toml."""
    state_since: datetime | None = None
    """When it entered this state."""
    state_reason: str | None = None
    """What a blocked or waiting agent waits for, for people."""
    tool: str | None = None
    """The tool that runs or waits for approval."""
    tool_position: tuple[int, int] | None = None
    """Number of the current tool call, from 1, and the number of calls in the plan."""
    worker: str | None = None
    """The worker that has claimed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What makes one agent different from another. Stored as JSON under these names."""

    id: str
    name: str = ""
    service: str | None = None
    """Id of its model service. None: the first service."""
    prompt: str = ""
    tools: tuple[str, ...] = ("*",)
    """Names or patterns of the tools it may use, within its maker's rights. Empty: none."""
    services: tuple[str, ...] = ()
    """Ids or patterns of services that agents it creates may use, besides its own."""
    parent: str | None = None
    """The agent that may terminate it."""
    maker: str | None = None
    """The agent whose rights limit its own. None: the owner created it."""
    role: str | None = None
    """The role it was created from."""
    made_by: str = ""
    """Key of the tool call that created it; a repeated call creates nothing."""
