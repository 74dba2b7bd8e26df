"""The connection that both engines provide, bulk inserts, the `meta` table, and conversion of rows to objects.

SQL uses SQLite's parameters: `?`, `?1`. A comment with a plus, `/*+ FOR UPDATE */`, holds what several writers need:
SQLite ignores the comment, and the PostgreSQL engine turns it into SQL.

The society's secret is one random row of `meta` that never changes. Message ids and the marks around messages in a
model's request are hashed with it. It leaves the database only in a backup or a copy of the whole society.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol

import msgspec

from coterie.agents import CLAIMED_STATES, Agent
from coterie.artifacts import Artifact
from coterie.clock import from_ms
from coterie.ids import new_secret
from coterie.messages import Message, Payload, QuestionAnswer

log = logging.getLogger(__name__)


class Rows(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    @property
    def Error(self) -> type[Exception]: ...  # noqa: N802 - the names of the DB-API

    @property
    def IntegrityError(self) -> type[Exception]: ...  # noqa: N802

    @property
    def OperationalError(self) -> type[Exception]: ...  # noqa: N802

    def execute(self, sql: str, parameters: Any = ..., /) -> Rows: ...

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> object:
        """Run `sql` once per row. It has no result and may run together with the next statement."""
        ...


def get_meta(db: Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None


def set_meta(db: Connection, key: str, value: str) -> str:
    db.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )
    return value


ROWS_PER_INSERT = (64, 8, 4, 3, 2, 1)
"""Rows of one INSERT. Few sizes, so that every statement stays prepared."""


def insert(db: Connection, into: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert `rows` into `into`, a table with its columns: `events (at, kind)`.

    One INSERT of many rows holds the interpreter lock once; `executemany` takes it once per row. A connection with a
    faster way has a method `insert_rows`.
    """
    if len(rows) == 1:
        db.execute(_statement(into, len(rows[0]), 1), rows[0])
        return
    if rows and (insert_rows := getattr(db, "insert_rows", None)):
        insert_rows(into, rows)
        return
    done = 0
    for size in ROWS_PER_INSERT if rows else ():
        while len(rows) - done >= size:
            part = rows[done : done + size]
            db.execute(_statement(into, len(part[0]), size), tuple(chain.from_iterable(part)))
            done += size


@cache
def _statement(into: str, width: int, size: int) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * size)}"


def read_secret(db: Connection) -> bytes:
    """Return the secret; random bytes if an old database, opened for reading only, has none."""
    value = get_meta(db, "secret")
    return value.encode() if value is not None else os.urandom(32)


def make_secret(db: Connection) -> bytes:
    """Return the secret; create it if it is missing. Call it when a store opens, outside any other transaction."""
    db.execute("INSERT INTO meta (key, value) VALUES ('secret', ?) ON CONFLICT (key) DO NOTHING", (new_secret(),))
    return read_secret(db)


