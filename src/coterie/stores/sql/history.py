"""An agent's history, read back: all of it, or what its model is shown."""

from __future__ import annotations

from typing import Any

import msgspec

from coterie.ids import frame_mark
from coterie.llm.chat import Call
from coterie.messages import Message
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import M_MESSAGE, to_message
from coterie.stores.sql.secret import read_secret
from coterie.turns import Claim, HistoryRow, StaleOwner, View

_decode = msgspec.json.decode
_encode = msgspec.json.Encoder(order="deterministic").encode


def history(db: Connection, agent_id: str, after: int) -> list[HistoryRow]:
    secret = read_secret(db)
    rows = db.execute(
        f"SELECT h.seq, h.turn_no, h.role, h.content, h.calls, h.call_id, h.hidden, {M_MESSAGE}"
        " FROM history h LEFT JOIN messages m ON m.id = h.message_id"
        " WHERE h.agent_id = ? AND h.seq > ? ORDER BY h.seq",
        (agent_id, after),
    )
    return [_history_row(row, secret) for row in rows]


def mark_of(message: Message | None, secret: bytes) -> str:
    """The mark that encloses the message in requests; empty for rows that are no message."""
    if message is None:
        return ""
    return frame_mark(secret, message.id, _encode(message.payload).decode())


def _history_row(row: tuple[Any, ...], secret: bytes) -> HistoryRow:
    seq, turn_no, role, content, calls, call_id, hidden = row[:7]
    message = to_message(row[7:]) if row[7] is not None else None
    return HistoryRow(
        seq=seq,
        turn_no=turn_no,
        role=role,
        message=message,
        text=content or "",
        calls=tuple(Call(**call) for call in _decode(calls)) if calls else (),
        call_id=call_id,
        hidden=bool(hidden),
        mark=mark_of(message, secret),
    )


def view(db: Connection, agent_id: str, claim: Claim | None = None) -> View:
    """Must run in one snapshot: the version belongs to the rows that are read with it."""
    found = db.execute("SELECT epoch, step_no, history_version FROM agents WHERE id = ?", (agent_id,)).fetchone()
    epoch, step_no, version = found or (0, 0, 0)
    if claim and (epoch, step_no) != (claim.epoch, claim.step_no):
        raise StaleOwner(f"{agent_id} was taken over by another worker")
    row = db.execute("SELECT upto, text FROM summaries WHERE agent_id = ? ORDER BY upto DESC LIMIT 1", (agent_id,))
    upto, text = row.fetchone() or (0, "")
    return View(text, history(db, agent_id, upto), version)


def tokens_since(db: Connection, start: int) -> int:
    row = db.execute("SELECT coalesce(sum(input_tokens + output_tokens), 0) FROM llm_calls WHERE at >= ?", (start,))
    return int(row.fetchone()[0])
