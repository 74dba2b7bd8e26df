"""One agent's turn in one transaction: the fence, the state a decision is made on, and the writes it asks for.

The mail of one agent in one transaction: what waits, what of it interrupts, and how it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from coterie.agent.builtins import SEND_MESSAGE, told
from coterie.agents import ACTIVE
from coterie.clock import from_ms, to_wire
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.llm.types import Call, Usage
from coterie.messages import PERSON, Envelope, Message
from coterie.stores.sql import turn_rows
from coterie.stores.sql.connection import Connection, insert
from coterie.stores.sql.poison import check_readable
from coterie.stores.sql.queries import mark_of
from coterie.stores.sql.replies import answer
from coterie.stores.sql.rows import to_message
from coterie.stores.sql.session import GLANCE
from coterie.stores.sql.turn_rows import APPROVE, question, question_id
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import (
    NOT_EXECUTED,
    Answered,
    ArgumentsFile,
    AskApproval,
    Become,
    Change,
    CloseGroup,
    Count,
    Deferred,
    Dismissed,
    DropPlan,
    Event,
    Judged,
    Letter,
    ModelFailed,
    NextTurn,
    OpenPlan,
    Plan,
    Poisoned,
    Quarantine,
    Ran,
    Reclassify,
    Reply,
    Resumed,
    Rules,
    Run,
    Say,
    Step,
    Stopped,
    TakeMail,
    Turn,
    Write,
    reduce,
)
from coterie.turn_store import Asked, Claim, HistoryRow, StaleOwner

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
    def __init__(self, db: Connection, post: UnitOfWork, agent_id: str) -> None:
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


_MS = timedelta(milliseconds=1)
_HISTORY = "history (agent_id, seq, turn_no, role, message_id, content, calls, call_id)"
CRASHES = 3
"""So often a step may bring the runtime down before its turn is given up."""
TOLD = 200
"""Messages named in an event; how many there were is said beside them."""
_encode = msgspec.json.encode
Reducer = Callable[[Turn, Event], Step]


class TurnTransaction:
    """One agent's turn, for the length of one transaction."""

    def __init__(self, db: Connection, post: UnitOfWork, agent_id: str, rules: Rules, reducer: Reducer = reduce) -> None:
        self._db, self._post, self._agent, self._rules, self._reduce = db, post, agent_id, rules, reducer
        self.row = post.mailbox(agent_id)
        self._mail = Mail(db, post, agent_id)
        self._key: turn_rows.Key = (0, 0)
        self._plan: Plan | None = None
        self._stored: Plan | None = None
        """The plan as the database has it; the other one is what it will be."""
        self._closed_by: tuple[str | None] | None = None
        self._withdrawn = 0
        self._cause: str | None = None
        self._asked: Asked | None = None
        self._spoke = True
        self._added: list[HistoryRow] = []
        self._rows: list[tuple[Any, ...]] = []
        self._replies: tuple[str, ...] = ()
        self._rewritten = False
        self._taken_over = False

    # The ways a transaction begins

    def claim(self, worker: str) -> Claim:
        """A new owner: whatever an earlier one still wants to write is void from here on."""
        fresh = self.row.state == "ready"
        self._taken_over = self.row.state in ("llm", "tools") and self.row.worker not in (None, worker)
        self.row.epoch += 1
        event: Event = Resumed()
        if fresh:
            self._next_turn()
            self._mail.begin()
        else:
            self._recall()
            if (approved := self._mail.verdict(self._plan)) is not None:
                event = Judged(approved)
            elif self.row.state in ("llm", "tools") and self._crashed():
                event = Poisoned("this request brought the runtime down three times; it was set aside")
        self.row.worker = worker
        return self.step(event)

    def dismiss(self) -> None:
        """The agent is to be no more: whoever works on it is turned away, and an open turn is closed."""
        self.row.epoch += 1
        if self.row.state in (*ACTIVE, "blocked"):
            self._recall()
            self.step(Dismissed())

    def halt(self) -> None:
        """A turn that waits, for a while or for the person's word, ends: whoever takes it up now comes too late."""
        self.row.epoch += 1
        self._recall()
        self._mail.leave()
        self.step(Stopped())

    def go_on(self, claim: Claim) -> None:
        """What was decided with `claim` is about to be written. The fence proves that what it says is still so."""
        self._post.write_messages()
        self.fence(claim)
        self._key, self._plan = claim.plan_key, claim.plan
        self._stored, self._cause = claim.plan, claim.cause
        self._asked, self._spoke = claim.asked, claim.spoke

    def acquit(self) -> None:
        """It has got further than the crash that it was suspected of; now the next suspect may go on."""
        self.row.crashes = 0
        self._post.frees = True

    def fence(self, claim: Claim) -> None:
        if (self.row.epoch, self.row.step_no) != (claim.epoch, claim.step_no):
            raise StaleOwner(f"{self._agent} was taken over by another worker")

    # The decision, and its writes

    def step(self, event: Event, sends: Envelope | None = None) -> Claim:
        if sends is not None and isinstance(event, Ran):
            event = self._send(event, sends)
        step = self._reduce(self._turn(), event)
        if isinstance(event, Answered):
            self.row.retries = 0
            withdrawn = any(isinstance(write, DropPlan) for write in step.writes)
            self.note_usage(event.service, event.usage, "withdrawn" if withdrawn else "used")
        elif isinstance(event, ModelFailed | Stopped) and event.usage.input_tokens:
            self.note_usage(event.service, event.usage, "used")
        elif isinstance(event, ModelFailed | Deferred):
            self.give_back()
        for write in step.writes:
            self._write(write)
        self._write_plan()
        self._flush_rows()
        self.row.step_no += 1
        hit("turn.before_save")
        return self._claimed(step)

    def _turn(self) -> Turn:
        return Turn(
            mail=self._mail.letters(self._plan, _name(self._key)),
            plan=self._plan,
            withdrawals=self.row.withdrawals,
            rounds=self.row.rounds,
            rules=self._rules,
            hold=bool(self.row.hold),
            society_paused=self._post.society_paused,
        )

    def _recall(self) -> None:
        """What nobody's claim tells: the open plan, and what the turn is about."""
        self._post.write_messages()
        if found := turn_rows.read_open(self._db, self._agent):
            self._key, self._plan = found
            self._stored = self._plan
        row = self._db.execute(
            "SELECT message_id FROM history WHERE agent_id = ? AND turn_no = ? AND message_id IS NOT NULL"
            " ORDER BY seq DESC LIMIT 1",
            (self._agent, self.row.turn_no),
        ).fetchone()
        self._cause = row[0] if row else None

    def _write(self, write: Write) -> None:
        match write:  # the usual ones first: to be none of the others takes longer than to be one
            case Become():
                self._become(write)
            case Count(withdrawals=withdrawals, rounds=rounds):
                self.row.withdrawals, self.row.rounds = withdrawals, rounds
            case Change(index=index, state=state, result=result):
                assert self._plan is not None  # noqa: S101 - a call of the open plan
                self._plan = self._plan.having(index, state, result)
            case Reclassify(index=index, effect=effect, gated=gated):
                assert self._plan is not None  # noqa: S101 - a call of the open plan
                self._plan = self._plan.reclassified(index, effect, gated)
            case TakeMail():
                self._take_mail()
            case OpenPlan(plan=plan):
                self._open(plan)
            case CloseGroup(plan=plan, by=by):
                self._close(plan, by)
            case Say(text=text):
                if text.strip():
                    self._append("assistant", content=text)
            case Reply():
                self._reply(write)
                hit("turn.replied")
            case NextTurn():
                self._next_turn()
            case DropPlan(plan=plan, by=by):
                self._drop(plan, by)
            case AskApproval(index=index, file=file):
                self._ask_approval(index, file)
            case Quarantine():
                self._quarantine()

    def _next_turn(self) -> None:
        self.row.turn_no += 1
        self.row.rounds = self.row.withdrawals = self.row.retries = 0
        self._cause, self._asked, self._spoke = None, None, False
        self.row.person = 0

    def _take_mail(self) -> None:
        taken = self._mail.take()
        self._asked = _asked(taken) if self._cause is None or self._asked else None
        if any(message.sender == PERSON for message in taken):
            self.row.person = 1
        for message in taken:
            self._append("user", message=message)
            self._cause = message.id
        names = [message.id for message in taken[:TOLD]]
        told_of = {"taken": names, "takenCount": len(taken), "withdrawnCalls": self._withdrawn}
        self._post.tell("queue.changed", self._agent, told_of)

    # The plan: changed in memory, written once at the end of the step

    def _open(self, plan: Plan) -> None:
        self._key = (self.row.turn_no, self.row.step_no)
        self._plan, self._stored = turn_rows.named(plan, self._key), None

    def _drop(self, plan: Plan, by: str | None) -> None:
        key = (self.row.turn_no, self.row.step_no)
        dropped = turn_rows.named(plan.closed(""), key)
        turn_rows.record(self._db, self._agent, key, dropped, "withdrawn", self._post.stamp, by)
        self._withdrawn = len(plan.calls)

    def _close(self, plan: Plan, by: str | None) -> None:
        self._plan, self._closed_by = plan, (by,)
        self._append("assistant", content=plan.text, calls=[one.call for one in plan.calls])
        for one in plan.calls:
            self._append("tool", content=one.result, call_id=one.call.id)
        self._withdrawn = sum(one.result == NOT_EXECUTED for one in plan.calls)

    def _write_plan(self) -> None:
        if self._plan is None:
            return
        self._tell_of_calls()
        if self._stored is None:
            turn_rows.record(self._db, self._agent, self._key, self._plan, "open", self._post.stamp)
        else:
            turn_rows.save_calls(self._db, self._agent, self._key, self._stored, self._plan, self._post.stamp)
        if self._closed_by:
            turn_rows.close(self._db, self._agent, *self._closed_by)
            self._plan = None
            hit("turn.group_closed")

    def _tell_of_calls(self) -> None:
        assert self._plan is not None  # noqa: S101
        before = [one.state for one in self._stored.calls] if self._stored else ["planned"] * len(self._plan.calls)
        for was, one in zip(before, self._plan.calls, strict=True):
            if one.state == "started" != was:
                self._post.tell("tool.started", f"{self._agent}/{one.call.id}")
            elif was == "started" != one.state:
                self._post.tell("tool.ended", f"{self._agent}/{one.call.id}")
            elif was == "gated" != one.state:
                self._post.close_question(question_id(self._agent, one.call.id))

    def _ask_approval(self, index: int, file: ArgumentsFile | None) -> None:
        assert self._plan is not None  # noqa: S101 - the plan was opened before
        call = self._plan.calls[index].call
        self._post.accept(
            Envelope(
                id=question_id(self._agent, call.id),
                sender=self._agent,
                to=PERSON,
                payload_json=question(call, file),
                retried=True,
                question=True,
                attachments=(file.artifact_ref,) if file else (),
            )
        )

    def _reply(self, reply: Reply) -> None:
        turn_no, only, spoke = self.row.turn_no, self._asked, self._spoke
        self._replies += answer(self._db, self._post, self._agent, turn_no, reply, only=only, spoke=spoke)

    def _quarantine(self) -> None:
        self._flush_rows()
        self._rewritten = True
        self.row.history_version += 1
        self._db.execute(
            "UPDATE history SET hidden = 1 WHERE agent_id = ? AND turn_no = ? AND role = 'user'",
            (self._agent, self.row.turn_no),
        )

    def _become(self, become: Become) -> None:
        row = self.row
        row.state = become.state
        row.runnable_at = self._post.now + become.after // _MS if become.after is not None else None
        if become.suspended:
            row.worker = None  # as after an orderly release: the next claim is no recovery from a crash
        if become.state == "idle" and row.waiting:
            # It came in this very transaction, from another agent whose turn ended in it.
            row.state, row.runnable_at = "ready", self._post.now
        row.retry_ms = None
        if become.state == "wait_retry":
            row.retries += 1
            row.retry_ms = become.after // _MS if become.after is not None else None
        row.why = become.why or None
        self._post.tell("agent.state", self._agent)
        if become.why:
            self._post.tell("problem", self._agent, self._problem(become))

    def _problem(self, become: Become) -> dict[str, Any]:
        retry_at = to_wire(from_ms(self.row.runnable_at)) if self.row.runnable_at is not None else None
        problem = {"category": become.category, "message": become.why, "retryable": retry_at is not None}
        return problem | ({"retryAt": retry_at} if retry_at else {})

    def _send(self, ran: Ran, envelope: Envelope) -> Ran:
        """The call's message, in the transaction of its result."""
        try:
            receipt = self._post.accept(envelope, plan=_name(self._key))
        except Refused as refusal:
            return replace(ran, ok=False, result=refusal.to_json())
        self._spoke = True
        return replace(ran, ok=True, result=_encode(told(receipt)).decode())

    def note_usage(self, service: str, usage: Usage, outcome: Literal["used", "withdrawn"]) -> None:
        """What this step costs; it takes the place of what was set aside for it."""
        self._db.execute(
            "INSERT INTO llm_calls"
            " (agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at, estimated)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (agent_id, turn_no, step_no, call_no) DO UPDATE"
            " SET service = excluded.service, input_tokens = excluded.input_tokens,"
            " output_tokens = excluded.output_tokens, outcome = excluded.outcome, at = excluded.at,"
            " estimated = excluded.estimated",
            (self._agent, self.row.turn_no, self.row.step_no, service, usage.input_tokens, usage.output_tokens,
             outcome, self._post.stamp, int(usage.estimated)),
        )  # fmt: skip

    def give_back(self) -> None:
        """What was set aside for this step."""
        self._db.execute(
            "DELETE FROM llm_calls WHERE agent_id = ? AND turn_no = ? AND step_no = ? AND call_no = 0",
            (self._agent, self.row.turn_no, self.row.step_no),
        )

    def _append(
        self,
        role: str,
        *,
        message: Message | None = None,
        content: str | None = None,
        calls: Sequence[Call] = (),
        call_id: str | None = None,
    ) -> None:
        seq, turn_no = self.row.next_hist_seq, self.row.turn_no
        calls = [replace(call, raw=None) if call.raw else call for call in calls]
        written = _encode([_described(call) for call in calls]).decode() if calls else None
        self._rows.append((self._agent, seq, turn_no, role, message and message.id, content, written, call_id))
        self._added.append(
            HistoryRow(
                seq=seq,
                turn_no=turn_no,
                role=role,
                message=message,
                text=content or "",
                calls=tuple(calls),
                call_id=call_id,
                mark=mark_of(message, self._post.secret),
            )
        )
        self.row.next_hist_seq += 1
        self.row.history_version += 1

    def _flush_rows(self) -> None:
        insert(self._db, _HISTORY, self._rows)
        self._rows = []

    def _crashed(self) -> bool:
        """Counts recoveries that found the turn where the last one found it; whether it is time to give it up."""
        row = self.row
        # Whoever let go of it in order has not crashed.
        crashes = (row.crashes if row.crash_step == row.step_no else 0) + (row.worker is not None)
        given_up = crashes >= CRASHES
        # The step of this very claim counts as no progress. What follows a turn that is given up starts afresh.
        row.crash_step, row.crashes = row.step_no + 1, 0 if given_up else crashes
        return given_up

    def _claimed(self, step: Step) -> Claim:
        call = self._plan.calls[step.effect.index] if isinstance(step.effect, Run) and self._plan else None
        return Claim(
            agent_id=self._agent,
            epoch=self.row.epoch,
            step_no=self.row.step_no,
            turn_no=self.row.turn_no,
            effect=step.effect,
            plan=self._plan,
            plan_key=self._key,
            call=call,
            cause=self._cause,
            person=self.row.person == 1,
            asked=self._asked,
            spoke=self._spoke,
            retries=self.row.retries,
            added=None if self._rewritten else tuple(self._added),
            history_version=self.row.history_version,
            replies=self._replies,
            withdrawn=self._withdrawn,
            taken_over=self._taken_over,
        )


def _asked(messages: Sequence[Message]) -> Asked | None:
    """The newest of them, if the person sent them all: theirs are never automatic."""
    if not messages or any(one.sender != PERSON for one in messages):
        return None
    one = messages[-1]
    return Asked(one.id, one.sender, 0, one.in_reply_to, one.cause, one.hops)


def _described(call: Call) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _name(key: turn_rows.Key) -> str:
    return f"{key[0]}/{key[1]}"
