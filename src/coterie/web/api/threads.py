"""The person's conversations, and overviews with their JSON bodies: snapshot, search, tool runs, usage."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta
from starlette.responses import Response

from coterie import store
from coterie.admin.inspect import read_thread, render_markdown
from coterie.clock import to_rfc3339
from coterie.messages import SYSTEM
from coterie.society import Society
from coterie.store import Page
from coterie.turn_store import PlanRecord
from coterie.web import markdown
from coterie.web.api.agents import find_agent
from coterie.web.api.messages import message_page, message_position
from coterie.web.openapi import COMMON_PROBLEMS, described_content, problems
from coterie.web.routing import (
    API,
    ClockDep,
    Cursor,
    Header,
    Id,
    Limit,
    Router,
    SocietyDep,
    invalid_query,
    json_response,
    position,
)
from coterie.web.schemas import (
    EMPTY_LIST,
    Agent,
    ClearedThread,
    ConfigurationState,
    Message,
    MessagePage,
    ReadCount,
    ReadMark,
    Rendered,
    Schema,
    Thread,
    ThreadExport,
    Time,
    UnreadCount,
    UnreadMark,
)  # fmt: skip
from coterie.web.sse import epoch_of
from coterie.web.task_schemas import Cost, Task, in_units

router = Router(prefix=API, responses=COMMON_PROBLEMS)

MARKDOWN = "text/markdown"


class Snapshot(Schema):
    """The state at event `seq`. Each list is cut; the count beside it is the whole."""

    epoch: str
    seq: int
    server_time: Time
    paused: Annotated[bool, Meta(description="The whole society is paused: no turn, model call or tool starts.")]
    agents: Annotated[list[Agent], Meta(description="At most 200, as in the lists below.")]
    agent_count: int
    threads: list[Thread]
    thread_count: Annotated[int, Meta(description="At most 1,000 are counted.")]
    queues: list[Message]
    queue_count: int
    delayed: list[Message]
    delayed_count: int
    open_questions: list[Message]
    open_question_count: int
    tasks: Annotated[list[Task], Meta(description="Those that work or wait for the person, newest first, at most 50.")]
    task_count: int
    configuration: ConfigurationState


class Usage(Schema, kw_only=True):
    day: str
    agent: str
    service: str
    requests: int
    withdrawn: int
    input_tokens: int
    output_tokens: int
    cached_tokens: Annotated[int, Meta(description="Part of the input tokens.")]
    estimated_tokens: Annotated[int, Meta(description="Part of both that the service did not report.")]
    cost: Cost
    currency: str | None
    unpriced_requests: Annotated[
        int, Meta(description="Requests whose price is not known. With any, `cost` is a lower bound.")
    ]

    @classmethod
    def of(cls, society: Society, usage: store.Usage) -> Self:
        has_cost = usage.requests > usage.unpriced
        return cls(
            day=usage.day,
            agent=usage.agent_id,
            service=usage.service,
            requests=usage.requests,
            withdrawn=usage.withdrawn,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            estimated_tokens=usage.estimated_tokens,
            cost=in_units(usage.cost) if has_cost else None,
            currency=society.currency if has_cost else None,
            unpriced_requests=usage.unpriced,
        )


class UsagePage(Schema):
    items: list[Usage]
    next: None


class ToolCall(Schema):
    call_id: str
    name: str
    arguments: str
    state: str
    result: str
    started_at: Time | None
    ended_at: Time | None


class Run(Schema):
    """One plan of an agent: what its model said and wanted to do at one step, and the tool calls.

    `text` was said before the calls. A withdrawn plan without calls is an answer that a message of the person ended.
    """

    agent: str
    turn: int
    step: int
    text: str
    rendered: Rendered
    outcome: Literal["open", "closed", "withdrawn"]
    interrupted_by: str | None
    at: Time
    position: Annotated[str, Meta(description="As `before`: the list continues after this plan.")]
    task: str | None
    calls: list[ToolCall]

    @classmethod
    def of(cls, plan: PlanRecord) -> Self:
        return cls(
            agent=plan.agent_id,
            turn=plan.turn_no,
            step=plan.step_no,
            text=plan.text,
            rendered=markdown.render_json(plan.text) if plan.text else EMPTY_LIST,
            outcome=plan.outcome,
            interrupted_by=plan.interrupted_by,
            at=to_rfc3339(plan.at) or "",
            position=str(plan.seq),
            task=plan.task,
            calls=[
                ToolCall(
                    call_id=call.call_id,
                    name=call.name,
                    arguments=call.arguments,
                    state=call.state,
                    result=call.result,
                    started_at=to_rfc3339(call.started_at),
                    ended_at=to_rfc3339(call.ended_at),
                )
                for call in plan.calls
            ],
        )


class RunPage(Schema):
    items: list[Run]
    next: str | None


class GrowingText(Schema):
    text: Annotated[str, Meta(max_length=markdown.MAX_TEXT)]


class RenderedBlocks(Schema):
    blocks: Rendered
    line: Annotated[
        int, Meta(description="The line, from 0, at which the last block begins. Earlier blocks are final.")
    ]


@router.get("/snapshot", tags=["overview"], summary="Get the state of the society")
async def get_snapshot(society: SocietyDep, clock: ClockDep) -> Snapshot:
    """Open the event stream with `lastEventId=<epoch>.<seq>` to get every later event."""
    snapshot = await society.store.snapshot()
    unread = {thread.agent_id: thread.unread for thread in snapshot.threads}
    return Snapshot(
        epoch=epoch_of(society.store.info.log_id),
        seq=snapshot.seq,
        server_time=to_rfc3339(clock.now()) or "",
        paused=snapshot.paused,
        agents=[Agent.in_society(society, agent, unread.get(agent.id, 0)) for agent in snapshot.agents],
        agent_count=snapshot.agent_count,
        threads=[Thread.of(thread) for thread in snapshot.threads],
        thread_count=snapshot.thread_count,
        queues=Message.of_all(snapshot.queues),
        queue_count=snapshot.queue_count,
        delayed=Message.of_all(snapshot.delayed),
        delayed_count=snapshot.delayed_count,
        open_questions=Message.of_all(snapshot.open_questions),
        open_question_count=snapshot.question_count,
        tasks=[Task.of(society, task) for task in snapshot.tasks],
        task_count=snapshot.task_count,
        configuration=ConfigurationState.of(society.configuration.health),
    )


@router.get(
    "/threads/{agent}/messages",
    tags=["threads"],
    summary="List messages of a conversation, oldest first",
    responses=problems("unknown_agent", "unknown_message"),
)
async def list_thread_messages(
    agent: str,
    society: SocietyDep,
    before: Cursor | None = None,
    after: Cursor | None = None,
    around: Cursor | None = None,
    limit: Limit = 50,
) -> MessagePage:
    """The latest messages, or those `before`, `after` or `around` the message of that id.

    `next` continues in the same direction: with `after` towards the present, else into the past.
    """
    if sum(cursor is not None for cursor in (before, after, around)) > 1:
        raise invalid_query("give at most one of before, after and around")
    await find_agent(society.store, agent)
    page = await society.store.thread(agent, before=before, after=after, around=around, limit=limit)
    following = None
    if len(page) == limit:
        following = page[-1].id if after is not None else page[0].id
    return MessagePage(items=Message.of_all(page), next=following)


@router.delete(
    "/threads/{agent}",
    tags=["threads"],
    summary="Clear the conversation and the agent's history",
    responses=problems("unknown_agent", "agent_busy"),
)
async def clear_thread(agent: str, society: SocietyDep) -> ClearedThread:
    await find_agent(society.store, agent)
    count = await society.store.clear_thread(agent)
    society.bus.notify()
    return ClearedThread(messages=count)


@router.get(
    "/threads/{agent}/export",
    tags=["threads"],
    summary="Export the whole conversation, as Markdown or JSON",
    responses={
        200: {"content": {**described_content(ThreadExport), MARKDOWN: {"schema": {"type": "string"}}}},
        **problems("unknown_agent"),
    },
)
async def export_thread(
    agent: str,
    society: SocietyDep,
    clock: ClockDep,
    accept: Annotated[str, Header(is_described=False)] = "",
    format: Literal["markdown", "json"] | None = None,  # noqa: A002
) -> Response:
    """`format` decides, else the `Accept` header; the default is Markdown."""
    found = await find_agent(society.store, agent)
    messages = await read_thread(society.store, agent)
    if format == "json" or (format is None and "json" in accept and MARKDOWN not in accept):
        exported_at = to_rfc3339(clock.now()) or ""
        response = json_response(
            ThreadExport(
                agent=Agent.in_society(society, found), exported_at=exported_at, messages=Message.of_all(messages)
            )
        )
    else:
        response = Response(render_markdown(found, messages), media_type=MARKDOWN)
    extension = "md" if response.media_type == MARKDOWN else "json"
    response.headers["Content-Disposition"] = f'attachment; filename="{agent}.{extension}"'
    return response


@router.post(
    "/read",
    tags=["overview"],
    summary="Mark a conversation as read up to a message",
    responses=problems("unknown_agent", "unknown_message"),
)
async def mark_read(body: ReadMark, society: SocietyDep) -> ReadCount:
    if body.thread != SYSTEM:  # the runtime's notices that concern no single agent
        await find_agent(society.store, body.thread)
    count = await society.store.mark_read(body.thread, body.upto)
    society.bus.notify()
    return ReadCount(read=count)


@router.post(
    "/unread",
    tags=["overview"],
    summary="Mark a conversation as unread from a message on",
    responses=problems("unknown_agent", "unknown_message"),
)
async def mark_unread(body: UnreadMark, society: SocietyDep) -> UnreadCount:
    await find_agent(society.store, body.thread)
    count = await society.store.mark_unread(body.thread, body.since)
    society.bus.notify()
    return UnreadCount(unread=count)


@router.get(
    "/search",
    tags=["overview"],
    summary="Search messages that contain all words, newest first",
    responses=problems("unknown_message"),
)
async def search_messages(
    society: SocietyDep,
    q: Annotated[str, Meta(min_length=1, max_length=500)],
    agent: Id | None = None,
    before: Cursor | None = None,
    limit: Limit = 50,
) -> MessagePage:
    page = Page(before=await message_position(society.store, before), limit=limit)
    return message_page(await society.store.search(q, page, agent), limit)


@router.get("/runs", tags=["overview"], summary="List tool runs and withdrawn plans, newest first")
async def list_runs(
    society: SocietyDep,
    agent: Id | None = None,
    q: Annotated[str, Meta(max_length=500)] = "",
    before: Cursor | None = None,
    limit: Limit = 50,
) -> RunPage:
    """With `q`, those whose text contains all words. A request searches in a part of them: a page with few or no items
    can have a `next`.
    """
    page = Page(before=position(before, "before"), limit=limit)
    if q.strip():
        plans, go_on = await society.store.search_runs(q, page, agent)
    else:
        plans = await society.store.runs(page, agent)
        go_on = plans[-1].seq if len(plans) == limit else None
    return RunPage(items=[Run.of(plan) for plan in plans], next=None if go_on is None else str(go_on))


@router.post("/markdown", tags=["overview"], summary="Render the Markdown of a text that is still being written")
async def render_markdown_blocks(body: GrowingText) -> RenderedBlocks:
    """Unfinished bold text and code at the end are rendered as if they were finished."""
    blocks, line = markdown.render_growing(body.text)
    return RenderedBlocks(blocks=msgspec.Raw(msgspec.json.encode(blocks)), line=line)


@router.get("/usage", tags=["overview"], summary="Get requests and tokens by day, agent and service")
async def get_usage(society: SocietyDep, clock: ClockDep, days: Annotated[int, Meta(ge=1, le=3660)] = 30) -> UsagePage:
    rows = await society.store.usage(clock.now() - timedelta(days=days))
    return UsagePage(items=[Usage.of(society, row) for row in rows], next=None)
