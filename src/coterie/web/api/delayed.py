"""What will be delivered later."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from coterie.web import shapes, wire
from coterie.web.api.messages import found
from coterie.web.endpoint import COMMON, Cursor, Id, Limit, SocietyDep, gives, listing, problems

router = APIRouter(tags=["messages"], responses=COMMON)


@router.get(
    "/delayed",
    summary="Delayed messages, by due time",
    responses=gives(shapes.Delayed) | problems("unknown_message"),
)
async def delayed(
    society: SocietyDep, recipient: Id | None = None, after: Cursor | None = None, limit: Limit = 50
) -> Response:
    behind = None if after is None else await found(society.store, after)
    count = await society.store.delayed_count(recipient)
    items = await society.store.delayed(recipient, after=behind, limit=limit)
    return listing(wire.messages(items), items[-1].id if len(items) == limit else None, count=count)
