"""One agent's turn in one transaction: the fence, the state a decision is made on, and the writes it asks for."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec

from coterie.agent.send_message import told
from coterie.agent.turn import (
    Answered,
    AskApproval,
    Become,
    Change,
    CloseGroup,
    Count,
    Dismissed,
    DropPlan,
    Event,
    Judged,
    Letter,
    NextTurn,
    OpenPlan,
    Plan,
    PlannedCall,
    Poisoned,
    Quarantine,
    Ran,
    Reply,
    Resumed,
    Rules,
    Run,
    Say,
    Step,
    TakeMail,
    Turn,
    Write,
    reduce,
)
from coterie.agents import ACTIVE
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.llm.chat import Call
from coterie.messages import PERSON, Envelope
from coterie.stores.sqlite.answers import answer
from coterie.stores.sqlite.approvals import APPROVE, question, question_id
from coterie.stores.sqlite.bulk import insert
from coterie.stores.sqlite.damage import check_readable
from coterie.stores.sqlite.post import Post
from coterie.turns import Claim, StaleOwner

_MS = timedelta(milliseconds=1)
CRASHES = 3
"""So often a step may bring the runtime down before its turn is given up."""
_decode = msgspec.json.decode
Reducer = Callable[[Turn, Event], Step]


class TurnDesk:
    """One agent's turn, for the length of one transaction."""

    def __init__(
        self, db: sqlite3.Connection, post: Post, agent_id: str, rules: Rules, reducer: Reducer = reduce
    ) -> None:
        self._db, self._post, self._agent, self._rules, self._reduce = db, post, agent_id, rules, reducer
        row = db.execute(
            "SELECT epoch, step_no, turn_no, state, taken_seq, next_in_seq, next_hist_seq,"
            " rounds, withdrawals, retries, hold"
            " FROM agents WHERE id = ?",
            (agent_id,),
        ).fetchone()
        self.epoch, self.step_no, self.turn_no, self.state, self._taken, self._next_in, self._next_hist = row[:7]
        self._rounds, self._withdrawals, self._retries, self._hold = row[7:]
        self._rows: list[tuple[Any, ...]] = []

    # The ways a transaction begins

    def claim(self, worker: str) -> Claim:
        """A new owner: whatever an earlier one still wants to write is void from here on."""
        fresh = self.state == "ready"
        self.epoch += 1
        event: Event = Resumed()
        if fresh:
            self._next_turn()
        elif (approved := self._verdict()) is not None:
            event = Judged(approved)
        elif self.state in ("llm", "tools") and self._crashed():
            event = Poisoned("this request brought the runtime down three times; it was set aside")
        self._db.execute("UPDATE agents SET epoch = ?, worker = ? WHERE id = ?", (self.epoch, worker, self._agent))
        return self.step(event)

    def dismiss(self) -> None:
        """The agent is to be no more: whoever works on it is turned away, and an open turn is closed."""
        self._db.execute("UPDATE agents SET epoch = epoch + 1 WHERE id = ?", (self._agent,))
        if self.state in (*ACTIVE, "blocked"):
            self.step(Dismissed())

    def acquit(self) -> None:
        """It has got further than the crash that it was suspected of; now the next suspect may go on."""
        self._db.execute("UPDATE agents SET crashes = 0 WHERE id = ?", (self._agent,))
        self._post.mailbox(self._agent).woken = True

    def fence(self, claim: Claim) -> None:
        if (self.epoch, self.step_no) != (claim.epoch, claim.step_no):
            raise StaleOwner(f"{self._agent} was taken over by another worker")

    # The decision, and its writes

    def step(self, event: Event, sends: Envelope | None = None) -> Claim:
        if sends is not None and isinstance(event, Ran):
            event = self._send(event, sends)
        turn = self._turn()
        step = self._reduce(turn, event)
        if isinstance(event, Answered):
            self._retries = 0
            self._note_usage(event, withdrawn=any(isinstance(write, DropPlan) for write in step.writes))
        for write in step.writes:
            self._write(write)
        insert(self._db, "history (agent_id, seq, turn_no, role, message_id, content, calls, call_id)", self._rows)
        self.step_no += 1
        hit("turn.before_save")
        self._save()
        return self._claimed(step)

    def _turn(self) -> Turn:
        plan = self._plan()
        waiting = self._next_in - 1 > self._taken
        return Turn(
            mail=self._mail(plan) if waiting else (),
            plan=plan[1] if plan else None,
            withdrawals=self._withdrawals,
            rounds=self._rounds,
            rules=self._rules,
            hold=bool(self._hold),
        )

    def _mail(self, plan: tuple[str, Plan] | None) -> tuple[Letter, ...]:
        rows = self._db.execute(
            "SELECT id, in_seq, sender, cause, in_reply_to, option FROM messages"
            " WHERE recipient = ? AND in_seq > ? AND state = 'pending'"
            " ORDER BY in_seq",
            (self._agent, self._taken),
        ).fetchall()
        return tuple(
            Letter(
                id=id_,
                in_seq=in_seq,
                from_person=sender == PERSON,
                echo=self._is_verdict(sender, in_reply_to, option, plan) or self._is_echo(sender, cause, plan),
            )
            for id_, in_seq, sender, cause, in_reply_to, option in rows
        )

    def _verdict(self) -> bool | None:
        """The person's word on the call that waits for it; the first one counts."""
        if self.state != "wait_approval" or (plan := self._plan()) is None:
            return None
        row = self._db.execute(
            "SELECT option FROM messages WHERE recipient = ? AND in_seq > ? AND state = 'pending' AND sender = ?"
            " AND in_reply_to = ? AND option IS NOT NULL ORDER BY in_seq LIMIT 1",
            (self._agent, self._taken, PERSON, question_id(self._agent, plan[1].awaited())),
        ).fetchone()
        return row[0] == APPROVE if row else None

    def _is_verdict(
        self, sender: str, in_reply_to: str | None, option: int | None, plan: tuple[str, Plan] | None
    ) -> bool:
        """A button pressed on a question of this plan. It stays in the mail until the plan is done."""
        if plan is None or sender != PERSON or option is None:
            return False
        return any(in_reply_to == question_id(self._agent, one.call.id) for one in plan[1].calls if one.gated)

    def _is_echo(self, sender: str, cause: str | None, plan: tuple[str, Plan] | None) -> bool:
        if sender == self._agent:
            return True
        if plan is None or cause is None:
            return False
        # The chain is at most as long as the hop limit.
        row = self._db.execute(
            "WITH RECURSIVE chain (id) AS"
            " (VALUES (?1) UNION SELECT m.cause FROM messages m JOIN chain c ON m.id = c.id)"
            " SELECT 1 FROM messages m JOIN chain c ON m.id = c.id WHERE m.sender = ?2 AND m.plan = ?3",
            (cause, self._agent, plan[0]),
        ).fetchone()
        return row is not None

    def _plan(self) -> tuple[str, Plan] | None:
        """The open plan. Whether there can be one is told by the state, without a look."""
        return self._plan_of("open") if self.state in ("tools", "wait_approval", "wait_retry", "blocked") else None

    def _plan_of(self, outcome: str) -> tuple[str, Plan] | None:
        row = self._db.execute(
            "SELECT turn_no, step_no, text FROM plans WHERE agent_id = ? AND outcome = ?", (self._agent, outcome)
        ).fetchone()
        if row is None:
            return None
        turn_no, step_no, text = row
        calls = self._db.execute(
            "SELECT call_id, name, arguments, raw, effect, gated, state, result FROM calls"
            " WHERE agent_id = ? AND turn_no = ? AND step_no = ? ORDER BY idx",
            (self._agent, turn_no, step_no),
        ).fetchall()
        return f"{turn_no}/{step_no}", Plan(text=text, calls=tuple(_call(*call) for call in calls))

    def _write(self, write: Write) -> None:
        match write:
            case NextTurn():
                self._next_turn()
            case TakeMail():
                self._take_mail()
            case Say(text=text):
                if text.strip():
                    self._append("assistant", content=text)
            case OpenPlan(plan=plan):
                self._open(plan, "open")
            case DropPlan(plan=plan):
                self._open(plan.closed(""), "withdrawn")
                self._post.tell("message.updated", self._agent)
            case Change():
                self._change(write)
            case CloseGroup(plan=plan):
                self._close(plan)
            case Reply():
                answer(self._db, self._post, self._agent, self.turn_no, write)
                hit("turn.replied")
            case AskApproval(index=index):
                self._ask_approval(index)
            case Quarantine():
                self._flush_rows()
                self._db.execute(
                    "UPDATE history SET hidden = 1 WHERE agent_id = ? AND turn_no = ? AND role = 'user'",
                    (self._agent, self.turn_no),
                )
            case Count(withdrawals=withdrawals, rounds=rounds):
                self._withdrawals, self._rounds = withdrawals, rounds
            case Become():
                self._become(write)

    def _next_turn(self) -> None:
        self.turn_no += 1
        self._rounds = self._withdrawals = self._retries = 0

    def _take_mail(self) -> None:
        rows = self._db.execute(
            "UPDATE messages SET state = 'taken', taken_at = ? WHERE recipient = ? AND in_seq > ? AND state = 'pending'"
            " RETURNING in_seq, id, length(payload), CAST(payload AS BLOB)",
            (self._post.stamp, self._agent, self._taken),
        ).fetchall()
        mailbox = self._post.mailbox(self._agent)
        for _, message_id, size, payload in sorted(rows):
            check_readable(message_id, payload)
            self._append("user", message_id=message_id)
            mailbox.remove(size)
        self._taken = self._next_in - 1
        self._post.tell("queue.changed", self._agent)

    def _open(self, plan: Plan, outcome: str) -> None:
        key = (self._agent, self.turn_no, self.step_no)
        self._db.execute(
            "INSERT INTO plans (agent_id, turn_no, step_no, text, outcome, at) VALUES (?, ?, ?, ?, ?, ?)",
            (*key, plan.text, outcome, self._post.stamp),
        )
        insert(
            self._db,
            "calls (agent_id, turn_no, step_no, idx, call_id, name, arguments, raw, effect, gated, state, result)",
            [
                # Providers repeat their ids over time; ours are unique for the agent.
                (*key, idx, f"call_{self.turn_no}_{self.step_no}_{idx}", one.call.name,
                 msgspec.json.encode(one.call.arguments).decode(), one.call.raw, one.effect, one.gated, one.state,
                 one.result)
                for idx, one in enumerate(plan.calls)
            ],
        )  # fmt: skip

    def _change(self, change: Change) -> None:
        ended = change.state not in ("planned", "gated", "started")
        self._db.execute(
            "UPDATE calls SET state = ?1, result = ?2, ended_at = CASE WHEN ?3 THEN ?4 END,"
            " started_at = CASE WHEN ?3 THEN started_at ELSE ?4 END"
            " WHERE agent_id = ?5 AND idx = ?6 AND (turn_no, step_no) ="
            " (SELECT turn_no, step_no FROM plans WHERE agent_id = ?5 AND outcome = 'open')",
            (change.state, change.result, ended, self._post.stamp, self._agent, change.index),
        )

    def _close(self, plan: Plan) -> None:
        open_plan = self._plan_row()
        ids = []
        for idx, one in enumerate(plan.calls):
            call_id = f"call_{open_plan[0]}_{open_plan[1]}_{idx}"
            ids.append({"id": call_id, "name": one.call.name, "arguments": one.call.arguments})
        self._append("assistant", content=plan.text, calls=msgspec.json.encode(ids).decode())
        for described, one in zip(ids, plan.calls, strict=True):
            self._append("tool", content=one.result, call_id=str(described["id"]))
        self._db.executemany(
            "UPDATE calls SET state = ?, result = ?, ended_at = coalesce(ended_at, ?)"
            " WHERE agent_id = ? AND turn_no = ? AND step_no = ? AND idx = ?",
            [
                (one.state, one.result, self._post.stamp, self._agent, *open_plan, idx)
                for idx, one in enumerate(plan.calls)
            ],
        )
        self._db.execute("UPDATE plans SET outcome = 'closed' WHERE agent_id = ? AND outcome = 'open'", (self._agent,))
        hit("turn.group_closed")

    def _ask_approval(self, index: int) -> None:
        found = self._plan_of("open")
        assert found is not None  # noqa: S101 - the plan was opened before
        call = found[1].calls[index].call
        self._post.accept(
            Envelope(
                id=question_id(self._agent, call.id),
                sender=self._agent,
                to=PERSON,
                payload_json=question(call),
                retried=True,
            )
        )

    def _become(self, become: Become) -> None:
        mailbox = self._post.mailbox(self._agent)
        self.state = mailbox.state = become.state
        mailbox.runnable_at = self._post.now + become.after // _MS if become.after is not None else None
        if become.state == "idle" and mailbox.waiting:
            # It came in this very transaction, from another agent whose turn ended in it.
            mailbox.state = "ready"
            mailbox.wake(self._post.now)
        if become.state == "wait_retry":
            self._retries += 1
        self._db.execute("UPDATE agents SET why = ? WHERE id = ?", (become.why or None, self._agent))
        self._post.tell("agent.state", self._agent)

    def _send(self, ran: Ran, envelope: Envelope) -> Ran:
        """The call's message, in the transaction of its result."""
        try:
            receipt = self._post.accept(envelope, plan=self._plan_key())
        except Refused as refusal:
            return replace(ran, ok=False, result=refusal.to_json())
        return replace(ran, ok=True, result=msgspec.json.encode(told(receipt)).decode())

    def _note_usage(self, answer: Answered, *, withdrawn: bool) -> None:
        self._db.execute(
            "INSERT INTO llm_calls (agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (self._agent, self.turn_no, self.step_no, answer.service, answer.usage.input_tokens,
             answer.usage.output_tokens, "withdrawn" if withdrawn else "used", self._post.stamp),
        )  # fmt: skip

    def _append(self, role: str, **columns: Any) -> None:
        self._rows.append(
            (self._agent, self._next_hist, self.turn_no, role, columns.get("message_id"), columns.get("content"),
             columns.get("calls"), columns.get("call_id"))
        )  # fmt: skip
        self._next_hist += 1

    def _flush_rows(self) -> None:
        insert(self._db, "history (agent_id, seq, turn_no, role, message_id, content, calls, call_id)", self._rows)
        self._rows = []

    def _save(self) -> None:
        self._db.execute(
            "UPDATE agents SET step_no = ?, turn_no = ?, taken_seq = ?, next_hist_seq = ?, rounds = ?, withdrawals = ?,"
            " retries = ? WHERE id = ?",
            (self.step_no, self.turn_no, self._taken, self._next_hist, self._rounds, self._withdrawals, self._retries,
             self._agent),
        )  # fmt: skip

    def _crashed(self) -> bool:
        """Counts recoveries that found the turn where the last one found it; whether it is time to give it up."""
        step, crashes, worker = self._db.execute(
            "SELECT crash_step, crashes, worker FROM agents WHERE id = ?", (self._agent,)
        ).fetchone()
        # Whoever let go of it in order has not crashed.
        crashes = (crashes if step == self.step_no else 0) + (worker is not None)
        given_up = crashes >= CRASHES
        # The step of this very claim counts as no progress. What follows a turn that is given up starts afresh.
        self._db.execute(
            "UPDATE agents SET crash_step = ?, crashes = ? WHERE id = ?",
            (self.step_no + 1, 0 if given_up else crashes, self._agent),
        )
        return given_up

    def _plan_row(self) -> tuple[int, int]:
        row = self._db.execute(
            "SELECT turn_no, step_no FROM plans WHERE agent_id = ? AND outcome = 'open'", (self._agent,)
        ).fetchone()
        return int(row[0]), int(row[1])

    def _plan_key(self) -> str:
        turn_no, step_no = self._plan_row()
        return f"{turn_no}/{step_no}"

    def _claimed(self, step: Step) -> Claim:
        call, key = None, ""
        if isinstance(step.effect, Run):
            found = self._plan()
            assert found is not None  # noqa: S101 - a call is to run, so its plan is open
            key, plan = found
            call = plan.calls[step.effect.index]
        cause = self._db.execute(
            "SELECT message_id FROM history WHERE agent_id = ? AND turn_no = ? AND message_id IS NOT NULL"
            " ORDER BY seq DESC LIMIT 1",
            (self._agent, self.turn_no),
        ).fetchone()
        return Claim(
            agent_id=self._agent,
            epoch=self.epoch,
            step_no=self.step_no,
            turn_no=self.turn_no,
            effect=step.effect,
            plan_key=key,
            call=call,
            cause=cause[0] if cause else None,
            retries=self._retries,
        )


def _call(
    call_id: str, name: str, arguments: str, raw: str | None, effect: Any, gated: int, state: Any, result: str
) -> PlannedCall:
    call = Call(id=call_id, name=name, arguments=_decode(arguments), raw=raw)
    return PlannedCall(call=call, effect=effect, gated=bool(gated), state=state, result=result)
