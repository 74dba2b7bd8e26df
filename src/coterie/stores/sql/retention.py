"""Retention: finds what is old enough and no longer needed, and deletes it in small transactions.

A `Pruner` walks each table once, oldest rows first, and yields its steps. A `Read` looks at a bounded number of rows
on a reader, where it delays no writer. A `Write` deletes a bounded number of them and checks again that nothing needs
them.

What stays, whatever its age: rows of a history that the model is still shown, messages that wait, open questions,
messages of tasks that are not done, what delayed and recurring messages refer to, and files that any of these show.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from coterie.clock import from_ms
from coterie.messages import PERSON
from coterie.retention_store import LastPrune, Pruned, Retention, StorageFigures, UnusedArtifacts
from coterie.stores.sql.rows import IS_BUSY, Connection, get_meta, json_keys, set_meta
from coterie.stores.sql.text_index import DeletedMessage, remove_from_index
from coterie.stores.sql.unit_of_work import UnitOfWork

T = TypeVar("T")

READ_ROWS = 500
"""Rows that one read looks at."""
DELETED_ROWS = 50
"""Rows that one transaction deletes at most, with their entries in many indexes."""
DELETED_EVENTS = 500
FEWEST_ROWS = 5
STEP_SECONDS = 0.0015
"""Intended length of the statements of one transaction. Its commit takes about as long again."""
FULL_PASS_INTERVAL = timedelta(days=1)
"""A run continues where the last one ended. After this time a run starts at the oldest rows again, because rows that
were needed then may be deletable now."""
_LAST_TURN_ROWS = 10_000
"""More rows than one turn has."""
_MS = timedelta(milliseconds=1)
_POSITIONS = "prune_positions"

# An unread message to the person does not stay for ever: programs that use the HTTP API may mark none as read.
_IS_DELETABLE = """
(messages.state IN ('taken', 'withdrawn', 'dead') OR (messages.state = 'pending' AND messages.recipient = 'user'))
AND coalesce(messages.taken_at, messages.delivered_at, messages.created_at) < :before
AND (messages.state <> 'dead' OR coalesce(messages.deliver_at, messages.created_at) < :before)
AND NOT (messages.question = 1 AND messages.answered_by IS NULL AND messages.state IN ('pending', 'taken'))
AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.id = coalesce(messages.task, messages.id)
                   AND (tasks.state IN ('working', 'waiting') OR tasks.last_at >= :before))
AND NOT EXISTS (SELECT 1 FROM messages AS delayed
                 WHERE delayed.unless_answered = messages.id AND delayed.state = 'delayed')
AND NOT EXISTS (SELECT 1 FROM schedules WHERE schedules.id = messages.schedule_id AND schedules.state <> 'ended'
                   AND schedules.previous_id = messages.id)
-- What the task scheduled: its answer goes to the asker, and a stop of the task reaches it.
AND NOT EXISTS (SELECT 1 FROM messages AS later
                  LEFT JOIN tasks AS started ON started.id = coalesce(later.task, later.id)
                 WHERE later.parent_task = coalesce(messages.task, messages.id)
                   AND (later.state = 'delayed' OR started.state IN ('working', 'waiting')
                     OR coalesce(later.task, later.id) IN (SELECT key FROM json_each(:busy))))
AND NOT EXISTS (SELECT 1 FROM schedules WHERE schedules.sender = messages.recipient AND schedules.state <> 'ended'
                   AND schedules.cause = messages.id)
-- A task that has ended may have a blocked turn. It goes on once the cause is removed, and needs the message then.
AND coalesce(messages.task, messages.id) NOT IN (SELECT key FROM json_each(:busy))
"""
_SELECT_MESSAGES = f"""
SELECT messages.seq, messages.id, messages.created_at, coalesce(messages.task, messages.id), history.agent_id,
       history.seq, CASE WHEN {_IS_DELETABLE} THEN 1 ELSE 0 END
  FROM messages LEFT JOIN history ON history.message_id = messages.id
 WHERE messages.seq > :after ORDER BY messages.seq LIMIT :limit
