"""Compares a society's database with the promises that the witness noted, in SQL independent of the store."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from coterie.ids import id_for, keyed_id
from coterie.messages import PERSON
from coterie.stores.sql.invariants import INVARIANTS
from coterie.stores.sql.rows import read_secret

from .witness import Note

MAX_CLOCK_DRIFT_MS = 2
"""The witness reads the wall clock each time, the society once at its start; they may drift this far."""


def open_database(folder: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(folder / "data" / "coterie.db"))


def message_id(secret: bytes, sender: str, key: str) -> str:
    """Id of the stored message with this client id, or of the message of a call."""
    return keyed_id(secret, id_for("message", sender, key))


def find_violations(db: sqlite3.Connection) -> list[str]:
    """Damaged pages and violated invariants."""
    try:
        found = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    for name, (sentence, sql) in INVARIANTS.items():
        found += [f"{name}: {sentence.format(*row)}" for row in db.execute(sql)]
    return found


class Verification:
    """Checks one folder after everything due was delivered."""

    arrived = "pending"
    """The state of a message that has reached its recipient."""

    def __init__(self, folder: Path, notes: list[Note]) -> None:
        self.problems: list[str] = []
        self.seen: Counter[str] = Counter()
        self._wanted = {note["wanted"]: note for note in notes if "wanted" in note}
        self._acked = {note["acked"]: note for note in notes if "acked" in note}
        self._notes = notes
        with open_database(folder) as db:
            db.row_factory = sqlite3.Row
            self.problems += find_violations(db)
            self._secret = read_secret(db)
            self._rows = {row["id"]: row for row in db.execute("SELECT * FROM messages")}
            self._copies = Counter(row[0] for row in db.execute("SELECT json_extract(payload, '$.text') FROM messages"))
            self._deliveries = Counter(
                row[0]
                for row in db.execute(
                    "SELECT subject FROM events WHERE kind IN ('delayed.delivered', 'message.created')"
                )
            )
        self._withdrawn = {note["withdrawn"] for note in notes if "withdrawn" in note}
        self._may_be_withdrawn = {note["withdrawing"] for note in notes if "withdrawing" in note}
        self._may_be_stopped = {note["stopping"] for note in notes if "stopping" in note}
        for client_id in self._wanted:
            self._verify(client_id)
        self._verify_repeated_answers()
        self._verify_order()
        self._verify_observed_deliveries()

    def _verify(self, client_id: str) -> None:
        row = self._row_of(client_id)
        if self._copies[client_id] > 1:
            self._add_problem(f"{client_id} is stored {self._copies[client_id]} times")
        if client_id not in self._acked:
            self.seen["recovered" if row else "unacknowledged and absent"] += 1
        else:
            self.seen["acknowledged"] += 1
            if row is None:
                self._add_problem(f"{client_id} was acknowledged and is lost")
        if row is not None:
            self._verify_row(client_id, row)

    def _row_of(self, client_id: str) -> sqlite3.Row | None:
        if "anonymous" in self._wanted[client_id]:
            return next((row for row in self._rows.values() if json.loads(row["payload"])["text"] == client_id), None)
        return self._rows.get(message_id(self._secret, PERSON, client_id))

    def _verify_row(self, client_id: str, row: sqlite3.Row) -> None:
        wanted = self._wanted[client_id]
        withdrawn = row["state"] == "withdrawn"
        may_be_withdrawn = client_id in self._may_be_withdrawn or self._belongs_to_stopped(row)
        if withdrawn and not may_be_withdrawn:
            self._add_problem(f"{client_id} is withdrawn without a withdrawal")
        if client_id in self._withdrawn and not withdrawn:
            self._add_problem(f"{client_id} was withdrawn and is {row['state']}")
        if withdrawn:
            self.seen["withdrawn"] += 1
            return
        if row["state"] != self.arrived or row["in_seq"] is None:
            self._add_problem(f"{client_id} is {row['state']} and was not delivered")
        if self._deliveries[row["id"]] != 1:
            self._add_problem(f"{client_id} was delivered {self._deliveries[row['id']]} times")
        if wanted["delay"]:
            self._verify_due(client_id, row, wanted)

    def _belongs_to_stopped(self, row: sqlite3.Row) -> bool:
        return bool({row["task"] or row["id"], row["parent_task"]} & self._may_be_stopped)

    def _verify_due(self, client_id: str, row: sqlite3.Row, wanted: Note) -> None:
        self.seen["delayed and delivered"] += 1
        self.seen["delivered early by a graceful stop"] += row["early"]
        if row["deliver_at"] < wanted["at"] + wanted["delay"] - MAX_CLOCK_DRIFT_MS:
            self._add_problem(f"{client_id} was due at {row['deliver_at']}, sooner than asked for")
        if row["delivered_at"] < row["deliver_at"] and not row["early"]:
            self._add_problem(f"{client_id} was delivered {row['deliver_at'] - row['delivered_at']} ms early")
        acked = self._acked.get(client_id)
        if acked and acked["due"] != row["deliver_at"]:
            self._add_problem(f"{client_id} was promised for {acked['due']} and is due at {row['deliver_at']}")

    def _verify_repeated_answers(self) -> None:
        answers: dict[str, set[Any]] = defaultdict(set)
        for note in self._notes:
            if "acked" in note:
                answers[note["acked"]].add((note["id"], note["due"]))
        for client_id, different in answers.items():
            if len(different) > 1:
                self._add_problem(f"{client_id} was answered differently each time: {different}")

    def _verify_order(self) -> None:
        """Messages without delay of one client to one recipient are in the order of sending."""
        last: dict[Any, int] = {}
        for note in self._notes:
            if "acked" not in note or note.get("again") or note["due"] is not None or note["id"] not in self._rows:
                continue
            row = self._rows[note["id"]]
            line = (note["client"], row["recipient"])
            if row["in_seq"] <= last.get(line, 0):
                self._add_problem(f"{note['acked']} overtook an earlier message of the same sender")
            last[line] = row["in_seq"]

    def _verify_observed_deliveries(self) -> None:
        for note in self._notes:
            if "delivery" in note and (row := self._rows.get(note["delivery"])):
                self.seen["deliveries watched"] += 1
                if note["at"] < row["deliver_at"] - MAX_CLOCK_DRIFT_MS and not row["early"]:
                    self._add_problem(f"{row['id']} was seen {row['deliver_at'] - note['at']} ms before it was due")
        self.problems += [problem for note in self._notes for problem in note.get("violations", ())]

    def _add_problem(self, problem: str) -> None:
        self.problems.append(problem)
