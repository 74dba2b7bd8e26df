"""Storage port for turns: claims, fenced steps, history. Agent workers use it; `stores/` implements it.

A step is durable when its method returns if the worker's next action, or a person, depends on it: the start of a call
that is not pure, a message to the person. A crash of the machine may take back other steps, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from coterie.errors import StoreError
from coterie.ids import random_mark
from coterie.llm.service import Completion, TokenUsage, ToolCall
from coterie.messages import Envelope, Message
from coterie.plan import Plan, PlannedCall
from coterie.turn import Action, Event, Rules


class StaleClaim(StoreError):
    """Another worker has claimed the agent. Nothing was written."""


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of an agent's history."""

    seq: int
    turn_no: int
    role: str
    message: Message | None = None
    """The message, for a user row."""
    text: str = ""
    calls: Sequence[ToolCall] = ()
    call_id: str | None = None
    attachments: Sequence[Mapping[str, Any]] = ()
    """Files of a tool's result, as in a message."""
    hidden: bool = False
    mark: str = msgspec.field(default_factory=random_mark)
    """Delimiter of the message in a request. The store derives it from the society's secret, so it is stable."""


class ReplyTarget(msgspec.Struct, frozen=True, gc=False):
    """The fields of a message that decide who gets the reply."""

    id: str
    sender: str
    automatic: int
    in_reply_to: str | None
    cause: str | None
    hops: int
    task: str
    via: str | None
    asks_back: bool = False


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The right to write the next step of one agent's turn. Each step returns a new claim."""

    agent_id: str
    epoch: int
    step_no: int
    turn_no: int
    action: Action
    """What the worker does next."""
    plan: Plan | None = None
    """The open plan. The next step is valid only while the stored plan is equal."""
    plan_key: tuple[int, int] = (0, 0)
    """Turn and step that opened the plan. Idempotency keys of its calls are derived from it."""
    call: PlannedCall | None = None
    """The call to run."""
    cause: str | None = None
    """Id of the newest message of this turn that belongs to `task`. What the turn sends is caused by it."""
    task: str | None = None
    """The task that the turn counts for."""
    for_person: bool = False
    """A message of this turn, or one that waits, is from a person. Its requests have priority."""
    reply_target: ReplyTarget | None = None
    """The newest message of this turn, if a person sent all of them. None: the store looks the senders up."""
    may_have_sent: bool = True
    """Calls of this turn may have sent messages."""
    model_failures: int = 0
    """Failures of the model in a row."""
    added_rows: Sequence[HistoryRow] | None = ()
    """Rows that this step appended to the history. None: earlier rows changed, read the history again."""
    history_version: int = 0
    """Version of the history after this step. Each added row, hidden turn, summary and clear adds 1 to it, in the
    transaction of the change. A cached conversation may be used only if its version is equal."""
    reply_ids: Sequence[str] = ()
    """Ids of the messages that carry the model's text."""
    newest_position: int = 0
    """Position of the newest message that the agent had got at this step. Only a later one may cut the answer."""
    cuts: int = 0
    """Requests of this turn that a person's messages have cut."""
    withdrawn_calls: int = 0
    """Calls that did not run because of an interruption."""
    is_crash_suspect: bool = False
    """Two crashes happened at this step. Only one suspect runs at a time, so a third crash identifies the cause."""
    was_taken_over: bool = False
    """The previous worker did not release the turn."""
    checked_seq: int = 0
    """Waiting messages up to this mailbox position cannot interrupt the open plan; later checks skip them."""

    def call_key(self, index: int) -> str:
        """Return the permanent idempotency key of a call in the plan."""
        return f"{self.agent_id}/{self.plan_key[0]}/{self.plan_key[1]}/{index}"


@dataclass(frozen=True, slots=True)
class HistoryView:
    summary: str
    """Summary of the rows before `rows`; may be empty."""
    rows: Sequence[HistoryRow]
    version: int = 0
    """The `history_version` of summary and rows."""


AdmitFunction = Callable[[str, bool], bool]
"""`(agent_id, for_person) -> bool`: True if a turn of this agent may start."""


ClaimKey = tuple[str, int]
"""Agent id and epoch: one claim. The agent's next turn has another epoch, and may begin before this one has ended."""


class Admission(Protocol):
    """Decides which agents may be claimed."""

    def begin_round(self) -> AdmitFunction | None:
        """Return the filter for one scan of ready agents. None: every agent may be claimed.

        Called inside the claiming transaction, and again when that transaction is retried.
        """
        ...


class Interruption(NamedTuple):
    """A person's message to an agent whose model is asked, or the end of an agent's turn."""

    agent_id: str
    position: int
    """Of the message in the agent's mailbox."""
    ended_epoch: int | None = None
    """The turn was ended in the store: results under an earlier epoch are refused. None: a message arrived."""


