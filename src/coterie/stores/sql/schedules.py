"""Recurring messages: their rows, and the occurrence that follows each delivery.

An active schedule has exactly one delayed message. The transaction that delivers or withdraws this message stores the
next one. Every change of a schedule locks the recipient's mailbox first, so it never crosses a delivery.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from coterie.clock import from_ms, to_ms
from coterie.errors import Refused
from coterie.ids import id_for, new_id
from coterie.messages import PERSON, Envelope, Schedule, ScheduleState
from coterie.recurrence import Recurrence, parse_recurrence
from coterie.stores.sql.rows import Connection, StoredMessage, to_payload

if TYPE_CHECKING:
    from coterie.stores.sql.unit_of_work import UnitOfWork

log = logging.getLogger(__name__)

SCHEDULE_COLUMNS = """
schedules.id, schedules.sender, schedules.recipient, CAST(schedules.payload AS BLOB), schedules.every, schedules.state,
schedules.created_at, schedules.cause, schedules.message_id, schedules.due_at, schedules.previous_id,
(SELECT messages.deliver_at FROM messages WHERE messages.id = schedules.message_id)
"""
"""Columns of `ScheduleRow`."""
SELECT_SCHEDULE = f"SELECT {SCHEDULE_COLUMNS} FROM schedules WHERE id = :id"
SELECT_SCHEDULES = f"""
SELECT {SCHEDULE_COLUMNS} FROM schedules
 WHERE state <> 'ended' AND id > :after AND (:recipient IS NULL OR recipient = :recipient)
   AND (:sender IS NULL OR sender = :sender)
 ORDER BY id LIMIT :limit
"""
COUNT_ACTIVE = "SELECT count(*) FROM schedules WHERE state = 'active'"
_INSERT = """
INSERT INTO schedules (id, sender, recipient, payload, every, state, created_at, cause, message_id, due_at)
VALUES (:id, :sender, :recipient, :payload, :every, 'active', :created_at, :cause, :message_id, :due_at)
"""
_SET_OCCURRENCE = """
UPDATE schedules SET message_id = :message_id, due_at = :due_at, previous_id = :previous_id, state = 'active'
 WHERE id = :id
"""
_POSTPONE = "UPDATE messages SET deliver_at = :deliver_at, missed = :missed WHERE seq = :seq"
_MOVE = "UPDATE messages SET deliver_at = :deliver_at, every = :every WHERE id = :id"
_WITHDRAW = "UPDATE messages SET state = 'withdrawn' WHERE id = :id AND state = 'delayed' RETURNING seq"
_SET_STATE = "UPDATE schedules SET state = :state WHERE id = :id"
_MS = timedelta(milliseconds=1)
MAX_LATENESS_MS = 60_000
"""An occurrence that is delivered later than this has missed its time."""


class ScheduleRow(NamedTuple):
    id: str
    sender: str
    recipient: str
    payload: str | bytes
    every: str
    state: ScheduleState
    created_at: int
    cause: str | None
    message_id: str
    due_at: int
    """When the next occurrence is due by the recurrence. The person may have rescheduled the message itself."""
    previous_id: str | None
    """The occurrence that was delivered last."""
    next_at: int | None
    """When the next occurrence is delivered, also if the person rescheduled it."""

    def to_schedule(self) -> Schedule:
        return Schedule(
            id=self.id,
            sender=self.sender,
            to=self.recipient,
            payload=to_payload(self.id, self.payload),
            every=self.every,
            state=self.state,
            created_at=from_ms(self.created_at),
            message_id=self.message_id,
            due_at=from_ms(self.due_at),
            next_at=from_ms(self.due_at if self.next_at is None else self.next_at),
        )


class _Attachment(msgspec.Struct, rename="camel"):
    artifact_ref: str


class _RecurringPayload(msgspec.Struct, rename="camel"):
    attachments: list[_Attachment] = []
    quick_replies: list[str] = []


_decode = msgspec.json.Decoder(_RecurringPayload).decode


def to_schedule(row: Sequence[Any]) -> Schedule:
    """Convert a row of `SCHEDULE_COLUMNS`."""
    return ScheduleRow._make(row).to_schedule()


def schedule_id_of(message_id: str) -> str:
    """Id of the schedule that the message starts: a repeated send finds the same one."""
    return id_for("schedule", message_id)


def set_first_due(envelope: Envelope, now: int) -> Envelope:
    """The envelope of a recurring message, delayed until its first occurrence."""
    due = parse_recurrence(envelope.every).first(from_ms(now), envelope.delay)
    return msgspec.structs.replace(envelope, delay=timedelta(milliseconds=to_ms(due) - now))


def start_schedule(db: Connection, uow: UnitOfWork, envelope: Envelope) -> str:
    """Store the schedule of a recurring message that has just been accepted; return its id."""
    schedule_id = schedule_id_of(envelope.id)
    db.execute(
        _INSERT,
        {
            "id": schedule_id,
            "sender": envelope.sender,
            "recipient": envelope.to,
            "payload": envelope.payload_json,
            "every": envelope.every,
            "created_at": uow.timestamp,
            "cause": envelope.cause,
            "message_id": envelope.id,
            "due_at": uow.now + envelope.delay // _MS,
        },
    )
    uow.record_event("schedule.changed", schedule_id)
    return schedule_id


class Repetition(NamedTuple):
    """What a due occurrence means for its schedule."""

    schedule: ScheduleRow
    missed: int
    """Due times that passed without a delivery, this one's own included if it is late."""
    following: int | None
    """When the next one is due, in ms. None: the schedule cannot go on."""
    is_waiting: bool
    """The previous occurrence still waits for the agent, so this one is postponed."""


