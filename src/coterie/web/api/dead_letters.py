"""Messages that their recipient never got: look at them, send them again, let go of them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from coterie.store import Page
from coterie.web import shapes
from coterie.web.api.messages import newest_first, place
from coterie.web.endpoint import COMMON, Cursor, Limit, SocietyDep, answer, gives, nothing, problems

router = APIRouter(prefix="/dead-letters", tags=["dead letters"], responses=COMMON)


@router.get("", summary="Newest first", responses=gives(shapes.Messages) | problems("unknown_message"))
async def letters(society: SocietyDep, before: Cursor | None = None, limit: Limit = 50) -> Response:
    page = Page(before=await place(society.store, before), limit=limit)
    return newest_first(await society.store.messages(page, state="dead"), limit)


@router.post(
    "/{message_id}/resend",
    status_code=202,
    summary="Send it again, as a new message",
    responses=gives(shapes.Receipt, 202)
    | problems("unknown_message", "recipient_terminated", "mailbox_full", "hop_limit", "attachment_unknown"),
)
async def resend(message_id: str, society: SocietyDep) -> Response:
    receipt = await society.store.resend_dead_letter(message_id)
    society.bus.notify()
    return answer(receipt.to_dict(), 202)


@router.delete(
    "/{message_id}",
    status_code=204,
    response_class=Response,
    summary="Delete it",
    responses=problems("unknown_message"),
)
async def forget(message_id: str, society: SocietyDep) -> Response:
    await society.store.delete_dead_letter(message_id)
    society.bus.notify()
    return nothing()
