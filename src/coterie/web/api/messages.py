"""Messages: send, list, reschedule, withdraw; delayed messages and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from coterie import messages
from coterie.errors import Refused
from coterie.store import Page, Store
from coterie.text import one_line
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Cursor, Id, Limit, Query, Router, SocietyDep, parse_cursor
from coterie.web.schemas import (
    DelayedPage,
    Message,
    MessagePage,
    NewDelay,
    NewMessage,
    Receipt,
    Schedule,
    ScheduleChange,
    SchedulePage,
)

router = Router(prefix=API, tags=["messages"], responses=COMMON_PROBLEMS)


@router.post(
    "/messages",
    status_code=202,
    summary="Send a message",
    responses=problems(
        "unknown_recipient",
        "recipient_terminated",
        "payload_too_large",
        "mailbox_full",
        "already_answered",
        "quickReplies_too_many",
        "quickReplies_invalid_type",
        "quickReplies_empty_string",
        "delayMs_invalid",
        "every_invalid",
        "payload_invalid",
        "attachment_unknown",
        "hop_limit",
        "inReplyTo_unknown",
        "option_invalid",
        "asksBack_invalid",
        "task_stopped",
        "unlessAnswered_invalid",
        "unlessAnswered_unknown",
        _422="`request_invalid`",
        _413="`body_too_large`",
        _429="`too_many_requests`",
    ),
)
async def send_message(body: NewMessage, society: SocietyDep) -> Receipt:
    receipt = await society.bus.send(
        sender=messages.PERSON,
        to=body.to,
        payload=body.payload,
        delay_ms=body.delay_ms,
        quick_replies=body.quick_replies,
        client_id=body.client_id,
        in_reply_to=body.in_reply_to,
        option=body.option,
        asks_back=body.asks_back,
        every=body.every,
        time_zone=body.time_zone,
        unless_answered=body.unless_answered,
    )
    return Receipt.of(receipt)


@router.get("/messages", summary="List messages, newest first", responses=problems("unknown_message"))
async def list_messages(
    society: SocietyDep,
    agent: Id | None = None,
    client_id: Annotated[Id | None, Query("clientId")] = None,
    before: Cursor | None = None,
    limit: Limit = 50,
) -> MessagePage:
    """With `clientId`: the message that the person sent with it, or none."""
    if client_id is not None:
        sent = await society.store.message(messages.message_id_of(society.store.info.secret, client_id))
        return MessagePage(items=Message.of_all([sent] if sent else []), next=None)
    page = Page(before=await message_position(society.store, before), limit=limit)
    return message_page(await society.store.messages(page, agent=agent), limit)


@router.get("/messages/{message_id}", summary="Get a message", responses=problems("unknown_message"))
async def get_message(message_id: str, society: SocietyDep) -> Message:
    return Message.of(await find_message(society.store, message_id))


@router.delete(
    "/messages/{message_id}",
    status_code=204,
    summary="Withdraw a message that was not taken yet",
    responses=problems("unknown_message", "already_taken"),
)
async def withdraw_message(message_id: str, society: SocietyDep) -> None:
    await society.bus.withdraw(message_id)


@router.patch(
    "/messages/{message_id}",
    summary="Change the due time of a delayed message",
    responses=problems("unknown_message", "already_delivered", "delayMs_invalid", _422="`request_invalid`"),
)
async def move_message(message_id: str, body: NewDelay, society: SocietyDep) -> Message:
    return Message.of(await society.bus.reschedule(message_id, body.delay_ms))


@router.get("/delayed", summary="List delayed messages, by due time", responses=problems("unknown_message"))
async def list_delayed_messages(
    society: SocietyDep, recipient: Id | None = None, after: Cursor | None = None, limit: Limit = 50
) -> DelayedPage:
    previous = None if after is None else await find_message(society.store, after)
    count = await society.store.delayed_count(recipient)
    items = await society.store.delayed(recipient, after=previous, limit=limit)
    return DelayedPage(items=Message.of_all(items), next=items[-1].id if len(items) == limit else None, count=count)


@router.get("/schedules", tags=["schedules"], summary="List recurring messages that have not ended")
async def list_schedules(
    society: SocietyDep, recipient: Id | None = None, after: Cursor | None = None, limit: Limit = 50
) -> SchedulePage:
    found = await society.store.schedules(recipient, after=after or "", limit=limit)
    return SchedulePage(
        items=[Schedule.of(schedule) for schedule in found], next=found[-1].id if len(found) == limit else None
    )


@router.get(
    "/schedules/{schedule_id}",
    tags=["schedules"],
    summary="Get a recurring message",
    responses=problems("unknown_schedule"),
)
async def get_schedule(schedule_id: str, society: SocietyDep) -> Schedule:
    schedule = await society.store.schedule(schedule_id)
    if schedule is None:
        raise Refused("unknown_schedule", f'there is no recurring message "{one_line(schedule_id)}"')
    return Schedule.of(schedule)


@router.patch(
    "/schedules/{schedule_id}",
    tags=["schedules"],
    summary="Change, pause or resume a recurring message",
    responses=problems(
        "unknown_schedule", "already_ended", "recipient_terminated", "every_invalid", "delayMs_invalid",
        "attachment_unknown", _422="`request_invalid`",
    ),
)  # fmt: skip
async def change_schedule(schedule_id: str, body: ScheduleChange, society: SocietyDep) -> Schedule:
    """A new recurrence or a delay moves the next message. A pause withdraws it; a resume makes another."""
    changed = await society.bus.change_schedule(
        schedule_id, every=body.every, time_zone=body.time_zone, paused=body.paused, delay_ms=body.delay_ms
    )
    return Schedule.of(changed)


@router.delete(
    "/schedules/{schedule_id}",
    tags=["schedules"],
    status_code=204,
    summary="End a recurring message and withdraw its next message",
    responses=problems("unknown_schedule"),
)
async def end_schedule(schedule_id: str, society: SocietyDep) -> None:
    await society.bus.end_schedule(schedule_id)


@router.get(
    "/dead-letters",
    tags=["dead letters"],
    summary="List dead letters, newest first",
    responses=problems("unknown_message"),
)
async def list_dead_letters(society: SocietyDep, before: Cursor | None = None, limit: Limit = 50) -> MessagePage:
    page = Page(before=await message_position(society.store, before), limit=limit)
    return message_page(await society.store.messages(page, state="dead"), limit)


@router.post(
    "/dead-letters/{message_id}/resend",
    tags=["dead letters"],
    status_code=202,
    summary="Send a dead letter again, as a new message",
    responses=problems("unknown_message", "recipient_terminated", "mailbox_full", "hop_limit", "attachment_unknown"),
)
async def resend_dead_letter(message_id: str, society: SocietyDep) -> Receipt:
    receipt = await society.store.resend_dead_letter(message_id)
    society.bus.notify()
    return Receipt.of(receipt)


@router.delete(
    "/dead-letters/{message_id}",
    tags=["dead letters"],
    status_code=204,
    summary="Delete a dead letter",
    responses=problems("unknown_message"),
)
async def delete_dead_letter(message_id: str, society: SocietyDep) -> None:
    await society.store.delete_dead_letter(message_id)
    society.bus.notify()


async def find_message(store: Store, message_id: str) -> messages.Message:
    message = await store.message(message_id)
    if message is None:
        raise Refused("unknown_message", f'there is no message "{one_line(message_id)}"')
    return message


async def message_position(store: Store, cursor: str | None) -> int | None:
    """The position that a list continues from: a page's `next`, or the id of a message."""
    if cursor is None:
        return None
    found = parse_cursor(cursor)
    return (await find_message(store, cursor)).seq if found is None else found


def message_page(page: Sequence[messages.Message], limit: int) -> MessagePage:
    return MessagePage(items=Message.of_all(page), next=str(page[-1].seq) if len(page) == limit else None)
