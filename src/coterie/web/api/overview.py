"""What people ask about a society: what was read, found, run, and what it cost."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from coterie.messages import SYSTEM
from coterie.store import Page
from coterie.web import shapes, wire
from coterie.web.api.messages import newest_first, place
from coterie.web.endpoint import BODY, COMMON, ClockDep, Cursor, Id, Limit, SocietyDep, answer, gives, listing, problems

router = APIRouter(tags=["overview"], responses=COMMON)


@router.post(
    "/read",
    summary="The person has read a conversation up to a message",
    responses=gives(shapes.Read) | BODY | problems("unknown_agent", "unknown_message"),
)
async def read(mark: shapes.ReadMark, society: SocietyDep) -> Response:
    if mark.thread != SYSTEM:  # the runtime's notices about no agent in particular
        wire.known(await society.store.agent(mark.thread), mark.thread)
    count = await society.store.mark_read(mark.thread, mark.upto)
    society.bus.notify()
    return answer({"read": count})


@router.get(
    "/search",
    summary="Messages that contain all the words, newest first",
    responses=gives(shapes.Messages) | problems("unknown_message"),
)
async def search(
    society: SocietyDep,
    q: Annotated[str, Query(min_length=1, max_length=500)],
    agent: Id | None = None,
    before: Cursor | None = None,
    limit: Limit = 50,
) -> Response:
    page = Page(before=await place(society.store, before), limit=limit)
    return newest_first(await society.store.search(q, page, agent), limit)


@router.get("/runs", summary="Tool runs and withdrawn plans, newest first", responses=gives(shapes.Runs))
async def runs(
    society: SocietyDep, agent: Id | None = None, before: Cursor | None = None, limit: Limit = 50
) -> Response:
    plans = await society.store.runs(Page(before=number(before), limit=limit), agent)
    return listing([wire.run(plan) for plan in plans], plans[-1].seq if len(plans) == limit else None)


@router.get("/usage", summary="What models cost, by day", responses=gives(shapes.Usage))
async def usage(society: SocietyDep, clock: ClockDep, days: Annotated[int, Query(ge=1, le=3660)] = 30) -> Response:
    rows = await society.store.usage(clock.now() - timedelta(days=days))
    return listing([wire.usage(row) for row in rows], None)


def number(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if cursor.isascii() and cursor.isdecimal() and len(cursor) < 19:
        return int(cursor)
    told = "is no place in this list: give the next of the page before"
    raise RequestValidationError([{"type": "value_error", "loc": ("query", "before"), "msg": told}])
