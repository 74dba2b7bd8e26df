"""Read queries: threads, open questions, the snapshot, tool runs, usage, statistics and histories.

They run on a reader. Numbers for `/metrics` are counted when they are read, so that writes do not pay for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import msgspec

from coterie.artifacts import Artifact
from coterie.clock import UNIX_EPOCH, from_ms
from coterie.errors import Refused
from coterie.ids import frame_mark
from coterie.llm.types import ToolCall
from coterie.messages import Message
from coterie.store import MAX_LISTED, CallRecord, Page, PlanRecord, Snapshot, Statistics, Thread, Usage
from coterie.stores.sql.rows import (
    AGENT_COLUMNS,
    AGENTS_WITH_CALL,
    ARTIFACT_COLUMNS,
    JOINED_MESSAGE_COLUMNS,
    MESSAGE_COLUMNS,
    SHOWN_STATE,
    Connection,
    read_secret,
    to_agent,
    to_artifact,
    to_message,
)
from coterie.stores.sql.session import SELECT_PAUSED
from coterie.turn_store import Claim, HistoryRow, HistoryView, StaleClaim

ThreadPosition = tuple[int, int]
"""`delivered_at` and `seq` of a message. Threads are ordered by delivery."""
_END: ThreadPosition = (1 << 62, 1 << 62)
_UP_TO = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE thread = ? AND delivered_at IS NOT NULL AND (delivered_at, seq) <= (?, ?)
 ORDER BY delivered_at DESC, seq DESC LIMIT ?
"""
_AFTER = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE thread = ? AND delivered_at IS NOT NULL AND (delivered_at, seq) > (?, ?)
 ORDER BY delivered_at, seq LIMIT ?
"""
_IS_OPEN = """
question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken')
"""
_UNREAD = "SELECT count(*) FROM messages WHERE thread = ? AND sender <> 'user' AND state = 'pending'"


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


def count_unread(db: Connection, agent_id: str) -> int:
    (count,) = db.execute(_UNREAD, (agent_id,)).fetchone()
    return int(count)


def read_open_questions(db: Connection, agent_id: str | None, limit: int) -> list[Message]:
    rows = db.execute(
        f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE {_IS_OPEN} AND (?1 IS NULL OR sender = ?1)"
        " ORDER BY delivered_at DESC, seq DESC LIMIT ?2",
        (agent_id, limit),
    )
    return [to_message(row) for row in rows]


def count_open_questions(db: Connection) -> int:
    return int(db.execute(f"SELECT count(*) FROM messages WHERE {_IS_OPEN}").fetchone()[0])


def _up_to(db: Connection, agent_id: str, position: ThreadPosition, limit: int) -> list[Message]:
    return [to_message(row) for row in db.execute(_UP_TO, (agent_id, *position, limit))][::-1]


def _after(db: Connection, agent_id: str, position: ThreadPosition, limit: int) -> list[Message]:
    return [to_message(row) for row in db.execute(_AFTER, (agent_id, *position, limit))]


def thread_position(db: Connection, thread: str | None, message_id: str) -> ThreadPosition:
    """Return the position of a message, or raise `Refused` if it is not in `thread`. None: notices of no agent."""
    row = db.execute("SELECT delivered_at, seq, thread FROM messages WHERE id = ?", (message_id,)).fetchone()
    if row is None or row[0] is None or row[2] != thread:
        raise Refused("unknown_message", f"there is no message {message_id!r} in this conversation")
    return int(row[0]), int(row[1])


_COUNTS = """
SELECT count(*), coalesce(sum(waiting), 0), (SELECT coalesce(sum(delayed), 0) FROM agents) FROM agents
 WHERE kind = 'agent'
"""
_LAST_OF_THREAD = """
(SELECT seq FROM messages WHERE thread = a.id AND delivered_at IS NOT NULL
  ORDER BY delivered_at DESC, seq DESC LIMIT 1)
"""
_UNREAD_OF_AGENT = "messages u WHERE u.thread = a.id AND u.sender <> 'user' AND u.state = 'pending'"
_THREADS = f"""
SELECT {JOINED_MESSAGE_COLUMNS}, a.id, (SELECT count(*) FROM {_UNREAD_OF_AGENT}),
       (SELECT u.id FROM {_UNREAD_OF_AGENT} ORDER BY u.delivered_at, u.seq LIMIT 1)
  FROM agents a JOIN messages m ON m.seq = {_LAST_OF_THREAD}
 ORDER BY m.delivered_at DESC, m.seq DESC LIMIT ?
"""
_THREAD_COUNT = f"SELECT count({_LAST_OF_THREAD}) FROM agents a"
# Agents come first in the join: few have waiting messages, and an index has those of one agent together.
_QUEUES = f"""
SELECT {JOINED_MESSAGE_COLUMNS} FROM agents a CROSS JOIN messages m
 WHERE a.kind = 'agent' AND a.waiting > 0 AND m.recipient = a.id AND m.in_seq > a.taken_seq AND m.state = 'pending'
 ORDER BY a.id, m.in_seq LIMIT ?
