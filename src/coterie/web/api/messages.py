"""Messages: send, look at, move, withdraw."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from coterie.errors import Refused
from coterie.messages import PERSON, Message
from coterie.society import Society
from coterie.store import Page, Store
from coterie.text import one_line
from coterie.web import shapes, wire
from coterie.web.endpoint import BODY, COMMON, Cursor, Id, Limit, SocietyDep, answer, gives, listing, nothing, problems

router = APIRouter(tags=["messages"], responses=COMMON)


class Draft(msgspec.Struct, rename="camel"):
    """What came in, as far as JSON goes; whether it can be sent is for the bus to say."""

    to: Any = None
    payload: Any = None
    client_id: str | None = None
    delay_ms: Any = None
    quick_replies: Any = None
    in_reply_to: Any = None
    option: Any = None


_decode = msgspec.json.Decoder(Draft).decode


# The way of every send: the body is read without FastAPI's detour, so its shape is given here by hand.
@router.post(
    "/messages",
    status_code=202,
    summary="Send a message",
    responses=gives(shapes.Receipt, 202)
    | BODY
    | problems(
        "unknown_recipient",
        "recipient_terminated",
        "payload_too_large",
        "mailbox_full",
        "already_answered",
        "quickReplies_too_many",
        "quickReplies_invalid_type",
        "quickReplies_empty_string",
        "delayMs_invalid",
        "payload_invalid",
        "attachment_unknown",
        "hop_limit",
        "inReplyTo_unknown",
        "option_invalid",
        _422="`request_invalid`",
        _413="`body_too_large`",
        _429="`too_many_requests`",
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": shapes.NewMessage.model_json_schema()}},
        }
    },
)
async def send(request: Request) -> Response:
    society = cast(Society, request.app.state.society)
    draft = _read(await request.body())
    receipt = await society.bus.send(
        sender=PERSON,
        to=draft.to,
        payload=draft.payload,
        delay_ms=draft.delay_ms,
        quick_replies=draft.quick_replies,
        client_id=draft.client_id,
        in_reply_to=draft.in_reply_to,
        option=draft.option,
    )
    return answer(receipt.to_dict(), 202)


def _read(body: bytes) -> Draft:
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise RequestValidationError([{"type": "value_error", "loc": ("body",), "msg": str(error)}]) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _read_surrogates(body)
    except RecursionError as error:
        raise Refused("payload_invalid", "the body is nested too deep") from error


def _read_surrogates(body: bytes) -> Draft:
    """JSON that names half of a character, as JavaScript writes it: the bus puts U+FFFD in its place."""
    try:
        return msgspec.convert(json.loads(body, parse_constant=_no_constant), Draft)
    except msgspec.ValidationError as error:
        raise RequestValidationError([{"type": "value_error", "loc": ("body",), "msg": str(error)}]) from error
    except (ValueError, RecursionError) as error:
        raise RequestValidationError([{"type": "json_invalid", "loc": ("body",), "msg": str(error)}]) from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@router.get(
    "/messages", summary="The timeline, newest first", responses=gives(shapes.Messages) | problems("unknown_message")
)
async def timeline(
    society: SocietyDep, agent: Id | None = None, before: Cursor | None = None, limit: Limit = 50
) -> Response:
    page = Page(before=await place(society.store, before), limit=limit)
    return newest_first(await society.store.messages(page, agent=agent), limit)


@router.get(
    "/messages/{message_id}",
    summary="One message",
    responses=gives(shapes.Message) | problems("unknown_message"),
)
async def one(message_id: str, society: SocietyDep) -> Response:
    return answer(wire.message(await found(society.store, message_id)))


@router.delete(
    "/messages/{message_id}",
    status_code=204,
    response_class=Response,
    summary="Withdraw a message that was not taken yet",
    responses=problems("unknown_message", "already_taken"),
)
async def withdraw(message_id: str, society: SocietyDep) -> Response:
    await society.bus.withdraw(message_id)
    return nothing()


@router.patch(
    "/messages/{message_id}",
    summary="Move a delayed message",
    responses=gives(shapes.Message)
    | BODY
    | problems("unknown_message", "already_delivered", "delayMs_invalid", _422="`request_invalid`"),
)
async def move(message_id: str, to: shapes.Move, society: SocietyDep) -> Response:
    return answer(wire.message(await society.bus.reschedule(message_id, to.delay_ms)))


async def found(store: Store, message_id: str) -> Message:
    message = await store.message(message_id)
    if message is None:
        raise Refused("unknown_message", f'there is no message "{one_line(message_id)}"')
    return message


async def place(store: Store, cursor: str | None) -> int | None:
    """Where a list goes on: behind the `next` of a page, or behind a message."""
    if cursor is None:
        return None
    if cursor.isascii() and cursor.isdecimal() and len(cursor) < 19:
        return int(cursor)
    return (await found(store, cursor)).seq


def newest_first(page: Any, limit: int) -> Response:
    return listing(wire.messages(page), page[-1].seq if len(page) == limit else None)
