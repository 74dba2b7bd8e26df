"""What a damaged row costs: itself. Everybody else's messages and turns go on."""

from __future__ import annotations

import logging

import msgspec

from coterie.errors import StoreError
from coterie.messages import PERSON, SYSTEM, seal
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.unit_of_work import DueRow, UnitOfWork

log = logging.getLogger(__name__)

TRIES = 3
"""So often a message is to be read, in a transaction of its own each time, before it is given up."""
CANNOT_GO_ON = "my stored turn is damaged; the log has the details. Restore a backup, or clear this conversation"


class Unreadable(StoreError):
    """A message that waits cannot be shown to any model."""

    def __init__(self, message_id: str, why: Exception) -> None:
        super().__init__(f"the stored message {message_id} is damaged ({why})")
        self.message_id = message_id


class Unclaimable(StoreError):
    """An agent's stored turn cannot be taken up."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"the stored turn of {agent_id} is damaged")
        self.agent_id = agent_id


class _Attached(msgspec.Struct, rename="camel"):
    artifact_ref: str


class _Shown(msgspec.Struct):
    """What a payload must be for a model to be shown it."""

    text: str | None = None
    attachments: list[_Attached] = []


_decode = msgspec.json.Decoder(_Shown).decode


def check_readable(message_id: str, payload: bytes | str) -> None:
    try:
        _decode(_text(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(message_id, error) from error


def _text(payload: bytes | str, errors: str = "strict") -> str:
    # SQLite keeps whatever it is given as text; PostgreSQL has looked at it.
    return payload if isinstance(payload, str) else payload.decode(errors=errors)


def limit_damage(db: Connection, post: UnitOfWork, *, trouble: Unreadable | Unclaimable) -> None:
    if isinstance(trouble, Unreadable):
        _count_try(db, post, trouble)
    else:
        _block(post, trouble)


def _count_try(db: Connection, post: UnitOfWork, trouble: Unreadable) -> None:
    """One more try was in vain; after the last one the message is a dead letter, and the mailbox moves on."""
    seq, attempts = db.execute(
        "UPDATE messages SET attempts = attempts + 1 WHERE id = ? RETURNING seq, attempts", (trouble.message_id,)
    ).fetchone()
    log.error("%s; try %d of %d", trouble, attempts, TRIES)
    if attempts >= TRIES:
        _give_up(db, post, seq)


def _give_up(db: Connection, post: UnitOfWork, seq: int) -> None:
    *row, payload = db.execute(
        "SELECT seq, id, sender, recipient, created_at, deliver_at, length(payload), CAST(payload AS BLOB)"
        " FROM messages WHERE seq = ?",
        (seq,),
    ).fetchone()
    dead = DueRow._make(row)
    post.mailbox(dead.recipient).remove(dead.payload_size)
    post.bury(dead, "poison")
    post.tell("queue.changed", dead.recipient)
    # What is no text at all could not even be listed.
    db.execute("UPDATE messages SET payload = ? WHERE seq = ?", (_text(payload, "replace"), seq))


def _block(post: UnitOfWork, trouble: Unclaimable) -> None:
    """Its row waits for somebody who mends it; the person is told."""
    agent_id = trouble.agent_id
    log.error("%s: it is blocked", trouble, exc_info=trouble)
    mailbox = post.mailbox(agent_id)
    mailbox.state, mailbox.runnable_at, mailbox.why = "blocked", None, CANNOT_GO_ON
    post.tell("agent.state", agent_id)
    post.accept(seal(sender=SYSTEM, to=PERSON, payload={"text": CANNOT_GO_ON, "problem": {"agent": agent_id}}))
