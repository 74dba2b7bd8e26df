"""Reminders: delayed messages with `unlessAnswered`, which the store withdraws when it stores an answer.

`agents.reminders` counts those of each sender, so that storing an answer needs a query only if the asker has any.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from coterie.errors import Refused
from coterie.messages import PERSON, Envelope
from coterie.stores.sql.rows import Connection
from coterie.stores.sql.task_changes import is_stopped

if TYPE_CHECKING:
    from coterie.stores.sql.unit_of_work import UnitOfWork

_SELECT_QUESTION = "SELECT seq, sender, recipient, state, question, answered_by FROM messages WHERE id = :id"
# Messages that the agent read in the same turn: one answer is for all of them. Questions about a call are apart.
SELECT_READ_TOGETHER = """
SELECT other.message_id FROM history AS asked
  JOIN history AS other ON other.agent_id = asked.agent_id AND other.turn_no = asked.turn_no
  JOIN messages AS taken ON taken.id = other.message_id
 WHERE asked.message_id = :id AND taken.sender = :asker AND coalesce(taken.option, 0) >= 0
"""
# A message that asks about a call is no answer to its question.
_SELECT_ANSWER = f"""
SELECT id FROM messages
 WHERE seq > :seq AND sender = :answerer AND state NOT IN ('withdrawn', 'dead') AND coalesce(option, 0) >= 0
   AND (in_reply_to = :id OR (automatic = 1 AND recipient = :asker AND in_reply_to IN ({SELECT_READ_TOGETHER})))
 LIMIT 1
"""
# Only an answer of the recipient of the question counts.
_SELECT_ANSWERED = """
SELECT seq FROM messages
 WHERE unless_answered = :question AND sender = :asker AND state = 'delayed'
   AND EXISTS (SELECT 1 FROM messages AS asked WHERE asked.id = :question AND asked.recipient = :answerer)
 ORDER BY seq
"""
_SELECT_WITHDRAWN = """
SELECT seq, unless_answered FROM messages WHERE withdrawn_by = :answer AND state = 'withdrawn' ORDER BY seq
"""
_SET_WITHDRAWN_BY = "UPDATE messages SET withdrawn_by = :answer WHERE seq = :seq"


def is_answered(db: Connection, uow: UnitOfWork, reminder: Envelope) -> bool:
    """True if the question of a new reminder has an answer already. `Refused` if it is no question of the sender."""
    uow.flush_messages()
    uow.mailbox(reminder.sender)  # locked, as every answer to this sender locks it: no answer is missed
    row = db.execute(_SELECT_QUESTION, {"id": reminder.unless_answered}).fetchone()
    seq, sender, recipient, state, question, answered_by = row or (0, None, None, None, 0, None)
    if sender != reminder.sender or state in ("withdrawn", "dead") or (recipient == PERSON and not question):
        raise Refused(
            "unlessAnswered_unknown",
            f"{reminder.unless_answered!r} is no question of yours: name a message that you sent to an agent, or one"
            " with quickReplies to the person",
        )
    if answered_by not in (None, reminder.unless_answered):  # its own id: it was closed without an answer
        return True
    parameters = {"seq": seq, "id": reminder.unless_answered, "answerer": recipient, "asker": sender}
    return db.execute(_SELECT_ANSWER, parameters).fetchone() is not None


def withdraw_answered(
    db: Connection, uow: UnitOfWork, questions: Collection[str], *, answer_id: str, asker: str, answerer: str
) -> None:
    """Withdraw the asker's reminders about these questions, which `answer_id` answers."""
    uow.flush_messages()  # a reminder of the same transaction may not be written yet
    for question in sorted(questions):
        parameters = {"question": question, "asker": asker, "answerer": answerer}
        for (seq,) in db.execute(_SELECT_ANSWERED, parameters).fetchall():
            uow.withdraw(uow.read_stored(seq))
            db.execute(_SET_WITHDRAWN_BY, {"answer": answer_id, "seq": seq})


def restore_reminders(db: Connection, uow: UnitOfWork, answer_id: str) -> None:
    """Schedule the messages again that an answer had withdrawn, because the answer itself is withdrawn.

    If there is another answer to the question, they stay withdrawn because of that one.
    """
    for seq, question in db.execute(_SELECT_WITHDRAWN, {"answer": answer_id}).fetchall():
        asked_seq, asker, answerer, *_ = db.execute(_SELECT_QUESTION, {"id": question}).fetchone() or (0, "", "")
        parameters = {"seq": asked_seq, "id": question, "answerer": answerer, "asker": asker}
        other = db.execute(_SELECT_ANSWER, parameters).fetchone()
        if other:
            db.execute(_SET_WITHDRAWN_BY, {"answer": other[0], "seq": seq})
            continue
        row = uow.read_stored(seq)
        if any(task and is_stopped(db, task) for task in (row.task, row.parent_task)):
            continue
        uow.mailbox(row.recipient).delayed += 1
        uow.mailbox(row.sender).reminders += 1
        db.execute("UPDATE messages SET state = 'delayed', withdrawn_by = NULL WHERE seq = :seq", {"seq": seq})
        row = row._replace(state="delayed")
        if row.is_queued:
            uow.tasks.of(row.task_id).queued += 1
        uow.record_event("delayed.scheduled", row.id)
