"""Read queries about tasks: listings, one task, and its tree of messages and turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from coterie.clock import from_ms
from coterie.messages import PERSON, Message
from coterie.store import Page
from coterie.stores.sql.rows import (
    IS_BUSY,
    LAST_SEQ,
    MESSAGE_COLUMNS,
    Connection,
    json_keys,
    to_answer,
    to_message,
    to_payload,
)
from coterie.stores.sql.task_changes import IS_WAITING_TASK
from coterie.tasks import (
    MAX_EXCERPT,
    MAX_TITLE,
    Away,
    MessageNode,
    RequestRecord,
    Task,
    TaskCall,
    TaskState,
    TaskTree,
    TurnNode,
    TurnState,
)

MAX_ACTIVE_AGENTS = 20
_WORKING_STATES = ("llm", "tools", "wait_retry")
_TASK_COLUMNS = """
tasks.seq, tasks.id, tasks.parent, tasks.sender, tasks.agent, tasks.state, tasks.created_at, tasks.last_at,
tasks.stopped_at, tasks.messages, tasks.active, tasks.queued, tasks.questions, tasks.turns, tasks.requests,
tasks.input_tokens, tasks.output_tokens, tasks.cached_tokens, tasks.tool_calls, tasks.model_ms, tasks.cost,
tasks.unpriced, tasks.budgets, tasks.budget_question,
(SELECT CAST(payload AS BLOB) FROM messages WHERE messages.id = tasks.id),
(SELECT count(DISTINCT agent_id) FROM turns WHERE turns.task = tasks.id),
(SELECT CASE WHEN state IN ('withdrawn', 'dead') THEN 1 ELSE 0 END FROM messages WHERE messages.id = tasks.id)
"""
"""Columns of `_TaskRow`. The text of a cleared or pruned message is gone."""
_SELECT_TASKS = f"""
SELECT {_TASK_COLUMNS} FROM tasks WHERE seq < :before AND (:state IS NULL OR state = :state)
 ORDER BY seq DESC LIMIT :limit
"""
# Each part of the UNION uses an index. `tasks.agent` is the first message's recipient. The last part is the open turn.
_TASKS_OF = """
(SELECT id FROM tasks WHERE agent = :agent
  UNION SELECT id FROM tasks WHERE agent = 'user' AND sender = :agent
  UNION SELECT task FROM turns WHERE agent_id = :agent
  UNION SELECT task FROM agents WHERE id = :agent AND task IS NOT NULL)
"""
_SELECT_TASKS_OF = f"""
SELECT {_TASK_COLUMNS} FROM tasks WHERE seq IN (
    SELECT seq FROM tasks WHERE id IN {_TASKS_OF} AND seq < :before AND (:state IS NULL OR state = :state)
     ORDER BY seq DESC LIMIT :limit)
 ORDER BY seq DESC
"""
# The same, along the index of states that few tasks have.
_SELECT_RARE = f"""
SELECT {_TASK_COLUMNS} FROM tasks
 WHERE state = :state AND (state = 'waiting' OR state = 'failed' OR state = 'stopped')
   AND seq < :before
 ORDER BY seq DESC LIMIT :limit
"""
_SELECT_BY_ID = f"SELECT {_TASK_COLUMNS} FROM tasks WHERE id IN (SELECT key FROM json_each(:ids))"
_SELECT_BUSY_AGENTS = f"SELECT id, waiting, delayed, task, other_tasks FROM agents WHERE {IS_BUSY}"
# Tasks at work are found by what keeps them at work: agents with a turn, messages in mailboxes, short delays. Agents
# come first in the joins: few have waiting messages, and an index has those of one agent together.
_SELECT_QUEUED_IDS = """
SELECT coalesce(messages.task, messages.id) FROM agents CROSS JOIN messages
 WHERE agents.id IN (SELECT key FROM json_each(:mailboxes)) AND messages.recipient = agents.id
   AND messages.in_seq > agents.taken_seq AND messages.state = 'pending'
 UNION
SELECT coalesce(task, id) FROM messages
 WHERE state = 'delayed' AND deliver_at - created_at < 60000 AND schedule_id IS NULL