"""
_DELETE_MESSAGES = f"""
DELETE FROM messages WHERE id IN (SELECT key FROM json_each(:ids)) AND {_IS_DELETABLE}
   AND NOT EXISTS (SELECT 1 FROM history WHERE history.message_id = messages.id)
RETURNING seq, sender, recipient, CAST(payload AS BLOB), state, length(payload)
"""
# No column has the time at which a message became a dead letter. One that was delayed did not before it was due, and
# any other one changed `tasks.last_at` then.
_DIED_BEFORE = """
coalesce(messages.delivered_at, messages.deliver_at, messages.created_at) < :before
AND NOT EXISTS (SELECT 1 FROM tasks
                 WHERE tasks.id = coalesce(messages.task, messages.id) AND tasks.last_at >= :before)
"""
_SELECT_DEAD = f"""
SELECT seq, id, CASE WHEN {_DIED_BEFORE} THEN 1 ELSE 0 END
  FROM messages WHERE state = 'dead' AND seq > :after ORDER BY seq LIMIT :limit
"""
_DELETE_DEAD = f"""
DELETE FROM messages WHERE id IN (SELECT key FROM json_each(:ids)) AND state = 'dead' AND {_DIED_BEFORE}
RETURNING seq, sender, recipient, CAST(payload AS BLOB)
"""
_SELECT_AGENTS = """
SELECT id, turn_no, state, (SELECT max(upto) FROM summaries WHERE agent_id = agents.id),
       (SELECT min(seq) FROM history WHERE agent_id = agents.id)
  FROM agents WHERE kind = 'agent' AND id > :after ORDER BY id LIMIT :limit
"""
_SELECT_HISTORY = """
SELECT history.seq, history.turn_no, messages.taken_at, messages.in_seq
  FROM history LEFT JOIN messages ON messages.id = history.message_id
 WHERE history.agent_id = :agent_id AND history.seq > :after AND history.seq <= :upto
 ORDER BY history.seq LIMIT :limit
"""
_SELECT_SHOWN_TURN = """
SELECT turn_no FROM history WHERE agent_id = :agent_id AND seq > :upto ORDER BY seq LIMIT 1
"""
_COUNT_PLANS = """
SELECT (SELECT count(*) FROM plans WHERE agent_id = :agent_id AND turn_no > :after AND turn_no <= :turn_no),
       (SELECT count(*) FROM calls WHERE agent_id = :agent_id AND turn_no > :after AND turn_no <= :turn_no)
"""
# A cleared conversation starts its history again at 1, so `seq` alone does not identify the rows.
_DELETE_HISTORY = "DELETE FROM history WHERE agent_id = :agent_id AND seq <= :seq AND turn_no <= :turn_no"
_DELETE_CALLS = "DELETE FROM calls WHERE agent_id = :agent_id AND turn_no <= :turn_no"
_DELETE_PLANS = "DELETE FROM plans WHERE agent_id = :agent_id AND turn_no <= :turn_no"
_DELETE_SUMMARIES = """
DELETE FROM summaries WHERE agent_id = :agent_id AND upto <= :seq
   AND upto < (SELECT max(upto) FROM summaries WHERE agent_id = :agent_id)
"""
_SET_CLEARED = "UPDATE agents SET cleared_seq = :in_seq WHERE id = :agent_id AND cleared_seq < :in_seq"
_IS_TASK_DELETABLE = """
tasks.state IN ('done', 'failed', 'stopped') AND tasks.last_at < :before
AND NOT EXISTS (SELECT 1 FROM messages WHERE messages.parent_task = tasks.id AND messages.state = 'delayed')
"""
_SELECT_TASKS = f"""
SELECT seq, id, created_at, turns, CASE WHEN {_IS_TASK_DELETABLE} THEN 1 ELSE 0 END,
       (SELECT count(*) FROM messages WHERE messages.id = tasks.id OR messages.task = tasks.id)
  FROM tasks WHERE seq > :after ORDER BY seq LIMIT :limit
