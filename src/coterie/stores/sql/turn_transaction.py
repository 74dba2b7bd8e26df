"""One step of an agent's turn in one transaction.

`TurnTransaction` checks the fence, loads the state, calls the turn reducer and executes the writes that it returns.
`Inbox` reads and takes the agent's waiting messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from coterie.agents import ACTIVE_STATES
from coterie.clock import from_ms, to_rfc3339
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.llm.types import TokenUsage, ToolCall
from coterie.messages import PERSON, Envelope, Message, describe_receipt
from coterie.stores.sql import turn_rows
from coterie.stores.sql.poison import check_readable
from coterie.stores.sql.queries import message_mark
from coterie.stores.sql.replies import send_replies
from coterie.stores.sql.rows import Connection, insert, to_message
from coterie.stores.sql.session import HEADER_COLUMN_COUNT
from coterie.stores.sql.turn_rows import APPROVE, approval_payload, approval_question_id
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import (
    INTERRUPTED_RESULT,
    SEND_MESSAGE_TOOL,
    AppendCallGroup,
    AppendText,
    ApprovalDecided,
    ArgumentsFile,
    BeginNextTurn,
    CallEnded,
    Deferred,
    Event,
    ModelAnswered,
    ModelFailed,
    OpenPlan,
    Plan,
    Poisoned,
    Quarantine,
    RequestApproval,
    Resumed,
    Rules,
    RunCall,
    SendReply,
    SetCallRules,
    SetCallState,
    SetCounters,
    SetState,
    Step,
    Stopped,
    TakeMail,
    Terminated,
    Turn,
    WaitingMessage,
    WithdrawPlan,
    Write,
    reduce,
)
from coterie.turn_store import Claim, HistoryRow, ReplyTarget, StaleClaim

_TAKE = """
UPDATE messages SET state = 'taken', taken_at = ?
 WHERE recipient = ? AND in_seq > ? AND in_seq <= ? AND state = 'pending'
"""
_SELECT_DECISION = """
SELECT option FROM messages WHERE recipient = ? AND in_seq > ? AND state = 'pending' AND sender = ?
   AND in_reply_to = ? AND option IS NOT NULL ORDER BY in_seq LIMIT 1
"""
_SELECT_SENT = "SELECT id FROM messages WHERE sender = ? AND plan = ?"
# The hop limit bounds the chain.
_SELECT_CAUSED_BY_PLAN = """
WITH RECURSIVE chain (id) AS
 (SELECT m.id FROM messages m WHERE m.id = ?1
  UNION SELECT m.cause FROM messages m JOIN chain c ON m.id = c.id)
