"""Tasks: everything that one request set off. What a task is, what it may use, and the question at its limit.

The store keeps the counters of a task in the transactions of the messages and turns that they count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from coterie.clock import to_rfc3339
from coterie.ids import id_for
from coterie.text import one_line

TaskState = Literal["working", "waiting", "done", "failed", "stopped"]
TurnState = Literal["working", "waiting", "done", "failed", "stopped", "blocked"]
BudgetReason = Literal["turns", "tokens", "cost", "minutes"]

NANO = 1_000_000_000
"""Costs are stored in billionths of the currency."""
MAX_TITLE, MAX_EXCERPT = 200, 500
"""Characters of a task's text, and of a message in its tree."""
CONTINUE, STOP = 0, 1
"""Options of the budget question."""
BUDGET_OPTIONS = ("Continue", "Stop")


class Budget(Struct, frozen=True, kw_only=True, gc=False):
    """What a task may use before the person is asked; 0: no limit. Each Continue adds the same once more."""

    turns: int = 100
    tokens: int = 0
    cost: float = 0.0
    minutes: float = 0.0
    """Of model time."""

    @property
    def limits_requests(self) -> bool:
        """True if every request counts, not only the start of a turn."""
        return bool(self.tokens or self.cost or self.minutes)

    def to_dict(self) -> dict[str, Any]:
        return {"turns": self.turns or None, "tokens": self.tokens or None, "cost": self.cost or None,
                "minutes": self.minutes or None}  # fmt: skip


class TaskTotals(Struct, frozen=True, kw_only=True, gc=False):
    """What a task has used."""

    turns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    model_ms: int = 0


def exceeded(budget: Budget, budgets: int, used: TaskTotals) -> BudgetReason | None:
    """Return the limit that forbids one more request. `budgets`: the first one, and one per Continue.

    A turn is counted when it starts, so the last allowed turn makes its count equal to the limit.
    """
    if budget.turns and used.turns > budget.turns * budgets:
        return "turns"
    if budget.tokens and used.input_tokens + used.output_tokens >= budget.tokens * budgets:
        return "tokens"
    if budget.cost and used.cost >= budget.cost * NANO * budgets:
        return "cost"
    if budget.minutes and used.model_ms >= budget.minutes * 60_000 * budgets:
        return "minutes"
    return None


class Task(Struct, frozen=True, kw_only=True, gc=False):
    """One task, as people see it."""

    seq: int
    """Number of its first message; the cursor of listings."""
    id: str
    parent: str | None
    """The task that scheduled its first message."""
    sender: str
    to: str
    """Recipient of its first message."""
    text: str
    state: TaskState
    created_at: datetime
    last_at: datetime
    """Last activity."""
    stopped_at: datetime | None = None
    messages: int
    agents: int = 0
    """Agents that have worked on it."""
    active_agents: Sequence[str] = ()
    """Agents at work on it now; at most 20."""
    active: int = 0
    queued: int = 0
    """Messages that wait for agents or are delayed by less than a minute."""
    questions: int = 0
    """Open questions to the person."""
    turns: int = 0
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    tool_calls: int = 0
    model_ms: int = 0
    cost: int = 0
    """In billionths; of the requests whose price is known."""
    unpriced: int = 0
    """Requests whose price is not known."""
    budgets: int = 1
    """Budgets granted: the first one, and one per Continue."""
    budget_question: str | None = None
    """The open question whether the task may go on."""
    unread: bool = False
    """No agent read its first message, which was withdrawn or could not be delivered."""

    @property
    def agent(self) -> str:
        """The agent that works on it: the recipient of its first message, or the sender if that is the person."""
        return self.sender if self.to == "user" else self.to

    def to_dict(self, budget: Budget | None = None, currency: str | None = None) -> dict[str, Any]:
        has_cost = self.requests > self.unpriced
        return {
            "id": self.id,
            "parentTask": self.parent,
            "person": "user",
            "from": self.sender,
            "to": self.to,
            "agent": self.agent,
            "text": self.text,
            "state": self.state,
            "createdAt": to_rfc3339(self.created_at),
            "lastAt": to_rfc3339(self.last_at),
            "stoppedAt": to_rfc3339(self.stopped_at),
            "messages": self.messages,
            "agents": self.agents,
            "active": self.active,
            "activeAgents": list(self.active_agents),
            "queued": self.queued,
            "questions": self.questions,
            "turns": self.turns,
            "requests": self.requests,
            "inputTokens": self.input_tokens,
            "outputTokens": self.output_tokens,
            "cachedTokens": self.cached_tokens,
            "toolCalls": self.tool_calls,
            "modelMs": self.model_ms,
            "cost": self.cost / NANO if has_cost else None,
            "currency": currency if has_cost else None,
            "unpricedRequests": self.unpriced,
            "budget": (budget or Budget()).to_dict(),
            "budgets": self.budgets,
            "budgetQuestion": self.budget_question,
            "unread": self.unread,
        }


