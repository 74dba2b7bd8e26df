"""What a storage engine shows to people: everything at one glance, conversations, tool runs, what it all cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.messages import Message
from coterie.store import Page

SHOWN = 200
"""The longest a list gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """The person's conversation with one agent."""

    agent_id: str
    last: Message
    unread: int
    """Messages of the agent that the person has not read."""
    first_unread: str | None
    """The oldest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything as it was at event `seq`, each list cut at `SHOWN` with its full count beside it."""

    seq: int
    agents: Sequence[Agent]
    agent_count: int
    threads: Sequence[Thread]
    """Those with at least one message, the one spoken in last first."""
    thread_count: int
    queues: Sequence[Message]
    """What waits for agents, by agent, in mailbox order."""
    queue_count: int
    delayed: Sequence[Message]
    delayed_count: int
    open_questions: Sequence[Message]
    """Newest first."""
    question_count: int
    paused: bool = False
    """The whole society is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One tool call of a plan, for people to look at."""

    call_id: str
    name: str
    arguments: str
    state: str
    """`planned`, `gated`, `started`, `done`, `failed`, `cancelled` or `unknown`."""
    result: str
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What an agent's model wanted to do at one step, and what became of it."""

    seq: int
    """The cursor of the listing."""
    agent_id: str
    turn_no: int
    step_no: int
    text: str
    outcome: Literal["open", "closed", "withdrawn"]
    interrupted_by: str | None
    """The message that withdrew it, or cut it short."""
    at: datetime
    calls: Sequence[CallRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    day: str
    """`2026-11-15`, in UTC."""
    agent_id: str
    service: str
    requests: int
    withdrawn: int
    """Requests whose answer was withdrawn by an interruption."""
    input_tokens: int
    output_tokens: int
    estimated_tokens: int
    """How many of both are our own estimate: the service did not report them, or the answer was cut off."""


class Overview(Protocol):
    async def snapshot(self) -> Snapshot:
        """Of one moment: whoever goes on with the events behind `seq` misses nothing and sees nothing twice."""
        ...

    async def thread(
        self,
        agent_id: str,
        *,
        before: str | None = None,
        after: str | None = None,
        around: str | None = None,
        limit: int = 50,
    ) -> Sequence[Message]:
        """The conversation, oldest first: the latest part, or the part next to the message named.

        `Refused("unknown_message")` when that one is not in this thread.
        """
        ...

    async def clear_thread(self, agent_id: str) -> int:
        """The conversation and what the agent remembers are gone; how many messages were. Its other mail stays.

        `Refused("agent_busy")` while the agent is at work.
        """
        ...

    async def unread(self, agent_ids: Sequence[str]) -> Mapping[str, int]:
        """How many messages of each conversation the person has not read."""
        ...

    async def open_questions(self, agent_id: str | None = None, limit: int = SHOWN) -> Sequence[Message]:
        """Messages with quick replies to the person that nobody has answered, newest first."""
        ...

    async def runs(self, page: Page, agent_id: str | None = None) -> Sequence[PlanRecord]:
        """Tool runs and withdrawn plans, newest first."""
        ...

    async def usage(self, since: datetime) -> Sequence[Usage]:
        """By day, agent and service, newest day first."""
        ...

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        """Messages whose text contains all of `words`, in any case, newest first."""
        ...

    async def artifacts_before(self, ref: str | None, limit: int) -> Sequence[Artifact]:
        """Newest first, behind the artifact `ref`."""
        ...
