"""Compares the work of agents with their stored histories. Plain SQL, independent of the store's code."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from coterie.messages import PERSON, SYSTEM
from coterie.stores.sql.rows import read_secret
from coterie.stores.sql.turn_rows import APPROVE, approval_question_id
from coterie.turn import DENIED_RESULT, INTERRUPTED_RESULT

from .fake_model import BLOCKING
from .requests import seen_of_requests, wrong_requests
from .verifier import Verification, message_id, open_database
from .witness import Note

MAY_HAVE_RUN = {"done": (1, 1), "failed": (1, 1), "unknown": (0, 1), "cancelled": (0, 0)}
"""How often a call that ended so has really begun, at least and at most, when it cannot be undone."""
DEEDS = ("look", "put", "fire", "pay")


class WorkVerification(Verification):
    """Of one folder, after all its agents have come to rest."""

    arrived = "taken"

    def __init__(self, folder: Path, notes: list[Note]) -> None:
        super().__init__(folder, notes)
        with open_database(folder) as db:
            db.row_factory = sqlite3.Row
            self.problems += wrong_histories(db) + wrong_answers(db) + wrong_effects(db, notes) + wrong_letters(db)
            self.problems += wrong_approvals(db, notes) + repeated_notices(db)
            self._count(db)
        self.problems += wrong_requests(notes)
        self.seen += seen_of_requests(notes)

    def _count(self, db: sqlite3.Connection) -> None:
        counts = {
            "unknown outcomes": "SELECT count(*) FROM calls WHERE state = 'unknown'",
            "withdrawn plans": "SELECT count(*) FROM plans WHERE outcome = 'withdrawn'",
            "plans closed in the middle": "SELECT count(*) FROM (SELECT 1 FROM calls JOIN plans p"
            " USING (agent_id, turn_no, step_no) WHERE p.outcome = 'closed' GROUP BY agent_id, turn_no, step_no"
            " HAVING sum(state = 'cancelled') AND sum(state <> 'cancelled'))",
            "closed plans": "SELECT count(*) FROM plans WHERE outcome = 'closed'",
            "turns": "SELECT sum(turn_no) FROM agents",
            "turns set aside": "SELECT count(DISTINCT agent_id || turn_no) FROM history WHERE hidden",
            "answers": "SELECT count(*) FROM messages WHERE automatic",
            "summaries": "SELECT count(*) FROM summaries",
            "letters of agents": "SELECT count(*) FROM messages WHERE plan IS NOT NULL",
        }
        for what, sql in counts.items():
            self.seen[what] += db.execute(sql).fetchone()[0] or 0
        self.seen["blocked agents"] += len({row["payload"] for row in _notices(db)})
        self.seen += Counter(what for _, what in _approvals(db))
        asked = Counter(note["seen"] for note in self._notes if "asks" in note)
        self.seen["requests"] += asked.total()
        self.seen["requests made again"] += asked.total() - len(asked)
        began = began_by_key(self._notes)
        self.seen["calls run again"] += began.total() - len(began)


def wrong_histories(db: sqlite3.Connection) -> list[str]:
    """Every message that reached an agent stands in its history once, in the order of its mailbox."""
    rows = db.execute(
        "SELECT m.id, m.recipient, m.in_seq, m.state, count(h.seq) AS times, min(h.seq) AS place FROM messages m"
        " JOIN agents a ON a.id = m.recipient AND a.kind = 'agent' LEFT JOIN history h"
        " ON h.message_id = m.id AND h.agent_id = m.recipient"
        " WHERE m.state NOT IN ('withdrawn', 'dead') GROUP BY m.id ORDER BY m.recipient, m.in_seq"
    ).fetchall()
    wrong, last = list[str](), defaultdict[str, int](int)
    for row in rows:
        if row["times"] != 1:
            wrong.append(f"message {row['id']} ({row['state']}) stands {row['times']} times in the history")
        elif row["place"] <= last[row["recipient"]]:
            wrong.append(f"message {row['id']} stands in the history before one that came earlier")
        else:
            last[row["recipient"]] = row["place"]
    return wrong


def wrong_effects(db: sqlite3.Connection, notes: list[Note]) -> list[str]:
    """What cannot be undone has happened once at most, and what was not to happen has not."""
    began, calls = began_by_key(notes), _calls(db)
    wrong = [f"{key} ran, and no plan knows of it" for key in began.keys() - calls.keys()]
    for key, row in calls.items():
        least, most = MAY_HAVE_RUN[row["state"]]
        if most and row["effect"] != "unsafe":
            most = began[key]  # such a call may run again
        if row["name"] in DEEDS and not least <= began[key] <= most:
            wrong.append(f"the {row['effect']} call {key} is {row['state']} and ran {began[key]} times")
    return wrong


def wrong_approvals(db: sqlite3.Connection, notes: list[Note]) -> list[str]:
    """A gated call has run only if the person's first word on that very call allowed it."""
    first: dict[str, int] = {}
    for row in db.execute("SELECT in_reply_to, option FROM messages WHERE option IS NOT NULL ORDER BY in_seq"):
        first.setdefault(row["in_reply_to"], row["option"])
    said = {(note["question"], note["option"]) for note in notes if "question" in note}
    began, wrong = began_by_key(notes), list[str]()
    for key, row in _calls(db).items():
        question = approval_question_id(row["agent_id"], row["call_id"])
        allowed = first.get(question) == APPROVE and (question, APPROVE) in said
        if row["gated"] and began[key] and not allowed:
            wrong.append(f"{key} ran, though the person did not allow it")
    return wrong