"""
_SELECT_WORKING = f"""
SELECT {_TASK_COLUMNS} FROM tasks
 WHERE id IN (SELECT key FROM json_each(:ids)) AND state = 'working' AND seq < :before
 ORDER BY seq DESC LIMIT :limit
"""
_COUNT_WORKING = "SELECT count(*) FROM tasks WHERE id IN (SELECT key FROM json_each(:ids)) AND state = 'working'"
# Ordered by +seq: along seq SQLite would read all tasks if few are that new.
_SELECT_SINCE = f"""
SELECT {_TASK_COLUMNS} FROM tasks WHERE seq IN (
    SELECT seq FROM tasks WHERE last_at >= :since AND state <> 'working' AND state = :state
     ORDER BY +seq DESC LIMIT :limit)
 ORDER BY seq DESC
"""
_COUNT_SINCE = "SELECT state, count(*) FROM tasks WHERE last_at >= :since AND state <> 'working' GROUP BY state"
_UNREAD_SINCE = """
SELECT thread, count(*) FROM messages
 WHERE thread IS NOT NULL AND sender <> 'user' AND state = 'pending' AND delivered_at >= :since GROUP BY thread
"""
_COUNT_QUESTIONED = "SELECT count(*) FROM tasks WHERE state = 'waiting'"
# Tasks without a row: their first message waits for an agent, and nothing else is there.
_FROM_MAILBOXES = f"""
  FROM agents CROSS JOIN messages
 WHERE agents.id IN (SELECT key FROM json_each(:mailboxes)) AND messages.recipient = agents.id
   AND messages.in_seq > agents.taken_seq AND {IS_WAITING_TASK}
"""
_WAITING_COLUMNS = """
messages.seq, messages.id, messages.parent_task, messages.sender, messages.recipient, messages.created_at,
CAST(messages.payload AS BLOB)
"""
_SELECT_WAITING = f"""
SELECT {_WAITING_COLUMNS} {_FROM_MAILBOXES}
   AND messages.seq < :before
 ORDER BY messages.seq DESC LIMIT :limit
"""
_SELECT_WAITING_BY_ID = f"""
SELECT {_WAITING_COLUMNS} FROM messages WHERE id IN (SELECT key FROM json_each(:ids)) AND {IS_WAITING_TASK}
"""
_COUNT_WAITING = f"SELECT count(*) {_FROM_MAILBOXES}"
WAITING_SEQ = 1 << 52
"""Added to the number of the first message of a task without a row: listings have such tasks before all others."""
_COUNT_BY_STATE = "SELECT state, count(*) FROM tasks GROUP BY state"
# Agents with an open turn for these tasks, and whether they have ended one for the same task.
_SELECT_OPEN_TURNS = """
SELECT task, id, state,
       CASE WHEN EXISTS (SELECT 1 FROM turns WHERE turns.task = agents.task AND turns.agent_id = agents.id)
            THEN 1 ELSE 0 END
  FROM agents WHERE id IN (SELECT key FROM json_each(:agents)) AND task IN (SELECT key FROM json_each(:ids))
 ORDER BY turn_began, id
"""
_SELECT_MESSAGES = """
SELECT id, cause, sender, recipient, CAST(payload AS BLOB), state, created_at, delivered_at, taken_at, automatic,
       question, answered_by, answered_option, in_reply_to
  FROM messages
 WHERE id = :task OR task = :task ORDER BY seq
"""
_SELECT_TURNS = """
SELECT turns.agent_id, turns.turn_no, turns.started_at, turns.ended_at, turns.outcome, agents.state,
       (SELECT history.message_id FROM history JOIN messages ON messages.id = history.message_id
         WHERE history.agent_id = turns.agent_id AND history.turn_no = turns.turn_no
           AND (messages.id = :task OR messages.task = :task) ORDER BY history.seq DESC LIMIT 1)
  FROM all_turns AS turns LEFT JOIN agents ON agents.id = turns.agent_id
 WHERE turns.task = :task ORDER BY turns.started_at, turns.agent_id
