"""What can happen to stored messages, besides being sent: each function is the body of one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from coterie.agents import ACTIVE, HELD, Agent
from coterie.artifacts import Artifact
from coterie.clock import from_ms
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.messages import PERSON, SYSTEM, Envelope, Message, Receipt
from coterie.store import Promotion, Pruned, Retention
from coterie.stores.sql.connection import Connection, set_meta
from coterie.stores.sql.mailbox import Mailbox, reopen, standing_of
from coterie.stores.sql.queries import position_of
from coterie.stores.sql.rows import ARTIFACT, find_message, to_artifact
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import DueRow, UnitOfWork
from coterie.turn import Rules

_DUE = "seq, id, sender, recipient, created_at, deliver_at, length(payload)"
PRUNE_BATCH = 5_000
_MS = timedelta(milliseconds=1)
# In the words of the index of what is unread.
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
_MEMORY = (
    "DELETE FROM summaries WHERE agent_id = ?",
    "DELETE FROM history WHERE agent_id = ?",
    "DELETE FROM calls WHERE agent_id = ?",
    "DELETE FROM plans WHERE agent_id = ?",
)


def add_agents(db: Connection, post: UnitOfWork, agents: Sequence[Agent]) -> None:
    db.executemany(
        "INSERT INTO agents (id, kind, name, parent, profile, created_at) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET name = excluded.name, parent = excluded.parent, profile = excluded.profile",
        # In the order of ids, in which all rows of agents are locked: another process may be adding the same ones.
        [
            (agent.id, agent.kind, agent.name, agent.parent, agent.profile, post.stamp)
            for agent in sorted(agents, key=lambda agent: agent.id)
        ],
    )
    for agent in agents:
        post.tell("agent.upsert", agent.id)


def put_role(db: Connection, name: str, profile: str, maker: str) -> None:
    written = db.execute(
        "INSERT INTO roles (name, profile, maker) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE"
        " SET profile = excluded.profile WHERE roles.maker = excluded.maker",
        (name, profile, maker),
    )
    if written.rowcount == 0:
        raise Refused("role_taken", f"the role {name!r} belongs to somebody else: choose another name")


def terminate(db: Connection, post: UnitOfWork, agent_id: str) -> None:
    mailbox = post.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state == "terminated":
        return
    TurnTransaction(db, post, agent_id, Rules()).dismiss()
    mailbox.state, mailbox.runnable_at, mailbox.waiting, mailbox.waiting_bytes = "terminated", None, 0, 0
    waiting = db.execute(
        f"SELECT {_DUE} FROM messages WHERE recipient = ?1 AND state = 'pending'"
        " AND in_seq > (SELECT taken_seq FROM agents WHERE id = ?1) ORDER BY in_seq",
        (agent_id,),
    ).fetchall()
    for row in waiting:
        post.bury(DueRow(*row), "recipient_terminated")
    post.tell("agent.state", agent_id)
    post.tell("agent.removed", agent_id)


def pause(db: Connection, post: UnitOfWork, agent_id: str) -> None:
    mailbox = _agents_mailbox(post, agent_id)
    mailbox.hold = 1
    if mailbox.state in ("idle", "ready"):
        mailbox.state, mailbox.runnable_at = "paused", None
    post.tell("agent.state", agent_id)


def resume(db: Connection, post: UnitOfWork, agent_id: str) -> None:
    mailbox = _agents_mailbox(post, agent_id)
    mailbox.hold = 0
    if mailbox.state == "paused":
        mailbox.state = "ready" if mailbox.waiting else "idle"
    if mailbox.state in ("ready", "blocked"):
        mailbox.runnable_at = post.now
    post.tell("agent.state", agent_id)


def pause_all(db: Connection, post: UnitOfWork) -> None:
    """One fact for the whole society: it counts for agents that do not exist yet, too."""
    post.pause_society(True)
    _tell_of_everybody(db, post)


def resume_all(db: Connection, post: UnitOfWork) -> None:
    """Who was paused individually stays so; blocked agents try again."""
    post.pause_society(False)
    unblock(post, [agent_id for (agent_id,) in db.execute("SELECT id FROM agents WHERE state = 'blocked' ORDER BY id")])
    post.frees = True
    _tell_of_everybody(db, post)


def _tell_of_everybody(db: Connection, post: UnitOfWork) -> None:
    post.tell("society.state", "society", {"paused": post.society_paused})
    living = "SELECT id FROM agents WHERE kind = 'agent' AND state <> 'terminated' ORDER BY id"
    for (agent_id,) in db.execute(living):
        post.tell("agent.state", agent_id)


def stop(db: Connection, post: UnitOfWork, agent_id: str) -> bool:
    mailbox = _agents_mailbox(post, agent_id)
    suspended = mailbox.state in HELD and mailbox.worker is None and post.society_paused
    if mailbox.state not in ("wait_retry", "wait_approval") and not suspended:
        return False
    TurnTransaction(db, post, agent_id, Rules()).halt()
    return True


def unblock(post: UnitOfWork, agent_ids: Sequence[str]) -> Sequence[str]:
    freed = []
    for agent_id in agent_ids:
        mailbox = post.mailbox(agent_id)
        if mailbox.state == "blocked" and not mailbox.hold:
            mailbox.runnable_at = post.now
            post.tell("agent.state", agent_id)
            freed.append(agent_id)
    return freed


def _agents_mailbox(post: UnitOfWork, agent_id: str) -> Mailbox:
    mailbox = post.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state == "terminated":
        raise Refused("recipient_terminated", f"{agent_id!r} was terminated")
    return mailbox


def promote(db: Connection, post: UnitOfWork, limit: int, early: bool) -> Promotion:
    until = "deliver_at <= ?1" if not early else "?1 = ?1"
    due = db.execute(
        f"SELECT {_DUE} FROM messages WHERE state = 'delayed' AND {until} ORDER BY deliver_at, seq LIMIT ?2"
        " /*+ FOR UPDATE */",
        (post.now, limit),
    ).fetchall()
    hit("promote.selected")
    delivered, dead = post.deliver((DueRow(*row) for row in due), early=early)
    hit("promote.moved")
    left = db.execute("SELECT deliver_at FROM messages WHERE state = 'delayed' ORDER BY deliver_at LIMIT 1").fetchone()
    next_due = from_ms(left[0]) - from_ms(post.now) if left else None
    return Promotion(delivered=delivered, dead=dead, next_due=next_due)


def withdraw(db: Connection, post: UnitOfWork, message_id: str, by: str) -> Message:
    message = _owned(db, post, message_id, by)
    if message.state == "withdrawn":
        return message
    if message.state not in ("delayed", "pending"):
        raise Refused("already_taken", "too late to withdraw: the message was taken already")
    approval = standing_of(db, message)
    if approval == "judged":
        raise Refused("already_taken", "too late to withdraw: the call was approved or denied by this message already")
    mailbox = post.mailbox(message.to)
    if message.state == "delayed":
        mailbox.delayed -= 1
    else:
        mailbox.remove(_size(db, message.seq))
        post.tell("queue.changed", message.to)
    db.execute("UPDATE messages SET state = 'withdrawn' WHERE seq = ?", (message.seq,))
    post.tell("delayed.withdrawn" if message.state == "delayed" else "message.updated", message.id)
    if message.sender == PERSON:
        for question in reopen(db, message.id):
            if approval == "void":
                post.close_question(question)
            post.tell("quick_replies.changed", question)
    return _again(db, message)


def move(db: Connection, post: UnitOfWork, message_id: str, delay: timedelta, by: str) -> Message:
    message = _owned(db, post, message_id, by)
    if message.state != "delayed":
        raise Refused("already_delivered", f"too late to move: the message is {message.state}")
    deliver_at = post.now + delay // _MS
    db.execute("UPDATE messages SET deliver_at = ? WHERE seq = ?", (deliver_at, message.seq))
    post.tell("delayed.moved", message.id)
    return _again(db, message)


def resend(db: Connection, post: UnitOfWork, message_id: str) -> Receipt:
    letter = _dead_letter(db, message_id)
    payload, question, thread = db.execute(
        "SELECT payload, question, thread FROM messages WHERE seq = ?", (letter.seq,)
    ).fetchone()
    refs = db.execute("SELECT artifact_ref FROM attachments WHERE message_seq = ?", (letter.seq,)).fetchall()
    envelope = Envelope(
        id=new_id(),
        sender=letter.sender,
        to=letter.to,
        payload_json=payload,
        in_reply_to=letter.in_reply_to,
        cause=letter.cause,
        attachments=tuple(ref for (ref,) in refs),
        question=bool(question),
        about=thread,
    )
    return post.accept(envelope, hops=letter.hops, replay_of=letter.id)


def forget(db: Connection, post: UnitOfWork, message_id: str) -> None:
    letter = _dead_letter(db, message_id)
    db.execute("DELETE FROM messages WHERE seq = ?", (letter.seq,))
    set_meta(db, "pruned", "1")
    post.tell("message.updated", letter.id)


def add_artifact(db: Connection, post: UnitOfWork, artifact: Artifact, maker: str | None) -> Artifact:
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
            post.stamp,
            maker,
        ),
    )
    post.tell("artifact.created", artifact.ref)
    row = db.execute(f"SELECT {ARTIFACT} FROM artifacts WHERE ref = ?", (artifact.ref,)).fetchone()
    return to_artifact(row)


def prune(db: Connection, post: UnitOfWork, retention: Retention) -> Pruned:
    """One bounded step; call it until nothing more goes."""
    messages = _prune_dead(db, post.now - retention.dead_letters // _MS)
    if retention.messages is not None:
        messages += _prune_done(db, post.now - retention.messages // _MS)
    if messages:
        set_meta(db, "pruned", "1")  # from here on mailboxes may have gaps
    # The newest event stays: it holds the highest time ever stamped.
    events = db.execute(
        "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE at < ?"
        " AND seq < (SELECT max(seq) FROM events) ORDER BY seq LIMIT ?)",
        (post.now - retention.events // _MS, PRUNE_BATCH),
    ).rowcount
    return Pruned(
        messages=messages,
        events=events,
        bytes_to_delete=_prune_artifacts(db, post.now - retention.loose_artifacts // _MS),
    )


def _prune_dead(db: Connection, before: int) -> int:
    return db.execute(
        "DELETE FROM messages WHERE seq IN (SELECT seq FROM messages WHERE state = 'dead' AND created_at < ? LIMIT ?)",
        (before, PRUNE_BATCH),
    ).rowcount


def _prune_done(db: Connection, before: int) -> int:
    return db.execute(
        # What an agent remembers stays as long as it does.
        "DELETE FROM messages WHERE seq IN (SELECT seq FROM messages m WHERE state IN ('taken', 'withdrawn')"
        " AND created_at < ? AND NOT EXISTS (SELECT 1 FROM history h WHERE h.message_id = m.id) ORDER BY seq LIMIT ?)",
        (before, PRUNE_BATCH),
    ).rowcount


def _prune_artifacts(db: Connection, before: int) -> list[str]:
    gone = db.execute(
        "DELETE FROM artifacts WHERE created_at < ? AND NOT EXISTS"
        " (SELECT 1 FROM attachments WHERE artifact_ref = ref) RETURNING sha256",
        (before,),
    ).fetchall()
    kept = "SELECT 1 FROM artifacts WHERE sha256 = ?"
    return [sha256 for (sha256,) in gone if not db.execute(kept, (sha256,)).fetchone()]


def mark_read(db: Connection, post: UnitOfWork, thread: str, upto: str) -> int:
    mailbox = post.mailbox(PERSON)
    if thread == SYSTEM:
        rows = db.execute(_READ_NOTICES, (post.stamp, *position_of(db, None, upto))).fetchall()
    else:
        rows = db.execute(_READ, (post.stamp, thread, *position_of(db, thread, upto))).fetchall()
    for (size,) in rows:
        mailbox.remove(size)
    if rows:
        post.tell("read", thread, {"upto": upto})
    return len(rows)


def clear_thread(db: Connection, post: UnitOfWork, agent_id: str) -> int:
    """What is delayed, and what waits for the agent, stays: nobody has met it yet.

    What other agents wrote to it stays as well, for their sake, though it remembers none of that. A turn in which it
    got stuck is over.
    """
    mailbox = post.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state in ACTIVE:
        raise Refused("agent_busy", f"{agent_id!r} is at work: stop it first, or wait until it is done")
    persons = post.mailbox(PERSON)
    gone = db.execute(_CLEAR, (agent_id,)).fetchall()
    for recipient, state, size in gone:
        if recipient == PERSON and state == "pending":
            persons.remove(size)
    for forget in _MEMORY:
        db.execute(forget, (agent_id,))
    db.execute("UPDATE agents SET cleared_seq = taken_seq WHERE id = ?", (agent_id,))
    mailbox.epoch, mailbox.next_hist_seq, mailbox.why = mailbox.epoch + 1, 1, None
    mailbox.history_version += 1
    if mailbox.state == "blocked":
        _unblock(post, agent_id, mailbox)
    if gone:
        set_meta(db, "pruned", "1")
    post.tell("thread.cleared", agent_id)
    return len(gone)


def _unblock(post: UnitOfWork, agent_id: str, mailbox: Mailbox) -> None:
    mailbox.state, mailbox.runnable_at = "paused" if mailbox.hold else "idle", None
    if mailbox.waiting and not mailbox.hold:
        mailbox.state, mailbox.runnable_at = "ready", post.now
    post.tell("agent.state", agent_id)


def _owned(db: Connection, post: UnitOfWork, message_id: str, by: str) -> Message:
    row = db.execute("SELECT recipient FROM messages WHERE id = ?", (message_id,)).fetchone()
    if row is None:
        raise Refused("unknown_message", f"there is no message {message_id!r}")
    post.mailbox(row[0])  # from here on nobody else delivers it, or takes it
    message = find_message(db, message_id)
    if message is None:
        raise Refused("unknown_message", f"there is no message {message_id!r}")
    if by not in (PERSON, message.sender):
        raise Refused("not_yours", f"only {message.sender!r} and the person may change this message")
    return message


def _dead_letter(db: Connection, message_id: str) -> Message:
    message = find_message(db, message_id)
    if message is None or message.state != "dead":
        raise Refused("unknown_message", f"there is no dead letter {message_id!r}")
    return message


def _again(db: Connection, message: Message) -> Message:
    changed = find_message(db, message.id)
    assert changed is not None  # noqa: S101 - it was here a statement ago, in this transaction
    return changed


def _size(db: Connection, seq: int) -> int:
    return int(db.execute("SELECT length(payload) FROM messages WHERE seq = ?", (seq,)).fetchone()[0])
