"""Read queries: threads, open questions, the snapshot, tool runs, usage, statistics and histories.

They run on a reader. Numbers for `/metrics` are counted when they are read, so that writes do not pay for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import msgspec

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import UNIX_EPOCH, from_ms
from coterie.errors import Refused
from coterie.ids import frame_mark
from coterie.llm.service import ToolCall
from coterie.messages import PERSON, Message, State
from coterie.store import (
    MAX_LISTED,
    Page,
    Snapshot,
    Statistics,
    StoredProfile,
    Thread,
    Usage,
)
from coterie.stores.sql.rows import (
    AGENT_COLUMNS,
    AGENTS_WITH_CALL,
    ARTIFACT_COLUMNS,
    LAST_SEQ,
    MESSAGE_COLUMNS,
    SHOWN_STATE,
    Connection,
    MessageRow,
    json_keys,
    read_secret,
    to_agent,
    to_artifact,
    to_message,
)
from coterie.stores.sql.session import SELECT_PAUSED
from coterie.stores.sql.task_queries import count_by_state, ids_with_mail, read_busy_agents, read_open_tasks
from coterie.turn_store import CallRecord, Claim, FoundRuns, HistoryRow, HistoryView, PlanRecord, StaleClaim

ThreadPosition = tuple[int, int]
"""`delivered_at` and `seq` of a message. Threads are ordered by delivery."""
_END: ThreadPosition = (1 << 62, 1 << 62)
_UP_TO = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE thread = :thread AND delivered_at IS NOT NULL AND (delivered_at, seq) <= (:delivered_at, :seq)
 ORDER BY delivered_at DESC, seq DESC LIMIT :limit
"""
_AFTER = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE thread = :thread AND delivered_at IS NOT NULL AND (delivered_at, seq) > (:delivered_at, :seq)
 ORDER BY delivered_at, seq LIMIT :limit
"""
_IS_OPEN = "question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken')"
_OPEN_QUESTIONS = f"""
SELECT {MESSAGE_COLUMNS} FROM messages WHERE {_IS_OPEN} AND (:sender IS NULL OR sender = :sender)
 ORDER BY delivered_at DESC, seq DESC LIMIT :limit
"""
_OPEN_QUESTION_COUNT = f"SELECT count(*) FROM messages WHERE {_IS_OPEN}"
_UNREAD = """
SELECT thread, count(*) FROM messages
 WHERE thread IN (SELECT key FROM json_each(:ids)) AND sender <> 'user' AND state = 'pending' GROUP BY thread
"""


def read_thread(
    db: Connection, agent_id: str, before: str | None, after: str | None, around: str | None, limit: int
) -> list[Message]:
    """Return messages oldest first: the last ones, or those before, after or around the given message."""
    if after is not None:
        return _after(db, agent_id, thread_position(db, agent_id, after), limit)
    if before is not None:
        delivered_at, seq = thread_position(db, agent_id, before)
        return _up_to(db, agent_id, (delivered_at, seq - 1), limit)
    if around is not None:
        position = thread_position(db, agent_id, around)
        # The message is in the middle, unless one side has too few messages.
        earlier, later = _up_to(db, agent_id, position, limit), _after(db, agent_id, position, limit)
        earlier_count = max(limit - limit // 2, limit - len(later))
        return (earlier[-earlier_count:] + later)[:limit]
    return _up_to(db, agent_id, _END, limit)


def count_unread(db: Connection, agent_ids: Sequence[str]) -> dict[str, int]:
    return dict.fromkeys(agent_ids, 0) | dict(db.execute(_UNREAD, {"ids": json_keys(agent_ids)}))


def read_open_questions(db: Connection, agent_id: str | None, limit: int) -> list[Message]:
    rows = db.execute(_OPEN_QUESTIONS, {"sender": agent_id, "limit": limit})
    return [to_message(row) for row in rows]


def count_open_questions(db: Connection) -> int:
    return int(db.execute(_OPEN_QUESTION_COUNT).fetchone()[0])


def _up_to(db: Connection, agent_id: str, position: ThreadPosition, limit: int) -> list[Message]:
    delivered_at, seq = position
    rows = db.execute(_UP_TO, {"thread": agent_id, "delivered_at": delivered_at, "seq": seq, "limit": limit})
    return [to_message(row) for row in rows][::-1]


def _after(db: Connection, agent_id: str, position: ThreadPosition, limit: int) -> list[Message]:
    delivered_at, seq = position
    rows = db.execute(_AFTER, {"thread": agent_id, "delivered_at": delivered_at, "seq": seq, "limit": limit})
    return [to_message(row) for row in rows]


def thread_position(db: Connection, thread: str | None, message_id: str) -> ThreadPosition:
    """Return the position of a message, or raise `Refused` if it is not in `thread`. None: notices of no agent."""
    row = db.execute("SELECT delivered_at, seq, thread FROM messages WHERE id = :id", {"id": message_id}).fetchone()
    delivered_at, seq, its_thread = row or (None, 0, None)
    if delivered_at is None or its_thread != thread:
        raise Refused("unknown_message", f"there is no message {message_id!r} in this conversation")
    return int(delivered_at), int(seq)


_SELECT_MESSAGES = f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE seq < :before ORDER BY seq DESC LIMIT :limit"
_SELECT_DEAD = f"""
SELECT {MESSAGE_COLUMNS} FROM messages WHERE state = 'dead' AND seq < :before ORDER BY seq DESC LIMIT :limit
"""
_SELECT_IN_STATE = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE seq < :before AND state = :state AND (:agent IS NULL OR :agent IN (sender, recipient))
 ORDER BY seq DESC LIMIT :limit
"""
# Each half reads its own index.
_SELECT_MESSAGES_OF = f"""
SELECT {MESSAGE_COLUMNS} FROM messages WHERE seq IN (
    SELECT seq FROM (SELECT seq FROM messages WHERE sender = :agent AND seq < :before ORDER BY seq DESC LIMIT :limit)
                    AS sent
     UNION
    SELECT seq FROM (SELECT seq FROM messages WHERE recipient = :agent AND seq < :before ORDER BY seq DESC LIMIT :limit)
                    AS received)
 ORDER BY seq DESC LIMIT :limit
"""


