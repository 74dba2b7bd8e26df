"""The person's conversation with one agent: read it, clear it, take it home."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from coterie.admin.inspect import read_thread, render_markdown
from coterie.clock import to_rfc3339
from coterie.web import shapes, wire
from coterie.web.endpoint import COMMON, ClockDep, Cursor, Limit, SocietyDep, answer, gives, listing, problems

router = APIRouter(tags=["threads"], responses=COMMON)

MARKDOWN = "text/markdown"


@router.get(
    "/threads/{agent}/messages",
    summary="A part of the conversation, oldest first",
    responses=gives(shapes.Messages) | problems("unknown_agent", "unknown_message"),
)
async def read(
    agent: str,
    society: SocietyDep,
    before: Cursor | None = None,
    after: Cursor | None = None,
    around: Cursor | None = None,
    limit: Limit = 50,
) -> Response:
    """The latest part; or the one `before`, `after` or `around` the message of that id.

    `next` goes on in the same direction: with `after` towards the present, else into the past.
    """
    if sum(place is not None for place in (before, after, around)) > 1:
        told = "give one of before, after and around"
        raise RequestValidationError([{"type": "value_error", "loc": ("query",), "msg": told}])
    wire.known(await society.store.agent(agent), agent)
    part = await society.store.thread(agent, before=before, after=after, around=around, limit=limit)
    following = None
    if len(part) == limit:
        following = part[-1].id if after is not None else part[0].id
    return listing(wire.messages(part), following)


@router.delete(
    "/threads/{agent}",
    summary="Clear the conversation, and what the agent remembers",
    responses=gives(shapes.Cleared) | problems("unknown_agent", "agent_busy"),
)
async def clear(agent: str, society: SocietyDep) -> Response:
    wire.known(await society.store.agent(agent), agent)
    cleared = await society.store.clear_thread(agent)
    society.bus.notify()
    return answer({"messages": cleared})


@router.get(
    "/threads/{agent}/export",
    summary="The whole conversation, as Markdown or JSON",
    responses=gives(shapes.Export, content={MARKDOWN: {"schema": {"type": "string"}}}) | problems("unknown_agent"),
)
async def export(
    agent: str,
    society: SocietyDep,
    clock: ClockDep,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    format: Annotated[Literal["markdown", "json"] | None, Query()] = None,  # noqa: A002
) -> Response:
    """By `format`, else by `Accept`, else Markdown."""
    known = wire.known(await society.store.agent(agent), agent)
    whole = await read_thread(society.store, agent)
    as_json = format == "json" or (format is None and "json" in accept and MARKDOWN not in accept)
    name = f'attachment; filename="{agent}.{"json" if as_json else "md"}"'
    if as_json:
        told = answer(
            {
                "agent": wire.agent(society, known),
                "exportedAt": to_rfc3339(clock.now()),
                "messages": wire.messages(whole),
            }
        )
        told.headers["Content-Disposition"] = name
        return told
    return Response(render_markdown(known, whole), headers={"Content-Disposition": name}, media_type=MARKDOWN)