def read_repetition(db: Connection, row: StoredMessage, now: int) -> Repetition | None:
    """What the due message `row` means for its schedule; None if it has none. Its recipient's mailbox is locked."""
    if row.schedule_id is None:
        return None
    found = db.execute(SELECT_SCHEDULE, {"id": row.schedule_id}).fetchone()
    if found is None:
        return None
    schedule = ScheduleRow._make(found)
    previous = db.execute("SELECT state FROM messages WHERE id = :id", {"id": schedule.previous_id}).fetchone()
    is_waiting = previous is not None and previous[0] == "pending"
    try:
        recurrence = parse_recurrence(schedule.every)
        missed = recurrence.count(from_ms(max(schedule.due_at, row.deliver_at)), from_ms(now))
        missed += now - row.deliver_at > MAX_LATENESS_MS
        following = _following(recurrence, schedule, now)
        _decode(schedule.payload)
    except (Refused, StopIteration, RuntimeError, msgspec.DecodeError) as error:
        log.error("the recurring message %s ends, because its next time cannot be found: %s", schedule.id, error)
        return Repetition(schedule, row.missed, None, is_waiting=False)
    return Repetition(schedule, row.missed + missed, following, is_waiting=is_waiting)


def _following(recurrence: Recurrence, schedule: ScheduleRow, now: int) -> int:
    return to_ms(recurrence.following(from_ms(schedule.due_at), from_ms(now)))


def postpone(db: Connection, uow: UnitOfWork, row: StoredMessage, repetition: Repetition) -> None:
    """Move an occurrence to the next due time, because the one before it still waits."""
    schedule, due_at = repetition.schedule, repetition.following
    missed = repetition.missed + (uow.now - row.deliver_at <= MAX_LATENESS_MS)  # a late one is counted already
    db.execute(_POSTPONE, {"deliver_at": due_at, "missed": missed, "seq": row.seq})
    db.execute("UPDATE schedules SET due_at = :due_at WHERE id = :id", {"due_at": due_at, "id": schedule.id})
    uow.record_event("delayed.moved", row.id)


def store_next(db: Connection, uow: UnitOfWork, repetition: Repetition, previous_id: str | None) -> None:
    """Store the next occurrence, or end the schedule if there is none."""
    if repetition.following is None:
        set_state(db, uow, repetition.schedule.id, "ended")
    else:
        store_occurrence(db, uow, repetition.schedule, repetition.following, previous_id)


def store_occurrence(
    db: Connection, uow: UnitOfWork, schedule: ScheduleRow, due_at: int, previous_id: str | None
) -> None:
    payload = _decode(schedule.payload)
    text = schedule.payload if isinstance(schedule.payload, str) else schedule.payload.decode(errors="replace")
    envelope = Envelope(
        id=new_id(),
        sender=schedule.sender,
        to=schedule.recipient,
        payload_json=text,
        delay=timedelta(milliseconds=max(1, due_at - uow.now)),
        every=schedule.every,
        cause=schedule.cause,
        attachments=tuple(item.artifact_ref for item in payload.attachments),
        is_question=bool(payload.quick_replies) and schedule.recipient == PERSON and schedule.sender != PERSON,
    )
    uow.accept_occurrence(envelope, schedule.id)
    db.execute(
        _SET_OCCURRENCE,
        {"message_id": envelope.id, "due_at": due_at, "previous_id": previous_id, "id": schedule.id},
    )
    uow.record_event("schedule.changed", schedule.id)