def read_messages(db: Connection, page: Page, agent: str | None, state: State | None) -> list[Message]:
    sql = _SELECT_MESSAGES if agent is None else _SELECT_MESSAGES_OF
    if state is not None:
        sql = _SELECT_DEAD if state == "dead" and agent is None else _SELECT_IN_STATE
    parameters = {"before": page.before or LAST_SEQ, "agent": agent, "state": state, "limit": page.limit}
    return [to_message(row) for row in db.execute(sql, parameters)]


PROFILES = 5_000
"""Profiles that one query reads."""
_SELECT_PROFILES = f"""
SELECT id, profile, state = 'terminated' FROM agents
 WHERE id > :after AND (profile <> '' OR state = 'terminated') ORDER BY id LIMIT {PROFILES}
"""
_SELECT_PROFILES_BY_ID = """
SELECT id, profile, state = 'terminated' FROM agents WHERE id IN (SELECT key FROM json_each(:ids))
"""


def read_profiles(db: Connection, ids: Sequence[str] | None, after: str) -> list[StoredProfile]:
    if ids is None:
        rows = db.execute(_SELECT_PROFILES, {"after": after})
    else:
        rows = db.execute(_SELECT_PROFILES_BY_ID, {"ids": json_keys(ids)})
    return [StoredProfile(agent_id, profile, bool(is_terminated)) for agent_id, profile, is_terminated in rows]


