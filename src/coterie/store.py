"""What a storage engine promises.

The port speaks in transitions: each write method is one transaction, wholly done and durable when it returns, or not
done at all. Time is the engine's own (the machine's clock for SQLite, the database's for PostgreSQL), so callers hand
in and get back durations and never compare clocks.

The processes whose agents work: who they are, and what each has done.

How much a society has done, in numbers.

What a storage engine shows to people: everything at one glance, conversations, tool runs, what it all cost.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import EPOCH, to_wire
from coterie.events import Event
from coterie.messages import PERSON, Envelope, Message, Receipt, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_hops: int = 32
    mailbox: int = 10_000
    """Messages that may wait for one agent."""
    mailbox_bytes: int = 64 << 20
    shared_artifacts: bool = False
    """Agents may read and forward every artifact, not only those that are theirs or reached them."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delayed message that has just reached its recipient's mailbox."""

    message_id: str
    recipient: str
    created_at: datetime
    deliver_at: datetime
    delivered_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What one round of delivering delayed messages did."""

    delivered: Sequence[Delivery] = ()
    dead: int = 0
    """Those whose recipient is gone; their senders were told."""
    next_due: timedelta | None = None
    """Until the next one. None: nothing is delayed. Zero or less: more is due than one round takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long what nobody needs any more is kept."""

    messages: timedelta | None = None
    """None: for ever."""
    dead_letters: timedelta = timedelta(days=30)
    events: timedelta = timedelta(days=7)
    loose_artifacts: timedelta = timedelta(hours=24)
    """Uploads that no message refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    messages: int = 0
    events: int = 0
    bytes_to_delete: Sequence[str] = ()
    """Content hashes that no artifact names any more."""


@dataclass(frozen=True, slots=True)
class Role:
    profile: str
    """As JSON."""
    maker: str | None
    """Whose it is. None: it was made before this was kept; it counts as the owner's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which part of a listing: newest first, `before` this `seq`."""

    before: int | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    engine: str
    version: str
    log_id: str
    """Names the event log, so that a place in it stays valid over restarts."""
    last_seen: datetime = EPOCH
    """The latest time anything in it was stamped with."""
    unclean: bool = False
    """The last owner did not close it."""
    warnings: Sequence[str] = field(default_factory=tuple)
    secret: bytes = field(default=b"", repr=False)
    """The society's secret, which ids are hashed with. Never shown, logged or sent."""