"""
# Turns that made requests for the task and counted for another one at their end. The tasks of the other messages that
# such a turn took find its row by the primary key.
_SELECT_MOVED_TURNS = """
SELECT turns.agent_id, turns.turn_no, turns.started_at, turns.ended_at, turns.outcome, NULL, max(asked.message_id)
  FROM messages
  JOIN history AS asked ON asked.message_id = messages.id
  JOIN history AS other ON other.agent_id = asked.agent_id AND other.turn_no = asked.turn_no
                       AND other.message_id IS NOT NULL
  JOIN messages AS counted ON counted.id = other.message_id
  JOIN turns ON turns.task = coalesce(counted.task, counted.id) AND turns.agent_id = asked.agent_id
            AND turns.turn_no = asked.turn_no
 WHERE (messages.id = :task OR messages.task = :task) AND turns.task <> :task
   AND EXISTS (SELECT 1 FROM llm_calls WHERE llm_calls.agent_id = asked.agent_id
                  AND llm_calls.turn_no = asked.turn_no AND llm_calls.task = :task)
 GROUP BY turns.agent_id, turns.turn_no, turns.started_at, turns.ended_at, turns.outcome
 UNION ALL
SELECT agents.id, agents.turn_no, agents.turn_began, NULL, NULL, agents.state, max(asked.message_id)
  FROM messages
  JOIN history AS asked ON asked.message_id = messages.id
  JOIN agents ON agents.id = asked.agent_id AND agents.turn_no = asked.turn_no
 WHERE (messages.id = :task OR messages.task = :task) AND agents.task <> :task
   AND EXISTS (SELECT 1 FROM llm_calls WHERE llm_calls.agent_id = asked.agent_id
                  AND llm_calls.turn_no = asked.turn_no AND llm_calls.task = :task)
 GROUP BY agents.id, agents.turn_no, agents.turn_began, agents.state
"""
_REQUEST_COLUMNS = """
llm_calls.agent_id, llm_calls.turn_no, llm_calls.service, llm_calls.at, llm_calls.model_ms, llm_calls.input_tokens,
llm_calls.output_tokens, llm_calls.cached_tokens, llm_calls.cost, llm_calls.outcome
"""
_SELECT_REQUESTS = f"""
SELECT {_REQUEST_COLUMNS}
  FROM all_turns AS turns JOIN llm_calls ON llm_calls.agent_id = turns.agent_id AND llm_calls.turn_no = turns.turn_no
 WHERE turns.task = :task AND llm_calls.task = :task
 ORDER BY llm_calls.agent_id, llm_calls.turn_no, llm_calls.step_no, llm_calls.call_no
"""
_SELECT_REQUESTS_OF_TURN = f"""
SELECT {_REQUEST_COLUMNS} FROM llm_calls
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND task = :task ORDER BY step_no, call_no
"""
_CALL_COLUMNS = """
calls.agent_id, calls.turn_no, calls.call_id, calls.name, calls.state, calls.started_at, calls.ended_at
"""
_JOIN_CALLS = """
JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no AND calls.step_no = plans.step_no
"""
_SELECT_CALLS = f"""
SELECT {_CALL_COLUMNS}
  FROM all_turns AS turns
  JOIN plans ON plans.agent_id = turns.agent_id AND plans.turn_no = turns.turn_no
  {_JOIN_CALLS}
 WHERE turns.task = :task AND coalesce(plans.task, :task) = :task
 ORDER BY calls.agent_id, calls.turn_no, calls.step_no, calls.idx
"""
_SELECT_CALLS_OF_TURN = f"""
SELECT {_CALL_COLUMNS} FROM plans {_JOIN_CALLS}
 WHERE plans.agent_id = :agent_id AND plans.turn_no = :turn_no AND plans.task = :task
 ORDER BY calls.step_no, calls.idx
"""


_SELECT_OF_PERSON = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE task = :task AND seq > :after AND 'user' IN (sender, recipient) AND state IN ('pending', 'taken') ORDER BY seq
"""


class _TaskRow(NamedTuple):
    seq: int
    id: str
    parent: str | None
    sender: str
    recipient: str
    state: TaskState
    created_at: int
    last_at: int
    stopped_at: int | None
    messages: int
    active: int
    queued: int
    questions: int
    turns: int
    requests: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    tool_calls: int
    model_ms: int
    cost: int
    unpriced: int
    budgets: int
    budget_question: str | None
    payload: str | bytes | None
    agents: int
    """Agents that have ended a turn for it."""
    is_dropped: int | None
    """1: its first message was withdrawn or could not be delivered."""