_COUNT_AGENTS = "SELECT count(*) FROM agents WHERE kind = 'agent'"
_LAST_OF_THREAD = """
(SELECT seq FROM messages WHERE thread = agents.id AND delivered_at IS NOT NULL
  ORDER BY delivered_at DESC, seq DESC LIMIT 1)
"""
_THREADS = f"""
SELECT {MESSAGE_COLUMNS}, agents.id,
       (SELECT count(*) FROM messages AS unread
         WHERE unread.thread = agents.id AND unread.sender <> 'user' AND unread.state = 'pending'),
       (SELECT unread.id FROM messages AS unread
         WHERE unread.thread = agents.id AND unread.sender <> 'user' AND unread.state = 'pending'
         ORDER BY unread.delivered_at, unread.seq LIMIT 1)
  FROM agents JOIN messages ON messages.seq = {_LAST_OF_THREAD}
 WHERE agents.id IN (SELECT key FROM json_each(:ids))
 ORDER BY messages.delivered_at DESC, messages.seq DESC
"""
_NEWEST_THREADS = f"""
SELECT agents.id FROM agents JOIN messages ON messages.seq = {_LAST_OF_THREAD}
 WHERE agents.id IN (SELECT key FROM json_each(:ids))
 ORDER BY messages.delivered_at DESC, messages.seq DESC LIMIT :limit
"""
# A loose index scan: one step per thread.
_SELECT_THREADS = """
WITH RECURSIVE found (thread, n) AS (
    SELECT (SELECT min(thread) FROM messages WHERE thread IS NOT NULL), 1
     UNION ALL
    SELECT (SELECT min(messages.thread) FROM messages WHERE messages.thread > found.thread), n + 1 FROM found
     WHERE found.thread IS NOT NULL AND n < :limit)
SELECT thread FROM found WHERE thread IS NOT NULL
"""
_SELECT_RECENT_THREADS = """
SELECT DISTINCT thread FROM (SELECT thread FROM messages ORDER BY seq DESC LIMIT :messages) AS recent
 WHERE thread IS NOT NULL
 UNION
SELECT thread FROM (SELECT thread FROM messages WHERE thread IS NOT NULL AND sender <> 'user' AND state = 'pending'
                     ORDER BY thread, delivered_at, seq LIMIT :messages) AS unread
"""
# Agents come first in the join: an index has the waiting messages of one agent together.
_QUEUES = f"""
SELECT {MESSAGE_COLUMNS} FROM agents CROSS JOIN messages
 WHERE agents.id IN (SELECT key FROM json_each(:ids)) AND messages.recipient = agents.id
   AND messages.in_seq > agents.taken_seq AND messages.state = 'pending'
 ORDER BY agents.id, messages.in_seq LIMIT :limit
"""
_DELAYED = f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE state = 'delayed' ORDER BY deliver_at, seq LIMIT :limit"
_SELECT_LIVING = "SELECT id FROM agents WHERE kind = 'agent' AND state <> 'terminated' ORDER BY id LIMIT :limit"
_SELECT_TERMINATED = "SELECT id FROM agents WHERE kind = 'agent' AND state = 'terminated' ORDER BY id LIMIT :limit"
_AGENTS = f"SELECT {AGENT_COLUMNS} FROM {AGENTS_WITH_CALL} WHERE id IN (SELECT key FROM json_each(:ids))"
MAX_COUNTED_THREADS = 1_000
"""Threads that a snapshot counts. Of more, it lists those of the newest messages and those with unread ones."""
RECENT_MESSAGES = 1_000


class _ThreadRow(MessageRow):
    """The last message of a thread, with the columns that `_THREADS` adds."""

    agent_id: str
    unread: int
    first_unread: str | None