"""
_DELAYED = f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE state = 'delayed' ORDER BY deliver_at, seq LIMIT ?"
_AGENTS = (
    f"SELECT {AGENT_COLUMNS} FROM {AGENTS_WITH_CALL} WHERE kind = 'agent' ORDER BY state = 'terminated', id LIMIT ?"
)


def read_snapshot(db: Connection) -> Snapshot:
    """Read everything that the panel shows first. Call it in a snapshot transaction."""
    (seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
    agent_count, queue_count, delayed_count = db.execute(_COUNTS).fetchone()
    (thread_count,) = db.execute(_THREAD_COUNT).fetchone()
    return Snapshot(
        seq=seq,
        paused=bool(db.execute(SELECT_PAUSED).fetchone()[0]),
        agents=[to_agent(row) for row in db.execute(_AGENTS, (MAX_LISTED,))],
        agent_count=agent_count,
        threads=_threads(db),
        thread_count=thread_count,
        queues=_messages(db, _QUEUES),
        queue_count=queue_count,
        delayed=_messages(db, _DELAYED),
        delayed_count=delayed_count,
        open_questions=read_open_questions(db, None, MAX_LISTED),
        question_count=count_open_questions(db),
    )


def _threads(db: Connection) -> list[Thread]:
    return [
        Thread(agent_id=agent_id, last=to_message(tuple(last)), unread=unread, first_unread=first_unread)
        for *last, agent_id, unread, first_unread in db.execute(_THREADS, (MAX_LISTED,))
    ]


def _messages(db: Connection, sql: str) -> list[Message]:
    return [to_message(row) for row in db.execute(sql, (MAX_LISTED,))]


_PLAN = "seq, agent_id, turn_no, step_no, text, outcome, interrupted_by, at"
_PLANS = f"SELECT {_PLAN} FROM plans WHERE ?1 IS NULL OR seq < ?1 ORDER BY seq DESC LIMIT ?2"
# The same order, but along the index of one agent's plans.
_PLANS_OF = f"""
SELECT {_PLAN} FROM plans WHERE agent_id = ?3 AND (?1 IS NULL OR seq < ?1)
 ORDER BY turn_no DESC, step_no DESC LIMIT ?2
"""
_CALLS = """
SELECT call_id, name, arguments, state, result, started_at, ended_at FROM calls
 WHERE agent_id = ? AND turn_no = ? AND step_no = ? ORDER BY idx
"""
_USAGE = """
SELECT at / 86400000 AS day, agent_id, service, count(*), count(*) FILTER (WHERE outcome = 'withdrawn'),
       sum(input_tokens), sum(output_tokens),
       coalesce(sum(input_tokens + output_tokens) FILTER (WHERE estimated = 1), 0)
  FROM llm_calls WHERE at >= ? GROUP BY day, agent_id, service ORDER BY day DESC, agent_id, service