def _approvals(db: sqlite3.Connection) -> list[tuple[str, str]]:
    """Each gated call that the person was asked about, and what became of it."""
    asked = {row["id"] for row in db.execute("SELECT id FROM messages WHERE recipient = ?", (PERSON,))}
    became = {DENIED_RESULT: "approvals denied", INTERRUPTED_RESULT: "approvals voided"}
    return [
        (key, became.get(row["result"], "approvals granted"))
        for key, row in _calls(db).items()
        if row["gated"] and approval_question_id(row["agent_id"], row["call_id"]) in asked
    ]


def repeated_notices(db: sqlite3.Connection) -> list[str]:
    """Each time that an agent is blocked, whoever waits for it is told once."""
    notices = Counter((row["recipient"], json.loads(row["payload"])["text"]) for row in _notices(db))
    return [f"{who} was told {times} times: {text}" for (who, text), times in notices.items() if times > 1]


def _notices(db: sqlite3.Connection) -> list[sqlite3.Row]:
    rows = db.execute("SELECT * FROM messages WHERE sender = ? AND automatic", (SYSTEM,)).fetchall()
    return [row for row in rows if _tells_of_a_block(row)]


def _tells_of_a_block(row: sqlite3.Row) -> bool:
    """Such a turn is not over: its answer is still to come."""
    return row["sender"] == SYSTEM and str(json.loads(row["payload"])["text"]).startswith(BLOCKING)


def wrong_letters(db: sqlite3.Connection) -> list[str]:
    """What an agent sends exists exactly when the result of the call does."""
    sent, secret = {row["id"] for row in db.execute("SELECT id FROM messages")}, read_secret(db)
    return [
        f"{key} is {row['state']}, but its message is {'there' if row['state'] != 'done' else 'missing'}"
        for key, row in _calls(db).items()
        if row["name"] == "send_message"
        and (message_id(secret, row["agent_id"], key) in sent) != (row["state"] == "done")
    ]


def wrong_answers(db: sqlite3.Connection) -> list[str]:
    """Whoever asked has one answer, or one notice of a failure, for each turn that was about it; and no more."""
    db.row_factory = sqlite3.Row
    messages = {row["id"]: row for row in db.execute("SELECT * FROM messages")}
    due: Counter[tuple[str, str, str]] = Counter()
    for agent, asked in _turns(db, messages):
        due.update((agent, asker, message) for asker, message in asked.items() if asker not in (agent, SYSTEM))
    given = Counter(
        (_speaker(row), row["recipient"], row["in_reply_to"])
        for row in messages.values()
        if row["automatic"] and not _tells_of_a_block(row)
    )
    missing = [f"{asker} got no answer of {agent} to {message}" for agent, asker, message in due - given]
    return missing + [f"{agent} answered {asker} too often on {message}" for agent, asker, message in given - due]


def _turns(db: sqlite3.Connection, messages: dict[str, sqlite3.Row]) -> list[tuple[str, dict[str, str]]]:
    """Each turn's agent, and of everybody who waits for what comes of it the message that it answers."""
    history = db.execute("SELECT * FROM history ORDER BY agent_id, seq").fetchall()
    taken = {row["message_id"]: (row["agent_id"], row["turn_no"], row["seq"]) for row in history if row["message_id"]}
    spoken: defaultdict[tuple[str, int], int] = defaultdict(int)
    """The last row of each turn in which the agent said something without a call."""
    for row in history:
        if row["role"] == "assistant" and row["calls"] is None:
            spoken[row["agent_id"], row["turn_no"]] = row["seq"]
    turns: dict[tuple[str, int], dict[str, tuple[tuple[bool, bool, int], str]]] = defaultdict(dict)
    for taken_id, (agent, turn_no, seq) in taken.items():
        if (origin := _origin(agent, messages[taken_id], messages)) is None:
            continue
        is_own = origin["id"] == taken_id
        _, asked_in, place = taken.get(origin["id"], (agent, 0, 0))
        is_open = not is_own and spoken[agent, asked_in] < place
        # A message of the turn itself, else an earlier one without an answer, else the newest.
        candidate = ((is_own, is_open, seq if is_own else place), str(origin["id"]))
        asked = turns[agent, turn_no]
        asked[origin["sender"]] = max(candidate, asked.get(origin["sender"], candidate))
    return [(agent, {who: message for who, (_, message) in asked.items()}) for (agent, _), asked in turns.items()]


def _origin(agent: str, message: sqlite3.Row, messages: dict[str, sqlite3.Row]) -> sqlite3.Row | None:
    """The explicit message behind `message`: itself, or what made `agent` ask for the answer that it is."""
    while message["automatic"]:
        question = messages.get(message["in_reply_to"])
        if question is None or question["sender"] != agent or question["cause"] not in messages:
            return None
        message = messages[question["cause"]]
    return message


def _speaker(row: sqlite3.Row) -> str:
    payload: dict[str, Any] = json.loads(row["payload"])
    return str(payload["problem"]["agent"] if row["sender"] == SYSTEM else row["sender"])


def began_by_key(notes: list[Note]) -> Counter[str]:
    return Counter(note["key"] for note in notes if "did" in note)


def _calls(db: sqlite3.Connection) -> dict[str, sqlite3.Row]:
    """By the key that each was run under."""
    rows = db.execute("SELECT * FROM calls").fetchall()
    return {f"{row['agent_id']}/{row['turn_no']}/{row['step_no']}/{row['idx']}": row for row in rows}
