"""Database rows as messages, agents and artifacts: their columns and conversions."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from coterie.agents import CLAIMED_STATES, Agent
from coterie.artifacts import Artifact
from coterie.clock import from_ms
from coterie.messages import Message, Payload, QuestionAnswer
from coterie.stores.sql.connection import Connection

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
log = logging.getLogger(__name__)
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