class BusyAgent(NamedTuple):
    """An agent, or the person, with mail or a turn. Columns of `_SELECT_BUSY_AGENTS`."""

    id: str
    waiting: int
    delayed: int
    task: str | None
    other_tasks: str | None


def read_busy_agents(db: Connection) -> list[BusyAgent]:
    """Return all agents with mail or a turn."""
    return [BusyAgent._make(row) for row in db.execute(_SELECT_BUSY_AGENTS)]


def ids_with_mail(busy: Sequence[BusyAgent]) -> list[str]:
    return [agent.id for agent in busy if agent.waiting and agent.id != PERSON]


def read_tasks(
    db: Connection,
    page: Page,
    state: TaskState | None,
    agent: str | None,
    busy: Sequence[BusyAgent] | None = None,
) -> list[Task]:
    """Return tasks, newest first: those whose first message waits, then the others. Call it in a snapshot.

    `busy`: all busy agents, if they are known.
    """
    tasks = list[Task]()
    busy = read_busy_agents(db) if busy is None else busy
    mailboxes = json_keys(agent_id for agent_id in ids_with_mail(busy) if agent in (None, agent_id))
    if state in (None, "working") and (page.before is None or page.before > WAITING_SEQ):
        before = (page.before or 2 * WAITING_SEQ) - WAITING_SEQ
        rows = db.execute(_SELECT_WAITING, {"before": before, "mailboxes": mailboxes, "limit": page.limit})
        tasks = [_to_waiting_task(row) for row in rows]
    if len(tasks) == page.limit:
        return tasks
    before = page.before or LAST_SEQ
    parameters = {"before": before, "state": state, "agent": agent, "limit": page.limit - len(tasks)}
    if agent is not None:
        return tasks + _to_tasks(db, db.execute(_SELECT_TASKS_OF, parameters).fetchall(), busy)
    match state:
        case "working":
            rows = db.execute(_SELECT_WORKING, parameters | {"ids": _busy_ids(db, busy)})
        case "waiting" | "failed" | "stopped":
            rows = db.execute(_SELECT_RARE, parameters)
        case _:
            rows = db.execute(_SELECT_TASKS, parameters)
    return tasks + _to_tasks(db, rows.fetchall(), busy)


def read_open_tasks(db: Connection, limit: int, busy: Sequence[BusyAgent] | None = None) -> tuple[list[Task], int]:
    """Return the newest tasks that work or wait for the person, and the number of all. Call it in a snapshot."""
    page, busy = Page(limit=limit), read_busy_agents(db) if busy is None else busy
    tasks = read_tasks(db, page, "working", None, busy) + read_tasks(db, page, "waiting", None, busy)
    (waiting,) = db.execute(_COUNT_QUESTIONED).fetchone()
    (with_row,) = db.execute(_COUNT_WORKING, {"ids": _busy_ids(db, busy)}).fetchone()
    return sorted(tasks, key=lambda task: -task.seq)[:limit], with_row + _count_waiting(db, busy) + waiting


def _count_waiting(db: Connection, busy: Sequence[BusyAgent]) -> int:
    return int(db.execute(_COUNT_WAITING, {"mailboxes": json_keys(ids_with_mail(busy))}).fetchone()[0])


def _busy_ids(db: Connection, busy: Sequence[BusyAgent]) -> str:
    """Return the ids of all tasks that may be at work, for `json_each`."""
    queued = db.execute(_SELECT_QUEUED_IDS, {"mailboxes": json_keys(ids_with_mail(busy))})
    ids = {task_id for (task_id,) in queued}
    for agent in busy:
        if agent.task is not None:
            ids |= {agent.task, *(agent.other_tasks or "").split()}
    return json_keys(ids)


def read_away(db: Connection, since: int, limit: int) -> Away:
    """Return what happened since then. Call it in a snapshot."""

    def read(state: TaskState) -> list[Task]:
        rows = db.execute(_SELECT_SINCE, {"since": since, "state": state, "limit": limit})
        return _to_tasks(db, rows.fetchall(), busy)

    busy = read_busy_agents(db)
    return Away(
        finished=read("done"),
        failed=read("failed"),
        waiting=read("waiting"),
        counts=dict(db.execute(_COUNT_SINCE, {"since": since}).fetchall()),
        unread=dict(db.execute(_UNREAD_SINCE, {"since": since}).fetchall()),
    )


