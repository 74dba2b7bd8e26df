"""The mail of one agent in one transaction: what waits, what of it interrupts, and how it is taken."""

from __future__ import annotations

from typing import Any

from coterie.agent.send_message import SEND_MESSAGE
from coterie.agent.turn import Letter, Plan
from coterie.messages import PERSON, Message
from coterie.stores.sql.approvals import APPROVE, question_id
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.damage import check_readable
from coterie.stores.sql.ledger import GLANCE
from coterie.stores.sql.post import Post
from coterie.stores.sql.rows import to_message

_TAKE = """
UPDATE messages SET state = 'taken', taken_at = ?
 WHERE recipient = ? AND in_seq > ? AND in_seq <= ? AND state = 'pending'
"""
_VERDICT = """
SELECT option FROM messages WHERE recipient = ? AND in_seq > ? AND state = 'pending' AND sender = ?
   AND in_reply_to = ? AND option IS NOT NULL ORDER BY in_seq LIMIT 1
"""
_SENT = "SELECT id FROM messages WHERE sender = ? AND plan = ?"
# The chain is at most as long as the hop limit.
_ECHO = """
WITH RECURSIVE chain (id) AS
 (SELECT m.id FROM messages m WHERE m.id = ?1
  UNION SELECT m.cause FROM messages m JOIN chain c ON m.id = c.id)
SELECT 1 FROM messages m JOIN chain c ON m.id = c.id WHERE m.sender = ?2 AND m.plan = ?3
"""


class Mail:
    def __init__(self, db: Connection, post: Post, agent_id: str) -> None:
        self._db, self._post, self._agent = db, post, agent_id
        self._row = post.mailbox(agent_id)
        self._last = self._row.next_in_seq - 1
        """What comes in this very transaction stands behind it, and is for the next decision."""
        self._fresh: list[tuple[int, Message]] = []
        self._stored: list[Any] = []
        """What waits, as it was read for the decision."""
        self._sent: set[str] | None = None
        """What the running plan has sent, once somebody asked."""

    def begin(self) -> None:
        """A turn begins with it. What was sent in this very transaction need not be written first and then changed."""
        self._fresh = self._post.unwritten(self._agent)
        if not self._fresh:
            self._post.write_messages()

    def leave(self) -> None:
        """It is not for this turn, and begins one of its own."""
        self._last = self._row.taken_seq

    def letters(self, plan: Plan | None, plan_name: str) -> tuple[Letter, ...]:
        """All that waits, as far as it matters for a decision."""
        if self._last <= self._row.taken_seq:
            return ()
        if self._fresh:  # where a turn begins there is no plan yet that something could answer
            return tuple(
                Letter(one.id, one.in_seq or 0, one.sender == PERSON, one.sender == self._agent)
                for _, one in self._fresh
            )
        # Without a plan it is taken in this step. A plan looks before every call: who interrupts it is read then.
        self._stored = self._post.waiting(self._agent, whole=plan is None)
        return tuple(
            [
                Letter(id_, in_seq, sender == PERSON,
                       self._is_verdict(plan, sender, in_reply_to, option)
                       or self._is_echo(plan, plan_name, sender, cause))
                for in_seq, id_, sender, in_reply_to, option, cause, *_ in self._stored
            ]
        )  # fmt: skip

    def verdict(self, plan: Plan | None) -> bool | None:
        """The person's word on the call that waits for it; the first one counts."""
        if self._row.state != "wait_approval" or plan is None:
            return None
        asked = question_id(self._agent, plan.awaited())
        row = self._db.execute(_VERDICT, (self._agent, self._row.taken_seq, PERSON, asked)).fetchone()
        return row[0] == APPROVE if row else None

    def take(self) -> list[Message]:
        """All of it, in order; it waits no more."""
        if self._fresh:
            self._post.take_unwritten(self._agent)
        taken = self._fresh or self._take_stored()
        for size, _ in taken:
            self._row.remove(size)
        self._row.taken_seq = self._last
        return [message for _, message in taken]

    def _take_stored(self) -> list[tuple[int, Message]]:
        rows, stamp = self._stored, self._post.stamp
        if rows and len(rows[0]) == GLANCE:
            rows = self._post.waiting(self._agent)
        if rows:
            self._db.execute(_TAKE, (stamp, self._agent, self._row.taken_seq, rows[-1][0]))
        taken = [(row[GLANCE], row[GLANCE + 1 :]) for row in rows]
        for _, (_, message_id, _, _, payload, *_) in taken:
            check_readable(message_id, payload)
        return [(size, to_message((*row[:5], "taken", *row[6:9], stamp, *row[10:]))) for size, row in taken]

    def _is_verdict(self, plan: Plan | None, sender: str, in_reply_to: str | None, option: int | None) -> bool:
        """A button pressed on a question of this plan. It stays in the mail until the plan is done."""
        if plan is None or sender != PERSON or option is None:
            return False
        return any(in_reply_to == question_id(self._agent, one.call.id) for one in plan.calls if one.gated)

    def _is_echo(self, plan: Plan | None, plan_name: str, sender: str, cause: str | None) -> bool:
        """It comes from the agent itself, or answers something that the running plan has sent."""
        if sender == self._agent:
            return True
        if plan is None or cause is None or not plan.has_done(SEND_MESSAGE.name):
            return False
        if self._sent is None:
            self._sent = {message_id for (message_id,) in self._db.execute(_SENT, (self._agent, plan_name))}
        # Most answers are to what was sent itself: the whole chain is seldom walked.
        if not self._sent or cause in self._sent:
            return bool(self._sent)
        return self._db.execute(_ECHO, (cause, self._agent, plan_name)).fetchone() is not None