"""
_DELETE_TASKS = f"""
DELETE FROM tasks WHERE id IN (SELECT key FROM json_each(:ids)) AND {_IS_TASK_DELETABLE}
   AND NOT EXISTS (SELECT 1 FROM messages WHERE messages.task = tasks.id)
   AND NOT EXISTS (SELECT 1 FROM messages WHERE messages.id = tasks.id) RETURNING id
"""
_DELETE_TURNS = "DELETE FROM turns WHERE task IN (SELECT key FROM json_each(:ids))"
_SELECT_BUSY_TASKS = f"SELECT task, other_tasks FROM agents WHERE {IS_BUSY} AND task IS NOT NULL"
_SELECT_MODEL_CALLS = """
SELECT at, task, CASE WHEN task IS NULL OR NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.id = task) THEN 1 ELSE 0 END
  FROM llm_calls WHERE at >= :after AND at < :before ORDER BY at LIMIT :limit
"""
# A task and its requests go together, so that what it has used stays right.
_DELETE_MODEL_CALLS = """
DELETE FROM llm_calls WHERE at >= :after AND at <= :upto
   AND (task IS NULL OR NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.id = task))
"""
_SELECT_SCHEDULES = """
SELECT id FROM schedules WHERE state = 'ended' AND due_at < :before AND id > :after ORDER BY id LIMIT :limit
"""
_DELETE_SCHEDULES = "DELETE FROM schedules WHERE id IN (SELECT key FROM json_each(:ids)) AND state = 'ended'"
_SELECT_EVENTS = "SELECT seq, at FROM events WHERE seq > :after ORDER BY seq LIMIT :limit"
# The newest event stays: its time is the latest stored one.
_DELETE_EVENTS = "DELETE FROM events WHERE seq <= :upto AND seq < (SELECT max(seq) FROM events)"
_IS_UNUSED = """
NOT EXISTS (SELECT 1 FROM attachments WHERE attachments.artifact_ref = artifacts.ref)
AND NOT EXISTS (SELECT 1 FROM history_artifacts WHERE history_artifacts.artifact_ref = artifacts.ref)
AND NOT EXISTS (SELECT 1 FROM plans JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                                              AND calls.step_no = plans.step_no
                 WHERE plans.outcome = 'open' AND calls.attachments IS NOT NULL
                   AND replace(calls.attachments, artifacts.ref, '') <> calls.attachments)
-- A paused schedule has no delayed message that would carry its files. The first condition is that of an index.
AND NOT EXISTS (SELECT 1 FROM schedules WHERE schedules.state <> 'ended' AND schedules.state = 'paused'
                   AND replace(schedules.payload, artifacts.ref, '') <> schedules.payload)
"""
_SELECT_ARTIFACTS = f"""
SELECT ref, created_at, size, CASE WHEN {_IS_UNUSED} THEN 1 ELSE 0 END
  FROM artifacts WHERE (created_at, ref) > (:created_at, :ref) AND created_at < :before
 ORDER BY created_at, ref LIMIT :limit
