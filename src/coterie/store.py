"""The storage ports: `Store` for agents, messages, artifacts and events; `Overview` for what people look at.

Each write method is one transaction: done when it returns, or not at all. It is then durable too, except for work on
which no person or program depends yet (`promote_due` of messages to agents, `prune`): a crash of the machine may undo
such work, but no write before it. The engine supplies the time (SQLite: the machine's clock, PostgreSQL: the
database's). Callers pass and get durations and never compare clocks. `turn_store` has the port for turns.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import UNIX_EPOCH
from coterie.messages import PERSON, Envelope, Message, Receipt, Schedule, State
from coterie.retention_store import RetentionStore
from coterie.tasks import Away, StoppedTask, Task, TaskState, TaskTree
from coterie.turn_store import FoundRuns, PlanRecord

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
    "unread",
    "problem",
    "thread.cleared",
    "society.state",
    "schedule.changed",
    "task.changed",
    "configuration.changed",
]
SOCIETY_EVENTS = ("agent.upsert", "agent.removed", "society.state", "configuration.changed")
"""Kinds of events that every process of a society follows. They are rare."""


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of the durable event log, which watchers read in order."""

    seq: int
    """Position in the log, strictly increasing."""
    at: datetime
    kind: EventKind
    subject: str
    """Id of the message, agent or artifact. For a tool call: `agent/call id`."""
    data: str | None = None
    """JSON with details that cannot be looked up later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_hops: int = 256
    mailbox: int = 10_000
    """Messages that may wait for one agent."""
    mailbox_bytes: int = 64 << 20
    shared_artifacts: bool = False
    """Agents may read and forward every artifact, not only those they made or received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConfiguration:
    """The society's agents, services without keys, and limits, where the database has them and not files."""

    version: int
    """Raised by every write, in the same transaction; 0: nothing was written yet."""
    document: str
    """JSON; `coterie.configuration` describes it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delayed message that was moved to its recipient's mailbox."""

    message_id: str
    recipient: str
    created_at: datetime
    deliver_at: datetime
    delivered_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """Result of one `promote_due` call."""

    delivered: Sequence[Delivery] = ()
    dead: int = 0
    """Messages whose recipient is terminated; their senders were notified."""
    next_due: timedelta | None = None
    """Time until the next due message. None: nothing is delayed. Zero or less: more messages are due."""
    is_elsewhere: bool = False
    """Another process is delivering or changing the next due message."""


@dataclass(frozen=True, slots=True)
class Role:
    """A profile from which agents can be created."""

    profile: str
    """As JSON."""
    maker: str | None
    """The agent that defined it. None: unknown, from an old version; treated as the owner's."""


class StoredProfile(NamedTuple):
    """What the directory of agents keeps of an agent. A tuple: a start reads those of all agents."""

    agent_id: str
    profile: str
    """As JSON; empty for an agent that coterie.toml describes."""
    is_terminated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Part of a listing, newest first: `limit` items with a `seq` less than `before`."""

    before: int | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    engine: str
    version: str
    log_id: str
    """Id of the event log. A position in the log is valid as long as the id is the same."""
    last_seen: datetime = UNIX_EPOCH
    """The latest time stamp in the store."""
    unclean: bool = False
    """The last process did not close the store."""
    warnings: Sequence[str] = field(default_factory=tuple)
    secret: bytes = field(default=b"", repr=False)
    """The society's secret for keyed ids. Never shown, logged or sent."""