def read_with_messages(db: Connection, task_id: str, after: int) -> tuple[Task | None, list[Message]]:
    """Return a task, and its messages from and to the person without its first one."""
    # The task first: one that has ended has all its messages. It is read without a snapshot, and gets its row when its
    # message leaves the mailbox. If that happens between the two queries, the second attempt finds the row.
    found = read_tasks_by_id(db, [task_id]) or read_tasks_by_id(db, [task_id])
    task = found.get(task_id)
    return task, [to_message(row) for row in db.execute(_SELECT_OF_PERSON, {"task": task_id, "after": after})]


def read_tasks_by_id(db: Connection, ids: Sequence[str]) -> dict[str, Task]:
    stored = db.execute(_SELECT_BY_ID, {"ids": json_keys(ids)}).fetchall()
    tasks = {task.id: task for task in _to_tasks(db, stored, read_busy_agents(db) if stored else ())}
    if missing := [task_id for task_id in ids if task_id not in tasks]:
        rows = db.execute(_SELECT_WAITING_BY_ID, {"ids": json_keys(missing)})
        tasks |= {task.id: task for task in map(_to_waiting_task, rows)}
    return tasks


def count_by_state(db: Connection) -> dict[str, int]:
    counts: dict[str, int] = dict(db.execute(_COUNT_BY_STATE).fetchall())
    if waiting := _count_waiting(db, read_busy_agents(db)):
        counts["working"] = counts.get("working", 0) + waiting
    return counts


def find_task_id(db: Connection, message_id: str) -> str:
    """Return the id of the task that a message belongs to; `message_id` itself if there is no such message."""
    row = db.execute("SELECT coalesce(task, id) FROM messages WHERE id = :id", {"id": message_id}).fetchone()
    return row[0] if row else message_id


def read_tree(db: Connection, message_id: str) -> TaskTree | None:
    """Return the task of a message with its messages and turns in the order of time. Call it in a snapshot."""
    task = read_tasks_by_id(db, [find_task_id(db, message_id)])
    if not task:
        return None
    ((task_id, summary),) = task.items()
    nodes: list[tuple[datetime, int, MessageNode | TurnNode]] = [
        (node.created_at, 0, node) for node in _read_messages(db, task_id)
    ]
    nodes += [(node.started_at, 1, node) for node in _read_turns(db, task_id)]
    # A message comes before the turn that it starts in the same millisecond; otherwise both keep their order.
    return TaskTree(task=summary, nodes=[node for *_, node in sorted(nodes, key=lambda entry: entry[:2])])


def _read_messages(db: Connection, task_id: str) -> list[MessageNode]:
    rows = db.execute(_SELECT_MESSAGES, {"task": task_id}).fetchall()
    ids = {row[0] for row in rows}
    nodes = []
    for (message_id, cause, sender, to, payload, state, created_at, delivered_at, taken_at, automatic, question,
         answered_by, answered_option, in_reply_to) in rows:  # fmt: skip
        answer = to_answer(answered_by, answered_option)
        parent = cause if cause in ids else in_reply_to if in_reply_to in ids else None
        nodes.append(
            MessageNode(
                id=message_id,
                parent=None if message_id == task_id else parent or (task_id if task_id in ids else None),
                sender=sender,
                to=to,
                text=_excerpt(message_id, payload, MAX_EXCERPT),
                state=state,
                created_at=from_ms(created_at),
                delivered_at=None if delivered_at is None else from_ms(delivered_at),
                taken_at=None if taken_at is None else from_ms(taken_at),
                automatic=bool(automatic),
                question=bool(question),
                answer=answer.to_dict() if answer else None,
            )
        )
    return nodes