"""
_DELETE_ARTIFACTS = f"""
DELETE FROM artifacts WHERE ref IN (SELECT key FROM json_each(:refs)) AND created_at < :before AND {_IS_UNUSED}
RETURNING sha256
"""
_SELECT_NAMED_BLOBS = "SELECT DISTINCT sha256 FROM artifacts WHERE sha256 IN (SELECT key FROM json_each(:hashes))"
_SELECT_MESSAGE_FROM = "SELECT seq, created_at FROM messages WHERE seq >= :seq ORDER BY seq LIMIT 1"


@dataclass(frozen=True, slots=True)
class Read:
    run: Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class Write:
    table: str
    run: Callable[[Connection, UnitOfWork], Pruned]
    expected: Pruned
    """What it deletes if nothing has changed since the read before it."""
    touches: tuple[str, ...] = ()
    """Agents whose rows it changes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Every transaction that began before this step must have ended before the next one."""


Steps = Generator[Read | Write | Wait, Any, None]


class _OldTurns(NamedTuple):
    """The first turns of a history, which are old and not shown any more."""

    agent_id: str
    rows: int
    seq: int
    """The last row of the last of these turns."""
    turn_no: int
    in_seq: int
    """Position of their newest message in the mailbox; 0 if none is known."""


class Positions(msgspec.Struct):
    """Where the walks of the last run ended, as stored in `meta`."""

    started: int = 0
    """Time of the run that started at the oldest rows."""
    messages: int = 0
    tasks: int = 0
    model_calls: int = 0


class StepSize:
    """How many rows the next transaction deletes, by table, so that it takes about `STEP_SECONDS`."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def __getitem__(self, table: str) -> int:
        return self._rows.get(table, min(FEWEST_ROWS, _most_rows(table)))

    def record(self, table: str, seconds: float) -> None:
        """Adapt the number of rows to the time that the last transaction took."""
        if seconds > 1.5 * STEP_SECONDS:
            self._rows[table] = max(min(FEWEST_ROWS, self[table]), self[table] // 2)
        elif seconds < STEP_SECONDS / 2:
            self._rows[table] = min(_most_rows(table), self[table] * 2)


def _most_rows(table: str) -> int:
    return DELETED_EVENTS if table == "events" else DELETED_ROWS


@dataclass(slots=True)
class Pruner:
    """One run at the time `now`, in ms. A dry run reads as a real one, takes each step as done and changes nothing."""

    retention: Retention
    now: int
    dry_run: bool = False
    full: bool = True
    """Start at the oldest rows, not where the last run ended."""
    _history: dict[str, int] = field(default_factory=dict)
    """By agent: the last row of its history that a dry run counts as deleted."""
    _messages: Counter[str] = field(default_factory=Counter)
    """By task: messages that a dry run counts as deleted."""
    _tasks: set[str] = field(default_factory=set)
    _sizes: StepSize = field(default_factory=StepSize)

    def steps(self) -> Steps:
        """Yield the steps in order; the caller sends each one's result back."""
        yield from self._prune_events(self._before(self.retention.events))
        yield from self._prune_dead(self._before(self.retention.dead_letters))
        if self.retention.messages is None:
            return
        before = self._before(self.retention.messages)
        positions = yield Read(self._read_positions)
        yield from self._prune_histories(before)
        positions.messages = yield from self._prune_messages(before, positions.messages)
        if not self.dry_run:
            # A sender may have read the last message of a task just before it was deleted, and add one to that task.
            yield Wait()
        positions.tasks = yield from self._prune_tasks(before, positions.tasks)
        positions.model_calls = yield from self._prune_model_calls(before, positions.model_calls)
        yield from self._prune_schedules(before)
        yield Write("meta", partial(_store_positions, positions=positions), Pruned())

    async def execute(
        self, read: Callable[..., Awaitable[Any]], write: Callable[..., Awaitable[Pruned]]
    ) -> AsyncIterator[Pruned | None]:
        """Run the steps with the methods of a store; yield what each deleted, nothing for a read, None for a `Wait`."""
        steps, result = self.steps(), None
        while True:
            try:
                step = steps.send(result)
            except StopIteration:
                return
            result = None
            if isinstance(step, Read):
                result = await read(step.run)
                yield Pruned()
            elif isinstance(step, Wait):
                yield None
            elif self.dry_run:
                yield step.expected
            else:
                yield await write(partial(self._run_timed, step), touches=step.touches)

    def _run_timed(self, step: Write, db: Connection, uow: UnitOfWork) -> Pruned:
        began = time.perf_counter()
        deleted = step.run(db, uow)
        self._sizes.record(step.table, time.perf_counter() - began)
        return deleted

    def _before(self, age: timedelta) -> int:
        return self.now - age // _MS

    def _read_positions(self, db: Connection) -> Positions:
        positions = _stored_positions(db)
        if self.full or self.now - positions.started >= FULL_PASS_INTERVAL // _MS:
            return Positions(started=self.now)
        return positions

    def _prune_events(self, before: int) -> Steps:
        after = 0
        while True:
            rows = yield _read(_SELECT_EVENTS, after=after, limit=READ_ROWS + 1)
            # The last row read is the newest event, or is read again as the first of the next step.
            old = [seq for seq, at in rows[:READ_ROWS] if at < before]
            old = old[: len(rows) - 1]
            for part in self._parts("events", old):
                after = part[-1]
                delete = partial(_delete, kind="events", sql=_DELETE_EVENTS, upto=after)
                yield Write("events", delete, Pruned(events=len(part)))
            if len(old) < READ_ROWS:
                return

    def _prune_dead(self, before: int) -> Steps:
        after = 0
        while rows := (yield _read(_SELECT_DEAD, after=after, before=before, limit=READ_ROWS)):
            after = rows[-1][0]
            for part in self._parts("dead", [message_id for _, message_id, is_old in rows if is_old]):
                delete = partial(_delete_dead, ids=json_keys(part), before=before)
                yield Write("dead", delete, Pruned(messages=len(part)))
            if len(rows) < READ_ROWS:
                return

    def _prune_histories(self, before: int) -> Steps:
        after = ""
        while agents := (yield _read(_SELECT_AGENTS, after=after, limit=READ_ROWS)):
            after = agents[-1][0]
            for agent_id, turn_no, state, upto, first in agents:
                is_terminated = state == "terminated"
                if first is None or (not is_terminated and (upto is None or first > upto)):
                    continue
                end = (_NEVER, _NEVER) if is_terminated else (upto, turn_no)
                yield from self._prune_history(before, agent_id, *end)
            if len(agents) < READ_ROWS:
                return

    def _prune_history(self, before: int, agent_id: str, upto: int, turn_no: int) -> Steps:
        """`upto`: the last row that a summary stands for. `turn_no`: the newest turn."""
        seq, last_turn = 0, 0
        find = partial(_find_old_turns, agent_id=agent_id, before=before, upto=upto, newest_turn=turn_no)
        while old := (yield Read(partial(find, after=seq, limit=self._sizes["history"]))):
            expected = Pruned(history=old.rows)
            if self.dry_run:
                bounds = {"agent_id": agent_id, "after": last_turn, "turn_no": old.turn_no}
                ((plans, calls),) = yield _read(_COUNT_PLANS, **bounds)
                expected = Pruned(history=old.rows, plans=plans, calls=calls)
            self._history[agent_id] = old.seq
            seq, last_turn = old.seq, old.turn_no
            yield Write("history", partial(_delete_turns, old=old), expected, (agent_id,))

    def _prune_messages(self, before: int, after: int) -> Generator[Read | Write | Wait, Any, int]:
        """Return the position of the last message that was looked at."""
        while rows := (yield Read(partial(_select_messages, after=after, before=before))):
            old = [row for row in rows if row[2] < before]
            found = [
                (message_id, task)
                for _, message_id, _, task, agent_id, history_seq, is_deletable in old
                if is_deletable and (agent_id is None or history_seq <= self._history.get(agent_id, 0))
            ]
            for part in self._parts("messages", found):
                self._messages.update(task for _, task in part)
                ids = json_keys(message_id for message_id, _ in part)
                delete = partial(_delete_messages, ids=ids, before=before)
                yield Write("messages", delete, Pruned(messages=len(part)), touches=(PERSON,))
            after = old[-1][0] if old else after
            if len(old) < READ_ROWS:
                return after
        return after

    def _prune_tasks(self, before: int, after: int) -> Generator[Read | Write | Wait, Any, int]:
        busy = yield Read(_find_busy_tasks)
        while rows := (yield _read(_SELECT_TASKS, after=after, before=before, limit=READ_ROWS)):
            old = [row for row in rows if row[2] < before]
            found = [
                (task_id, turns)
                for _, task_id, _, turns, is_deletable, messages in old
                if is_deletable and task_id not in busy and messages <= (self._messages[task_id] if self.dry_run else 0)
            ]
            for part in self._parts("tasks", found):
                self._tasks.update(task_id for task_id, _ in part)
                yield Write(
                    "tasks",
                    partial(_delete_tasks, ids=json_keys(task_id for task_id, _ in part), before=before),
                    Pruned(tasks=len(part), turns=sum(turns for _, turns in part)),
                )
            after = old[-1][0] if old else after
            if len(old) < READ_ROWS:
                return after
        return after

    def _prune_model_calls(self, before: int, after: int) -> Generator[Read | Write | Wait, Any, int]:
        while rows := (yield _read(_SELECT_MODEL_CALLS, after=after, before=before, limit=READ_ROWS)):
            for part in self._parts(
                "model_calls", [at for at, task, is_loose in rows if is_loose or task in self._tasks]
            ):
                delete = partial(_delete, kind="model_calls", sql=_DELETE_MODEL_CALLS, after=part[0], upto=part[-1])
                yield Write("model_calls", delete, Pruned(model_calls=len(part)))
            after = rows[-1][0] + 1
            if len(rows) < READ_ROWS:
                return after
        return after

    def _prune_schedules(self, before: int) -> Steps:
        after = ""
        while rows := (yield _read(_SELECT_SCHEDULES, before=before, after=after, limit=READ_ROWS)):
            after = rows[-1][0]
            for part in self._parts("schedules", [schedule_id for (schedule_id,) in rows]):
                delete = partial(_delete, kind="schedules", sql=_DELETE_SCHEDULES, ids=json_keys(part))
                yield Write("schedules", delete, Pruned(schedules=len(part)))
            if len(rows) < READ_ROWS:
                return

    def _parts(self, table: str, rows: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield the rows of each transaction. Its size is read when the one before it has ended."""
        start = 0
        while part := rows[start : start + self._sizes[table]]:
            start += len(part)
            yield part


_NEVER = 1 << 62


def _read(sql: str, **parameters: Any) -> Read:
    return Read(lambda db: db.execute(sql, parameters).fetchall())


def _delete(db: Connection, _: UnitOfWork, *, kind: str, sql: str, **parameters: Any) -> Pruned:
    return Pruned(**{kind: db.execute(sql, parameters).rowcount})


def mark_pruned(db: Connection) -> None:
    """Let invariant checks accept gaps in mailboxes, histories and tasks from now on."""
    if get_meta(db, "pruned") is None:
        set_meta(db, "pruned", "1")


def _find_old_turns(
    db: Connection, *, agent_id: str, before: int, after: int, upto: int, newest_turn: int, limit: int
) -> _OldTurns | None:
    """Return the next turns whose messages were all taken before `before` and that are in no part of a request.

    The turn that reaches `limit` rows is the last one.
    """
    shown = db.execute(_SELECT_SHOWN_TURN, {"agent_id": agent_id, "upto": upto}).fetchone()
    end_turn = min(newest_turn, shown[0] if shown else _NEVER)
    bounds = {"agent_id": agent_id, "after": after, "upto": upto}
    rows = db.execute(_SELECT_HISTORY, bounds | {"limit": READ_ROWS}).fetchall()
    if len(rows) == READ_ROWS and rows[0][1] == rows[-1][1]:
        rows = db.execute(_SELECT_HISTORY, bounds | {"limit": _LAST_TURN_ROWS}).fetchall()
    if len(rows) >= READ_ROWS:
        end_turn = min(end_turn, rows[-1][1])  # its rows are not all here
    count, seq, turn_no, in_seq = 0, 0, 0, 0
    turns: dict[int, list[Any]] = {}
    for row in rows:
        turns.setdefault(row[1], []).append(row)
    for turn, its_rows in turns.items():
        if turn >= end_turn or any(taken_at is not None and taken_at >= before for _, _, taken_at, _ in its_rows):
            break
        count, seq, turn_no = count + len(its_rows), its_rows[-1][0], turn
        in_seq = max(in_seq, *(position or 0 for *_, position in its_rows))
        if count >= limit:
            break
    return _OldTurns(agent_id, count, seq, turn_no, in_seq) if count else None


def _delete_turns(db: Connection, uow: UnitOfWork, *, old: _OldTurns) -> Pruned:
    """Delete turns from the beginning of a history, with their plans and calls."""
    mailbox = uow.mailbox(old.agent_id)
    if mailbox.state != "terminated":
        sql = "SELECT max(upto) FROM summaries WHERE agent_id = :agent_id"
        (upto,) = db.execute(sql, {"agent_id": old.agent_id}).fetchone()
        if upto is None or upto < old.seq or mailbox.turn_no <= old.turn_no:  # the conversation was cleared
            return Pruned()
    parameters = old._asdict()
    history = db.execute(_DELETE_HISTORY, parameters).rowcount
    calls = db.execute(_DELETE_CALLS, parameters).rowcount
    plans = db.execute(_DELETE_PLANS, parameters).rowcount
    db.execute(_DELETE_SUMMARIES, parameters)
    db.execute(_SET_CLEARED, parameters)
    mark_pruned(db)
    return Pruned(history=history, calls=calls, plans=plans)


def _find_busy_tasks(db: Connection) -> set[str]:
    """Tasks of open turns, also of blocked ones."""
    found = db.execute(_SELECT_BUSY_TASKS).fetchall()
    return {task for own, others in found for task in (own, *(others.split() if others else ()))}


def _select_messages(db: Connection, *, after: int, before: int) -> list[Any]:
    parameters = {"after": after, "before": before, "busy": json_keys(_find_busy_tasks(db)), "limit": READ_ROWS}
    return db.execute(_SELECT_MESSAGES, parameters).fetchall()


def _delete_messages(db: Connection, uow: UnitOfWork, *, ids: str, before: int) -> Pruned:
    parameters = {"ids": ids, "before": before, "busy": json_keys(_find_busy_tasks(db))}
    deleted = db.execute(_DELETE_MESSAGES, parameters).fetchall()
    for _, _, recipient, _, state, size in deleted:
        if recipient == PERSON and state == "pending":
            uow.mailbox(PERSON).remove_message(size)
    return _record_deleted(db, [DeletedMessage(*row[:4]) for row in deleted])


def _delete_dead(db: Connection, _: UnitOfWork, *, ids: str, before: int) -> Pruned:
    deleted = db.execute(_DELETE_DEAD, {"ids": ids, "before": before}).fetchall()
    return _record_deleted(db, [DeletedMessage(*row) for row in deleted])


def _record_deleted(db: Connection, deleted: Sequence[DeletedMessage]) -> Pruned:
    if deleted:
        remove_from_index(db, deleted)
        mark_pruned(db)
    return Pruned(messages=len(deleted))


def _delete_tasks(db: Connection, _: UnitOfWork, *, ids: str, before: int) -> Pruned:
    deleted = [task_id for (task_id,) in db.execute(_DELETE_TASKS, {"ids": ids, "before": before}).fetchall()]
    turns = db.execute(_DELETE_TURNS, {"ids": json_keys(deleted)}).rowcount if deleted else 0
    return Pruned(tasks=len(deleted), turns=turns)


def _stored_positions(db: Connection) -> Positions:
    stored = get_meta(db, _POSITIONS)
    return msgspec.json.decode(stored, type=Positions) if stored else Positions()


def _store_positions(db: Connection, _: UnitOfWork, *, positions: Positions) -> Pruned:
    set_meta(db, _POSITIONS, msgspec.json.encode(positions).decode())
    return Pruned()


def find_unused_artifacts(db: Connection, before: int, after: tuple[int, str]) -> UnusedArtifacts:
    """Return the unused ones among the next artifacts after the position `after`."""
    created_at, ref = after
    rows = db.execute(
        _SELECT_ARTIFACTS, {"created_at": created_at, "ref": ref, "before": before, "limit": READ_ROWS}
    ).fetchall()
    unused = [(ref, size) for ref, _, size, is_unused in rows if is_unused]
    position = (rows[-1][1], rows[-1][0]) if len(rows) == READ_ROWS else None
    return UnusedArtifacts(refs=[ref for ref, _ in unused], bytes=sum(size for _, size in unused), next=position)


def delete_artifacts(db: Connection, refs: Sequence[str], before: int) -> tuple[int, list[str]]:
    """Delete those that are still unused; return their number and the hashes of bytes that are not needed any more."""
    deleted = db.execute(_DELETE_ARTIFACTS, {"refs": json_keys(refs), "before": before}).fetchall()
    is_used = "SELECT 1 FROM artifacts WHERE sha256 = :sha256"
    hashes = dict.fromkeys(sha256 for (sha256,) in deleted)
    return len(deleted), [sha256 for sha256 in hashes if not db.execute(is_used, {"sha256": sha256}).fetchone()]


def find_named_blobs(db: Connection, hashes: Sequence[str]) -> set[str]:
    found = db.execute(_SELECT_NAMED_BLOBS, {"hashes": json_keys(hashes)}).fetchall()
    return {sha256 for (sha256,) in found}


def find_time_after(db: Connection, fraction: float) -> int | None:
    """Return when the messages begin that follow the oldest `fraction` of all, in ms; None if there is no message.

    The oldest are those after the position where the last run ended. Those before it could not be deleted then, and
    most of their neighbours are gone, so their number does not follow from their positions.
    """
    last = db.execute("SELECT max(seq) FROM messages").fetchone()[0]
    if last is None:
        return None
    row = db.execute(_SELECT_MESSAGE_FROM, {"seq": _stored_positions(db).messages + 1}).fetchone()
    first = row[0] if row else last
    seq = min(last, first + math.ceil((last - first + 1) * fraction))
    return int(db.execute(_SELECT_MESSAGE_FROM, {"seq": seq}).fetchone()[1])


# Figures

COUNTED_TABLES = ("agents", "messages", "history", "tasks", "calls", "llm_calls", "events", "artifacts")
_LAST_PRUNE = "last_prune"
PRUNE_CLAIM = "prune_claim"
"""Key in `meta` of the claim of a run, where several processes share the store."""


class DatabaseSize(NamedTuple):
    file_bytes: int
    used_bytes: int
    rows: dict[str, int]
    """By table of `COUNTED_TABLES`."""
    can_shrink: bool


class _StoredPrune(msgspec.Struct):
    """The value of `last_prune` in `meta`."""

    at: int
    deleted: dict[str, int]


def record_prune(db: Connection, now: int, deleted: Pruned) -> None:
    """Store what a run has deleted, and end its claim."""
    db.execute("DELETE FROM meta WHERE key = :key", {"key": PRUNE_CLAIM})
    set_meta(db, _LAST_PRUNE, msgspec.json.encode(_StoredPrune(now, asdict(deleted))).decode())


def _last_prune(stored: _StoredPrune, now: int) -> LastPrune:
    return LastPrune(at=from_ms(stored.at), age=(now - stored.at) * _MS, deleted=Pruned(**stored.deleted))


def read_figures(db: Connection, size: DatabaseSize, now: int) -> StorageFigures:
    stored = get_meta(db, _LAST_PRUNE)
    last = msgspec.json.decode(stored, type=_StoredPrune) if stored else None
    oldest = db.execute("SELECT created_at FROM messages ORDER BY seq LIMIT 1").fetchone()
    (artifact_bytes,) = db.execute("SELECT coalesce(sum(size), 0) FROM artifacts").fetchone()
    return StorageFigures(
        file_bytes=size.file_bytes,
        used_bytes=size.used_bytes,
        artifact_bytes=int(artifact_bytes),
        rows=size.rows,
        oldest=from_ms(oldest[0]) if oldest else None,
        last_prune=_last_prune(last, now) if last else None,
        can_shrink=size.can_shrink,
    )