"""
MAX_WORDS, MAX_WORD_CHARS = 16, 200


def read_runs(db: Connection, page: Page, agent_id: str | None) -> list[PlanRecord]:
    if agent_id is None:
        plans = db.execute(_PLANS, (page.before, page.limit)).fetchall()
    else:
        plans = db.execute(_PLANS_OF, (page.before, page.limit, agent_id)).fetchall()
    return [_to_plan(row, db.execute(_CALLS, row[1:4])) for row in plans]


def read_usage(db: Connection, since: int) -> list[Usage]:
    return [
        Usage(
            day=(UNIX_EPOCH + timedelta(days=day)).strftime("%Y-%m-%d"),
            agent_id=agent_id,
            service=service,
            requests=requests,
            withdrawn=withdrawn,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            estimated_tokens=estimated_tokens,
        )
        for day, agent_id, service, requests, withdrawn, input_tokens, output_tokens, estimated_tokens in db.execute(
            _USAGE, (since,)
        )
    ]


def like_patterns(words: str) -> list[str]:
    """Return one LIKE pattern per word. A text that matches all of them contains all words."""
    return [f"%{_escaped(word[:MAX_WORD_CHARS])}%" for word in words.casefold().split()[:MAX_WORDS]]


def read_artifacts_before(db: Connection, ref: str | None, limit: int) -> list[Artifact]:
    position: tuple[Any, ...] = (1 << 62, "")
    if ref is not None:
        position = db.execute("SELECT created_at, ref FROM artifacts WHERE ref = ?", (ref,)).fetchone()
        if position is None:
            raise Refused("unknown_artifact", f"there is no artifact {ref!r}")
    rows = db.execute(
        f"SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE (created_at, ref) < (?, ?)"
        " ORDER BY created_at DESC, ref DESC LIMIT ?",
        (*position, limit),
    )
    return [to_artifact(row) for row in rows]


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _to_plan(row: tuple[Any, ...], calls: Iterable[tuple[Any, ...]]) -> PlanRecord:
    seq, agent_id, turn_no, step_no, text, outcome, interrupted_by, at = row
    return PlanRecord(
        seq=seq,
        agent_id=agent_id,
        turn_no=turn_no,
        step_no=step_no,
        text=text,
        outcome=outcome,
        interrupted_by=interrupted_by,
        at=from_ms(at),
        calls=[_to_call(*call) for call in calls],
    )


def _to_call(
    call_id: str, name: str, arguments: str, state: str, result: str, started_at: int | None, ended_at: int | None
) -> CallRecord:
    return CallRecord(
        call_id=call_id,
        name=name,
        arguments=arguments,
        state=state,
        result=result,
        started_at=None if started_at is None else from_ms(started_at),
        ended_at=None if ended_at is None else from_ms(ended_at),
    )


def read_statistics(db: Connection, after: int) -> Statistics:
    events = db.execute("SELECT kind, count(*), max(seq) FROM events WHERE seq > ? GROUP BY kind", (after,)).fetchall()
    turns, waiting, fullest, delayed = db.execute(
        "SELECT coalesce(sum(turn_no), 0), coalesce(sum(waiting), 0), coalesce(max(waiting), 0),"
        " coalesce(sum(delayed), 0) FROM agents WHERE kind = 'agent'"
    ).fetchone()
    (withdrawn,) = db.execute("SELECT count(*) FROM plans WHERE outcome = 'withdrawn'").fetchone()
    return Statistics(
        seq=max((seq for _, _, seq in events), default=after),
        events={kind: count for kind, count, _ in events},
        turns=int(turns),
        model_calls=dict(db.execute("SELECT outcome, count(*) FROM llm_calls GROUP BY outcome").fetchall()),
        tool_calls=dict(db.execute("SELECT state, count(*) FROM calls GROUP BY state").fetchall()),
        withdrawn_plans=withdrawn,
        waiting=int(waiting),
        largest_mailbox=fullest,
        delayed=int(delayed),
        agents=dict(
            db.execute(f"SELECT {SHOWN_STATE}, count(*) FROM agents WHERE kind = 'agent' GROUP BY 1").fetchall()
        ),
    )


_decode = msgspec.json.decode
_encode = msgspec.json.Encoder(order="deterministic").encode


def read_history(db: Connection, agent_id: str, after: int) -> list[HistoryRow]:
    secret = read_secret(db)
    rows = db.execute(
        f"SELECT h.seq, h.turn_no, h.role, h.content, h.calls, h.call_id, h.hidden, {JOINED_MESSAGE_COLUMNS}"
        " FROM history h LEFT JOIN messages m ON m.id = h.message_id"
        " WHERE h.agent_id = ? AND h.seq > ? ORDER BY h.seq",
        (agent_id, after),
    )
    return [_to_history_row(row, secret) for row in rows]


def message_mark(message: Message | None, secret: bytes) -> str:
    """Return the mark that encloses the message in model requests. Empty for other rows."""
    if message is None:
        return ""
    return frame_mark(secret, message.id, _encode(message.payload).decode())


def _to_history_row(row: tuple[Any, ...], secret: bytes) -> HistoryRow:
    seq, turn_no, role, content, calls, call_id, hidden = row[:7]
    message = to_message(row[7:]) if row[7] is not None else None
    return HistoryRow(
        seq=seq,
        turn_no=turn_no,
        role=role,
        message=message,
        text=content or "",
        calls=tuple(ToolCall(**call) for call in _decode(calls)) if calls else (),
        call_id=call_id,
        hidden=bool(hidden),
        mark=message_mark(message, secret),
    )


def read_history_view(db: Connection, agent_id: str, claim: Claim | None = None) -> HistoryView:
    """Read summary, rows and version of what the model is shown. Call it in a snapshot transaction.

    `StaleClaim` if `claim` is given and another worker has taken the agent over.
    """
    agent = db.execute("SELECT epoch, step_no, history_version FROM agents WHERE id = ?", (agent_id,)).fetchone()
    epoch, step_no, version = agent or (0, 0, 0)
    if claim and (epoch, step_no) != (claim.epoch, claim.step_no):
        raise StaleClaim(f"{agent_id} was taken over by another worker")
    row = db.execute("SELECT upto, text FROM summaries WHERE agent_id = ? ORDER BY upto DESC LIMIT 1", (agent_id,))
    upto, text = row.fetchone() or (0, "")
    return HistoryView(text, read_history(db, agent_id, upto), version)


def count_tokens_since(db: Connection, start: int) -> int:
    row = db.execute("SELECT coalesce(sum(input_tokens + output_tokens), 0) FROM llm_calls WHERE at >= ?", (start,))
    return int(row.fetchone()[0])
