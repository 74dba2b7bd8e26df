"""Agents as the store knows them, and their profiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from coterie.llm.service import DEFAULT_SAMPLING, Sampling

AgentState = Literal["idle", "ready", "llm", "tools", "wait_approval", "wait_retry", "blocked", "paused", "terminated"]
ACTIVE_STATES: frozenset[AgentState] = frozenset({"llm", "tools", "wait_approval", "wait_retry"})
"""The agent is working on a turn; a message sent now interrupts it."""
CLAIMED_STATES: frozenset[AgentState] = frozenset({"llm", "tools"})
"""A worker has claimed the agent; no other worker may continue its turn."""
InterruptMode = Literal["step", "stream"]
"""When a person's message is read: at the end of the step, or at once, even while the model writes its answer."""

AGENT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MAX_DESCRIPTION = 500
"""Characters of an agent's description. It is part of the prompt of every other agent."""
MAX_ROLE = 60
MAX_INITIALS = 3
AgentColour = Literal["teal", "blue", "violet", "pink", "red", "orange", "green", "grey"]
"""What the panel may show an agent's initials in. Names, so that each theme has a shade of enough contrast."""


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
    problem: str = ""
    """The same as JSON: category, facts such as `service` and `status`, and `retryAt`."""
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
    description: str = ""
    """What it is for, in a sentence; other agents and people see it."""
    tools: tuple[str, ...] = ("*",)
    """Patterns of the tools it may use besides the built-in ones, within its maker's rights; `!name` excludes.

    Empty: none, not even built-in ones, but `send_message`.
    """
    services: tuple[str, ...] = ()
    """Ids or patterns of services that agents it creates may use, besides its own."""
    parent: str | None = None
    """The agent that may terminate it."""
    sampling: Sampling = DEFAULT_SAMPLING
    """Overrides the values of its service."""
    answer_schema: str = ""
    """JSON schema of its answers; empty: any text."""
    maker: str | None = None
    """The agent whose rights limit its own. None: the owner created it."""
    role: str | None = None
    """The role it was created from, or as the owner named it."""
    colour: AgentColour | None = None
    """Of its initials in the panel. None: the panel chooses one by the id."""
    initials: str = ""
    """What the panel shows beside its name. Empty: the first letters of the name."""
    interrupt: InterruptMode | None = None
    """When it reads a person's message. None: as the society's setting says."""
    made_by: str = ""
    """Key of the tool call that created it; a repeated call creates nothing."""
