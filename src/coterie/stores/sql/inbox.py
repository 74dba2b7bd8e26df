"""The waiting messages of one agent within one transaction: those that may interrupt its plan, and those it takes.

`turn.py` decides; this module looks up the facts. For a decision it reads a number of messages that does not grow with
the mailbox: the person's first message, by an index, and a few messages after the known echoes. It takes as many
messages as the agent's mail budget allows.
"""

from __future__ import annotations

from functools import cached_property

from coterie.messages import PERSON, Message
from coterie.plan import SEND_MESSAGE_TOOL, Plan
from coterie.stores.sql.quarantine import check_readable
from coterie.stores.sql.rows import ASKS_BACK_OPTION, Connection, NewMessageRow
from coterie.stores.sql.session import WaitingHeader, WaitingRow
from coterie.stores.sql.turn_rows import APPROVE, approval_question_id
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Rules, WaitingMessage, count_fitting, is_echo

_HEADERS = "SELECT in_seq, id, sender, in_reply_to, option, cause FROM messages"
# Not "sender = 'user'": SQLite would prepare every query with a sender parameter again for each value.
_FROM_PERSON = "NOT sender <> 'user' AND state = 'pending'"
SELECT_FROM_PERSON = f"""
{_HEADERS} WHERE recipient = :recipient AND in_seq > :after AND in_seq <= :upto AND {_FROM_PERSON}
 ORDER BY in_seq LIMIT :limit
"""
SELECT_NEXT_HEADERS = f"""
{_HEADERS} WHERE recipient = :recipient AND in_seq > :after AND in_seq <= :upto AND state = 'pending'
 ORDER BY in_seq LIMIT :limit
"""
_TAKE = """
UPDATE messages SET state = 'taken', taken_at = :taken_at
 WHERE recipient = :recipient AND in_seq > :taken_seq AND in_seq <= :last_in_seq AND state = 'pending'
"""
_SELECT_DECISION = f"""
SELECT option FROM messages
 WHERE recipient = :recipient AND in_seq > :after AND in_seq <= :upto AND {_FROM_PERSON}
   AND in_reply_to = :question AND option >= 0 ORDER BY in_seq LIMIT 1
"""
_SELECT_SENT = "SELECT id FROM messages WHERE sender = :sender AND plan = :plan"
# The hop limit bounds the chain; a message delayed by a minute or more starts a new one, with 0 hops.
_SELECT_CAUSED_BY_PLAN = """
WITH RECURSIVE chain (id) AS
 (SELECT messages.id FROM messages WHERE messages.id = :cause
  UNION SELECT messages.cause FROM messages JOIN chain ON messages.id = chain.id WHERE messages.hops > 0)
SELECT 1 FROM messages JOIN chain ON messages.id = chain.id WHERE messages.sender = :sender AND messages.plan = :plan
"""
MAX_EXAMINED = 32
"""Messages examined per check. If all of them are echoes, the next check examines the messages after them."""
MAX_ASKED_BACK = 1
"""Messages read in the first query that ask back about a call of the plan. More of them are read in pages."""
PAGE_SIZE = 64
"""Messages read at a time while only a part is taken."""
MESSAGE_COST = 200
"""Bytes that a request adds to each message: who sent it, and when."""
ATTACHMENT_COST = 3_000
"""Bytes that an attached picture or file counts as."""