def read_snapshot(db: Connection, upto: int | None = None) -> Snapshot | None:
    """Read everything that the panel shows first. Call it in a snapshot transaction.

    None: an event after `upto` is visible.
    """
    (seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
    if upto is not None and seq > upto:
        return None
    (agent_count,) = db.execute(_COUNT_AGENTS).fetchone()
    busy = read_busy_agents(db)
    threads = [thread for (thread,) in db.execute(_SELECT_THREADS, {"limit": MAX_COUNTED_THREADS})]
    tasks, task_count = read_open_tasks(db, MAX_LISTED_TASKS, busy)
    return Snapshot(
        seq=seq,
        paused=bool(db.execute(SELECT_PAUSED).fetchone()[0]),
        agents=_agents(db),
        agent_count=agent_count,
        threads=_threads(db, threads),
        thread_count=len(threads),
        queues=_queues(db, ids_with_mail(busy)),
        queue_count=sum(agent.waiting for agent in busy if agent.id != PERSON),
        delayed=_messages(db, _DELAYED),
        delayed_count=sum(agent.delayed for agent in busy),
        open_questions=read_open_questions(db, None, MAX_LISTED),
        question_count=count_open_questions(db),
        tasks=tasks,
        task_count=task_count,
    )


def _agents(db: Connection) -> list[Agent]:
    """Return the first agents by id; terminated ones come last."""
    ids = [agent_id for (agent_id,) in db.execute(_SELECT_LIVING, {"limit": MAX_LISTED})]
    if len(ids) < MAX_LISTED:
        ids += [agent_id for (agent_id,) in db.execute(_SELECT_TERMINATED, {"limit": MAX_LISTED - len(ids)})]
    found = {agent.id: agent for agent in map(to_agent, db.execute(_AGENTS, {"ids": json_keys(ids)}))}
    return [found[agent_id] for agent_id in ids]


def _threads(db: Connection, threads: Sequence[str]) -> list[Thread]:
    """`threads`: all, or `MAX_COUNTED_THREADS` of them."""
    if len(threads) == MAX_COUNTED_THREADS:
        threads = [thread for (thread,) in db.execute(_SELECT_RECENT_THREADS, {"messages": RECENT_MESSAGES})]
    newest = db.execute(_NEWEST_THREADS, {"ids": json_keys(threads), "limit": MAX_LISTED})
    ids = json_keys(agent_id for (agent_id,) in newest)
    rows = [_ThreadRow(*row) for row in db.execute(_THREADS, {"ids": ids})]
    return [
        Thread(agent_id=row.agent_id, last=row.to_message(), unread=row.unread, first_unread=row.first_unread)
        for row in rows
    ]


def _queues(db: Connection, ids: Sequence[str]) -> list[Message]:
    """`ids`: all agents with mail."""
    first = json_keys(sorted(ids)[:MAX_LISTED])
    return [to_message(row) for row in db.execute(_QUEUES, {"ids": first, "limit": MAX_LISTED})]


def _messages(db: Connection, sql: str) -> list[Message]:
    return [to_message(row) for row in db.execute(sql, {"limit": MAX_LISTED})]


SEARCHED_PLANS = 500
"""Plans that one statement reads for a search.

Texts are compared in Python, as PostgreSQL and SQLite fold case differently.
"""
MAX_SEARCHED_PLANS = 20_000
"""Plans that one search reads. It says where the next one goes on."""
_PLAN_COLUMNS = "seq, agent_id, turn_no, step_no, text, outcome, interrupted_by, at, task"
"""Columns of `_PlanRow`."""
_PLANS = f"SELECT {_PLAN_COLUMNS} FROM plans WHERE seq < :before ORDER BY seq DESC LIMIT :limit"
# The same order, but along the index of one agent's plans. It begins at the plan `before`, if that still exists.
_PLANS_OF = f"""
SELECT {_PLAN_COLUMNS} FROM plans WHERE agent_id = :agent_id AND seq < :before
   AND turn_no <= coalesce((SELECT turn_no FROM plans WHERE seq = :before AND agent_id = :agent_id), 999999999999999)
 ORDER BY turn_no DESC, step_no DESC LIMIT :limit
"""
_CALLS = """
SELECT call_id, name, arguments, state, result, started_at, ended_at FROM calls
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND step_no = :step_no ORDER BY idx
"""
_USAGE = """
SELECT at / 86400000 AS day, agent_id, service, count(*), count(*) FILTER (WHERE outcome = 'withdrawn'),
       sum(input_tokens), sum(output_tokens), sum(cached_tokens), coalesce(sum(cost), 0),
       count(*) FILTER (WHERE cost IS NULL),
       coalesce(sum(input_tokens + output_tokens) FILTER (WHERE estimated = 1), 0)
  FROM llm_calls WHERE at >= :since GROUP BY day, agent_id, service ORDER BY day DESC, agent_id, service
"""
_ARTIFACTS_BEFORE = f"""
SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE (created_at, ref) < (:created_at, :ref)
 ORDER BY created_at DESC, ref DESC LIMIT :limit
"""
MAX_LISTED_TASKS = 50
MAX_WORDS, MAX_WORD_CHARS = 16, 200


class _PlanRow(NamedTuple):
    seq: int
    agent_id: str
    turn_no: int
    step_no: int
    text: str
    outcome: Literal["open", "closed", "withdrawn"]
    interrupted_by: str | None
    at: int
    task: str | None


class _CallRow(NamedTuple):
    """Columns of `_CALLS`."""

    call_id: str
    name: str
    arguments: str
    state: str
    result: str
    started_at: int | None
    ended_at: int | None


class _UsageRow(NamedTuple):
    """Columns of `_USAGE`."""

    day: int
    agent_id: str
    service: str
    requests: int
    withdrawn: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cost: int
    unpriced: int
    estimated_tokens: int


def read_runs(db: Connection, page: Page, agent_id: str | None) -> list[PlanRecord]:
    return [_read_plan(db, plan) for plan in _read_plans(db, page.before or LAST_SEQ, page.limit, agent_id)]


def search_runs(db: Connection, words: str, page: Page, agent_id: str | None) -> FoundRuns:
    wanted, before, found = search_words(words), page.before or LAST_SEQ, list[_PlanRow]()
    go_on: int | None = None
    for _ in range(MAX_SEARCHED_PLANS // SEARCHED_PLANS):
        plans = _read_plans(db, before, SEARCHED_PLANS, agent_id)
        found += [plan for plan in plans if all(word in plan.text.casefold() for word in wanted)]
        go_on = plans[-1].seq if len(plans) == SEARCHED_PLANS else None
        if go_on is None or len(found) >= page.limit:
            break
        before = go_on
    if len(found) > page.limit:
        go_on = found[page.limit - 1].seq
    return [_read_plan(db, plan) for plan in found[: page.limit]], go_on


def _read_plans(db: Connection, before: int, limit: int, agent_id: str | None) -> list[_PlanRow]:
    parameters = {"before": before, "limit": limit, "agent_id": agent_id}
    rows = db.execute(_PLANS if agent_id is None else _PLANS_OF, parameters).fetchall()
    return [_PlanRow._make(row) for row in rows]


def read_usage(db: Connection, since: int) -> list[Usage]:
    rows = [_UsageRow._make(row) for row in db.execute(_USAGE, {"since": since})]
    return [
        Usage(
            day=(UNIX_EPOCH + timedelta(days=row.day)).strftime("%Y-%m-%d"),
            agent_id=row.agent_id,
            service=row.service,
            requests=row.requests,
            withdrawn=row.withdrawn,
            input_tokens=int(row.input_tokens),
            output_tokens=int(row.output_tokens),
            cached_tokens=int(row.cached_tokens),
            cost=int(row.cost),
            unpriced=row.unpriced,
            estimated_tokens=row.estimated_tokens,
        )
        for row in rows
    ]


def like_patterns(words: str) -> list[str]:
    """Return one LIKE pattern per word. A text that matches all of them contains all words."""
    return [_like_pattern(word) for word in search_words(words)]


def json_patterns(words: str) -> list[str]:
    """Return one LIKE pattern per word that matches the JSON of every payload whose text contains the word."""
    return [_like_pattern(msgspec.json.encode(word).decode()[1:-1]) for word in search_words(words)]


def search_words(words: str) -> list[str]:
    """The words of a search in lower case, at most `MAX_WORDS`, each of at most `MAX_WORD_CHARS`."""
    return [word[:MAX_WORD_CHARS] for word in words.casefold().split()[:MAX_WORDS]]


def read_artifacts_before(db: Connection, ref: str | None, limit: int) -> list[Artifact]:
    created_at, last_ref = 1 << 62, ""
    if ref is not None:
        row = db.execute("SELECT created_at FROM artifacts WHERE ref = :ref", {"ref": ref}).fetchone()
        if row is None:
            raise Refused("unknown_artifact", f"there is no artifact {ref!r}")
        created_at, last_ref = row[0], ref
    rows = db.execute(_ARTIFACTS_BEFORE, {"created_at": created_at, "ref": last_ref, "limit": limit})
    return [to_artifact(row) for row in rows]


def _like_pattern(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _read_plan(db: Connection, plan: _PlanRow) -> PlanRecord:
    calls = db.execute(_CALLS, {"agent_id": plan.agent_id, "turn_no": plan.turn_no, "step_no": plan.step_no}).fetchall()
    return PlanRecord(
        seq=plan.seq,
        agent_id=plan.agent_id,
        turn_no=plan.turn_no,
        step_no=plan.step_no,
        text=plan.text,
        outcome=plan.outcome,
        interrupted_by=plan.interrupted_by,
        at=from_ms(plan.at),
        task=plan.task,
        calls=[_to_call(_CallRow._make(call)) for call in calls],
    )


def _to_call(row: _CallRow) -> CallRecord:
    return CallRecord(
        call_id=row.call_id,
        name=row.name,
        arguments=row.arguments,
        state=row.state,
        result=row.result,
        started_at=None if row.started_at is None else from_ms(row.started_at),
        ended_at=None if row.ended_at is None else from_ms(row.ended_at),
    )


_EVENT_COUNTS = "SELECT kind, count(*), max(seq) FROM events WHERE seq > :after AND seq <= :upto GROUP BY kind"
_AGENT_SUMS = """
SELECT coalesce(sum(turn_no), 0), coalesce(sum(waiting), 0), coalesce(max(waiting), 0), coalesce(sum(delayed), 0)
  FROM agents WHERE kind = 'agent'
"""
_STATE_COUNTS = f"SELECT {SHOWN_STATE}, count(*) FROM agents WHERE kind = 'agent' GROUP BY 1"


def read_statistics(db: Connection, after: int, upto: int) -> Statistics:
    """`after`, `upto`: numbers of the events that are counted."""
    events = db.execute(_EVENT_COUNTS, {"after": after, "upto": upto}).fetchall()
    turns, waiting, largest_mailbox, delayed = db.execute(_AGENT_SUMS).fetchone()
    (withdrawn,) = db.execute("SELECT count(*) FROM plans WHERE outcome = 'withdrawn'").fetchone()
    return Statistics(
        seq=max((seq for _, _, seq in events), default=after),
        events={kind: count for kind, count, _ in events},
        turns=int(turns),
        model_calls=dict(db.execute("SELECT outcome, count(*) FROM llm_calls GROUP BY outcome").fetchall()),
        tool_calls=dict(db.execute("SELECT state, count(*) FROM calls GROUP BY state").fetchall()),
        withdrawn_plans=withdrawn,
        waiting=int(waiting),
        largest_mailbox=largest_mailbox,
        delayed=int(delayed),
        agents=dict(db.execute(_STATE_COUNTS).fetchall()),
        tasks=count_by_state(db),
    )


_decode = msgspec.json.decode
_encode = msgspec.json.Encoder(order="deterministic").encode


_NO_LIMIT = 1 << 62
_SELECT_HISTORY = f"""
SELECT {MESSAGE_COLUMNS}, history.seq, history.turn_no, history.role, history.content, history.calls, history.call_id,
       history.hidden, history.attachments
  FROM history LEFT JOIN messages ON messages.id = history.message_id
 WHERE history.agent_id = :agent_id AND history.seq > :after ORDER BY history.seq LIMIT :limit
"""


class _HistoryMessageRow(MessageRow):
    """Columns of `_SELECT_HISTORY`. Those of the message are all None if the history row has no message."""

    history_seq: int
    turn_no: int
    role: str
    content: str | None
    calls: str | None
    call_id: str | None
    hidden: int
    attachments: str | None


def read_history(db: Connection, agent_id: str, after: int, limit: int | None = None) -> list[HistoryRow]:
    secret = read_secret(db)
    rows = db.execute(_SELECT_HISTORY, {"agent_id": agent_id, "after": after, "limit": limit or _NO_LIMIT})
    return [_to_history_row(row, secret) for row in rows]


def message_mark(message: Message | None, secret: bytes) -> str:
    """Return the mark that encloses the message in model requests. Empty for other rows."""
    if message is None:
        return ""
    return frame_mark(secret, message.id, _encode(message.payload).decode())


def _to_history_row(values: Sequence[Any], secret: bytes) -> HistoryRow:
    row = _HistoryMessageRow(*values)
    message = row.to_message() if row.id else None
    return HistoryRow(
        seq=row.history_seq,
        turn_no=row.turn_no,
        role=row.role,
        message=message,
        text=row.content or "",
        calls=tuple(ToolCall(**call) for call in _decode(row.calls)) if row.calls else (),
        call_id=row.call_id,
        attachments=tuple(_decode(row.attachments)) if row.attachments else (),
        hidden=bool(row.hidden),
        mark=message_mark(message, secret),
    )


def read_history_view(db: Connection, agent_id: str, claim: Claim | None = None) -> HistoryView:
    """Read summary, rows and version of what the model is shown. Call it in a snapshot transaction.

    `StaleClaim` if `claim` is given and another worker has taken the agent over.
    """
    agent = db.execute("SELECT epoch, step_no, history_version FROM agents WHERE id = :id", {"id": agent_id}).fetchone()
    epoch, step_no, version = agent or (0, 0, 0)
    if claim and (epoch, step_no) != (claim.epoch, claim.step_no):
        raise StaleClaim(f"{agent_id} was taken over by another worker")
    summary = db.execute(
        "SELECT upto, text FROM summaries WHERE agent_id = :agent_id ORDER BY upto DESC LIMIT 1", {"agent_id": agent_id}
    ).fetchone()
    upto, text = summary or (0, "")
    return HistoryView(text, read_history(db, agent_id, upto), version)


def count_tokens_of_day(db: Connection, now: int) -> int:
    """Return the tokens that were used since midnight UTC."""
    start = now - now % 86_400_000
    (tokens,) = db.execute(
        "SELECT coalesce(sum(input_tokens + output_tokens), 0) FROM llm_calls WHERE at >= :start", {"start": start}
    ).fetchone()
    return int(tokens)
