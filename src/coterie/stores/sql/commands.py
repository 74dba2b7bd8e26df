"""Commands of the store on agents, messages and artifacts. Each public function is the body of one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from coterie.agents import ACTIVE_STATES, CLAIMED_STATES, Agent
from coterie.artifacts import Artifact
from coterie.clock import from_ms
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.messages import PERSON, SYSTEM, Envelope, Message, Receipt
from coterie.store import Delivery, Promotion
from coterie.stores.sql import reminders, schedules, task_budgets, task_control
from coterie.stores.sql.mailbox import Mailbox, answered_approval_status, reopen_questions
from coterie.stores.sql.queries import thread_position
from coterie.stores.sql.rows import (
    ARTIFACT_COLUMNS,
    STORED_MESSAGE_COLUMNS,
    Connection,
    StoredMessage,
    find_message,
    json_keys,
    set_meta,
    to_artifact,
)
from coterie.stores.sql.text_index import DeletedMessage, remove_from_index
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Rules

_MS = timedelta(milliseconds=1)
_UPSERT_AGENT = """
INSERT INTO agents (id, kind, name, parent, profile, created_at)
VALUES (:id, :kind, :name, :parent, :profile, :created_at)
    ON CONFLICT (id) DO UPDATE SET name = excluded.name, parent = excluded.parent, profile = excluded.profile
"""
_INSERT_AGENT = """
INSERT INTO agents (id, kind, name, parent, profile, created_at)
VALUES (:id, :kind, :name, :parent, :profile, :created_at) ON CONFLICT (id) DO NOTHING
"""
_INSERT_CONFIGURATION_VERSION = """
INSERT INTO meta (key, value) VALUES ('configuration_version', '0') ON CONFLICT (key) DO NOTHING
"""
_RAISE_CONFIGURATION_VERSION = """
UPDATE meta SET value = :version WHERE key = 'configuration_version' AND value = :expected
"""
_UPSERT_ROLE = """
INSERT INTO roles (name, profile, maker) VALUES (:name, :profile, :maker)
    ON CONFLICT (name) DO UPDATE SET profile = excluded.profile WHERE roles.maker = excluded.maker
"""
_SELECT_WAITING = f"""
SELECT {STORED_MESSAGE_COLUMNS} FROM messages WHERE recipient = :recipient AND state = 'pending'
   AND in_seq > (SELECT taken_seq FROM agents WHERE id = :recipient) ORDER BY in_seq
"""
_SELECT_DUE = f"""
SELECT {STORED_MESSAGE_COLUMNS} FROM messages WHERE state = 'delayed' AND deliver_at <= :now
 ORDER BY deliver_at, seq LIMIT :limit
"""
_SELECT_DELAYED = f"""
SELECT {STORED_MESSAGE_COLUMNS} FROM messages WHERE state = 'delayed' AND schedule_id IS NULL
 ORDER BY deliver_at, seq LIMIT :limit
"""
_DELIVER = """
UPDATE messages SET state = 'pending', in_seq = :in_seq, delivered_at = :delivered_at, early = :early, missed = :missed
 WHERE seq = :seq
"""
# The conditions match the partial index of unread messages.
_READ = """
UPDATE messages SET state = 'taken', taken_at = :now
 WHERE thread = :thread AND sender <> 'user' AND state = 'pending' AND (delivered_at, seq) <= (:delivered_at, :seq)
RETURNING length(payload)
"""
_READ_NOTICES = """
UPDATE messages SET state = 'taken', taken_at = :now
 WHERE recipient = 'user' AND thread IS NULL AND state = 'pending' AND (delivered_at, seq) <= (:delivered_at, :seq)
RETURNING length(payload)
"""
_UNREAD = """
UPDATE messages SET state = 'pending', taken_at = NULL
 WHERE thread = :thread AND sender <> 'user' AND state = 'taken' AND (delivered_at, seq) >= (:delivered_at, :seq)
RETURNING length(payload)
"""
_CLEAR = """
DELETE FROM messages
 WHERE thread = :agent_id AND state <> 'delayed' AND NOT (state = 'pending' AND recipient = :agent_id)
RETURNING seq, sender, recipient, CAST(payload AS BLOB), state, length(payload), coalesce(task, id),
          CASE WHEN question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken') THEN 1 ELSE 0 END