class MessageNode(Struct, frozen=True, kw_only=True, gc=False):
    """A message in the tree of a task."""

    id: str
    parent: str | None
    """The message of the same task that caused it."""
    sender: str
    to: str
    text: str
    state: str
    created_at: datetime
    delivered_at: datetime | None
    taken_at: datetime | None
    automatic: bool
    """The reply that ended a turn."""
    question: bool
    answer: dict[str, Any] | None


class RequestRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One request to a model."""

    service: str
    at: datetime
    """When it ended."""
    ms: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cost: int | None
    outcome: str


class TaskCall(Struct, frozen=True, kw_only=True, gc=False):
    """One tool call of a turn."""

    call_id: str
    name: str
    state: str
    started_at: datetime | None
    ended_at: datetime | None


class TurnNode(Struct, frozen=True, kw_only=True, gc=False):
    """A turn in the tree of a task."""

    agent_id: str
    turn_no: int
    parent: str | None
    """The newest message of the task that it took."""
    state: TurnState
    started_at: datetime
    ended_at: datetime | None
    requests: Sequence[RequestRecord]
    calls: Sequence[TaskCall]

    @property
    def cost(self) -> int | None:
        """None if no request of it has a price."""
        known = [request.cost for request in self.requests if request.cost is not None]
        return sum(known) if known else None


class TaskTree(Struct, frozen=True, kw_only=True, gc=False):
    task: Task
    nodes: Sequence[MessageNode | TurnNode]
    """In the order of time."""


class StoppedTask(Struct, frozen=True, kw_only=True, gc=False):
    """What a stop ended."""

    turns: int = 0
    messages: int = 0
    questions: int = 0
    agent_ids: Sequence[str] = ()
    """Agents whose turns ended. Their workers may still execute an action, whose result is refused."""


class Away(Struct, frozen=True, kw_only=True, gc=False):
    """What happened since a moment, for a person who comes back."""

    finished: Sequence[Task]
    failed: Sequence[Task]
    waiting: Sequence[Task]
    """Each with activity since then, newest first, the first ones."""
    counts: Mapping[str, int]
    """All of them, by state."""
    unread: Mapping[str, int]
    """Unread messages that came since then, by conversation."""


def budget_question_id(task_id: str, number: int) -> str:
    """Return the id of the budget question number `number` of a task: several agents at the limit send it once."""
    return id_for("budget", task_id, str(number))


_UNITS: dict[BudgetReason, str] = {
    "turns": "turns",
    "tokens": "tokens",
    "cost": "",
    "minutes": "minutes of model time",
}


def budget_payload(
    task_id: str, about: str, names: Sequence[str], reason: BudgetReason, budget: Budget, budgets: int, used: TaskTotals
) -> dict[str, Any]:
    """Return the payload of the question whether a task may go on."""
    limit = getattr(budget, reason) * budgets
    if reason == "turns":  # the turns that came to the limit were counted, but have not run
        used = replace(used, turns=min(used.turns, limit))
    spent = f"{limit:g} {_UNITS[reason]}".strip() if reason != "cost" else f"a cost of {limit:g}"
    workers = f" {', '.join(names)} worked on it." if names else ""
    minutes = used.model_ms / 60_000
    text = (
        f"The task “{one_line(about)}” has used its budget of {spent}.{workers} So far: {used.turns} turns,"
        f" {used.input_tokens + used.output_tokens:,} tokens, {minutes:.1f} minutes of model time. May it go on?"
    )
    return {
        "text": text,
        "quickReplies": list(BUDGET_OPTIONS),
        "budget": {
            "task": task_id,
            "reason": reason,
            "limit": limit,
            "about": about,
            "agents": list(names),
            "used": {
                "turns": used.turns,
                "inputTokens": used.input_tokens,
                "outputTokens": used.output_tokens,
                "cost": used.cost / NANO if used.cost else None,
                "modelMs": used.model_ms,
            },
        },
    }
