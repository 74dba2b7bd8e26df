"""Commands of the store on agents, messages and artifacts. Each public function is the body of one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from coterie.agents import ACTIVE_STATES, CLAIMED_STATES, Agent
from coterie.artifacts import Artifact
from coterie.clock import from_ms
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.messages import PERSON, SYSTEM, Envelope, Message, Receipt
from coterie.store import Promotion, Pruned, Retention
from coterie.stores.sql.mailbox import Mailbox, answered_approval_status, reopen_questions
from coterie.stores.sql.queries import thread_position
from coterie.stores.sql.rows import ARTIFACT_COLUMNS, Connection, find_message, set_meta, to_artifact
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import MessageRow, UnitOfWork
from coterie.turn import Rules

_MESSAGE_ROW = "seq, id, sender, recipient, created_at, deliver_at, length(payload)"
PRUNE_BATCH = 5_000
_MS = timedelta(milliseconds=1)
# The conditions match the partial index of unread messages.
_READ = """
UPDATE messages SET state = 'taken', taken_at = ?
 WHERE thread = ? AND sender <> 'user' AND state = 'pending' AND (delivered_at, seq) <= (?, ?)
RETURNING length(payload)
"""
_READ_NOTICES = """
UPDATE messages SET state = 'taken', taken_at = ?
 WHERE recipient = 'user' AND thread IS NULL AND state = 'pending' AND (delivered_at, seq) <= (?, ?)
RETURNING length(payload)
"""
_CLEAR = """
DELETE FROM messages
 WHERE thread = ?1 AND state <> 'delayed' AND NOT (state = 'pending' AND recipient = ?1)