class Store(RetentionStore, Protocol):
    @property
    def info(self) -> StoreInfo: ...

    @property
    def is_healthy(self) -> bool:
        """False while writes fail."""
        ...

    @property
    def write_error(self) -> str | None:
        """Why writes fail, in one sentence, as far as known without trying."""
        ...

    async def close(self) -> None: ...

    async def is_only_process(self) -> bool:
        """True if no other live process runs this society."""
        ...

    # Agents

    async def add_agents(self, agents: Sequence[Agent]) -> None:
        """Add agents, so that they can get mail. A known agent keeps its mail and gets the new name."""
        ...

    async def create_agent(self, agent: Agent) -> None:
        """Add an agent with a new id. `Refused("id_taken")`: there is one, or was one."""
        ...

    async def terminate(self, agent_id: str) -> None:
        """End an agent. Its waiting messages become dead letters and their senders are notified."""
        ...

    async def pause(self, agent_id: str) -> None:
        """Let the agent end its current turn and start no other until `resume`. Its mail waits."""
        ...

    async def resume(self, agent_id: str) -> None:
        """Let a paused agent read its mail, or a blocked one retry."""
        ...

    async def pause_all(self) -> None:
        """Pause the society: after this returns no process starts a turn, a model call or a tool.

        Agents created later are paused, too. A running model call or tool finishes its step; the turn continues
        after `resume_all`.
        """
        ...

    async def resume_all(self) -> None:
        """Resume the society. Individually paused agents stay paused; blocked ones retry."""
        ...

    async def is_paused(self) -> bool: ...

    async def stop_waiting_turn(self, agent_id: str) -> bool:
        """End a turn that waits for a retry or an approval; its mail starts the next turn. False if there is none."""
        ...

    async def flush(self) -> None:
        """Return when all earlier writes are durable or refused and their callers have the result."""
        ...

    async def unblock(self, agent_ids: Sequence[str]) -> Sequence[str]:
        """Let those of the agents retry that are blocked and not paused; return their ids."""
        ...

    async def put_role(self, name: str, profile: str, maker: str = PERSON) -> None:
        """Define a role. Only its maker may replace it; others get `Refused("role_taken")`."""
        ...

    async def roles(self) -> Mapping[str, Role]: ...

    async def agents(self, after: str = "", limit: int = 200) -> Sequence[Agent]: ...

    async def agent(self, agent_id: str) -> Agent | None: ...

    async def agents_by_id(self, ids: Sequence[str]) -> Mapping[str, Agent]:
        """The agents that exist."""
        ...

    async def agent_profiles(self, ids: Sequence[str] | None = None, *, after: str = "") -> Sequence[StoredProfile]:
        """These agents, or all with a stored profile and terminated ones, by id: the next ones after `after`."""
        ...

    async def configuration(self) -> StoredConfiguration: ...

    async def write_configuration(self, document: str, expected: int, agents: Sequence[Agent]) -> int:
        """Replace the configuration of version `expected`, and add or rename `agents`. Return the new version.

        `Refused("config_changed")`: it has another version.
        """
        ...

    # Messages

    async def send(self, envelope: Envelope) -> Receipt:
        """Store a message in the recipient's mailbox or as delayed. `Refused`: nothing was stored.

        Idempotent by id. Messages from one sender to one recipient keep the order of the calls.
        """
        ...

    async def promote_due(self, limit: int, *, early: bool = False) -> Promotion:
        """Deliver up to `limit` due messages (`early`: also those not due), by due time, then send order.

        The delivery of a recurring message stores its next occurrence. It is never early.
        """
        ...

    async def until_next_due(self) -> timedelta | None: ...

    async def withdraw(self, message_id: str, by: str) -> Message:
        """Withdraw a message that is not taken yet. Idempotent. `Refused` if it was taken or is not from `by`."""
        ...

    async def reschedule(self, message_id: str, delay: timedelta, by: str) -> Message:
        """Make a delayed message due `delay` from now. `Refused` if it was delivered."""
        ...

    async def change_schedule(
        self,
        schedule_id: str,
        by: str,
        *,
        every: str | None = None,
        paused: bool | None = None,
        delay: timedelta | None = None,
    ) -> Schedule:
        """Change the recurrence of a schedule, pause or resume it. `Refused` if it ended or is not from `by`.

        A new recurrence moves the next occurrence to its first due time; with `delay`, to the first one that is not
        before `delay` from now. A pause withdraws the next occurrence, a resume stores another.
        """
        ...

    async def end_schedule(self, schedule_id: str, by: str) -> Schedule:
        """End a schedule and withdraw its next occurrence. Idempotent. `Refused` if it is not from `by`."""
        ...

    async def schedule(self, schedule_id: str) -> Schedule | None: ...

    async def schedules(
        self, recipient: str | None = None, *, sender: str | None = None, after: str = "", limit: int = 50
    ) -> Sequence[Schedule]:
        """Active and paused schedules by id; `after`: only those with a greater id."""
        ...

    async def schedule_count(self) -> int:
        """Number of active schedules."""
        ...

    async def mark_read(self, thread: str, upto: str) -> int:
        """Mark the person's conversation with the agent `thread` as read up to the message `upto`.

        Returns how many messages were unread. Notices about no particular agent are in the thread `system`.
        `Refused("unknown_message")` if `upto` is not in the thread.
        """
        ...

    async def mark_unread(self, thread: str, since: str) -> int:
        """Mark the messages of an agent to the person as unread, from the message `since` on.

        Returns how many were read. `Refused("unknown_message")` if `since` is not in the thread.
        """
        ...

    async def resend_dead_letter(self, message_id: str) -> Receipt:
        """Send a dead letter again as a new message."""
        ...

    async def delete_dead_letter(self, message_id: str) -> None: ...

    async def message(self, message_id: str) -> Message | None: ...

    async def messages_by_id(self, ids: Sequence[str]) -> Mapping[str, Message]:
        """The messages that exist."""
        ...

    async def messages(self, page: Page, *, agent: str | None = None, state: State | None = None) -> Sequence[Message]:
        """Newest first. `agent`: only messages from or to it. Only dead letters have an index by state."""
        ...

    async def waiting(self, recipient: str, limit: int = 200) -> Sequence[Message]:
        """Delivered and not yet taken, in mailbox order."""
        ...

    async def delayed(
        self, recipient: str | None = None, *, sender: str | None = None, after: Message | None = None, limit: int = 50
    ) -> Sequence[Message]:
        """Delayed messages by due time, then send order; `after`: only those after this one."""
        ...

    async def delayed_count(self, recipient: str | None = None) -> int: ...

    # Artifacts

    async def add_artifact(self, artifact: Artifact, maker: str | None = None) -> Artifact:
        """Add the row of an artifact whose bytes are durable. For a known ref return the existing artifact.

        `maker`: the agent that made it; None: the person.
        """
        ...

    async def artifacts(self, refs: Sequence[str], *, reader: str | None = None) -> Mapping[str, Artifact]:
        """The artifacts that exist. With `reader`: only those that this agent made or took in a message."""
        ...

    async def latest_artifacts(self, limit: int = 50, *, reader: str | None = None) -> Sequence[Artifact]:
        """Newest first. With `reader`: only those that this agent made or took in a message."""
        ...

    # Event log and maintenance

    async def events(self, after: int, limit: int = 500, *, about_society: bool = False) -> Sequence[Event]:
        """The events after number `after`, in order. They are durable: no other event gets their numbers.

        `about_society`: only those of `SOCIETY_EVENTS`.
        """
        ...

    async def last_event(self) -> int:
        """The number of the newest event, which is durable."""
        ...

    def violations(self) -> AsyncIterator[str]:
        """A description of every violated invariant."""
        ...

    async def backup(self, target: Path) -> None:
        """Write a consistent, durable copy of everything but artifact bytes to `target`. Writers continue."""
        ...


