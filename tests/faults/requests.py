"""Compares every request to a model with the rows of the database.

The rows are read with plain SQL on a separate connection at the moment of the request, in one snapshot with the epoch
and the step of the agent. As long as the worker's claim holds, nothing else can change the history, so the request must
be equal to it. A request of a worker that has lost its claim is counted and not compared. The results are noted by the
witness, outside the database.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import tomllib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import psycopg

from coterie.agent.context import QUARANTINED_NOTE
from coterie.agent.context_window import NOT_SHOWN
from coterie.agent.runner import LlmHandler
from coterie.llm.routing import to_single_line_json
from coterie.llm.service import (
    AssistantMessage,
    ChatMessage,
    Completion,
    LLMService,
    ModelRequest,
    SystemMessage,
    TextDelta,
    TextPart,
    ToolMessage,
    UserMessage,
)
from coterie.turn_store import Claim

from .fake_model import is_summary
from .witness import Note, Witness

_asking: ContextVar[Claim | None] = ContextVar("asking", default=None)
"""The claim of the current request."""
_STEP = "SELECT epoch, step_no FROM agents WHERE id = ?"
_SUMMARY = "SELECT upto, text FROM summaries WHERE agent_id = ? ORDER BY upto DESC LIMIT 1"
_ROWS = """
SELECT h.role, h.content, h.calls, h.call_id, h.hidden, m.payload FROM history h
  LEFT JOIN messages m ON m.id = h.message_id WHERE h.agent_id = ? AND h.seq > ? ORDER BY h.seq
