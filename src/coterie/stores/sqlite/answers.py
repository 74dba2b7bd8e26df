"""Answers unwind like a call stack: the text that ends a turn goes to whoever asked for it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import msgspec

from coterie.agent.turn import Reply
from coterie.drafts import seal
from coterie.errors import Refused
from coterie.messages import SYSTEM
from coterie.stores.sqlite.post import Post

_MESSAGE = "SELECT id, sender, automatic, in_reply_to, cause FROM messages WHERE id = ?"


def answer(db: sqlite3.Connection, post: Post, agent_id: str, turn_no: int, reply: Reply) -> None:
    """Send `reply` to each asker of the turn, once, as the answer to the newest thing they said."""
    if not reply.text.strip():
        return
    for asker, message_id in _askers(db, agent_id, turn_no).items():
        if reply.trouble:
            _send(post, SYSTEM, asker, {"text": reply.text, "problem": {"agent": agent_id}}, message_id)
        elif not _told_already(db, agent_id, asker, turn_no, reply.text):
            _send(post, agent_id, asker, {"text": reply.text}, message_id, stopped=reply.stopped)


def _send(
    post: Post, sender: str, to: str, payload: dict[str, object], message_id: str, *, stopped: bool = False
) -> None:
    envelope = seal(sender=sender, to=to, payload=payload, in_reply_to=message_id, cause=message_id)
    try:
        post.accept(envelope, automatic=True, stopped=stopped)
    except Refused as refusal:
        # Nobody may be left without knowing: what cannot be answered is kept as a dead letter.
        post.bury_unsent(envelope, refusal.code)


def _askers(db: sqlite3.Connection, agent_id: str, turn_no: int) -> dict[str, str]:
    """Who asked, with the newest message each is waiting for an answer to."""
    rows = db.execute(
        "SELECT message_id FROM history WHERE agent_id = ? AND turn_no = ? AND message_id IS NOT NULL ORDER BY seq",
        (agent_id, turn_no),
    ).fetchall()
    asked: dict[str, str] = {}
    for (message_id,) in rows:
        for asker, asked_in in _asker_behind(db, agent_id, message_id):
            asked[asker] = asked_in
    return {asker: asked_in for asker, asked_in in asked.items() if asker not in (agent_id, SYSTEM)}


def _asker_behind(db: sqlite3.Connection, agent_id: str, message_id: str) -> Iterator[tuple[str, str]]:
    """The sender of an explicit message; behind an automatic answer, whoever made this agent ask."""
    seen: set[str] = set()
    next_id: str | None = message_id
    while next_id is not None and next_id not in seen:
        seen.add(next_id)
        row = db.execute(_MESSAGE, (next_id,)).fetchone()
        if row is None:
            return
        id_, sender, automatic, in_reply_to, _ = row
        if not automatic:
            yield sender, id_
            return
        request = db.execute(_MESSAGE, (in_reply_to,)).fetchone() if in_reply_to else None
        next_id = request[4] if request and request[1] == agent_id else None


def _told_already(db: sqlite3.Connection, agent_id: str, asker: str, turn_no: int, text: str) -> bool:
    """A model that has just sent the same words with `send_message` need not say them twice."""
    rows = db.execute(
        # All plans of the turn: what begins with its number and a stroke, behind which the next letter is "0".
        "SELECT payload FROM messages WHERE sender = ? AND plan >= ? AND plan < ? AND recipient = ?",
        (agent_id, f"{turn_no}/", f"{turn_no}0", asker),
    ).fetchall()
    return any(msgspec.json.decode(row[0]).get("text") == text for row in rows)
