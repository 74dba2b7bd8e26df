"""Isolates rows that cannot be decoded, so that other messages and agents go on.

A damaged message becomes a dead letter; an agent with a damaged turn is blocked.
"""

from __future__ import annotations

import logging

import msgspec

from coterie.errors import StoreError
from coterie.messages import PERSON, SYSTEM, make_envelope
from coterie.stores.sql.rows import STORED_MESSAGE_COLUMNS, Connection, StoredMessage
from coterie.stores.sql.unit_of_work import UnitOfWork

log = logging.getLogger(__name__)

MAX_READ_ATTEMPTS = 3
"""Failed reads, each in its own transaction, after which a message is a dead letter."""
_SUM_WAITING = """
SELECT coalesce(sum(length(payload)), 0) FROM messages
 WHERE recipient = :recipient AND in_seq > :taken_seq AND state = 'pending'
"""
BLOCKED_TEXT = "my stored turn is damaged; the log has the details. Restore a backup, or clear this conversation"


class UnreadableMessage(StoreError):
    """The payload of a waiting message cannot be decoded."""

    def __init__(self, message_id: str, cause: Exception) -> None:
        super().__init__(f"the stored message {message_id} is damaged ({cause})")
        self.message_id = message_id


class UnclaimableAgent(StoreError):
    """The stored turn of an agent cannot be loaded."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"the stored turn of {agent_id} is damaged")
        self.agent_id = agent_id


class _Attachment(msgspec.Struct, rename="camel"):
    artifact_ref: str


class _ReadablePayload(msgspec.Struct):
    """The parts of a payload that a model request needs."""

    text: str | None = None
    attachments: list[_Attachment] = []


_decode_payload = msgspec.json.Decoder(_ReadablePayload).decode


def check_readable(message_id: str, payload: bytes | str) -> None:
    try:
        _decode_payload(_text(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableMessage(message_id, error) from error


def _text(payload: bytes | str, errors: str = "strict") -> str:
    # SQLite stores any bytes as text; PostgreSQL validates them.
    return payload if isinstance(payload, str) else payload.decode(errors=errors)


def quarantine(db: Connection, uow: UnitOfWork, *, error: UnreadableMessage | UnclaimableAgent) -> None:
    """Isolate the damaged row, so that the failed transaction can be retried."""
    if isinstance(error, UnreadableMessage):
        _count_attempt(db, uow, error)
    else:
        _block_agent(uow, error)


def _count_attempt(db: Connection, uow: UnitOfWork, error: UnreadableMessage) -> None:
    message = {"id": error.message_id}
    for (recipient,) in db.execute("SELECT recipient FROM messages WHERE id = :id", message).fetchall():
        uow.mailbox(recipient)  # locks it, so that no other process changes the message meanwhile
    row = db.execute(
        "UPDATE messages SET attempts = attempts + 1 WHERE id = :id AND state = 'pending' RETURNING seq, attempts",
        message,
    ).fetchone()
    if row is None:  # another process has met it, too, and isolated it
        return
    seq, attempts = row
    log.error("%s; attempt %d of %d", error, attempts, MAX_READ_ATTEMPTS)
    if attempts >= MAX_READ_ATTEMPTS:
        _dead_letter_unreadable(db, uow, seq)


def _dead_letter_unreadable(db: Connection, uow: UnitOfWork, seq: int) -> None:
    payload, *stored = db.execute(
        f"SELECT CAST(payload AS BLOB), {STORED_MESSAGE_COLUMNS} FROM messages WHERE seq = :seq", {"seq": seq}
    ).fetchone()
    dead = StoredMessage._make(stored)
    mailbox = uow.mailbox(dead.recipient)
    mailbox.remove_message(dead.payload_size)
    uow.dead_letter(dead, "poison")
    # The damaged payload may have another size than the one that was counted.
    bounds = {"recipient": dead.recipient, "taken_seq": mailbox.taken_seq}
    mailbox.waiting_bytes = int(db.execute(_SUM_WAITING, bounds).fetchone()[0])
    uow.record_event("queue.changed", dead.recipient)
    # A payload that is not valid UTF-8 cannot be listed.
    db.execute(
        "UPDATE messages SET payload = :payload WHERE seq = :seq", {"payload": _text(payload, "replace"), "seq": seq}
    )


def _block_agent(uow: UnitOfWork, error: UnclaimableAgent) -> None:
    """Block the agent until its rows are repaired, and notify the person."""
    agent_id = error.agent_id
    log.error("%s: the agent is blocked", error, exc_info=error)
    mailbox = uow.mailbox(agent_id)
    mailbox.state, mailbox.runnable_at, mailbox.why = "blocked", None, BLOCKED_TEXT
    mailbox.problem = '{"category":"damaged"}'
    uow.record_event("agent.state", agent_id)
    problem = {"agent": agent_id, "category": "damaged"}
    uow.accept(make_envelope(sender=SYSTEM, to=PERSON, payload={"text": BLOCKED_TEXT, "problem": problem}))