MESSAGE_COLUMNS = (
    "seq, id, sender, recipient, CAST(payload AS BLOB), state, created_at, deliver_at, delivered_at, taken_at, in_seq,"
    " in_reply_to, option, cause, hops, early, stopped, reason, replay_of, answered_by, answered_option"
)
"""The payload as bytes: one that is not valid UTF-8 must not make the other rows unreadable."""
JOINED_MESSAGE_COLUMNS = ", ".join(f"m.{column.strip()}" for column in MESSAGE_COLUMNS.split(",")).replace(
    "m.CAST(", "CAST(m."
)
"""The same for messages joined as `m`."""
SHOWN_STATE = """
CASE WHEN (SELECT paused FROM log) = 1 AND kind = 'agent'
          AND (state IN ('idle', 'ready', 'wait_retry')
               OR (state IN ('llm', 'tools') AND (worker IS NULL OR runnable_at = 0)))
     THEN 'paused' ELSE state END
"""
"""State of an agent as people see it. While the society is paused, agents that no worker runs are `paused`."""
AGENT_COLUMNS = (
    f"id, name, kind, {SHOWN_STATE}, waiting, delayed, parent, profile, since, why, tool, call_no, call_count, worker"
)
AGENTS_WITH_CALL = """
(SELECT a.*, c.name AS tool, c.idx + 1 AS call_no,
        (SELECT count(*) FROM calls n
          WHERE n.agent_id = c.agent_id AND n.turn_no = c.turn_no AND n.step_no = c.step_no) AS call_count
   FROM agents a
   LEFT JOIN plans p ON p.agent_id = a.id AND p.outcome = 'open'
   LEFT JOIN calls c ON c.agent_id = p.agent_id AND c.turn_no = p.turn_no AND c.step_no = p.step_no
                    AND c.state IN ('started', 'gated')) AS at_work
"""
"""Agents with the call that runs or waits for approval; each has at most one."""
ARTIFACT_COLUMNS = "ref, filename, type, mime_type, size, sha256, created_at"
IS_READABLE_BY = """
(maker = ? OR EXISTS (SELECT 1 FROM attachments t JOIN messages m ON m.seq = t.message_seq
                       WHERE t.artifact_ref = artifacts.ref AND m.recipient = ? AND m.state = 'taken'))
"""
"""True if an agent, given twice, made the artifact or took a message with it."""
# Each half of the UNION uses its own index.
SELECT_READABLE_ARTIFACTS = f"""
SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE ref IN (
    SELECT ref FROM artifacts WHERE maker = ?1
     UNION
    SELECT t.artifact_ref FROM messages m JOIN attachments t ON t.message_seq = m.seq
     WHERE m.recipient = ?1 AND m.in_seq IS NOT NULL AND m.state = 'taken')
 ORDER BY created_at DESC, ref DESC LIMIT ?2
"""

DAMAGED_TEXT = "[This message is damaged: what it said is lost.]"
_decode = msgspec.json.Decoder(Payload).decode


def to_message(row: tuple[Any, ...]) -> Message:
    (seq, id_, sender, to, payload, state, created_at, deliver_at, delivered_at, taken_at, in_seq, in_reply_to,
     option, cause, hops, early, stopped, reason, replay_of, answered_by, answered_option) = row  # fmt: skip
    return Message(
        seq=seq,
        id=id_,
        sender=sender,
        to=to,
        payload=to_payload(id_, payload),
        state=state,
        created_at=from_ms(created_at),
        deliver_at=None if deliver_at is None else from_ms(deliver_at),
        delivered_at=None if delivered_at is None else from_ms(delivered_at),
        taken_at=None if taken_at is None else from_ms(taken_at),
        mailbox_position=in_seq,
        in_reply_to=in_reply_to,
        option=option,
        cause=cause,
        hops=hops,
        early=bool(early),
        stopped=bool(stopped),
        reason=reason,
        replay_of=replay_of,
        answer=QuestionAnswer(answered_by, answered_option) if answered_by is not None else None,
    )


def to_payload(message_id: str, stored: str | bytes) -> Payload:
    try:
        return _decode(stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # One damaged message must not make the others unreadable.
        log.error(
            "the stored message %s is damaged (%s): restore a backup with coterie restore FILE", message_id, error
        )
        return {"text": DAMAGED_TEXT}


def to_agent(row: tuple[Any, ...]) -> Agent:
    (id_, name, kind, state, waiting, delayed, parent, profile, since, why, tool, call_no, call_count, worker) = row
    return Agent(
        id=id_,
        name=name,
        kind=kind,
        state=state,
        waiting=waiting,
        delayed=delayed,
        parent=parent,
        profile=profile,
        state_since=None if since is None else from_ms(since),
        state_reason=why,
        tool=tool,
        tool_position=None if tool is None else (call_no, call_count),
        worker=worker if state in CLAIMED_STATES else None,
    )


def to_artifact(row: tuple[Any, ...]) -> Artifact:
    ref, filename, type_, mime_type, size, sha256, created_at = row
    return Artifact(
        ref=ref,
        filename=filename,
        type=type_,
        mime_type=mime_type,
        size=size,
        sha256=sha256,
        created_at=from_ms(created_at),
    )


def find_message(db: Connection, message_id: str) -> Message | None:
    row = db.execute(f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE id = ?", (message_id,)).fetchone()
    return row and to_message(row)
