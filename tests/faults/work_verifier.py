"""Compares the work of agents with their stored histories. Plain SQL, independent of the store's code."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from coterie.messages import PERSON, SYSTEM
from coterie.plan import DENIED_RESULT, INTERRUPTED_RESULT
from coterie.stores.sql.rows import read_secret
from coterie.stores.sql.turn_rows import APPROVE, approval_question_id

from .fake_model import BLOCKING
from .requests import count_requests, wrong_requests
from .verifier import Verification, message_id, open_database
from .witness import Note

MAY_HAVE_RUN = {"done": (1, 1), "failed": (1, 1), "unknown": (0, 1), "cancelled": (0, 0)}
"""How often an unsafe call with this state has started, at least and at most."""
TEST_TOOLS = ("look", "put", "fire", "pay")


class WorkVerification(Verification):
    """Checks one folder after all agents became idle."""

    arrived = "taken"

    def __init__(self, folder: Path, notes: list[Note]) -> None:
        super().__init__(folder, notes)
        with open_database(folder) as db:
            db.row_factory = sqlite3.Row
            self.problems += (
                wrong_histories(db)
                + wrong_answers(db, self._may_be_stopped)
                + wrong_effects(db, notes)
                + wrong_tool_messages(db)
            )
            self.problems += wrong_approvals(db, notes) + repeated_notices(db) + wrong_stops(db, notes)
            self._count(db)
        self.problems += wrong_requests(notes)
        self.seen += count_requests(notes)

    def _count(self, db: sqlite3.Connection) -> None:
        counts = {
            "unknown outcomes": "SELECT count(*) FROM calls WHERE state = 'unknown'",
            "withdrawn plans": "SELECT count(*) FROM plans WHERE outcome = 'withdrawn'",
            "answers cut": "SELECT count(*) FROM plans p WHERE outcome = 'withdrawn'"
            " AND NOT EXISTS (SELECT 1 FROM calls c"
            " WHERE (c.agent_id, c.turn_no, c.step_no) = (p.agent_id, p.turn_no, p.step_no))",
            "plans closed in the middle": "SELECT count(*) FROM (SELECT 1 FROM calls JOIN plans p"
            " USING (agent_id, turn_no, step_no) WHERE p.outcome = 'closed' GROUP BY agent_id, turn_no, step_no"
            " HAVING sum(state = 'cancelled') AND sum(state <> 'cancelled'))",
            "closed plans": "SELECT count(*) FROM plans WHERE outcome = 'closed'",
            "turns": "SELECT sum(turn_no) FROM agents",
            "turns quarantined": "SELECT count(DISTINCT agent_id || turn_no) FROM history WHERE hidden",
            "answers": "SELECT count(*) FROM messages WHERE automatic",
            "summaries": "SELECT count(*) FROM summaries",
            "messages of agents": "SELECT count(*) FROM messages WHERE plan IS NOT NULL",
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
    """Messages that are not in the history exactly once, in mailbox order."""
    rows = db.execute(
        "SELECT m.id, m.recipient, m.in_seq, m.state, count(h.seq) AS times, min(h.seq) AS place FROM messages m"
        " JOIN agents a ON a.id = m.recipient AND a.kind = 'agent' LEFT JOIN history h"
        " ON h.message_id = m.id AND h.agent_id = m.recipient"
        " WHERE m.state NOT IN ('withdrawn', 'dead') GROUP BY m.id ORDER BY m.recipient, m.in_seq"
    ).fetchall()
    wrong, last = list[str](), defaultdict[str, int](int)
    for row in rows:
        if row["times"] != 1:
            wrong.append(f"message {row['id']} ({row['state']}) is {row['times']} times in the history")
        elif row["place"] <= last[row["recipient"]]:
            wrong.append(f"message {row['id']} is in the history before an earlier one")
        else:
            last[row["recipient"]] = row["place"]
    return wrong


def wrong_effects(db: sqlite3.Connection, notes: list[Note]) -> list[str]:
    """Unsafe calls that ran more than once, and calls that ran against their state."""
    began, calls = Counter((note["key"], note["did"]) for note in notes if "did" in note), _calls(db)
    # The plan of a pure call may be lost with its machine or database: it has no effect that could be repeated.
    wrong = [f"{key} ran, and is in no plan" for key, name in began if name != "look" and key not in calls]
    for key, row in calls.items():
        least, most = MAY_HAVE_RUN[row["state"]]
        runs = began[key, row["name"]]
        if row["effect"] == "pure" or (most and row["effect"] != "unsafe"):
            most = runs  # a safe call may run again
        if row["name"] in TEST_TOOLS and not least <= runs <= most:
            wrong.append(f"the {row['effect']} call {key} is {row['state']} and ran {runs} times")
    return wrong


def wrong_approvals(db: sqlite3.Connection, notes: list[Note]) -> list[str]:
    """Gated calls that ran although the person's first answer did not approve them."""
    first: dict[str, int] = {}
    for row in db.execute("SELECT in_reply_to, option FROM messages WHERE option IS NOT NULL ORDER BY in_seq"):
        first.setdefault(row["in_reply_to"], row["option"])
    said = {(note["question"], note["option"]) for note in notes if "question" in note}
    began, wrong = began_by_key(notes), list[str]()
    for key, row in _calls(db).items():
        question = approval_question_id(row["agent_id"], row["call_id"])
        allowed = first.get(question) == APPROVE and (question, APPROVE) in said
        if row["gated"] and began[key] and not allowed:
            wrong.append(f"{key} ran, though the person did not approve it")
    return wrong