class Inbox:
    def __init__(self, db: Connection, uow: UnitOfWork, agent_id: str, rules: Rules) -> None:
        self._db, self._uow, self._agent_id, self._rules = db, uow, agent_id, rules
        self._mailbox = uow.mailbox(agent_id)
        self._last_position = self._mailbox.next_in_seq - 1
        """Messages that this transaction adds later are left for the next step."""
        self.has_mail = self._mailbox.waiting > 0
        self.checked_seq = 0
        """Messages up to this position are echoes of the open plan."""
        self._buffered: list[tuple[NewMessageRow, Message]] = []
        """Rows and messages that are not in the database yet."""
        self._rows: list[WaitingRow] | None = None
        """Stored messages to take. None: not read yet."""
        self._is_partial = False
        """More messages wait behind `_rows`."""
        self._sent_by_plan: set[str] | None = None
        """Ids of messages that the open plan sent. None: not read yet."""

    def begin_turn(self) -> None:
        """Prepare for a new turn. Messages of this transaction can be written as taken at once."""
        self._buffered = self._uow.buffered_messages(self._agent_id)
        if not self._buffered:
            self._uow.flush_messages()

    def leave_for_next_turn(self) -> None:
        """Hide all waiting messages from this turn."""
        self.has_mail, self._last_position = False, self._mailbox.taken_seq

    # Decisions

    def messages_to_take(self) -> tuple[WaitingMessage, ...]:
        """Return the messages that `take` takes."""
        if not self.has_mail:
            return ()
        if self._buffered:
            taken = (message for _, message in self._fit())
            return tuple(_waiting(message.id, message.mailbox_position, message.sender) for message in taken)
        return tuple(_waiting(row.id, row.in_seq, row.sender) for row in self._read_fitting())

    def messages_to_check(self, plan: Plan | None, plan_name: str) -> tuple[WaitingMessage, ...]:
        """Return messages that decide whether the plan is interrupted. If none of them interrupts it, no other does."""
        if not self.has_mail:
            return ()
        mailbox = self._mailbox
        approvals = sum(planned.needs_approval for planned in plan.calls) if plan else 0
        # Only an answer to an approval question can be an echo of the person.
        page = approvals + MAX_ASKED_BACK + 1 if approvals else 1
        after = max(mailbox.taken_seq, mailbox.first_from_person - 1)
        upto = min(mailbox.last_from_person, self._last_position)
        bounds = {"recipient": self._agent_id, "after": after, "upto": upto, "limit": page}
        from_person = self._db.execute(SELECT_FROM_PERSON, bounds) if after < upto else ()
        unchecked = self._db.execute(
            SELECT_NEXT_HEADERS,
            {
                "recipient": self._agent_id,
                "after": max(mailbox.taken_seq, self.checked_seq),
                "upto": self._last_position,
                "limit": MAX_EXAMINED,
            },
        )
        # Results are read after both queries were sent: PostgreSQL answers them in one round trip.
        examined = list[WaitingMessage]()
        for header in map(WaitingHeader._make, from_person):
            if not examined and header.in_seq > after + 1:
                mailbox.first_from_person = header.in_seq  # the next check need not read what is before it
            examined.append(self._examine(header, plan, plan_name))
            if not examined[-1].is_echo:
                return tuple(examined)
        if after < upto and not examined:
            mailbox.first_from_person = upto + 1
        while len(examined) == page:  # the person asked back many times, and may have sent another message after that
            bounds |= {"after": examined[-1].position, "limit": PAGE_SIZE}
            page += PAGE_SIZE
            for row in self._db.execute(SELECT_FROM_PERSON, bounds).fetchall():
                examined.append(self._examine(WaitingHeader._make(row), plan, plan_name))
                if not examined[-1].is_echo:
                    return tuple(examined)
        for header in map(WaitingHeader._make, unchecked):
            examined.append(self._examine(header, plan, plan_name))
            if not examined[-1].is_echo:
                break
            self.checked_seq = header.in_seq
        return tuple(examined)

    def read_decision(self, plan: Plan | None) -> bool | None:
        """Return the person's first answer about the call that waits for approval. None: there is none yet."""
        mailbox = self._mailbox
        if mailbox.state not in ("wait_approval", "llm") or plan is None or not mailbox.may_have_from_person():
            return None
        row = self._db.execute(
            _SELECT_DECISION,
            {
                "recipient": self._agent_id,
                "after": max(mailbox.taken_seq, mailbox.first_from_person - 1),
                "upto": mailbox.last_from_person,
                "question": approval_question_id(self._agent_id, plan.awaiting_approval()),
            },
        ).fetchone()
        return row[0] == APPROVE if row else None

    def _examine(self, header: WaitingHeader, plan: Plan | None, plan_name: str) -> WaitingMessage:
        echo = is_echo(
            header.sender,
            self._agent_id,
            answers_approval=lambda: self._answers_approval(plan, header),
            is_caused_by_plan=lambda: self._is_caused_by_plan(plan, plan_name, header),
        )
        asks_back = echo and header.sender == PERSON and header.option == ASKS_BACK_OPTION
        return _waiting(header.id, header.in_seq, header.sender, echo, asks_back)

    def _answers_approval(self, plan: Plan | None, header: WaitingHeader) -> bool:
        """True for a button pressed on an approval question of this plan, or a question about it."""
        if plan is None or header.option is None:
            return False
        return any(
            header.in_reply_to == approval_question_id(self._agent_id, planned.call.id)
            for planned in plan.calls
            if planned.needs_approval
        )

    def _is_caused_by_plan(self, plan: Plan | None, plan_name: str, header: WaitingHeader) -> bool:
        if plan is None or header.cause is None or not plan.has_completed(SEND_MESSAGE_TOOL):
            return False
        if self._sent_by_plan is None:
            rows = self._db.execute(_SELECT_SENT, {"sender": self._agent_id, "plan": plan_name})
            self._sent_by_plan = {message_id for (message_id,) in rows}
        # Most answers are caused directly: the whole chain is rarely read.
        if not self._sent_by_plan or header.cause in self._sent_by_plan:
            return bool(self._sent_by_plan)
        caused = self._db.execute(
            _SELECT_CAUSED_BY_PLAN, {"cause": header.cause, "sender": self._agent_id, "plan": plan_name}
        )
        return caused.fetchone() is not None

    # Taking

    @cached_property
    def _budget(self) -> int | None:
        """Bytes of mail to take at most; None: no limit."""
        return self._rules.mail_budget(self._agent_id) if self._rules.mail_budget else None

    def take(self) -> list[Message]:
        """Mark the messages that fit the budget as taken, and return them in order. The others stay waiting."""
        taken = self._take_buffered() if self._buffered else self._take_stored()
        for size, _ in taken:
            self._mailbox.remove_message(size)
        if not self._is_partial:
            self._mailbox.taken_seq = self._last_position
        elif taken:
            self._mailbox.taken_seq = taken[-1][1].mailbox_position or 0
        return [message for _, message in taken]

    def _take_buffered(self) -> list[tuple[int, Message]]:
        taken = self._fit()
        self._is_partial = len(taken) < len(self._buffered)
        self._uow.take_buffered(self._agent_id, len(taken))
        for row, _ in taken:
            self._uow.leave_queue(row)
        return [(len(row.payload), message) for row, message in taken]

    def _fit(self) -> list[tuple[NewMessageRow, Message]]:
        """Return the buffered messages that fit the budget."""
        costs = (_cost(row.payload) for row, _ in self._buffered)
        return self._buffered[: count_fitting(costs, self._budget)]

    def _take_stored(self) -> list[tuple[int, Message]]:
        rows = self._read_fitting()
        if not rows:
            return []
        taken_at = self._uow.timestamp
        self._db.execute(
            _TAKE,
            {
                "taken_at": taken_at,
                "recipient": self._agent_id,
                "taken_seq": self._mailbox.taken_seq,
                "last_in_seq": rows[-1].in_seq,
            },
        )
        for row in rows:
            check_readable(row.id, row.payload)
            self._uow.leave_queue(row)
            row.state, row.taken_at = "taken", taken_at
        return [(row.payload_size, row.to_message()) for row in rows]

    def _read_fitting(self) -> list[WaitingRow]:
        """Read the stored messages that fit the budget, once per transaction."""
        if self._rows is None:
            self._rows, self._is_partial = self._read_pages()
        return self._rows

    def _read_pages(self) -> tuple[list[WaitingRow], bool]:
        """Return the messages that fit the budget, and whether more wait."""
        rows, costs = list[WaitingRow](), list[int]()
        limit = None if self._budget is None else PAGE_SIZE
        while True:
            after = (rows[-1].in_seq or 0) if rows else self._mailbox.taken_seq
            page = self._uow.read_waiting(self._agent_id, after=after, upto=self._last_position, limit=limit)
            rows += page
            costs += (_cost(row.payload) for row in page)
            fitting = count_fitting(costs, self._budget)
            if fitting < len(rows):
                return rows[:fitting], True
            if limit is None or len(page) < limit:
                return rows, False


def _waiting(
    message_id: str, position: int | None, sender: str, echo: bool = False, asks_back: bool = False
) -> WaitingMessage:
    return WaitingMessage(message_id, position or 0, sender == PERSON, echo, asks_back)


def _cost(payload: str | bytes) -> int:
    """Return the bytes that a message is estimated to add to a request."""
    data = payload if isinstance(payload, bytes) else payload.encode(errors="replace")
    return MESSAGE_COST + len(data) + ATTACHMENT_COST * data.count(b'"artifactRef"')