class TurnWorker(Protocol):
    """A worker to which the store pushes claims as soon as agents get mail."""

    worker: str
    rules: Rules

    @property
    def running_turns(self) -> int:
        """Turns that run here or for which a slot is reserved. Called from any thread."""
        ...

    @property
    def max_turns(self) -> int:
        """The most turns that can run here at the same time; 0: no more turns start. Called from any thread."""
        ...

    def reserve_slot(self, agent_id: str, for_person: bool) -> bool:
        """Reserve a slot for this agent; False: the worker cannot take it. Called from any thread.

        `for_person`: a person's message waits for the agent.
        """
        ...

    def release_slots(self, agent_ids: Collection[str]) -> None:
        """Release the slots reserved for these agents, which were not claimed. Called from any thread."""
        ...

    def start_turns(self, claims: Sequence[Claim]) -> None:
        """Start claimed turns, in slots reserved before. Called on the event loop.

        The commit of the claims need not be flushed yet: a power cut may take it back.
        """
        ...

    def abandon_turns(self) -> None:
        """Cancel all turns without a further write; the lease may be lost. Called on the event loop."""
        ...

    def interrupt(self, interruption: Interruption) -> None:
        """A person's message arrived while the agent's model is asked, or its turn was ended. On the event loop.

        The agent's turn may run in another process. The call may be missing: then the turn finds the message, or that
        it was ended, at the end of its step.
        """
        ...

    def wake(self) -> None:
        """Look for ready agents that were not claimed. Called on the event loop."""
        ...

    def reconcile_claims(self) -> None:
        """Release stored claims that never reached the worker because of an error. Called on the event loop."""
        ...


class TurnStore(Protocol):
    @property
    def claims_per_round(self) -> int:
        """Agents that one call of `claim_ready` should claim at most."""
        ...

    def register_worker(self, worker: TurnWorker) -> None:
        """Claim agents for `worker` in the transaction that delivers their mail, while `worker` has slots."""
        ...

    async def flush(self) -> None:
        """Return when all earlier commits are durable."""
        ...

    async def claim_ready(
        self, worker: str, rules: Rules, limit: int, *, others: int | None = None, admission: Admission | None = None
    ) -> Sequence[Claim]:
        """Claim up to `limit` ready agents. Steps under earlier claims then fail with `StaleClaim`.

        Agents with a person's message come first, then those that waited longest. `others`: maximum of agents without a
        person's message. `admission`: filter of agents.

        The waiting mail of the claimed agents is in their history when this returns: all of it, or as much as
        `rules.mail_budget` allows. The rest stays waiting and is taken by the next steps.
        """
        ...

    async def wake_forgotten(self) -> Sequence[str]:
        """Wake agents that are idle although mail waits for them, and log each; return their ids.

        No transaction of the store leaves an agent in such a state. The row was changed by other means.
        """
        ...

    async def claims_of(self, worker: str) -> Collection[ClaimKey]:
        """Return the claims that are stored for `worker`."""
        ...

    async def release_claims(self, worker: str, *, only: Collection[ClaimKey] | None = None, failed: bool) -> None:
        """Release claims of `worker`: those of `only` that it still has; None: all.

        `failed`: count each as a crash of its turn.
        """
        ...

    async def advance(self, claim: Claim, event: Event, rules: Rules, *, sends: Envelope | None = None) -> Claim:
        """Reduce `event` with the mail that waits now, and write the step, in one transaction.

        `sends`: message of the call that just ended, stored in the same transaction as its result.
        `StaleClaim`: the claim is no longer valid; nothing was written.
        """
        ...

    async def history(self, agent_id: str, after: int = 0, limit: int | None = None) -> Sequence[HistoryRow]:
        """Return the rows after row `after`: the first `limit` of them, or all."""
        ...

    async def history_view(self, agent_id: str, claim: Claim | None = None) -> HistoryView:
        """Read the last summary, the rows after it and their version in one snapshot.

        With `claim`, the read is fenced: `StaleClaim` if the claim is not valid in that snapshot.
        """
        ...

    async def summarise(self, claim: Claim, upto: int, text: str, answer: Completion | None = None) -> Claim:
        """Show `text` to the model instead of the rows up to `upto`, which stay stored. Fenced like a step.

        Returns `claim` with the new history version, for the same step. `answer`: the model's answer to the summary
        request; its tokens are added to the cost of the step.
        """
        ...

    async def reserve_tokens(self, claim: Claim, service: str, tokens: int, *, limit: int) -> bool:
        """Reserve `tokens` for the request of `claim`; False if `limit` tokens were used today.

        The next step replaces the reservation by the real usage; a failure or a stop removes it. If the store ends the
        turn while a worker runs it, the reservation stays until the worker calls `add_refused_usage`: the request may
        be paid for. Fenced like a step.
        """
        ...

    async def add_usage(self, claim: Claim, service: str, usage: TokenUsage) -> None:
        """Add the tokens of a further model request to the cost of the step: one that a tool's server asked for.

        Not fenced: they are paid for in any case.
        """
        ...

    async def add_refused_usage(self, claim: Claim, service: str, usage: TokenUsage) -> None:
        """Replace the tokens reserved for a request whose step was refused by those that it used; 0: it was not sent.

        Not fenced: they are paid for in any case.
        """
        ...

    async def tokens_used_today(self) -> int:
        """Return the tokens that all model answers used since midnight UTC, by the clock that all processes share."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A tool call of a plan, for people."""

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
    """A plan of an agent's model and its outcome, for people."""

    seq: int
    """The cursor of the listing."""
    agent_id: str
    turn_no: int
    step_no: int
    text: str
    outcome: Literal["open", "closed", "withdrawn"]
    interrupted_by: str | None
    """The message that withdrew or shortened it."""
    at: datetime
    task: str | None
    """The task that it was made for."""
    calls: Sequence[CallRecord]


FoundRuns = tuple[Sequence[PlanRecord], int | None]
"""A part of them, and before which plan the search goes on; None: all plans were read."""