class Store(Protocol):
    @property
    def info(self) -> StoreInfo: ...

    @property
    def healthy(self) -> bool:
        """False while writes do not get through."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why writes do not get through, in one sentence, as far as it is known without trying."""
        ...

    async def close(self) -> None: ...

    async def is_last(self) -> bool:
        """Whether no other process runs this society."""
        ...

    # Agents

    async def add_agents(self, agents: Sequence[Agent]) -> None:
        """They exist and can be written to. Those known already keep their mail; a new name is taken over."""
        ...

    async def terminate(self, agent_id: str) -> None:
        """It gets no more mail: what waited is dead, and its senders are told."""
        ...

    async def pause(self, agent_id: str) -> None:
        """It ends the turn it is in, if any, and begins no other until it is resumed. Its mail waits."""
        ...

    async def resume(self, agent_id: str) -> None:
        """A paused agent takes up its mail; a blocked one tries again."""
        ...

    async def pause_all(self) -> None:
        """Nothing begins after this returns, on any process: no turn, no model call, no tool.

        It counts for agents that are made later, too. What is inside a model call or a tool ends that step; the turn
        goes on with the next one after `resume_all`.
        """
        ...

    async def resume_all(self) -> None:
        """The society goes on. Agents that were paused individually stay paused; blocked ones try again."""
        ...

    async def society_paused(self) -> bool: ...

    async def stop(self, agent_id: str) -> bool:
        """A turn that nobody works on, because it waits for a retry or for the person's word, ends; its mail begins
        the next. False when there is none."""
        ...

    async def catch_up(self) -> None:
        """Whatever was handed in before is written or refused, and whoever waited for it has been told."""
        ...

    async def unblock(self, agent_ids: Sequence[str]) -> Sequence[str]:
        """Those of them that are blocked, and not paused, try again; the ids of those that do."""
        ...

    async def put_role(self, name: str, profile: str, maker: str = PERSON) -> None:
        """Agents can be made after this pattern. Its maker may replace it; `Refused("role_taken")` for anybody else."""
        ...

    async def roles(self) -> Mapping[str, Role]: ...

    async def agents(self, after: str = "", limit: int = 200) -> Sequence[Agent]: ...

    async def agent(self, agent_id: str) -> Agent | None: ...

    async def agents_named(self, ids: Sequence[str]) -> Mapping[str, Agent]:
        """Those of them that there are."""
        ...

    # Messages

    async def send(self, envelope: Envelope) -> Receipt:
        """Stored, in the recipient's mailbox or with its due time; `Refused` with nothing stored.

        Sent again under the same id, the answer is the same and there is one message. Messages of one sender to one
        recipient keep the order of the calls.
        """
        ...

    async def promote(self, limit: int, *, early: bool = False) -> Promotion:
        """Deliver up to `limit` delayed messages that are due (`early`: all of them), by due time, then send order."""
        ...

    async def until_next_due(self) -> timedelta | None: ...

    async def withdraw(self, message_id: str, by: str) -> Message:
        """It will never be taken; again: the same. `Refused` once it was taken, or when it is not `by`'s."""
        ...

    async def move(self, message_id: str, delay: timedelta, by: str) -> Message:
        """A delayed message gets a new due time, `delay` from now. `Refused` once it was delivered."""
        ...

    async def read(self, thread: str, upto: str) -> int:
        """The person has seen their conversation with the agent `thread` up to the message `upto`.

        How many were new to them. The runtime's notices about no agent in particular are the thread `system`.
        `Refused("unknown_message")` when `upto` is not in it.
        """
        ...

    async def resend(self, message_id: str) -> Receipt:
        """A dead letter goes out again as a new message."""
        ...

    async def forget(self, message_id: str) -> None:
        """A dead letter is deleted."""
        ...

    async def message(self, message_id: str) -> Message | None: ...

    async def messages_named(self, ids: Sequence[str]) -> Mapping[str, Message]:
        """Those of them that there are."""
        ...

    async def messages(self, page: Page, *, agent: str | None = None, state: State | None = None) -> Sequence[Message]:
        """Newest first; `agent`: sent by it or to it."""
        ...

    async def waiting(self, recipient: str, limit: int = 200) -> Sequence[Message]:
        """Delivered and not yet taken, in mailbox order."""
        ...

    async def delayed(
        self, recipient: str | None = None, *, sender: str | None = None, after: Message | None = None, limit: int = 50
    ) -> Sequence[Message]:
        """By due time, then send order."""
        ...

    async def delayed_count(self, recipient: str | None = None) -> int: ...

    # Artifacts

    async def add_artifact(self, artifact: Artifact, maker: str | None = None) -> Artifact:
        """Its bytes are durable already. Again under the same ref: the first one stands.

        `maker`: the agent that made it. None: the person did.
        """
        ...

    async def artifacts(self, refs: Sequence[str], *, reader: str | None = None) -> Mapping[str, Artifact]:
        """Those of `refs` that there are. With `reader`: those that this agent made, or took in a message."""
        ...

    async def latest_artifacts(self, limit: int = 50, *, reader: str | None = None) -> Sequence[Artifact]:
        """Newest first. With `reader`: those that this agent made, or took in a message."""
        ...

    # The log, and care

    async def events(self, after: int, limit: int = 500) -> Sequence[Event]: ...

    async def last_event(self) -> int: ...

    async def prune(self, retention: Retention) -> Pruned: ...

    def violations(self) -> AsyncIterator[str]:
        """Every stored fact that contradicts an invariant, in words."""
        ...

    async def backup(self, target: Path) -> None:
        """A consistent copy of everything but artifact bytes, durable at `target`; writers go on meanwhile."""
        ...


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