SELECT 1 FROM messages m JOIN chain c ON m.id = c.id WHERE m.sender = ?2 AND m.plan = ?3
"""


class Inbox:
    """The waiting messages of one agent within one transaction."""

    def __init__(self, db: Connection, uow: UnitOfWork, agent_id: str) -> None:
        self._db, self._uow, self._agent_id = db, uow, agent_id
        self._mailbox = uow.mailbox(agent_id)
        self._last_position = self._mailbox.next_in_seq - 1
        """Messages that this transaction adds later are left for the next step."""
        self._buffered: list[tuple[int, Message]] = []
        """Sizes and messages that are not in the database yet."""
        self._rows: list[Any] = []
        """Stored waiting messages, as `waiting_messages` read them."""
        self._sent_by_plan: set[str] | None = None
        """Ids of messages that the open plan sent. None: not read yet."""

    def begin_turn(self) -> None:
        """Prepare for a new turn. Messages of this transaction can be written as taken at once."""
        self._buffered = self._uow.buffered_messages(self._agent_id)
        if not self._buffered:
            self._uow.flush_messages()

    def leave_for_next_turn(self) -> None:
        """Hide all waiting messages from this turn."""
        self._last_position = self._mailbox.taken_seq

    def waiting_messages(self, plan: Plan | None, plan_name: str) -> tuple[WaitingMessage, ...]:
        """Return the waiting messages, as the turn reducer needs them."""
        if self._last_position <= self._mailbox.taken_seq:
            return ()
        if self._buffered:  # only at the begin of a turn, when there is no plan
            return tuple(
                WaitingMessage(
                    message.id,
                    message.mailbox_position or 0,
                    message.sender == PERSON,
                    message.sender == self._agent_id,
                )
                for _, message in self._buffered
            )
        # Without a plan this step takes the messages. With a plan it looks before every call, so headers suffice.
        self._rows = self._uow.read_waiting(self._agent_id, full=plan is None)
        return tuple(
            [
                WaitingMessage(id_, in_seq, sender == PERSON,
                               self._is_approval_answer(plan, sender, in_reply_to, option)
                               or self._is_echo(plan, plan_name, sender, cause))
                for in_seq, id_, sender, in_reply_to, option, cause, *_ in self._rows
            ]
        )  # fmt: skip

    def read_decision(self, plan: Plan | None) -> bool | None:
        """Return the person's first answer about the call that waits for approval. None: there is none yet."""
        if self._mailbox.state != "wait_approval" or plan is None:
            return None
        question = approval_question_id(self._agent_id, plan.awaiting_approval())
        row = self._db.execute(_SELECT_DECISION, (self._agent_id, self._mailbox.taken_seq, PERSON, question)).fetchone()
        return row[0] == APPROVE if row else None

    def take_all(self) -> list[Message]:
        """Mark all waiting messages as taken, and return them in order."""
        if self._buffered:
            self._uow.take_buffered(self._agent_id)
        taken = self._buffered or self._take_stored()
        for size, _ in taken:
            self._mailbox.remove_message(size)
        self._mailbox.taken_seq = self._last_position
        return [message for _, message in taken]

    def _take_stored(self) -> list[tuple[int, Message]]:
        rows, taken_at = self._rows, self._uow.timestamp
        if rows and len(rows[0]) == HEADER_COLUMN_COUNT:
            rows = self._uow.read_waiting(self._agent_id)
        if rows:
            self._db.execute(_TAKE, (taken_at, self._agent_id, self._mailbox.taken_seq, rows[-1][0]))
        taken = [(row[HEADER_COLUMN_COUNT], row[HEADER_COLUMN_COUNT + 1 :]) for row in rows]
        for _, (_, message_id, _, _, payload, *_) in taken:
            check_readable(message_id, payload)
        return [(size, to_message((*row[:5], "taken", *row[6:9], taken_at, *row[10:]))) for size, row in taken]

    def _is_approval_answer(self, plan: Plan | None, sender: str, in_reply_to: str | None, option: int | None) -> bool:
        """True for a button pressed on an approval question of this plan. The plan must end before it is taken."""
        if plan is None or sender != PERSON or option is None:
            return False
        return any(
            in_reply_to == approval_question_id(self._agent_id, planned.call.id)
            for planned in plan.calls
            if planned.needs_approval
        )

    def _is_echo(self, plan: Plan | None, plan_name: str, sender: str, cause: str | None) -> bool:
        """True for a message of the agent itself, or one caused by a message of the open plan."""
        if sender == self._agent_id:
            return True
        if plan is None or cause is None or not plan.has_completed(SEND_MESSAGE_TOOL):
            return False
        if self._sent_by_plan is None:
            rows = self._db.execute(_SELECT_SENT, (self._agent_id, plan_name))
            self._sent_by_plan = {message_id for (message_id,) in rows}
        # Most answers are caused directly: the whole chain is rarely read.
        if not self._sent_by_plan or cause in self._sent_by_plan:
            return bool(self._sent_by_plan)
        return self._db.execute(_SELECT_CAUSED_BY_PLAN, (cause, self._agent_id, plan_name)).fetchone() is not None


_MS = timedelta(milliseconds=1)
_HISTORY = "history (agent_id, seq, turn_no, role, message_id, content, calls, call_id)"
MAX_CRASHES = 3
"""Crashes at one step after which its turn is quarantined."""
MAX_IDS_IN_EVENT = 200
"""Message ids in one event. The event also has the full count."""
_encode = msgspec.json.encode
Reducer = Callable[[Turn, Event], Step]