RETURNING recipient, state, length(payload)
"""
_DELETE_HISTORY = (
    "DELETE FROM summaries WHERE agent_id = ?",
    "DELETE FROM history WHERE agent_id = ?",
    "DELETE FROM calls WHERE agent_id = ?",
    "DELETE FROM plans WHERE agent_id = ?",
)


def add_agents(db: Connection, uow: UnitOfWork, agents: Sequence[Agent]) -> None:
    db.executemany(
        "INSERT INTO agents (id, kind, name, parent, profile, created_at) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET name = excluded.name, parent = excluded.parent, profile = excluded.profile",
        # Agent rows are always locked in the order of ids: another process may be adding the same ones.
        [
            (agent.id, agent.kind, agent.name, agent.parent, agent.profile, uow.timestamp)
            for agent in sorted(agents, key=lambda agent: agent.id)
        ],
    )
    for agent in agents:
        uow.record_event("agent.upsert", agent.id)


def put_role(db: Connection, name: str, profile: str, maker: str) -> None:
    written = db.execute(
        "INSERT INTO roles (name, profile, maker) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE"
        " SET profile = excluded.profile WHERE roles.maker = excluded.maker",
        (name, profile, maker),
    )
    if written.rowcount == 0:
        raise Refused("role_taken", f"the role {name!r} belongs to another agent: choose another name")


def terminate(db: Connection, uow: UnitOfWork, agent_id: str) -> None:
    mailbox = uow.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state == "terminated":
        return
    TurnTransaction(db, uow, agent_id, Rules()).terminate()
    mailbox.state, mailbox.runnable_at, mailbox.waiting, mailbox.waiting_bytes = "terminated", None, 0, 0
    waiting = db.execute(
        f"SELECT {_MESSAGE_ROW} FROM messages WHERE recipient = ?1 AND state = 'pending'"
        " AND in_seq > (SELECT taken_seq FROM agents WHERE id = ?1) ORDER BY in_seq",
        (agent_id,),
    ).fetchall()
    for row in waiting:
        uow.dead_letter(MessageRow(*row), "recipient_terminated")
    uow.record_event("agent.state", agent_id)
    uow.record_event("agent.removed", agent_id)


def pause(db: Connection, uow: UnitOfWork, agent_id: str) -> None:
    mailbox = _active_mailbox(uow, agent_id)
    mailbox.hold = 1
    if mailbox.state in ("idle", "ready"):
        mailbox.state, mailbox.runnable_at = "paused", None
    uow.record_event("agent.state", agent_id)


def resume(db: Connection, uow: UnitOfWork, agent_id: str) -> None:
    mailbox = _active_mailbox(uow, agent_id)
    mailbox.hold = 0
    if mailbox.state == "paused":
        mailbox.state = "ready" if mailbox.waiting else "idle"
    if mailbox.state in ("ready", "blocked"):
        mailbox.runnable_at = uow.now
    uow.record_event("agent.state", agent_id)


def pause_all(db: Connection, uow: UnitOfWork) -> None:
    """Pause the whole society, including agents that are added later."""
    uow.set_society_paused(True)
    _record_all_states(db, uow)


def resume_all(db: Connection, uow: UnitOfWork) -> None:
    """Resume the society. Agents that were paused individually stay paused; blocked agents try again."""
    uow.set_society_paused(False)
    unblock(uow, [agent_id for (agent_id,) in db.execute("SELECT id FROM agents WHERE state = 'blocked' ORDER BY id")])
    uow.frees_other_agents = True
    _record_all_states(db, uow)


def _record_all_states(db: Connection, uow: UnitOfWork) -> None:
    uow.record_event("society.state", "society", {"paused": uow.is_society_paused})
    agents = db.execute("SELECT id FROM agents WHERE kind = 'agent' AND state <> 'terminated' ORDER BY id")
    for (agent_id,) in agents:
        uow.record_event("agent.state", agent_id)


def stop_waiting_turn(db: Connection, uow: UnitOfWork, agent_id: str) -> bool:
    mailbox = _active_mailbox(uow, agent_id)
    is_suspended = mailbox.state in CLAIMED_STATES and mailbox.worker is None and uow.is_society_paused
    if mailbox.state not in ("wait_retry", "wait_approval") and not is_suspended:
        return False
    TurnTransaction(db, uow, agent_id, Rules()).stop()
    return True


def unblock(uow: UnitOfWork, agent_ids: Sequence[str]) -> Sequence[str]:
    unblocked = []
    for agent_id in agent_ids:
        mailbox = uow.mailbox(agent_id)
        if mailbox.state == "blocked" and not mailbox.hold:
            mailbox.runnable_at = uow.now
            uow.record_event("agent.state", agent_id)
            unblocked.append(agent_id)
    return unblocked


def _active_mailbox(uow: UnitOfWork, agent_id: str) -> Mailbox:
    mailbox = uow.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state == "terminated":
        raise Refused("recipient_terminated", f"{agent_id!r} was terminated")
    return mailbox


def promote_due(db: Connection, uow: UnitOfWork, limit: int, early: bool) -> Promotion:
    is_due = "deliver_at <= ?1" if not early else "?1 = ?1"
    due = db.execute(
        f"SELECT {_MESSAGE_ROW} FROM messages WHERE state = 'delayed' AND {is_due} ORDER BY deliver_at, seq LIMIT ?2"
        " /*+ FOR UPDATE */",
        (uow.now, limit),
    ).fetchall()
    hit("promote.selected")
    delivered, dead = uow.deliver_due((MessageRow(*row) for row in due), early=early)
    hit("promote.moved")
    next_row = db.execute(
        "SELECT deliver_at FROM messages WHERE state = 'delayed' ORDER BY deliver_at LIMIT 1"
    ).fetchone()
    next_due = from_ms(next_row[0]) - from_ms(uow.now) if next_row else None
    return Promotion(delivered=delivered, dead=dead, next_due=next_due)


def withdraw(db: Connection, uow: UnitOfWork, message_id: str, by: str) -> Message:
    message = _lock_message(db, uow, message_id, by)
    if message.state == "withdrawn":
        return message
    if message.state not in ("delayed", "pending"):
        raise Refused("already_taken", "too late to withdraw: the message was taken already")
    approval = answered_approval_status(db, message)
    if approval == "decided":
        raise Refused("already_taken", "too late to withdraw: the call was approved or denied by this message already")
    mailbox = uow.mailbox(message.to)
    if message.state == "delayed":
        mailbox.delayed -= 1
    else:
        (size,) = db.execute("SELECT length(payload) FROM messages WHERE seq = ?", (message.seq,)).fetchone()
        mailbox.remove_message(size)
        uow.record_event("queue.changed", message.to)
    db.execute("UPDATE messages SET state = 'withdrawn' WHERE seq = ?", (message.seq,))
    uow.record_event("delayed.withdrawn" if message.state == "delayed" else "message.updated", message.id)
    if message.sender == PERSON:
        for question in reopen_questions(db, message.id):
            if approval == "void":
                uow.close_question(question)
            uow.record_event("quick_replies.changed", question)
    return _reload(db, message)


def reschedule(db: Connection, uow: UnitOfWork, message_id: str, delay: timedelta, by: str) -> Message:
    message = _lock_message(db, uow, message_id, by)
    if message.state != "delayed":
        raise Refused("already_delivered", f"too late to move: the message is {message.state}")
    deliver_at = uow.now + delay // _MS
    db.execute("UPDATE messages SET deliver_at = ? WHERE seq = ?", (deliver_at, message.seq))
    uow.record_event("delayed.moved", message.id)
    return _reload(db, message)


def resend_dead_letter(db: Connection, uow: UnitOfWork, message_id: str) -> Receipt:
    message = _find_dead_letter(db, message_id)
    payload, question, thread = db.execute(
        "SELECT payload, question, thread FROM messages WHERE seq = ?", (message.seq,)
    ).fetchone()
    refs = db.execute("SELECT artifact_ref FROM attachments WHERE message_seq = ?", (message.seq,)).fetchall()
    envelope = Envelope(
        id=new_id(),
        sender=message.sender,
        to=message.to,
        payload_json=payload,
        in_reply_to=message.in_reply_to,
        cause=message.cause,
        attachments=tuple(ref for (ref,) in refs),
        is_question=bool(question),
        about_agent=thread,
    )
    return uow.accept(envelope, hops=message.hops, replay_of=message.id)


def delete_dead_letter(db: Connection, uow: UnitOfWork, message_id: str) -> None:
    message = _find_dead_letter(db, message_id)
    db.execute("DELETE FROM messages WHERE seq = ?", (message.seq,))
    set_meta(db, "pruned", "1")
    uow.record_event("message.updated", message.id)


def add_artifact(db: Connection, uow: UnitOfWork, artifact: Artifact, maker: str | None) -> Artifact:
    db.execute(
        "INSERT INTO artifacts (ref, filename, type, mime_type, size, sha256, created_at, maker)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (ref) DO NOTHING",
        (
            artifact.ref,
            artifact.filename,
            artifact.type,
            artifact.mime_type,
            artifact.size,
            artifact.sha256,
            uow.timestamp,
            maker,
        ),
    )
    uow.record_event("artifact.created", artifact.ref)
    row = db.execute(f"SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE ref = ?", (artifact.ref,)).fetchone()
    return to_artifact(row)


def prune(db: Connection, uow: UnitOfWork, retention: Retention) -> Pruned:
    """Delete one bounded batch. Call it again until it deletes nothing."""
    messages = _prune_dead(db, uow.now - retention.dead_letters // _MS)
    if retention.messages is not None:
        messages += _prune_done(db, uow.now - retention.messages // _MS)
    if messages:
        set_meta(db, "pruned", "1")  # invariant checks accept gaps in mailboxes from now on
    # The newest event stays: its time is the latest stored one.
    events = db.execute(
        "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE at < ?"
        " AND seq < (SELECT max(seq) FROM events) ORDER BY seq LIMIT ?)",
        (uow.now - retention.events // _MS, PRUNE_BATCH),
    ).rowcount
    return Pruned(
        messages=messages,
        events=events,
        unreferenced_blobs=_prune_artifacts(db, uow.now - retention.unused_artifacts // _MS),
    )


def _prune_dead(db: Connection, before: int) -> int:
    return db.execute(
        "DELETE FROM messages WHERE seq IN (SELECT seq FROM messages WHERE state = 'dead' AND created_at < ? LIMIT ?)",
        (before, PRUNE_BATCH),
    ).rowcount


def _prune_done(db: Connection, before: int) -> int:
    return db.execute(
        # Messages in an agent's history stay.
        "DELETE FROM messages WHERE seq IN (SELECT seq FROM messages m WHERE state IN ('taken', 'withdrawn')"
        " AND created_at < ? AND NOT EXISTS (SELECT 1 FROM history h WHERE h.message_id = m.id) ORDER BY seq LIMIT ?)",
        (before, PRUNE_BATCH),
    ).rowcount


def _prune_artifacts(db: Connection, before: int) -> list[str]:
    deleted = db.execute(
        "DELETE FROM artifacts WHERE created_at < ? AND NOT EXISTS"
        " (SELECT 1 FROM attachments WHERE artifact_ref = ref) RETURNING sha256",
        (before,),
    ).fetchall()
    is_used = "SELECT 1 FROM artifacts WHERE sha256 = ?"
    return [sha256 for (sha256,) in deleted if not db.execute(is_used, (sha256,)).fetchone()]


def mark_read(db: Connection, uow: UnitOfWork, thread: str, upto: str) -> int:
    mailbox = uow.mailbox(PERSON)
    if thread == SYSTEM:
        rows = db.execute(_READ_NOTICES, (uow.timestamp, *thread_position(db, None, upto))).fetchall()
    else:
        rows = db.execute(_READ, (uow.timestamp, thread, *thread_position(db, thread, upto))).fetchall()
    for (size,) in rows:
        mailbox.remove_message(size)
    if rows:
        uow.record_event("read", thread, {"upto": upto})
    return len(rows)


def clear_thread(db: Connection, uow: UnitOfWork, agent_id: str) -> int:
    """Delete the conversation and the agent's history; return the number of deleted messages.

    Delayed messages, messages that wait for the agent and messages of other agents stay. A blocked turn ends.
    """
    mailbox = uow.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state in ACTIVE_STATES:
        raise Refused("agent_busy", f"{agent_id!r} is at work: stop it first, or wait until it is done")
    person_mailbox = uow.mailbox(PERSON)
    deleted = db.execute(_CLEAR, (agent_id,)).fetchall()
    for recipient, state, size in deleted:
        if recipient == PERSON and state == "pending":
            person_mailbox.remove_message(size)
    for sql in _DELETE_HISTORY:
        db.execute(sql, (agent_id,))
    db.execute("UPDATE agents SET cleared_seq = taken_seq WHERE id = ?", (agent_id,))
    mailbox.epoch, mailbox.next_hist_seq, mailbox.why = mailbox.epoch + 1, 1, None
    mailbox.history_version += 1
    if mailbox.state == "blocked":
        mailbox.state, mailbox.runnable_at = "paused" if mailbox.hold else "idle", None
        if mailbox.waiting and not mailbox.hold:
            mailbox.state, mailbox.runnable_at = "ready", uow.now
        uow.record_event("agent.state", agent_id)
    if deleted:
        set_meta(db, "pruned", "1")
    uow.record_event("thread.cleared", agent_id)
    return len(deleted)


def _lock_message(db: Connection, uow: UnitOfWork, message_id: str, by: str) -> Message:
    """Return the message after its recipient's mailbox is locked. `Refused` unless `by` may change it."""
    row = db.execute("SELECT recipient FROM messages WHERE id = ?", (message_id,)).fetchone()
    if row is None:
        raise Refused("unknown_message", f"there is no message {message_id!r}")
    uow.mailbox(row[0])  # locked: no other process delivers or takes the message now
    message = find_message(db, message_id)
    if message is None:
        raise Refused("unknown_message", f"there is no message {message_id!r}")
    if by not in (PERSON, message.sender):
        raise Refused("not_yours", f"only {message.sender!r} and the person may change this message")
    return message


def _find_dead_letter(db: Connection, message_id: str) -> Message:
    message = find_message(db, message_id)
    if message is None or message.state != "dead":
        raise Refused("unknown_message", f"there is no dead letter {message_id!r}")
    return message


def _reload(db: Connection, message: Message) -> Message:
    changed = find_message(db, message.id)
    assert changed is not None  # noqa: S101 - the row is locked in this transaction
    return changed