"""
_DELETE_DEAD_LETTER = """
DELETE FROM messages WHERE seq = :seq RETURNING seq, sender, recipient, CAST(payload AS BLOB)
"""
_SELECT_CLEARED_BUDGETS = """
SELECT id FROM tasks
 WHERE id IN (SELECT key FROM json_each(:asked)) AND budget_question IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM messages WHERE messages.id = budget_question)
"""
_SELECT_EXISTS = "SELECT 1 FROM messages WHERE id = :id"
_CLEAR_BUDGET_QUESTION = "UPDATE tasks SET budget_question = NULL WHERE id = :id"
_DELETE_HISTORY = (
    "DELETE FROM summaries WHERE agent_id = :agent_id",
    "DELETE FROM history WHERE agent_id = :agent_id",
    "DELETE FROM calls WHERE agent_id = :agent_id",
    "DELETE FROM plans WHERE agent_id = :agent_id",
)
_INSERT_ARTIFACT = """
INSERT INTO artifacts (ref, filename, type, mime_type, size, sha256, created_at, maker)
VALUES (:ref, :filename, :type, :mime_type, :size, :sha256, :created_at, :maker) ON CONFLICT (ref) DO NOTHING
"""


def add_agents(db: Connection, uow: UnitOfWork, agents: Sequence[Agent]) -> None:
    # Agent rows are always locked in the order of ids: another process may be adding the same ones.
    db.executemany(_UPSERT_AGENT, [_agent_row(uow, agent) for agent in sorted(agents, key=lambda agent: agent.id)])
    for agent in agents:
        uow.record_event("agent.upsert", agent.id)


def create_agent(db: Connection, uow: UnitOfWork, agent: Agent) -> None:
    # It was alive a moment ago. An agent below it would outlive its family.
    if agent.parent is not None and uow.mailbox(agent.parent).state == "terminated":
        raise Refused("recipient_terminated", f"{agent.parent!r} was terminated")
    # The insert decides, not a read before it: another process may create an agent with this id at the same moment.
    if db.execute(_INSERT_AGENT, _agent_row(uow, agent)).rowcount == 0:
        raise Refused("id_taken", f"the id {agent.id!r} is taken: choose another, or leave it out")
    uow.record_event("agent.upsert", agent.id)


def _agent_row(uow: UnitOfWork, agent: Agent) -> dict[str, Any]:
    return {
        "id": agent.id,
        "kind": agent.kind,
        "name": agent.name,
        "parent": agent.parent,
        "profile": agent.profile,
        "created_at": uow.timestamp,
    }


def write_configuration(db: Connection, uow: UnitOfWork, document: str, expected: int, agents: Sequence[Agent]) -> int:
    version = expected + 1
    db.execute(_INSERT_CONFIGURATION_VERSION)
    raised = db.execute(_RAISE_CONFIGURATION_VERSION, {"version": str(version), "expected": str(expected)})
    if raised.rowcount == 0:
        raise Refused("config_changed", "another process changed the configuration meanwhile: read it again")
    set_meta(db, "configuration", document)
    # Recorded before the events of the agents: a process that renders those must know the new configuration.
    uow.record_event("configuration.changed", "configuration", {"version": version})
    if agents:
        add_agents(db, uow, agents)
    return version


def put_role(db: Connection, name: str, profile: str, maker: str) -> None:
    written = db.execute(_UPSERT_ROLE, {"name": name, "profile": profile, "maker": maker})
    if written.rowcount == 0:
        raise Refused("role_taken", f"the role {name!r} belongs to another agent: choose another name")


def terminate(db: Connection, uow: UnitOfWork, agent_id: str) -> None:
    mailbox = uow.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state == "terminated":
        return
    TurnTransaction(db, uow, agent_id, Rules()).terminate()
    uow.ended_epochs[agent_id] = mailbox.epoch
    mailbox.state, mailbox.runnable_at, mailbox.waiting, mailbox.waiting_bytes = "terminated", None, 0, 0
    for row in db.execute(_SELECT_WAITING, {"recipient": agent_id}).fetchall():
        uow.dead_letter(StoredMessage._make(row), "recipient_terminated")
    schedules.end_schedules_of(db, uow, agent_id)
    uow.record_event("agent.state", agent_id)
    uow.record_event("agent.removed", agent_id)


def pause(uow: UnitOfWork, agent_id: str) -> None:
    mailbox = _active_mailbox(uow, agent_id)
    mailbox.hold = 1
    if mailbox.state in ("idle", "ready"):
        mailbox.state, mailbox.runnable_at = "paused", None
    uow.record_event("agent.state", agent_id)


def resume(uow: UnitOfWork, agent_id: str) -> None:
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
    rows, is_cut = _lock_delayed(db, uow, limit, early)
    hit("promote.selected")
    delivered, dead = _deliver(db, uow, rows, early=early)
    uow.flush_messages()  # the next occurrences of recurring messages count for the next due time
    hit("promote.moved")
    next_row = db.execute(
        "SELECT deliver_at FROM messages WHERE state = 'delayed' ORDER BY deliver_at LIMIT 1"
    ).fetchone()
    next_due = from_ms(next_row[0]) - from_ms(uow.now) if next_row else None
    return Promotion(delivered=delivered, dead=dead, next_due=next_due, is_elsewhere=is_cut)


def _lock_delayed(db: Connection, uow: UnitOfWork, limit: int, early: bool) -> tuple[list[StoredMessage], bool]:
    """Return the due messages up to the first one that another transaction has locked, and True if there is one.

    It does not wait for that transaction, which may wait for one of the messages returned. Messages after the locked
    one are left, so that they do not overtake it.
    """
    bounds = {"limit": limit} if early else {"now": uow.now, "limit": limit}
    locked = db.execute(f"{_SELECT_DELAYED if early else _SELECT_DUE} /*+ FOR UPDATE SKIP LOCKED */", bounds)
    if not uow.has_other_writers:
        return [StoredMessage._make(row) for row in locked], False
    visible = db.execute(_SELECT_DELAYED if early else _SELECT_DUE, bounds)
    by_seq = {row.seq: row for row in map(StoredMessage._make, locked)}
    rows = [by_seq.get(row.seq) for row in map(StoredMessage._make, visible)]
    count = rows.index(None) if None in rows else len(rows)
    return [row for row in rows[:count] if row], count < len(rows)


def _deliver(
    db: Connection, uow: UnitOfWork, due: Iterable[StoredMessage], *, early: bool
) -> tuple[list[Delivery], int]:
    """Move delayed messages into their mailboxes, in the order given.

    Messages to terminated agents become dead letters. Return the deliveries and the number of dead letters.
    """
    moved, delivered, dead, at = [], [], 0, from_ms(uow.timestamp)
    for row in due:
        mailbox = uow.mailbox(row.recipient)
        repetition = schedules.read_repetition(db, row, uow.now)
        if repetition and repetition.is_waiting and mailbox.kind == "agent" and mailbox.state != "terminated":
            schedules.postpone(db, uow, row, repetition)
            continue
        mailbox.delayed -= 1
        if row.unless_answered:
            uow.mailbox(row.sender).reminders -= 1
        if mailbox.state == "terminated":
            uow.dead_letter(row, "recipient_terminated")
            dead += 1
            if repetition:
                schedules.set_state(db, uow, repetition.schedule.id, "ended")
            continue
        moved.append(
            {
                "in_seq": uow.add_message(row.recipient, mailbox, row.payload_size, row.sender),
                "delivered_at": uow.timestamp,
                "early": early and row.deliver_at > uow.now,
                "missed": repetition.missed if repetition else 0,
                "seq": row.seq,
            }
        )
        _count_delivery(uow, row)
        if repetition:
            schedules.store_next(db, uow, repetition, row.id)
        uow.record_event("delayed.delivered", row.id)
        delivered.append(Delivery(row.id, row.recipient, from_ms(row.created_at), from_ms(row.deliver_at), at))
    db.executemany(_DELIVER, moved)
    return delivered, dead


def _count_delivery(uow: UnitOfWork, row: StoredMessage) -> None:
    """Count a delayed message that is delivered now."""
    if row.starts_task_when_due:
        uow.tasks.start(row.id, row.parent_task, row.sender, row.recipient, uow.timestamp)
        change = uow.tasks.of(row.id)
        change.messages += 1
        change.queued += row.recipient != PERSON
    else:
        change = uow.tasks.of(row.task_id)
        change.queued -= row.recipient == PERSON
    if row.recipient == PERSON:
        change.questions += row.question
        change.failed = 0


def withdraw(db: Connection, uow: UnitOfWork, message_id: str, by: str) -> Message:
    message = _lock_message(db, uow, message_id, by)
    if message.state == "withdrawn":
        # An answer may have withdrawn it. It must not come back if that answer is withdrawn.
        db.execute("UPDATE messages SET withdrawn_by = NULL WHERE seq = :seq", {"seq": message.seq})
        return message
    if message.state not in ("delayed", "pending"):
        raise Refused("already_taken", "too late to withdraw: the message was taken already")
    approval = answered_approval_status(db, message)
    if approval == "decided":
        raise Refused("already_taken", "too late to withdraw: the call was approved or denied by this message already")
    if message.option is not None and message.in_reply_to and task_budgets.find_budget_task(db, message.in_reply_to):
        raise Refused("already_taken", "too late to withdraw: this message has decided about the budget already")
    withdrawn = uow.read_stored(message.seq)
    uow.withdraw(withdrawn)
    if withdrawn.question and withdrawn.state == "pending" and message.answer is None:
        uow.tasks.of(message.task).questions -= 1
    if message.state == "delayed" and message.schedule_id:
        schedules.skip_occurrence(db, uow, message.schedule_id)
    if message.sender == PERSON:
        uow.lock_questions()
    reopened = reopen_questions(db, uow.tasks, message.id) if message.sender == PERSON else []
    for question, _ in reopened:
        if approval == "void":
            uow.close_question(question)
        task_budgets.reopen_budget_question(db, uow, question)
        uow.record_event("quick_replies.changed", question)
    reminders.restore_reminders(db, uow, message.id)
    return _reload(db, message)


def reschedule(db: Connection, uow: UnitOfWork, message_id: str, delay: timedelta, by: str) -> Message:
    message = _lock_message(db, uow, message_id, by)
    if message.state != "delayed":
        raise Refused("already_delivered", f"too late to move: the message is {message.state}")
    deliver_at = uow.now + delay // _MS
    before = uow.read_stored(message.seq)
    db.execute(
        "UPDATE messages SET deliver_at = :deliver_at WHERE seq = :seq", {"deliver_at": deliver_at, "seq": message.seq}
    )
    _move_to_task(db, uow, before, before._replace(deliver_at=deliver_at))
    uow.record_event("delayed.moved", message.id)
    return _reload(db, message)


def _move_to_task(db: Connection, uow: UnitOfWork, before: StoredMessage, after: StoredMessage) -> None:
    """A message that is moved beyond a minute leaves its task; one that is moved within a minute starts its own now."""
    if before.starts_task_when_due == after.starts_task_when_due:
        return
    if before.starts_task_when_due:
        uow.tasks.start(after.id, after.parent_task, after.sender, after.recipient, uow.timestamp)
        change = uow.tasks.of(after.id)
        change.messages += 1
        change.queued += 1
        return
    if before.task is None:  # nothing else can belong to a task whose first message was not delivered
        uow.lock_tasks([before.id])
        db.execute("DELETE FROM tasks WHERE id = :id", {"id": before.id})
        uow.record_event("task.changed", before.id)
        return
    change = uow.tasks.of(before.task)
    change.messages -= 1
    change.queued -= 1
    db.execute(
        "UPDATE messages SET task = NULL, parent_task = :task WHERE seq = :seq",
        {"task": before.task, "seq": before.seq},
    )


def resend_dead_letter(db: Connection, uow: UnitOfWork, message_id: str) -> Receipt:
    message = _find_dead_letter(db, message_id)
    payload, question, thread = db.execute(
        "SELECT payload, question, thread FROM messages WHERE seq = :seq", {"seq": message.seq}
    ).fetchone()
    refs = db.execute("SELECT artifact_ref FROM attachments WHERE message_seq = :seq", {"seq": message.seq}).fetchall()
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
    row = db.execute(_DELETE_DEAD_LETTER, {"seq": message.seq}).fetchone()
    remove_from_index(db, [DeletedMessage(*row)])
    set_meta(db, "pruned", "1")
    uow.record_event("message.updated", message.id)


def add_artifact(db: Connection, uow: UnitOfWork, artifact: Artifact, maker: str | None) -> Artifact:
    db.execute(
        _INSERT_ARTIFACT,
        {
            "ref": artifact.ref,
            "filename": artifact.filename,
            "type": artifact.type,
            "mime_type": artifact.mime_type,
            "size": artifact.size,
            "sha256": artifact.sha256,
            "created_at": uow.timestamp,
            "maker": maker,
        },
    )
    uow.record_event("artifact.created", artifact.ref)
    row = db.execute(f"SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE ref = :ref", {"ref": artifact.ref}).fetchone()
    return to_artifact(row)


def mark_read(db: Connection, uow: UnitOfWork, thread: str, upto: str) -> int:
    mailbox = uow.mailbox(PERSON)
    is_agent = thread != SYSTEM
    delivered_at, seq = thread_position(db, thread if is_agent else None, upto)
    rows = db.execute(
        _READ if is_agent else _READ_NOTICES,
        {"now": uow.timestamp, "thread": thread, "delivered_at": delivered_at, "seq": seq},
    ).fetchall()
    for (size,) in rows:
        mailbox.remove_message(size)
    if rows:
        uow.record_event("read", thread, {"upto": upto})
    return len(rows)


def mark_unread(db: Connection, uow: UnitOfWork, thread: str, since: str) -> int:
    mailbox = uow.mailbox(PERSON)
    delivered_at, seq = thread_position(db, thread, since)
    rows = db.execute(_UNREAD, {"thread": thread, "delivered_at": delivered_at, "seq": seq}).fetchall()
    for (size,) in rows:
        mailbox.waiting += 1
        mailbox.waiting_bytes += size
    if rows:
        uow.record_event("unread", thread, {"from": since, "count": len(rows)})
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
    deleted = db.execute(_CLEAR, {"agent_id": agent_id}).fetchall()
    remove_from_index(db, (DeletedMessage(*row[:4]) for row in deleted))
    for _, _, recipient, _, state, size, task, is_open in deleted:
        if recipient == PERSON and state == "pending":
            person_mailbox.remove_message(size)
        if is_open:
            uow.tasks.of(task).questions -= 1
    asked = sorted({task for *_, task, is_open in deleted if is_open})
    freed = _clear_budget_questions(db, uow, asked) if asked else []
    for sql in _DELETE_HISTORY:
        db.execute(sql, {"agent_id": agent_id})
    db.execute("UPDATE agents SET cleared_seq = taken_seq WHERE id = :id", {"id": agent_id})
    mailbox.epoch, mailbox.next_hist_seq, mailbox.why, mailbox.problem = mailbox.epoch + 1, 1, None, None
    mailbox.history_version += 1
    mailbox.over_budget = 0
    if mailbox.state == "blocked":
        TurnTransaction(db, uow, agent_id, Rules()).end_cleared()
        mailbox.state, mailbox.runnable_at = "paused" if mailbox.hold else "idle", None
        if mailbox.waiting and not mailbox.hold:
            mailbox.state, mailbox.runnable_at = "ready", uow.now
        uow.record_event("agent.state", agent_id)
    for task_id in freed:
        task_control.retry_blocked(db, uow, task_id)  # one of the other agents asks the person
    if deleted:
        set_meta(db, "pruned", "1")
    uow.record_event("thread.cleared", agent_id)
    return len(deleted)


def _clear_budget_questions(db: Connection, uow: UnitOfWork, asked: Sequence[str]) -> list[str]:
    """Close the budget questions whose messages were deleted. Return their tasks.

    `asked`: tasks of which open questions were deleted. An earlier job of the batch may have opened one that is not in
    the task's row yet.
    """
    cleared = db.execute(_SELECT_CLEARED_BUDGETS, {"asked": json_keys(asked)}).fetchall()
    task_ids = [task_id for (task_id,) in cleared]
    uow.lock_tasks(task_ids)
    db.executemany(_CLEAR_BUDGET_QUESTION, [{"id": task_id} for task_id in task_ids])
    for task_id in asked:
        opened = [change.budget_question for change in uow.unwritten_changes(task_id) if change.budget_question]
        if opened and not db.execute(_SELECT_EXISTS, {"id": opened[-1]}).fetchone():
            uow.tasks.of(task_id).close_question()
            task_ids.append(task_id)
    return task_ids


def _lock_message(db: Connection, uow: UnitOfWork, message_id: str, by: str) -> Message:
    """Return the message after its recipient's mailbox is locked. `Refused` unless `by` may change it."""
    row = db.execute("SELECT recipient FROM messages WHERE id = :id", {"id": message_id}).fetchone()
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