class TurnTransaction:
    """One agent's turn during one transaction."""

    def __init__(self, db: Connection, uow: UnitOfWork, agent_id: str, rules: Rules, reducer: Reducer = reduce) -> None:
        self._db, self._uow, self._agent_id, self._rules, self._reduce = db, uow, agent_id, rules, reducer
        self.mailbox = uow.mailbox(agent_id)
        self._inbox = Inbox(db, uow, agent_id)
        self._plan_key: turn_rows.PlanKey = (0, 0)
        self._plan: Plan | None = None
        """The open plan with the changes of this step."""
        self._stored_plan: Plan | None = None
        """The open plan as the database has it."""
        self._closed_by: tuple[str | None] | None = None
        """Set when the plan is closed: the message that interrupted it, or None."""
        self._withdrawn_calls = 0
        self._cause: str | None = None
        self._reply_target: ReplyTarget | None = None
        self._may_have_sent = True
        self._added: list[HistoryRow] = []
        """History rows of this step, for the claim."""
        self._history_rows: list[tuple[Any, ...]] = []
        """The same as database rows, until they are written."""
        self._reply_ids: tuple[str, ...] = ()
        self._history_changed = False
        """Earlier history rows were changed."""
        self._was_taken_over = False

    # Entry points

    def claim(self, worker: str) -> Claim:
        """Make `worker` the owner and take the first step. Claims of earlier owners become stale."""
        is_new_turn = self.mailbox.state == "ready"
        self._was_taken_over = self.mailbox.state in ("llm", "tools") and self.mailbox.worker not in (None, worker)
        self.mailbox.epoch += 1
        event: Event = Resumed()
        if is_new_turn:
            self._next_turn()
            self._inbox.begin_turn()
        else:
            self._load_turn()
            if (approved := self._inbox.read_decision(self._plan)) is not None:
                event = ApprovalDecided(approved)
            elif self.mailbox.state in ("llm", "tools") and self._count_crash():
                event = Poisoned("this request crashed the runtime three times; it was quarantined")
        self.mailbox.worker = worker
        return self.advance(event)

    def terminate(self) -> None:
        """Close an open turn of an agent that is being terminated. Its claims become stale."""
        self.mailbox.epoch += 1
        if self.mailbox.state in (*ACTIVE_STATES, "blocked"):
            self._load_turn()
            self.advance(Terminated())

    def stop(self) -> None:
        """End a turn that waits for a retry or for approval. Its claims become stale."""
        self.mailbox.epoch += 1
        self._load_turn()
        self._inbox.leave_for_next_turn()
        self.advance(Stopped())

    def resume(self, claim: Claim) -> None:
        """Continue the turn of `claim`. The fence proves that the claim's copy of the state is current."""
        self._uow.flush_messages()
        self.check_fence(claim)
        self._plan_key, self._plan, self._stored_plan = claim.plan_key, claim.plan, claim.plan
        self._cause, self._reply_target, self._may_have_sent = claim.cause, claim.reply_target, claim.may_have_sent

    def clear_crashes(self) -> None:
        """Clear the crash counter of a turn that progressed. The next crash suspect may be claimed."""
        self.mailbox.crashes = 0
        self._uow.frees_other_agents = True

    def check_fence(self, claim: Claim) -> None:
        """Raise `StaleClaim` unless epoch and step are still those of `claim`."""
        if (self.mailbox.epoch, self.mailbox.step_no) != (claim.epoch, claim.step_no):
            raise StaleClaim(f"{self._agent_id} was taken over by another worker")

    def advance(self, event: Event, sends: Envelope | None = None) -> Claim:
        """Reduce `event`, write the result and return the claim of the next step.

        `sends`: the message of the tool call that just ended.
        """
        if sends is not None and isinstance(event, CallEnded):
            event = self._send(event, sends)
        step = self._reduce(self._build_turn(), event)
        if isinstance(event, ModelAnswered):
            self.mailbox.retries = 0
            withdrawn = any(isinstance(write, WithdrawPlan) for write in step.writes)
            self.record_usage(event.service, event.usage, "withdrawn" if withdrawn else "used")
        elif isinstance(event, ModelFailed | Stopped) and event.usage.input_tokens:
            self.record_usage(event.service, event.usage, "used")
        elif isinstance(event, ModelFailed | Deferred):
            self.release_reserved_tokens()
        for write in step.writes:
            self._write(write)
        self._write_plan()
        self._flush_history()
        self.mailbox.step_no += 1
        hit("turn.before_save")
        return self._make_claim(step)

    def _build_turn(self) -> Turn:
        return Turn(
            mail=self._inbox.waiting_messages(self._plan, _plan_name(self._plan_key)),
            plan=self._plan,
            withdrawals=self.mailbox.withdrawals,
            rounds=self.mailbox.rounds,
            rules=self._rules,
            hold=bool(self.mailbox.hold),
            society_paused=self._uow.is_society_paused,
        )

    def _load_turn(self) -> None:
        """Read the open plan and the cause of the turn from the database."""
        self._uow.flush_messages()
        if stored := turn_rows.read_open_plan(self._db, self._agent_id):
            self._plan_key, self._plan = stored
            self._stored_plan = self._plan
        row = self._db.execute(
            "SELECT message_id FROM history WHERE agent_id = ? AND turn_no = ? AND message_id IS NOT NULL"
            " ORDER BY seq DESC LIMIT 1",
            (self._agent_id, self.mailbox.turn_no),
        ).fetchone()
        self._cause = row[0] if row else None

    def _write(self, write: Write) -> None:
        match write:  # the frequent ones first: cases are tested in order
            case SetState():
                self._change_state(write)
            case SetCounters(withdrawals=withdrawals, rounds=rounds):
                self.mailbox.withdrawals, self.mailbox.rounds = withdrawals, rounds
            case SetCallState(index=index, state=state, result=result):
                assert self._plan is not None  # noqa: S101 - a call of the open plan
                self._plan = self._plan.with_state(index, state, result)
            case SetCallRules(index=index, effect=effect, needs_approval=needs_approval):
                assert self._plan is not None  # noqa: S101 - a call of the open plan
                self._plan = self._plan.with_rules(index, effect, needs_approval)
            case TakeMail():
                self._take_messages()
            case OpenPlan(plan=plan):
                self._open_plan(plan)
            case AppendCallGroup(plan=plan, interrupted_by=by):
                self._close_plan(plan, by)
            case AppendText(text=text):
                if text.strip():
                    self._append_history("assistant", content=text)
            case SendReply():
                self._reply(write)
                hit("turn.replied")
            case BeginNextTurn():
                self._next_turn()
            case WithdrawPlan(plan=plan, interrupted_by=by):
                self._withdraw_plan(plan, by)
            case RequestApproval(index=index, file=file):
                self._request_approval(index, file)
            case Quarantine():
                self._quarantine()

    def _next_turn(self) -> None:
        self.mailbox.turn_no += 1
        self.mailbox.rounds = self.mailbox.withdrawals = self.mailbox.retries = 0
        self._cause, self._reply_target, self._may_have_sent = None, None, False
        self.mailbox.person = 0

    def _take_messages(self) -> None:
        taken = self._inbox.take_all()
        self._reply_target = _reply_target(taken) if self._cause is None or self._reply_target else None
        if any(message.sender == PERSON for message in taken):
            self.mailbox.person = 1
        for message in taken:
            self._append_history("user", message=message)
            self._cause = message.id
        ids = [message.id for message in taken[:MAX_IDS_IN_EVENT]]
        data = {"taken": ids, "takenCount": len(taken), "withdrawnCalls": self._withdrawn_calls}
        self._uow.record_event("queue.changed", self._agent_id, data)

    # The plan is changed in memory and written once, at the end of the step.

    def _open_plan(self, plan: Plan) -> None:
        self._plan_key = (self.mailbox.turn_no, self.mailbox.step_no)
        self._plan, self._stored_plan = turn_rows.assign_call_ids(plan, self._plan_key), None

    def _withdraw_plan(self, plan: Plan, by: str | None) -> None:
        key = (self.mailbox.turn_no, self.mailbox.step_no)
        withdrawn = turn_rows.assign_call_ids(plan.close_remaining(""), key)
        turn_rows.insert_plan(self._db, self._agent_id, key, withdrawn, "withdrawn", self._uow.timestamp, by)
        self._withdrawn_calls = len(plan.calls)

    def _close_plan(self, plan: Plan, by: str | None) -> None:
        self._plan, self._closed_by = plan, (by,)
        self._append_history("assistant", content=plan.text, calls=[planned.call for planned in plan.calls])
        for planned in plan.calls:
            self._append_history("tool", content=planned.result, call_id=planned.call.id)
        self._withdrawn_calls = sum(planned.result == INTERRUPTED_RESULT for planned in plan.calls)

    def _write_plan(self) -> None:
        if self._plan is None:
            return
        self._record_call_events(self._plan)
        key, timestamp = self._plan_key, self._uow.timestamp
        if self._stored_plan is None:
            turn_rows.insert_plan(self._db, self._agent_id, key, self._plan, "open", timestamp)
        else:
            turn_rows.update_calls(self._db, self._agent_id, key, self._stored_plan, self._plan, timestamp)
        if self._closed_by:
            turn_rows.close_plan(self._db, self._agent_id, *self._closed_by)
            self._plan = None
            hit("turn.group_closed")

    def _record_call_events(self, plan: Plan) -> None:
        stored = self._stored_plan
        before = [planned.state for planned in stored.calls] if stored else ["planned"] * len(plan.calls)
        for old_state, planned in zip(before, plan.calls, strict=True):
            if planned.state == "started" != old_state:
                self._uow.record_event("tool.started", f"{self._agent_id}/{planned.call.id}")
            elif old_state == "started" != planned.state:
                self._uow.record_event("tool.ended", f"{self._agent_id}/{planned.call.id}")
            elif old_state == "gated" != planned.state:
                self._uow.close_question(approval_question_id(self._agent_id, planned.call.id))

    def _request_approval(self, index: int, file: ArgumentsFile | None) -> None:
        assert self._plan is not None  # noqa: S101 - the plan was opened before
        call = self._plan.calls[index].call
        self._uow.accept(
            Envelope(
                id=approval_question_id(self._agent_id, call.id),
                sender=self._agent_id,
                to=PERSON,
                payload_json=approval_payload(call, file),
                may_exist=True,
                is_question=True,
                attachments=(file.artifact_ref,) if file else (),
            )
        )

    def _reply(self, reply: SendReply) -> None:
        self._reply_ids += send_replies(
            self._db,
            self._uow,
            self._agent_id,
            self.mailbox.turn_no,
            reply,
            only=self._reply_target,
            may_have_sent=self._may_have_sent,
        )

    def _quarantine(self) -> None:
        self._flush_history()
        self._history_changed = True
        self.mailbox.history_version += 1
        self._db.execute(
            "UPDATE history SET hidden = 1 WHERE agent_id = ? AND turn_no = ? AND role = 'user'",
            (self._agent_id, self.mailbox.turn_no),
        )

    def _change_state(self, change: SetState) -> None:
        row = self.mailbox
        row.state = change.state
        row.runnable_at = self._uow.now + change.delay // _MS if change.delay is not None else None
        if change.is_suspended:
            row.worker = None  # released in order: the next claim is not a recovery from a crash
        if change.state == "idle" and row.waiting:
            # The message arrived in this transaction, from another agent whose turn ended in it.
            row.state, row.runnable_at = "ready", self._uow.now
        row.retry_ms = None
        if change.state == "wait_retry":
            row.retries += 1
            row.retry_ms = change.delay // _MS if change.delay is not None else None
        row.why = change.reason or None
        self._uow.record_event("agent.state", self._agent_id)
        if change.reason:
            self._uow.record_event("problem", self._agent_id, self._describe_problem(change))

    def _describe_problem(self, change: SetState) -> dict[str, Any]:
        retry_at = to_rfc3339(from_ms(self.mailbox.runnable_at)) if self.mailbox.runnable_at is not None else None
        problem = {"category": change.category, "message": change.reason, "retryable": retry_at is not None}
        return problem | ({"retryAt": retry_at} if retry_at else {})

    def _send(self, ended: CallEnded, envelope: Envelope) -> CallEnded:
        """Send the call's message in the transaction of its result, and return the event with that result."""
        try:
            receipt = self._uow.accept(envelope, plan=_plan_name(self._plan_key))
        except Refused as refusal:
            return replace(ended, ok=False, result=refusal.to_json())
        self._may_have_sent = True
        return replace(ended, ok=True, result=_encode(describe_receipt(receipt)).decode())

    def record_usage(self, service: str, usage: TokenUsage, outcome: Literal["used", "withdrawn"]) -> None:
        """Write the token usage of this step. It replaces the tokens reserved for it."""
        self._db.execute(
            "INSERT INTO llm_calls"
            " (agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at, estimated)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (agent_id, turn_no, step_no, call_no) DO UPDATE"
            " SET service = excluded.service, input_tokens = excluded.input_tokens,"
            " output_tokens = excluded.output_tokens, outcome = excluded.outcome, at = excluded.at,"
            " estimated = excluded.estimated",
            (self._agent_id, self.mailbox.turn_no, self.mailbox.step_no, service, usage.input_tokens,
             usage.output_tokens, outcome, self._uow.timestamp, int(usage.estimated)),
        )  # fmt: skip

    def release_reserved_tokens(self) -> None:
        """Delete the tokens reserved for this step."""
        self._db.execute(
            "DELETE FROM llm_calls WHERE agent_id = ? AND turn_no = ? AND step_no = ? AND call_no = 0",
            (self._agent_id, self.mailbox.turn_no, self.mailbox.step_no),
        )

    def _append_history(
        self,
        role: str,
        *,
        message: Message | None = None,
        content: str | None = None,
        calls: Sequence[ToolCall] = (),
        call_id: str | None = None,
    ) -> None:
        seq, turn_no = self.mailbox.next_hist_seq, self.mailbox.turn_no
        calls = [replace(call, invalid_arguments=None) if call.invalid_arguments else call for call in calls]
        calls_json = None
        if calls:
            described = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]
            calls_json = _encode(described).decode()
        message_id = message and message.id
        self._history_rows.append((self._agent_id, seq, turn_no, role, message_id, content, calls_json, call_id))
        self._added.append(
            HistoryRow(
                seq=seq,
                turn_no=turn_no,
                role=role,
                message=message,
                text=content or "",
                calls=tuple(calls),
                call_id=call_id,
                mark=message_mark(message, self._uow.secret),
            )
        )
        self.mailbox.next_hist_seq += 1
        self.mailbox.history_version += 1

    def _flush_history(self) -> None:
        insert(self._db, _HISTORY, self._history_rows)
        self._history_rows = []

    def _count_crash(self) -> bool:
        """Count recoveries at the same step. True: `MAX_CRASHES` are reached."""
        row = self.mailbox
        # Without a worker name the turn was released in order: no crash.
        crashes = (row.crashes if row.crash_step == row.step_no else 0) + (row.worker is not None)
        is_poison = crashes >= MAX_CRASHES
        # The claim itself is a step and no progress, so the next recovery is expected one step later.
        row.crash_step, row.crashes = row.step_no + 1, 0 if is_poison else crashes
        return is_poison

    def _make_claim(self, step: Step) -> Claim:
        call = self._plan.calls[step.action.index] if isinstance(step.action, RunCall) and self._plan else None
        return Claim(
            agent_id=self._agent_id,
            epoch=self.mailbox.epoch,
            step_no=self.mailbox.step_no,
            turn_no=self.mailbox.turn_no,
            action=step.action,
            plan=self._plan,
            plan_key=self._plan_key,
            call=call,
            cause=self._cause,
            for_person=self.mailbox.person == 1,
            reply_target=self._reply_target,
            may_have_sent=self._may_have_sent,
            model_failures=self.mailbox.retries,
            added_rows=None if self._history_changed else tuple(self._added),
            history_version=self.mailbox.history_version,
            reply_ids=self._reply_ids,
            withdrawn_calls=self._withdrawn_calls,
            was_taken_over=self._was_taken_over,
        )


def _reply_target(messages: Sequence[Message]) -> ReplyTarget | None:
    """Return the newest message if the person sent all of them. None: the database must be asked."""
    if not messages or any(message.sender != PERSON for message in messages):
        return None
    newest = messages[-1]
    return ReplyTarget(newest.id, newest.sender, 0, newest.in_reply_to, newest.cause, newest.hops)


def _plan_name(key: turn_rows.PlanKey) -> str:
    return f"{key[0]}/{key[1]}"
