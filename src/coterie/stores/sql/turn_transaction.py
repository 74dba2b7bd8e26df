"""One step of an agent's turn in one transaction.

`TurnTransaction` checks the fence, loads the state, calls the turn reducer and executes the writes that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from coterie.agents import ACTIVE_STATES
from coterie.clock import from_ms, to_rfc3339
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.llm.service import TokenUsage, ToolCall
from coterie.messages import PERSON, Envelope, Message, describe_receipt
from coterie.plan import INTERRUPTED_RESULT, SEND_MESSAGE_TOOL, ArgumentsFile, Plan
from coterie.stores.sql import task_budgets, turn_rows
from coterie.stores.sql.inbox import Inbox
from coterie.stores.sql.queries import message_mark
from coterie.stores.sql.replies import send_replies
from coterie.stores.sql.rows import Connection, insert
from coterie.stores.sql.turn_rows import approval_payload, approval_question_id
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import (
    AppendCallGroup,
    AppendText,
    ApprovalDecided,
    AskModel,
    BeginNextTurn,
    CallEnded,
    Deferred,
    Event,
    Interrupted,
    ModelAnswered,
    ModelFailed,
    OpenPlan,
    Poisoned,
    Quarantine,
    RequestApproval,
    Rest,
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
    TaskDropped,
    Terminated,
    Turn,
    WithdrawPlan,
    Write,
    reduce,
)
from coterie.turn_store import Claim, HistoryRow, ReplyTarget, StaleClaim

_HIDE_MESSAGES = "UPDATE history SET hidden = 1 WHERE agent_id = :agent_id AND turn_no = :turn_no AND role = 'user'"
_INSERT_TURN = "turns (agent_id, turn_no, task, started_at, ended_at, outcome)"
_HIDE_TASK = """
UPDATE history SET hidden = 1
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND role = 'user'
   AND message_id IN (SELECT id FROM messages WHERE id = :task OR task = :task)
"""
# The newest row decides whether the next request answers the person's own message.
_SELECT_LAST_SENDER = """
SELECT messages.sender FROM history LEFT JOIN messages ON messages.id = history.message_id
 WHERE history.agent_id = :agent_id ORDER BY history.seq DESC LIMIT 1