def _read_turns(db: Connection, task_id: str) -> list[TurnNode]:
    turns = db.execute(_SELECT_TURNS, {"task": task_id}).fetchall()
    request_rows = db.execute(_SELECT_REQUESTS, {"task": task_id}).fetchall()
    call_rows = db.execute(_SELECT_CALLS, {"task": task_id}).fetchall()
    for moved in db.execute(_SELECT_MOVED_TURNS, {"task": task_id}).fetchall():
        turns.append(moved)
        turn = {"agent_id": moved[0], "turn_no": moved[1], "task": task_id}
        request_rows += db.execute(_SELECT_REQUESTS_OF_TURN, turn).fetchall()
        call_rows += db.execute(_SELECT_CALLS_OF_TURN, turn).fetchall()
    requests: dict[tuple[str, int], list[RequestRecord]] = {}
    for agent_id, turn_no, service, at, ms, used, said, cached, cost, outcome in request_rows:
        requests.setdefault((agent_id, turn_no), []).append(
            RequestRecord(
                service=service,
                at=from_ms(at),
                ms=ms,
                input_tokens=used,
                output_tokens=said,
                cached_tokens=cached,
                cost=cost,
                outcome=outcome,
            )
        )
    calls: dict[tuple[str, int], list[TaskCall]] = {}
    for agent_id, turn_no, call_id, name, state, started_at, ended_at in call_rows:
        calls.setdefault((agent_id, turn_no), []).append(
            TaskCall(
                call_id=call_id,
                name=name,
                state=state,
                started_at=None if started_at is None else from_ms(started_at),
                ended_at=None if ended_at is None else from_ms(ended_at),
            )
        )
    return [
        TurnNode(
            agent_id=agent_id,
            turn_no=turn_no,
            parent=parent,
            state=_turn_state(outcome, agent_state),
            started_at=from_ms(started_at),
            ended_at=None if ended_at is None else from_ms(ended_at),
            requests=requests.get((agent_id, turn_no), ()),
            calls=calls.get((agent_id, turn_no), ()),
        )
        for agent_id, turn_no, started_at, ended_at, outcome, agent_state, parent in turns
    ]


def _turn_state(outcome: TurnState | None, agent_state: str | None) -> TurnState:
    if outcome is not None:
        return outcome
    match agent_state:
        case "wait_approval":
            return "waiting"
        case "blocked":
            return "blocked"
    return "working"


def _to_tasks(db: Connection, rows: Sequence[Sequence[Any]], busy: Sequence[BusyAgent]) -> list[Task]:
    found = [_TaskRow._make(row) for row in rows]
    ids = {row.id for row in found}
    active: dict[str, list[str]] = {}
    beginners: Counter[str] = Counter()
    if agents := [agent.id for agent in busy if agent.task in ids]:
        for task, agent_id, state, has_ended_turn in db.execute(
            _SELECT_OPEN_TURNS, {"ids": json_keys(ids), "agents": json_keys(agents)}
        ):
            if state in _WORKING_STATES:
                active.setdefault(task, []).append(agent_id)
            beginners[task] += not has_ended_turn
    return [
        Task(
            seq=row.seq,
            id=row.id,
            parent=row.parent,
            sender=row.sender,
            to=row.recipient,
            text="" if row.payload is None else _excerpt(row.id, row.payload, MAX_TITLE),
            state=row.state,
            created_at=from_ms(row.created_at),
            last_at=from_ms(row.last_at),
            stopped_at=None if row.stopped_at is None else from_ms(row.stopped_at),
            messages=row.messages,
            agents=row.agents + beginners[row.id],
            active_agents=active.get(row.id, [])[:MAX_ACTIVE_AGENTS],
            active=row.active,
            queued=row.queued,
            questions=row.questions,
            turns=row.turns,
            requests=row.requests,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            cached_tokens=row.cached_tokens,
            tool_calls=row.tool_calls,
            model_ms=row.model_ms,
            cost=row.cost,
            unpriced=row.unpriced,
            budgets=row.budgets,
            budget_question=row.budget_question,
            unread=row.is_dropped == 1 and not row.turns,
        )
        for row in found
    ]


def _to_waiting_task(row: Sequence[Any]) -> Task:
    """Convert a row of `_WAITING_COLUMNS`."""
    seq, message_id, parent, sender, recipient, created_at, payload = row
    return Task(
        seq=WAITING_SEQ + seq,
        id=message_id,
        parent=parent,
        sender=sender,
        to=recipient,
        text=_excerpt(message_id, payload, MAX_TITLE),
        state="working",
        created_at=from_ms(created_at),
        last_at=from_ms(created_at),
        messages=1,
        queued=1,
    )


def _excerpt(message_id: str, payload: str | bytes, length: int) -> str:
    text = to_payload(message_id, payload).get("text")
    return text[:length] if isinstance(text, str) else ""