def skip_occurrence(db: Connection, uow: UnitOfWork, schedule_id: str) -> None:
    """Store the occurrence after one that was withdrawn."""
    found = db.execute(SELECT_SCHEDULE, {"id": schedule_id}).fetchone()
    if found is None:
        return
    schedule = ScheduleRow._make(found)
    due_at = _following(parse_recurrence(schedule.every), schedule, uow.now)
    store_occurrence(db, uow, schedule, due_at, schedule.previous_id)


def change_schedule(
    db: Connection,
    uow: UnitOfWork,
    schedule_id: str,
    by: str,
    every: str | None,
    paused: bool | None,
    delay: timedelta | None = None,
) -> Schedule:
    schedule = _lock_schedule(db, uow, schedule_id, by)
    if schedule.state == "ended":
        raise Refused("already_ended", "this recurring message has ended: send a new one")
    start = delay or timedelta(0)
    if delay is not None or every not in (None, schedule.every):
        schedule = _set_every(db, uow, schedule, every or schedule.every, start)
    if paused and schedule.state == "active":
        _withdraw_next(db, uow, schedule)
        set_state(db, uow, schedule_id, "paused")
    elif paused is False and schedule.state == "paused":
        uow.check_occurrence(schedule.recipient, [item.artifact_ref for item in _decode(schedule.payload).attachments])
        first = to_ms(parse_recurrence(schedule.every).first(from_ms(uow.now), start))
        store_occurrence(db, uow, schedule, first, schedule.previous_id)
    return _reload(db, schedule_id)


def _set_every(db: Connection, uow: UnitOfWork, schedule: ScheduleRow, every: str, delay: timedelta) -> ScheduleRow:
    """Change the recurrence, and move the next occurrence to its first due time that is not before `delay` from now."""
    due_at = to_ms(parse_recurrence(every).first(from_ms(uow.now), delay))
    db.execute(
        "UPDATE schedules SET every = :every, due_at = :due_at WHERE id = :id",
        {"every": every, "due_at": due_at, "id": schedule.id},
    )
    if schedule.state == "active":
        db.execute(_MOVE, {"deliver_at": due_at, "every": every, "id": schedule.message_id})
        uow.record_event("delayed.moved", schedule.message_id)
    uow.record_event("schedule.changed", schedule.id)
    return schedule._replace(every=every, due_at=due_at)


def end_schedule(db: Connection, uow: UnitOfWork, schedule_id: str, by: str) -> Schedule:
    _end(db, uow, _lock_schedule(db, uow, schedule_id, by))
    return _reload(db, schedule_id)


def end_schedules_of(db: Connection, uow: UnitOfWork, sender: str) -> None:
    """End the schedules of an agent that is terminated."""
    rows = db.execute(
        f"SELECT {SCHEDULE_COLUMNS} FROM schedules WHERE sender = :sender AND state <> 'ended' ORDER BY recipient, id",
        {"sender": sender},
    ).fetchall()
    for schedule in map(ScheduleRow._make, rows):
        uow.mailbox(schedule.recipient)
        _end(db, uow, schedule)


def set_state(db: Connection, uow: UnitOfWork, schedule_id: str, state: ScheduleState) -> None:
    db.execute(_SET_STATE, {"state": state, "id": schedule_id})
    uow.record_event("schedule.changed", schedule_id)


def _end(db: Connection, uow: UnitOfWork, schedule: ScheduleRow) -> None:
    if schedule.state == "active":
        _withdraw_next(db, uow, schedule)
    if schedule.state != "ended":
        set_state(db, uow, schedule.id, "ended")


def _withdraw_next(db: Connection, uow: UnitOfWork, schedule: ScheduleRow) -> None:
    if db.execute(_WITHDRAW, {"id": schedule.message_id}).fetchone():  # it counts for no task before it is due
        uow.mailbox(schedule.recipient).delayed -= 1
        uow.record_event("delayed.withdrawn", schedule.message_id)


def _lock_schedule(db: Connection, uow: UnitOfWork, schedule_id: str, by: str) -> ScheduleRow:
    """Return the schedule after its recipient's mailbox is locked. `Refused` unless `by` may change it."""
    row = db.execute("SELECT recipient FROM schedules WHERE id = :id", {"id": schedule_id}).fetchone()
    if row is None:
        raise Refused("unknown_schedule", f"there is no recurring message {schedule_id!r}")
    uow.mailbox(row[0])  # locked: no other process delivers the next occurrence now
    schedule = ScheduleRow._make(db.execute(SELECT_SCHEDULE, {"id": schedule_id}).fetchone())
    if by not in (PERSON, schedule.sender):
        raise Refused("not_yours", f"only {schedule.sender!r} and the person may change this recurring message")
    return schedule


def _reload(db: Connection, schedule_id: str) -> Schedule:
    return to_schedule(db.execute(SELECT_SCHEDULE, {"id": schedule_id}).fetchone())