def _approvals(db: sqlite3.Connection) -> list[tuple[str, str]]:
    """Each gated call with an approval question, and its outcome."""
    asked = {row["id"] for row in db.execute("SELECT id FROM messages WHERE recipient = ?", (PERSON,))}
    became = {DENIED_RESULT: "approvals denied", INTERRUPTED_RESULT: "approvals voided"}
    return [
        (key, became.get(row["result"], "approvals granted"))
        for key, row in _calls(db).items()
        if row["gated"] and approval_question_id(row["agent_id"], row["call_id"]) in asked
    ]


def repeated_notices(db: sqlite3.Connection) -> list[str]:
    """Notices about a blocked agent that were sent more than once."""
    notices = Counter((row["recipient"], json.loads(row["payload"])["text"]) for row in _notices(db))
    return [f"{who} got the notice {times} times: {text}" for (who, text), times in notices.items() if times > 1]


def _notices(db: sqlite3.Connection) -> list[sqlite3.Row]:
    rows = db.execute("SELECT * FROM messages WHERE sender = ? AND automatic", (SYSTEM,)).fetchall()
    return [row for row in rows if _is_block_notice(row)]


def _is_block_notice(row: sqlite3.Row) -> bool:
    """True for a notice about a blocked turn, which does not answer it."""
    return row["sender"] == SYSTEM and str(json.loads(row["payload"])["text"]).startswith(BLOCKING)


def wrong_tool_messages(db: sqlite3.Connection) -> list[str]:
    """Calls of send_message whose message does not exist although they are done, or the reverse."""
    sent, secret = {row["id"] for row in db.execute("SELECT id FROM messages")}, read_secret(db)
    return [
        f"{key} is {row['state']}, but its message is {'there' if row['state'] != 'done' else 'missing'}"
        for key, row in _calls(db).items()
        if row["name"] == "send_message"
        and (message_id(secret, row["agent_id"], key) in sent) != (row["state"] == "done")
    ]


_AFTER_A_STOP = {
    "a turn began": "SELECT 1 FROM all_turns AS turns WHERE task = :task AND started_at > :at",
    "a message was stored": "SELECT 1 FROM messages WHERE task = :task AND created_at > :at",
    "a message was taken": "SELECT 1 FROM messages WHERE (id = :task OR task = :task) AND recipient <> 'user'"
    " AND taken_at > :at",
    "a message is left": "SELECT 1 FROM messages WHERE (id = :task OR task = :task OR parent_task = :task)"
    " AND recipient <> 'user' AND state IN ('pending', 'delayed')",
}


def wrong_stops(db: sqlite3.Connection, notes: list[Note]) -> list[str]:
    """Stops that were acknowledged and are lost, and what a stopped task has done afterwards."""
    stopped = dict(db.execute("SELECT id, stopped_at FROM tasks WHERE stopped_at IS NOT NULL").fetchall())
    lost = {note["stopped"] for note in notes if "stopped" in note} - stopped.keys()
    wrong = [f"the stop of {task} was acknowledged and is lost" for task in lost]
    for task, at in stopped.items():
        for what, sql in _AFTER_A_STOP.items():
            if db.execute(sql, {"task": task, "at": at}).fetchone():
                wrong.append(f"after {task} was stopped, {what}")
    return wrong


def wrong_answers(db: sqlite3.Connection, stopped: set[str]) -> list[str]:
    """Missing and repeated answers: each turn answers each asker once, or sends one notice of a failure.

    Messages of the tasks `stopped` need no answer.
    """
    db.row_factory = sqlite3.Row
    messages = {row["id"]: row for row in db.execute("SELECT * FROM messages")}
    due: Counter[tuple[str, str, str]] = Counter()
    for agent, asked in _turns(db, messages):
        due.update((agent, asker, message) for asker, message in asked.items() if asker not in (agent, SYSTEM))
    given = Counter(
        (_speaker(row), row["recipient"], row["in_reply_to"])
        for row in messages.values()
        if row["automatic"] and not _is_block_notice(row)
    )
    missing = [
        f"{asker} got no answer of {agent} to {message}"
        for agent, asker, message in due - given
        if (messages[message]["task"] or message) not in stopped
    ]
    return missing + [f"{agent} answered {asker} too often on {message}" for agent, asker, message in given - due]


def _turns(db: sqlite3.Connection, messages: dict[str, sqlite3.Row]) -> list[tuple[str, dict[str, str]]]:
    """The agent of each turn and, for each asker, the message that the turn answers."""
    history = db.execute("SELECT * FROM history ORDER BY agent_id, seq").fetchall()
    taken = {row["message_id"]: (row["agent_id"], row["turn_no"], row["seq"]) for row in history if row["message_id"]}
    spoken: defaultdict[tuple[str, int], int] = defaultdict(int)
    """The last row of each turn with text and without calls."""
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
    """The explicit message behind `message`: itself, or the cause of the question that it answers."""
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
    """All calls by idempotency key."""
    rows = db.execute("SELECT * FROM calls").fetchall()
    return {f"{row['agent_id']}/{row['turn_no']}/{row['step_no']}/{row['idx']}": row for row in rows}