"""

_MS = timedelta(milliseconds=1)
_HISTORY = "history (agent_id, seq, turn_no, role, message_id, content, calls, call_id, attachments)"
_HISTORY_ARTIFACTS = "history_artifacts (agent_id, seq, artifact_ref)"
BUDGET_REASON = "the task has used its budget; the person is asked whether it may go on"
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
        self._inbox = Inbox(db, uow, agent_id, rules)
        self._had_person = self.mailbox.person
        """The mailbox's `person` before this step."""
        self._plan_key: turn_rows.PlanKey = (0, 0)
        self._plan: Plan | None = None
        """The open plan with the changes of this step."""
        self._stored_plan: Plan | None = None
        """The open plan as the database has it."""
        self._closed_by: tuple[str | None] | None = None
        """Set when the plan is closed: the message that interrupted it, or None."""
        self._withdrawn_calls = self._cuts = 0
        self._cause: str | None = None
        self._reply_target: ReplyTarget | None = None
        self._may_have_sent = True
        self._added: list[HistoryRow] = []
        """History rows of this step, for the claim."""
        self._history_rows: list[tuple[Any, ...]] = []
        self._history_artifacts: list[tuple[str, int, str]] = []
        """The same as database rows, until they are written."""
        self._reply_ids: tuple[str, ...] = ()
        self._history_changed = False
        """Earlier history rows were changed."""
        self._was_taken_over = False
        self._has_claim = False
        """The worker of the turn takes this step. Otherwise its request may run, and the worker counts its tokens."""
        self._plan_task = self.mailbox.task
        """The task of the open plan: a turn changes its task only when no plan is open."""
        self._is_new_work = bool(self.mailbox.over_budget)
        """In this step a turn begins, changes its task, or tries again after it was over the budget."""
        self._took_from_person = False
        """In this step the turn took a message of the person."""
        self._outcome: Literal["done", "failed", "stopped"] = "done"

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

    def end_cleared(self) -> None:
        """End a blocked turn whose history was deleted."""
        self._outcome = "stopped"
        self._end_turn()

    def drop_task(self, task: str) -> None:
        """Remove a stopped task from the turn: close the plan, hide its messages, go on with the other tasks."""
        self.mailbox.epoch += 1
        self._load_turn()
        self._inbox.leave_for_next_turn()
        self._flush_history()
        self._db.execute(_HIDE_TASK, {"agent_id": self._agent_id, "turn_no": self.mailbox.turn_no, "task": task})
        self._history_changed = True
        self.mailbox.history_version += 1
        others = [other for other in self._other_tasks() if other != task]
        self._set_task(others[-1], others[:-1])
        self.advance(TaskDropped())
        self.mailbox.over_budget = 2

    def resume(self, claim: Claim) -> None:
        """Continue the turn of `claim`. The fence proves that the claim's copy of the state is current."""
        self._uow.flush_messages()
        self.check_fence(claim)
        self._has_claim = True
        self._plan_key, self._plan, self._stored_plan = claim.plan_key, claim.plan, claim.plan
        self._cause, self._reply_target, self._may_have_sent = claim.cause, claim.reply_target, claim.may_have_sent
        self._cuts = claim.cuts
        self._inbox.checked_seq = claim.checked_seq

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
        step = self._reduce(self._build_turn(event), event)
        if isinstance(event, ModelAnswered):
            self.mailbox.retries = 0
            withdrawn = WithdrawPlan in map(type, step.writes)
            self.record_usage(event.service, event.usage, "withdrawn" if withdrawn else "used")
        elif isinstance(event, ModelFailed | Stopped) and event.usage.input_tokens:
            self.record_usage(event.service, event.usage, "used")
        elif isinstance(event, Interrupted) and event.usage.input_tokens:
            self.record_usage(event.service, event.usage, "withdrawn")
        elif isinstance(event, ModelFailed | Deferred | Interrupted | Stopped) and self._has_claim:
            turn_rows.release_reserved_tokens(self._db, self._agent_id, self.mailbox.turn_no, self.mailbox.step_no)
        self._cuts += isinstance(event, Interrupted)
        if isinstance(event, Stopped):
            self._outcome = "stopped"
        for write in step.writes:
            self._write(write)
        is_plan_open = self._plan is not None and self._closed_by is None  # the person asked back: always let through
        if isinstance(step.action, AskModel) and not is_plan_open and not self._is_within_budget():
            step = self._block_for_budget(step)
        self._write_plan()
        self._flush_history()
        self.mailbox.step_no += 1
        hit("turn.before_save")
        return self._make_claim(step)

    def _build_turn(self, event: Event) -> Turn:
        # Without a plan this step takes the messages. With a plan it looks before every call, and rarely takes them.
        is_check = self._plan is not None or (isinstance(event, ModelAnswered) and bool(event.calls))
        inbox, plan_name = self._inbox, _plan_name(self._plan_key)
        return Turn(
            mail=inbox.messages_to_check(self._plan, plan_name) if is_check else inbox.messages_to_take(),
            mail_waits=inbox.has_mail,
            plan=self._plan,
            withdrawals=self.mailbox.withdrawals,
            rounds=self.mailbox.rounds,
            rules=self._rules,
            hold=bool(self.mailbox.hold),
            society_paused=self._uow.is_society_paused,
            answers_back=self._plan is not None and self.mailbox.state == "llm",
        )

    def _load_turn(self) -> None:
        """Read the open plan and the cause of the turn from the database."""
        self._uow.flush_messages()
        if stored := turn_rows.read_open_plan(self._db, self._agent_id):
            self._plan_key, self._plan = stored
            self._stored_plan = self._plan
        row = self.mailbox
        self._cause = turn_rows.read_cause(self._db, self._agent_id, row.turn_no, row.task)
        self._cuts = turn_rows.count_cuts(self._db, self._agent_id, self.mailbox.turn_no)

    def _write(self, write: Write) -> None:
        match write:  # the frequent ones first: cases are tested in order
            case SetState():
                self._change_state(write)
            case SetCounters(withdrawals=withdrawals, rounds=rounds):
                self.mailbox.withdrawals, self.mailbox.rounds = withdrawals, rounds
            case SetCallState(index=index, state=state, result=result, attachments=attachments):
                assert self._plan is not None  # noqa: S101 - a call of the open plan
                self._plan = self._plan.with_state(index, state, result, attachments)
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
        self._end_turn()
        self.mailbox.turn_no += 1
        self.mailbox.rounds = self.mailbox.withdrawals = self.mailbox.retries = self._cuts = 0
        self._cause, self._reply_target, self._may_have_sent = None, None, False
        self.mailbox.person = 0

    def _take_messages(self) -> None:
        taken = self._inbox.take()
        before, self._reply_target = self._reply_target, _reply_target(taken)
        if self._cause is not None and (before is None or not taken or before.via != taken[0].via):
            self._reply_target = None
        if any(message.sender == PERSON for message in taken) or (self.mailbox.waiting and self._had_person):
            self.mailbox.person = 1
        for message in taken:
            self._append_history("user", message=message)
        if taken:
            self._took_from_person = any(message.sender == PERSON for message in taken)
            tasks = [*self._other_tasks(), *([self.mailbox.task] if self.mailbox.task else [])]
            tasks += (message.task for message in taken)
            # While a plan is open, the turn keeps the task of the plan.
            newest = self.mailbox.task if self._plan and not self._closed_by and self.mailbox.task else tasks[-1]
            self._set_task(newest, [task for task in dict.fromkeys(tasks) if task != newest])
            self._cause = next((message.id for message in reversed(taken) if message.task == newest), self._cause)
        ids = [message.id for message in taken[:MAX_IDS_IN_EVENT]]
        data: dict[str, Any] = {"taken": ids, "takenCount": len(taken), "withdrawnCalls": self._withdrawn_calls}
        if taken:
            data["takenAt"] = to_rfc3339(from_ms(self._uow.timestamp))
        self._uow.record_event("queue.changed", self._agent_id, data)

    # Tasks

    def _other_tasks(self) -> list[str]:
        return self.mailbox.other_tasks.split() if self.mailbox.other_tasks else []

    def _set_task(self, task: str, others: Sequence[str]) -> None:
        """Let the open turn count for `task`; the tasks `others` go on until it ends."""
        row = self.mailbox
        if row.task != task:
            if row.task is None:
                row.turn_began = self._uow.timestamp
            else:
                self._uow.tasks.of(row.task).turns -= 1
            self._uow.tasks.of(task).turns += 1
            self._is_new_work = True
        row.task, row.other_tasks = task, " ".join(others) or None

    def _end_turn(self) -> None:
        row = self.mailbox
        if row.task is not None:
            began, at = row.turn_began, self._uow.timestamp
            insert(self._db, _INSERT_TURN, [(self._agent_id, row.turn_no, row.task, began, at, self._outcome)])
        row.task = row.turn_began = row.other_tasks = None
        self._outcome = "done"

    def _is_within_budget(self) -> bool:
        """True if the model may be asked. A turn over the budget of its task goes on for another task that has some."""
        row, budget = self.mailbox, self._rules.budget
        if row.task is None or not (budget.limits_requests or self._is_new_work):
            return True
        if task_budgets.find_exceeded(self._db, self._uow, row.task, budget) is None:
            return True
        for other in reversed(self._other_tasks()):
            if task_budgets.find_exceeded(self._db, self._uow, other, budget, with_turn=True) is None:
                others = [task for task in self._other_tasks() if task != other]
                self._set_task(other, [*others, row.task])
                self._uow.flush_messages()
                self._flush_history()
                self._cause = turn_rows.read_cause(self._db, self._agent_id, row.turn_no, other)
                return True
        return self._answers_person()

    def _answers_person(self) -> bool:
        """True if the next request answers the person's own message, which is always let through."""
        if self._took_from_person:
            return True
        self._flush_history()
        last = self._db.execute(_SELECT_LAST_SENDER, {"agent_id": self._agent_id}).fetchone()
        return last is not None and last[0] == PERSON

    def _block_for_budget(self, step: Step) -> Step:
        """Block the turn until the person decides. The person is asked once, also if several agents reach the limit."""
        assert self.mailbox.task is not None  # noqa: S101 - only tasks have budgets
        self._write(SetState(state="blocked", reason=BUDGET_REASON, category="budget"))
        self.mailbox.over_budget = 1
        if self.mailbox.waiting:
            self.mailbox.runnable_at = self._uow.now  # the waiting mail may be the person's, or of another task
        task_budgets.ask_about_budget(
            self._db, self._uow, self.mailbox.task, self._rules.budget, self._agent_id, self._cause
        )
        return Step(step.writes, Rest())

    # The plan is changed in memory and written once, at the end of the step.

    def _open_plan(self, plan: Plan) -> None:
        self._plan_key = (self.mailbox.turn_no, self.mailbox.step_no)
        self._plan, self._stored_plan = turn_rows.assign_call_ids(plan, self._plan_key), None
        if self._plan_task:
            self._uow.tasks.of(self._plan_task).tool_calls += len(plan.calls)

    def _withdraw_plan(self, plan: Plan, by: str | None) -> None:
        key = (self.mailbox.turn_no, self.mailbox.step_no)
        withdrawn = turn_rows.assign_call_ids(plan.close_remaining(""), key)
        turn_rows.insert_plan(
            self._db, self._agent_id, key, withdrawn, "withdrawn", self._uow.timestamp, self._plan_task, by
        )
        self._withdrawn_calls = len(plan.calls)

    def _close_plan(self, plan: Plan, by: str | None) -> None:
        self._plan, self._closed_by = plan, (by,)
        self._append_history("assistant", content=plan.text, calls=[planned.call for planned in plan.calls])
        for planned in plan.calls:
            self._append_history(
                "tool", content=planned.result, call_id=planned.call.id, attachments=planned.attachments
            )
        self._withdrawn_calls = sum(planned.result == INTERRUPTED_RESULT for planned in plan.calls)

    def _write_plan(self) -> None:
        if self._plan is None:
            return
        self._record_call_events(self._plan)
        key, timestamp = self._plan_key, self._uow.timestamp
        if self._stored_plan is None:
            turn_rows.insert_plan(self._db, self._agent_id, key, self._plan, "open", timestamp, self._plan_task)
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
                cause=self._cause,
                attachments=(file.artifact_ref,) if file else (),
            ),
            hops=0,
            task=self.mailbox.task,
        )

    def _reply(self, reply: SendReply) -> None:
        if reply.is_error and not reply.asks_back:
            self._outcome = "failed"
        self._reply_ids += send_replies(
            self._db,
            self._uow,
            self._agent_id,
            self.mailbox.turn_no,
            reply,
            only=self._reply_target,
            may_have_sent=self._may_have_sent,
            open_tasks=(self.mailbox.task, *self._other_tasks()),
        )

    def _quarantine(self) -> None:
        self._flush_history()
        self._history_changed = True
        self.mailbox.history_version += 1
        self._db.execute(_HIDE_MESSAGES, {"agent_id": self._agent_id, "turn_no": self.mailbox.turn_no})

    def _change_state(self, change: SetState) -> None:
        row = self.mailbox
        row.state = change.state
        row.runnable_at = self._uow.now + change.delay // _MS if change.delay is not None else None
        row.over_budget = 0
        if change.is_suspended:
            row.worker = None  # released in order: the next claim is not a recovery from a crash
        if change.state in ("idle", "paused", "terminated"):
            self._end_turn()
        if change.state == "idle" and row.waiting:
            # The message arrived in this transaction, from another agent whose turn ended in it.
            row.state, row.runnable_at = "ready", self._uow.now
        row.retry_ms = None
        if change.state == "wait_retry":
            row.retries += not change.is_suspended
            row.retry_ms = change.delay // _MS if change.delay is not None else None
        row.why = change.reason or None
        row.problem = _encode(self._describe_problem(change)).decode() if change.reason else None
        self._uow.record_event("agent.state", self._agent_id)
        if change.reason:
            retryable = self.mailbox.runnable_at is not None
            problem = {**self._describe_problem(change), "message": change.reason, "retryable": retryable}
            self._uow.record_event("problem", self._agent_id, problem)

    def _describe_problem(self, change: SetState) -> dict[str, Any]:
        retry_at = to_rfc3339(from_ms(self.mailbox.runnable_at)) if self.mailbox.runnable_at is not None else None
        return {"category": change.category, **change.facts} | ({"retryAt": retry_at} if retry_at else {})

    def _send(self, ended: CallEnded, envelope: Envelope) -> CallEnded:
        """Send the call's message in the transaction of its result, and return the event with that result."""
        try:
            receipt = self._uow.accept(envelope, plan=_plan_name(self._plan_key))
        except Refused as refusal:
            return replace(ended, ok=False, result=refusal.to_json())
        self._may_have_sent = True
        return replace(ended, ok=True, result=_encode(describe_receipt(receipt)).decode())

    def record_usage(
        self, service: str, usage: TokenUsage, outcome: Literal["used", "withdrawn"], *, is_reserved: bool = False
    ) -> None:
        """Write the token usage of this step. It replaces the tokens reserved for it, which count for no task."""
        task = None if is_reserved else self.mailbox.task
        if task:
            self._uow.tasks.of(task).add_usage(usage)
        step, at = (self.mailbox.turn_no, self.mailbox.step_no), self._uow.timestamp
        turn_rows.put_usage(self._db, self._agent_id, step, service, usage, outcome, at, task)

    def _append_history(
        self,
        role: str,
        *,
        message: Message | None = None,
        content: str | None = None,
        calls: Sequence[ToolCall] = (),
        call_id: str | None = None,
        attachments: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        seq, turn_no = self.mailbox.next_hist_seq, self.mailbox.turn_no
        calls_json = files = None
        if calls:
            calls = [replace(call, invalid_arguments=None) if call.invalid_arguments else call for call in calls]
            described = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]
            calls_json = _encode(described).decode()
        if attachments:
            files = turn_rows.encode_attachments(attachments)
            refs = dict.fromkeys(str(file["artifactRef"]) for file in attachments if file.get("artifactRef"))
            self._history_artifacts += [(self._agent_id, seq, ref) for ref in refs]
        message_id = message and message.id
        self._history_rows.append((self._agent_id, seq, turn_no, role, message_id, content, calls_json, call_id, files))
        self._added.append(
            HistoryRow(
                seq=seq,
                turn_no=turn_no,
                role=role,
                message=message,
                text=content or "",
                calls=tuple(calls),
                call_id=call_id,
                attachments=attachments,
                mark=message_mark(message, self._uow.secret),
            )
        )
        self.mailbox.next_hist_seq += 1
        self.mailbox.history_version += 1

    def _flush_history(self) -> None:
        insert(self._db, _HISTORY, self._history_rows)
        insert(self._db, _HISTORY_ARTIFACTS, self._history_artifacts)
        self._history_rows, self._history_artifacts = [], []

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
        if call and call.effect != "pure" and call.call.name != SEND_MESSAGE_TOOL:
            # The call acts under a key that names this plan. After a crash the same plan must be there.
            self._uow.needs_flush = True
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
            task=self.mailbox.task,
            for_person=self.mailbox.person == 1,
            reply_target=self._reply_target,
            may_have_sent=self._may_have_sent,
            model_failures=self.mailbox.retries,
            added_rows=None if self._history_changed else tuple(self._added),
            history_version=self.mailbox.history_version,
            reply_ids=self._reply_ids,
            newest_position=self.mailbox.next_in_seq - 1,
            cuts=self._cuts,
            withdrawn_calls=self._withdrawn_calls,
            was_taken_over=self._was_taken_over,
            checked_seq=self._inbox.checked_seq if self._plan else 0,
        )


def _reply_target(messages: Sequence[Message]) -> ReplyTarget | None:
    """Return the newest message if one asker, the person or a program, sent all. None: the database must be asked."""
    if not messages or any(one.sender != PERSON or one.via != messages[0].via or one.asks_back for one in messages):
        return None
    newest = messages[-1]
    return ReplyTarget(
        newest.id, newest.sender, 0, newest.in_reply_to, newest.cause, newest.hops, newest.task, newest.via
    )


def _plan_name(key: turn_rows.PlanKey) -> str:
    return f"{key[0]}/{key[1]}"