@dataclass(slots=True)
class WorkerCounters:
    """Counters of one process since its start."""

    heartbeats: int = 0
    """Always 0 with SQLite."""
    fenced: int = 0
    """Writes rejected because another worker had claimed the agent."""
    takeovers: int = 0
    """Turns claimed from a worker that was gone without releasing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that runs the society."""

    id: str | None
    """As in `Agent.worker`. None: the process runs no agents."""
    name: str
    """`host/pid`."""
    since: datetime
    seen_at: datetime
    claims: int
    """Agents it has claimed."""
    heartbeats: int
    fenced: int
    takeovers: int


def worker_name(pid: int | None = None) -> str:
    """Name of a process on this machine; by default the current one."""
    return f"{socket.gethostname()}/{os.getpid() if pid is None else pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Numbers from one snapshot. Pruned rows are not counted."""

    seq: int
    """The last event counted in `events`."""
    events: Mapping[str, int]
    """New events by kind."""
    turns: int
    """Turns started."""
    model_calls: Mapping[str, int]
    """By outcome: `used` or `withdrawn`."""
    tool_calls: Mapping[str, int]
    """By state."""
    withdrawn_plans: int
    waiting: int
    """Messages in the mailboxes of agents."""
    largest_mailbox: int
    """Messages in the fullest mailbox."""
    delayed: int
    agents: Mapping[str, int]
    """By state."""
    tasks: Mapping[str, int]
    """By state."""


