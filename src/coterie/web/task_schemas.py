"""JSON bodies about tasks. The rules of `web/schemas` hold here too."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, field

from coterie import tasks
from coterie.clock import to_rfc3339
from coterie.society import Society
from coterie.tasks import NANO, TaskState, TurnState
from coterie.web.schemas import Answer, Schema, Time

Cost = Annotated[float | None, Meta(description="In units of `currency`; null: unknown, no request has a price.")]


class TaskBudget(Schema):
    """What one budget allows; null: no limit."""

    turns: int | None
    tokens: int | None
    cost: float | None
    minutes: Annotated[float | None, Meta(description="Of model time.")]


class Task(Schema, kw_only=True):
    """Everything that one message set off. Its id is that of the message."""

    id: str
    parent_task: Annotated[str | None, Meta(description="The task that scheduled its first message.")]
    agent: Annotated[
        str,
        Meta(description="The recipient of its first message, or the sender if the person is the recipient."),
    ]
    person: str
    sender: str = field(name="from")
    to: Annotated[str, Meta(description="Recipient of its first message.")]
    text: Annotated[str, Meta(description="The beginning of its first message.")]
    state: Annotated[
        TaskState,
        Meta(description="`waiting`: for an answer of the person. `failed`: its last message reports a failure."),
    ]
    created_at: Time
    last_at: Time
    stopped_at: Time | None
    messages: int
    agents: Annotated[int, Meta(description="Agents that have worked on it.")]
    active: Annotated[int, Meta(description="Agents at work on it now.")]
    active_agents: Annotated[list[str], Meta(description="Their ids, at most 20.")]
    queued: Annotated[int, Meta(description="Messages that wait for agents, or are delayed by less than a minute.")]
    questions: Annotated[int, Meta(description="Open questions to the person.")]
    turns: int
    requests: Annotated[int, Meta(description="Requests to models.")]
    input_tokens: int
    output_tokens: int
    cached_tokens: Annotated[int, Meta(description="Part of the input tokens.")]
    tool_calls: int
    model_ms: Annotated[int, Meta(description="Time of all requests to models.")]
    cost: Cost
    currency: str | None
    unpriced_requests: Annotated[
        int, Meta(description="Requests whose price is not known. With any, `cost` is a lower bound.")
    ]
    budget: TaskBudget
    budgets: Annotated[int, Meta(description="Budgets granted: the first one, and one per Continue.")]
    budget_question: Annotated[str | None, Meta(description="The open question whether it may go on.")]
    unread: Annotated[
        bool,
        Meta(description="No agent read its first message, which was withdrawn or could not be delivered."),
    ]

    @classmethod
    def of(cls, society: Society, task: tasks.Task) -> Self:
        return msgspec.convert(task.to_dict(society.config.limits.task.budget, society.currency), cls)


class TaskPage(Schema):
    items: list[Task]
    next: str | None


class MessageNode(Schema, kw_only=True):
    kind: Literal["message"] = "message"
    id: str
    parent: Annotated[str | None, Meta(description="The message of this task that caused it.")]
    sender: str = field(name="from")
    to: str
    text: Annotated[str, Meta(description="Its beginning.")]
    state: str
    created_at: Time
    delivered_at: Time | None
    taken_at: Time | None
    automatic: Annotated[bool, Meta(description="The reply that ended a turn.")]
    question: bool
    answer: Answer | None

    @classmethod
    def of(cls, node: tasks.MessageNode) -> Self:
        return cls(
            id=node.id,
            parent=node.parent,
            sender=node.sender,
            to=node.to,
            text=node.text,
            state=node.state,
            created_at=to_rfc3339(node.created_at) or "",
            delivered_at=to_rfc3339(node.delivered_at),
            taken_at=to_rfc3339(node.taken_at),
            automatic=node.automatic,
            question=node.question,
            answer=None if node.answer is None else msgspec.convert(node.answer, Answer),
        )


class TaskRequest(Schema):
    """One request to a model."""

    service: str
    at: Annotated[Time, Meta(description="When it ended.")]
    ms: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cost: Cost
    outcome: str


class TaskCall(Schema):
    """One tool call."""

    call_id: str
    name: str
    state: str
    started_at: Time | None
    ended_at: Time | None


class TurnNode(Schema, kw_only=True):
    kind: Literal["turn"] = "turn"
    id: Annotated[str, Meta(description="`agent/turn`.")]
    parent: Annotated[str | None, Meta(description="The newest message of this task that it took.")]
    agent: str
    turn: int
    state: TurnState
    started_at: Time
    ended_at: Time | None
    requests: list[TaskRequest]
    calls: list[TaskCall]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cost: Cost

    @classmethod
    def of(cls, node: tasks.TurnNode) -> Self:
        return cls(
            id=f"{node.agent_id}/{node.turn_no}",
            parent=node.parent,
            agent=node.agent_id,
            turn=node.turn_no,
            state=node.state,
            started_at=to_rfc3339(node.started_at) or "",
            ended_at=to_rfc3339(node.ended_at),
            requests=[
                TaskRequest(
                    service=request.service,
                    at=to_rfc3339(request.at) or "",
                    ms=request.ms,
                    input_tokens=request.input_tokens,
                    output_tokens=request.output_tokens,
                    cached_tokens=request.cached_tokens,
                    cost=in_units(request.cost),
                    outcome=request.outcome,
                )
                for request in node.requests
            ],
            calls=[
                TaskCall(
                    call_id=call.call_id,
                    name=call.name,
                    state=call.state,
                    started_at=to_rfc3339(call.started_at),
                    ended_at=to_rfc3339(call.ended_at),
                )
                for call in node.calls
            ],
            input_tokens=sum(request.input_tokens for request in node.requests),
            output_tokens=sum(request.output_tokens for request in node.requests),
            cached_tokens=sum(request.cached_tokens for request in node.requests),
            cost=in_units(node.cost),
        )


def in_units(billionths: int | None) -> float | None:
    return None if billionths is None else billionths / NANO


class TaskTree(Task, kw_only=True):
    """A task with its messages and turns, in the order of time."""

    nodes: Annotated[
        list[Any],
        Meta(
            extra_json_schema={
                "items": {
                    "oneOf": [{"$ref": "#/components/schemas/MessageNode"}, {"$ref": "#/components/schemas/TurnNode"}]
                }
            }
        ),
    ]

    @classmethod
    def of_tree(cls, society: Society, tree: tasks.TaskTree) -> Self:
        summary = tree.task.to_dict(society.config.limits.task.budget, society.currency)
        nodes = [
            MessageNode.of(node) if isinstance(node, tasks.MessageNode) else TurnNode.of(node) for node in tree.nodes
        ]
        made = msgspec.convert(summary | {"nodes": []}, cls)
        made.nodes = nodes
        return made


class StoppedTask(Schema):
    """What the stop ended. All counts are 0 if the task was stopped before."""

    turns: int
    messages: Annotated[int, Meta(description="Messages that were withdrawn.")]
    questions: Annotated[int, Meta(description="Open questions that were closed.")]


class AwayCounts(Schema):
    finished: int
    failed: int
    waiting: int


class AwayThread(Schema):
    agent: str
    unread: int


class Away(Schema):
    """What happened since a moment. Each list of tasks has the newest 20; `counts` has all."""

    since: Time
    finished: list[Task]
    failed: list[Task]
    waiting: Annotated[list[Task], Meta(description="They wait for an answer of the person.")]
    counts: AwayCounts
    messages: Annotated[int, Meta(description="Unread messages that came since then.")]
    threads: list[AwayThread]