"""
_NOT_SHOWN = re.compile(re.escape(NOT_SHOWN).replace(re.escape("{0:,}"), r"([\d,]+)"))
_NOT_A_MESSAGE = re.compile(r'\{"from": ?"(you|tool|earlier summary)"')
"""A line of a transcript that is not a message."""
Item = tuple[Any, ...]
"""One part of a conversation: role and content."""
Query = Callable[..., list[Any]]


@dataclass(frozen=True)
class Stored:
    """Rows of an agent in one snapshot."""

    epoch: int
    step_no: int
    summary: str
    rows: Sequence[Item]

    @property
    def items(self) -> Sequence[Item]:
        """The conversation that a request must have."""
        return [("user", to_single_line_json({"summary": self.summary})), *self.rows] if self.summary else self.rows


class Rows(Protocol):
    def read(self, agent_id: str) -> Stored: ...


class SqliteRows:
    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self, agent_id: str) -> Stored:
        with closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, isolation_level=None)) as db:
            db.execute("BEGIN")
            return _stored(lambda sql, *values: db.execute(sql, values).fetchall(), agent_id)


class PostgresRows:
    def __init__(self, url: str) -> None:
        self._url = url
        self._db: psycopg.Connection[Any] | None = None

    def read(self, agent_id: str) -> Stored:
        try:
            if self._db is None:
                self._db = psycopg.connect(self._url, autocommit=True)
            with self._db.transaction():
                self._db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                return _stored(self._query, agent_id)
        except psycopg.Error:
            if self._db is not None:
                self._db.close()
            self._db = None
            raise

    def _query(self, sql: str, *values: Any) -> list[Any]:
        assert self._db is not None
        return self._db.execute(sql.replace("?", "%s").encode(), values).fetchall()


def rows_of(folder: Path) -> Rows:
    """Reader of the database of the society in `folder`."""
    url = tomllib.loads((folder / "coterie.toml").read_text()).get("store", {}).get("url")
    return PostgresRows(url) if url else SqliteRows(folder / "data" / "coterie.db")


def _stored(query: Query, agent_id: str) -> Stored:
    ((epoch, step_no),) = query(_STEP, agent_id)
    ((upto, summary),) = query(_SUMMARY, agent_id) or [(0, "")]
    items = list[Item]()
    for role, content, calls, call_id, hidden, payload in query(_ROWS, agent_id, upto):
        if role == "assistant":
            made = [(call["id"], call["name"], call["arguments"]) for call in json.loads(calls or "[]")]
            items.append(("assistant", content or "", made))
        elif role == "tool":
            items.append(("tool", call_id, content or ""))
        else:
            items.append(("user", QUARANTINED_NOTE if hidden else json.loads(payload).get("text", "")))
    return Stored(epoch, step_no, summary, items)


def conversation(messages: Sequence[ChatMessage]) -> list[Item]:
    """The conversation of a request without system messages."""
    return [_item(message) for message in messages if not isinstance(message, SystemMessage)]


def _item(message: ChatMessage) -> Item:
    match message:
        case AssistantMessage(text, calls):
            return "assistant", text, [(call.id, call.name, dict(call.arguments)) for call in calls]
        case ToolMessage(call_id, text):
            return "tool", call_id, text
        case UserMessage(parts):
            return "user", "\n".join(part.text for part in parts if isinstance(part, TextPart))
    raise AssertionError(message)


def differences(asked: Sequence[Item], stored: Sequence[Item]) -> list[str]:
    """The first difference between a request and the rows; empty if there is none.

    A request that is too long for the model has a note instead of the oldest groups of rows.
    """
    for number, item in enumerate(asked[:2]):
        if item[0] == "user" and (note := _NOT_SHOWN.fullmatch(item[1])):
            groups = [position for position in range(number, len(stored)) if stored[position][0] != "tool"]
            dropped = int(note[1].replace(",", ""))
            if dropped >= len(groups):
                return [f"the request has none of {len(groups)} groups: {_short(item)}"]
            stored = [*stored[:number], item, *stored[groups[dropped] :]]
    for number, (was, should) in enumerate(zip(asked, stored, strict=False)):
        if not _is_same(was, should):
            return [f"part {number} of the request is {_short(was)} instead of {_short(should)}"]
    if len(asked) < len(stored):
        return [f"the request lacks {len(stored) - len(asked)} parts, from {_short(stored[len(asked)])} on"]
    return [f"the request has {_short(item)} that no row has" for item in asked[len(stored) : len(stored) + 1]]


def _is_same(was: Item, should: Item) -> bool:
    if (was[0], should[0]) != ("user", "user"):
        return was == should
    # A request shows a message with its sender and time.
    return re.search(rf"(?<![\w.]){re.escape(should[1])}(?![\w.])", was[1]) is not None


def _short(item: Item) -> str:
    return repr(item)[:200]


class Compared:
    """A model service whose requests are compared before they are answered."""

    def __init__(self, service: LLMService, rows: Rows, witness: Witness) -> None:
        self.id, self._service, self._rows, self._witness = service.id, service, rows, witness

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        self._compare(request)
        async for piece in self._service.generate(request):
            yield piece

    async def close(self) -> None:
        await self._service.close()

    def _compare(self, request: ModelRequest) -> None:
        claim = _asking.get()
        if claim is None:
            self._witness.note(unclaimed=repr(request.messages)[:200])
            return
        who = {"pid": os.getpid(), "turn": claim.turn_no, "epoch": claim.epoch, "step": claim.step_no}
        try:
            stored = self._rows.read(claim.agent_id)
        except (sqlite3.Error, psycopg.Error) as error:
            self._witness.note(uncompared=claim.agent_id, why=f"{type(error).__name__}", **who)
            return
        if (stored.epoch, stored.step_no) != (claim.epoch, claim.step_no):
            self._witness.note(uncompared=claim.agent_id, why="the claim is lost", **who)
            return
        asked = conversation(request.messages)
        wrong = _gaps(asked, stored) if is_summary(request) else differences(asked, stored.items)
        self._witness.note(compared=claim.agent_id, taken_over=claim.was_taken_over, wrong=wrong, **who)


def _gaps(asked: Sequence[Item], stored: Stored) -> list[str]:
    """Check that a request for a summary has the first messages of the history, in order and without gaps."""
    lines = "\n".join(item[1] for item in asked).splitlines()
    # A message of an agent is in its call as well as in a row.
    transcript = "\n".join(line for line in lines if not _NOT_A_MESSAGE.match(line))
    messages, position, complete = [item for item in stored.rows if item[0] == "user"], 0, True
    for _, text in messages:
        found = re.compile(rf"(?<![\w.]){re.escape(text)}(?![\w.])").search(transcript, position)
        if found and not complete:
            return [f"the request for a summary has {text[:100]!r} and lacks an earlier message"]
        complete = complete and found is not None
        position = found.end() if found else position
    return []


@contextmanager
def compared(folder: Path, witness: Witness) -> Iterator[Callable[[LLMService], LLMService]]:
    """Yield a wrapper for services that compares their requests with the rows of the society in `folder`."""
    answer, rows = LlmHandler._answer, rows_of(folder)

    async def with_its_claim(self: LlmHandler, claim: Claim, *rest: Any) -> Completion:
        token = _asking.set(claim)
        try:
            return await answer(self, claim, *rest)
        finally:
            _asking.reset(token)

    with patch.object(LlmHandler, "_answer", with_its_claim):
        yield lambda service: Compared(service, rows, witness)


# Evaluation of the notes


def wrong_requests(notes: Sequence[Note]) -> list[str]:
    """Requests that differ from the rows or have no claim, and steps in which two processes asked."""
    wrong = [f"a request without a claim: {note['unclaimed']}" for note in notes if "unclaimed" in note]
    asked: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)
    for note in notes:
        agent = note.get("compared") or note.get("uncompared")
        if agent is None:
            continue
        asked[agent, note["epoch"], note["step"]].add(note["pid"])
        where = f"{agent}, turn {note['turn']}, step {note['step']}"
        wrong += [f"{where}: {problem}" for problem in note.get("wrong", ())]
    wrong += [
        f"{len(pids)} processes asked for {agent} in epoch {epoch}, step {step}"
        for (agent, epoch, step), pids in asked.items()
        if len(pids) > 1
    ]
    return wrong


def count_requests(notes: Sequence[Note]) -> Counter[str]:
    """Count the compared requests, and those after a takeover."""
    seen, last, known = Counter[str](), dict[str, int](), set[tuple[int, str]]()
    for note in notes:
        if "uncompared" in note:
            seen[f"requests not compared: {note['why']}"] += 1
        if (agent := note.get("compared")) is None:
            continue
        pid = note["pid"]
        seen["requests compared"] += 1
        seen["requests compared after a takeover"] += note["taken_over"]
        came_back = (pid, agent) in known and last[agent] != pid
        # Only such a process can have an outdated conversation in its cache.
        seen["requests compared of a process that an agent came back to"] += came_back
        seen["requests compared after a takeover by a process that knew the agent"] += (
            note["taken_over"] and (pid, agent) in known
        )
        known.add((pid, agent))
        last[agent] = pid
    return seen