MAX_LISTED = 200
"""Maximum length of a list in a `Snapshot`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """The person's conversation with one agent."""

    agent_id: str
    last: Message
    unread: int
    """Number of messages of the agent that the person has not read."""
    first_unread: str | None
    """Id of the oldest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The society's state at event `seq`. Each list has at most `MAX_LISTED` items and a full count."""

    seq: int
    agents: Sequence[Agent]
    agent_count: int
    threads: Sequence[Thread]
    """Conversations with at least one message, most recent first."""
    thread_count: int
    """Up to 1,000. If there are more, `threads` has those of the newest messages and those with unread ones."""
    queues: Sequence[Message]
    """Messages waiting for agents, by agent, in mailbox order."""
    queue_count: int
    delayed: Sequence[Message]
    delayed_count: int
    open_questions: Sequence[Message]
    """Newest first."""
    question_count: int
    tasks: Sequence[Task] = ()
    """Those that work or wait for the person, newest first."""
    task_count: int = 0
    paused: bool = False
    """True if the whole society is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Model usage of one agent at one service on one day."""

    day: str
    """`2026-11-15`, in UTC."""
    agent_id: str
    service: str
    requests: int
    withdrawn: int
    """Requests whose answer an interruption withdrew."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cost: int
    """In billionths of the currency, of the requests whose price is known."""
    unpriced: int
    """Requests whose price is not known."""
    estimated_tokens: int
    """Tokens of both counts that are estimated, because the service did not report them or the answer was cut off."""


class Overview(Protocol):
    async def workers(self) -> Sequence[Worker]:
        """The live processes, by name."""
        ...

    async def statistics(self, after: int) -> Statistics:
        """`after`: count only events after this one."""
        ...

    async def snapshot(self) -> Snapshot:
        """A consistent snapshot. The events after its `seq` continue it without gap or overlap."""
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
        """The conversation, oldest first: its end, or the part next to the given message.

        `Refused("unknown_message")` if the message is not in this thread.
        """
        ...

    async def clear_thread(self, agent_id: str) -> int:
        """Delete the conversation and the agent's history; return the number of deleted messages.

        The agent's other mail stays. `Refused("agent_busy")` while the agent works on a turn.
        """
        ...

    async def unread(self, agent_ids: Sequence[str]) -> Mapping[str, int]:
        """Number of messages in each conversation that the person has not read."""
        ...

    async def open_questions(self, agent_id: str | None = None, limit: int = MAX_LISTED) -> Sequence[Message]:
        """Unanswered messages with quick replies to the person, newest first."""
        ...

    async def runs(self, page: Page, agent_id: str | None = None) -> Sequence[PlanRecord]:
        """Tool runs and withdrawn plans, newest first."""
        ...

    async def search_runs(self, words: str, page: Page, agent_id: str | None = None) -> FoundRuns:
        """Those whose text contains all words. Reads a bounded number of plans."""
        ...

    async def usage(self, since: datetime) -> Sequence[Usage]:
        """By day, agent and service, newest day first."""
        ...

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        """Messages whose text contains all of `words`, ignoring case, newest first."""
        ...

    async def index_messages(self) -> bool:
        """Bring the text index of `search` up to date, by some messages. False: there is nothing to do now."""
        ...

    async def artifacts_before(self, ref: str | None, limit: int) -> Sequence[Artifact]:
        """Newest first, starting after the artifact `ref`."""
        ...


class TaskStore(Protocol):
    """Tasks: everything that one message set off. The store starts and counts them with its other writes."""

    async def tasks(self, page: Page, *, state: TaskState | None = None, agent: str | None = None) -> Sequence[Task]:
        """Newest first. `agent`: only those that it got the first message of or worked on."""
        ...

    async def tasks_by_id(self, ids: Sequence[str]) -> Mapping[str, Task]:
        """The tasks that exist."""
        ...

    async def open_tasks(self, limit: int) -> tuple[Sequence[Task], int]:
        """The newest tasks that work or wait for the person, and the number of all of them."""
        ...

    async def away(self, since: datetime, limit: int) -> Away:
        """What happened since then; at most `limit` tasks in each list."""
        ...

    async def task_tree(self, message_id: str) -> TaskTree | None:
        """The task of this message, with all its messages and turns in the order of time."""
        ...

    async def task_with_messages(self, task_id: str, *, after: int = 0) -> tuple[Task | None, Sequence[Message]]:
        """The task, and its messages from and to the person without its first one, oldest first.

        If the task has ended, all of its messages are there. `after`: only messages with a greater `seq`.
        """
        ...

    async def stop_task(self, task_id: str) -> StoppedTask:
        """End everything of the task that runs or would run, in one transaction. Idempotent.

        `Refused("unknown_task")` if there is none.
        """
        ...

    async def continue_task(self, task_id: str) -> None:
        """Grant one more budget and let the agents go on that are blocked by the last one.

        `Refused`: there is no such task, or it was stopped.
        """
        ...
