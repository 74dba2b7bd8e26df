"""Many tasks, some stopped at random moments, with kill -9 in between; then a verification.

Every line of agents passes one request on: the first asks the second, the second the third, and the first schedules a
message for later. So a task has waiting, running and scheduled parts when it is stopped.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.clock import SystemClock
from coterie.config import SocietyFolder
from coterie.errors import Refused
from coterie.llm.service import Completion, ModelRequest, TokenUsage, ToolCall, UserMessage
from coterie.society import Society

from .fake_model import FakeModel, ToolEffects, agent_of, fake_models, last_text
from .harness import Child, scaled_timeout
from .requests import compared
from .scenarios import make_home
from .verifier import find_violations, open_database
from .witness import Note, Reader, Witness
from .workload import history_errors

LINES = 10
LENGTH = 3
"""Agents of a line."""
LATER_MS = 3_600_000
MODEL_SECONDS = 0.012
"""Longest time of a model request."""


def agent_name(line: int, place: int) -> str:
    return f"a{line}-{place}"


AGENTS = tuple(agent_name(line, place) for line in range(LINES) for place in range(LENGTH))


def run(folder: str, seed: int, tasks: int, stops: int, kills: int) -> dict[str, Any]:
    """Run `tasks` tasks, stop `stops` of them, and kill `kills` times. Return what was seen and all problems."""
    home, rng = Path(folder), random.Random(seed)
    keys = [f"{line}/{number}" for number in range(tasks // LINES) for line in range(LINES)]
    stopped = rng.sample(keys, stops)
    make_home(home / "society", agents=AGENTS)
    entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m", "contextTokens": 1_000_000}
    (home / "society" / "llmservices.json").write_text(json.dumps({"services": [entry]}))
    seen: Counter[str] = Counter()
    reader = Reader(home / "witness")
    for number in range(kills * 4):
        child = Child(functools.partial(_work, home, f"{seed}/{number}", keys, stopped))
        if child.read(scaled_timeout()):
            time.sleep(rng.uniform(0.01, 0.5))  # the injected fault: a random instant
        child.kill()
        child.end()
        notes = reader.notes()
        ended = {note["stopped"] for note in notes if "stopped" in note}
        open_stops = {note["stopping"] for note in reader.notes() if "stopping" in note} - ended
        seen["kills"] += 1
        seen["killed during a stop"] += bool(open_stops)
        if number + 1 >= kills and ended:
            break
    end = Child(functools.partial(_work, home, f"{seed}/last", keys, stopped)).end()
    problems = [f"the last child, which is not killed, ended with {end}"] if end else []
    notes = reader.notes()
    problems += [problem for note in notes for problem in note.get("violations", ())]
    problems += _verify(home / "society", keys, stopped, notes, seen)
    return {"seen": dict(seen), "problems": problems}


def _work(home: Path, name: str, keys: list[str], stopped: list[str], ready: int) -> None:
    asyncio.run(_run_tasks(home, name, keys, stopped, ready))


async def _run_tasks(home: Path, name: str, keys: list[str], stopped: list[str], ready: int) -> None:
    """Run what the last child left and the rest, until all tasks have ended."""
    witness = ToolEffects.witness = Witness(home / "witness")
    rng, folder = random.Random(name), home / "society"

    def seconds(_: ModelRequest) -> float:
        return rng.uniform(0, MODEL_SECONDS)

    with (
        compared(folder, witness) as comparing,
        fake_models(lambda service: comparing(FakeModel(service, _pass_on, seconds))),
    ):
        society = await Society._assemble(SocietyFolder(folder), SystemClock())
        wrong = [violation async for violation in society.store.violations()]
        witness.note(opened=name, violations=wrong)
        await society._start(society._make_runtime())
        os.write(ready, b"r")
        async with asyncio.timeout(scaled_timeout(120)):
            await asyncio.gather(*(_run_line(society, line, keys, stopped, witness, rng) for line in range(LINES)))
        wrong = [violation async for violation in society.store.violations()]
        for agent in AGENTS:
            if await society.store.history(agent):
                wrong += await history_errors(society, agent)
        witness.note(rested=name, violations=wrong)
        await society.stop()


async def _run_line(
    society: Society, line: int, keys: list[str], stopped: list[str], witness: Witness, rng: random.Random
) -> None:
    """Send one task after the other to the first agent of a line, so that no turn has messages of two tasks."""
    for key in keys:
        if not key.startswith(f"{line}/"):
            continue
        receipt = await society.send(to=agent_name(line, 0), text=f"task {key} place 0", client_id=key)
        witness.note(acked=key, task=receipt.task)
        if key in stopped:
            await asyncio.sleep(rng.uniform(0, 0.1))  # a random moment of the task
            witness.note(stopping=key)
            ended = await society.store.stop_task(receipt.task)
            witness.note(stopped=key, turns=ended.turns, messages=ended.messages, at=time.time_ns() // 1_000_000)
            try:
                await society.store.send(_late_message(line, receipt.task))
                witness.note(violations=[f"{key} was stopped, and a late message of it was accepted"])
            except Refused as refusal:
                assert refusal.code == "task_stopped", refusal
        async with society.bus.watch(queue=100_000) as watcher:
            while (await society.store.tasks_by_id([receipt.task]))[receipt.task].state == "working":
                await anext(watcher)


def _late_message(line: int, task: str) -> Any:
    from coterie.messages import make_envelope

    sender, to = agent_name(line, 0), agent_name(line, 1)
    return make_envelope(sender=sender, to=to, payload={"text": "too late"}, cause=task)


def _pass_on(request: ModelRequest) -> Completion:
    """Pass a request on to the next agent of the line, and schedule a message; answer everything else."""
    usage = TokenUsage(input_tokens=3, output_tokens=1)
    found = re.search(r"task (\d+)/(\d+) place (\d+)", last_text(request))
    if not found or not isinstance(request.messages[-1], UserMessage) or int(found[3]) == LENGTH - 1:
        return Completion(text=f"{agent_of(request)} is done", usage=usage)
    line, number, place = map(int, found.groups())
    next_agent = {"to": agent_name(line, place + 1), "payload": {"text": f"task {line}/{number} place {place + 1}"}}
    calls = [ToolCall(id="next", name="send_message", arguments=next_agent)]
    if place == 0:
        later = {"to": "user", "payload": {"text": f"later {line}/{number}"}, "delayMs": LATER_MS}
        calls.append(ToolCall(id="later", name="send_message", arguments=later))
    return Completion(text="", calls=tuple(calls), usage=usage)


_AFTER_THE_STOP: Mapping[str, str] = {
    "a turn began": "SELECT count(*) FROM all_turns AS turns JOIN tasks ON tasks.id = turns.task WHERE tasks.id = :task"
    " AND turns.started_at > tasks.stopped_at",
    "a turn goes on": "SELECT count(*) FROM all_turns AS turns WHERE task = :task AND ended_at IS NULL",
    "a message was stored": "SELECT count(*) FROM messages JOIN tasks ON tasks.id = messages.task"
    " WHERE tasks.id = :task AND messages.created_at > tasks.stopped_at",
    "a message was taken": "SELECT count(*) FROM messages JOIN tasks ON tasks.id = coalesce(messages.task, messages.id)"
    " WHERE tasks.id = :task AND messages.recipient <> 'user' AND messages.taken_at > tasks.stopped_at",
    "a message waits": "SELECT count(*) FROM messages WHERE (id = :task OR task = :task) AND recipient <> 'user'"
    " AND state IN ('pending', 'delayed')",
    "a message is scheduled": "SELECT count(*) FROM messages WHERE parent_task = :task AND state = 'delayed'",
}
_QUARANTINED = (
    "SELECT 1 FROM all_turns AS turns"
    "  JOIN history ON history.agent_id = turns.agent_id AND history.turn_no = turns.turn_no"
    " WHERE turns.task = :task AND history.content LIKE '[turn aborted%'"
)


def _verify(folder: Path, keys: list[str], stopped: list[str], notes: list[Note], seen: Counter[str]) -> list[str]:
    task_of = {note["acked"]: note["task"] for note in notes if "acked" in note}
    acknowledged = {note["stopped"] for note in notes if "stopped" in note}
    for note in notes:
        if "stopped" in note:
            seen["turns ended by stops"] += note["turns"]
            seen["messages withdrawn by stops"] += note["messages"]
    problems = [f"{key} was never stopped" for key in {*stopped} - acknowledged]
    with open_database(folder) as db:
        problems += find_violations(db)
        for key in keys:
            parameters = {"task": task_of.get(key, "")}
            state = (db.execute("SELECT state FROM tasks WHERE id = :task", parameters).fetchone() or ("missing",))[0]
            seen[state] += 1
            if key in stopped:
                problems += [
                    f"after {key} was stopped, {what}"
                    for what, sql in _AFTER_THE_STOP.items()
                    if db.execute(sql, parameters).fetchone()[0]
                ]
            elif db.execute(_QUARANTINED, parameters).fetchone():
                seen["quarantined"] += 1  # three kills met the same request
            elif state != "done":
                problems.append(f"{key} was not stopped and is {state}")
            else:
                problems += _unfinished(db, key)
    return problems


def _unfinished(db: sqlite3.Connection, key: str) -> list[str]:
    """What another task has lost: a message on the way, or the one for later."""
    found = dict(
        db.execute(
            "SELECT json_extract(payload, '$.text'), state || ' ' || count(*) FROM messages"
            " WHERE json_extract(payload, '$.text') LIKE :task OR json_extract(payload, '$.text') = :later GROUP BY 1",
            {"task": f"task {key} place %", "later": f"later {key}"},
        )
    )
    expected = {f"task {key} place {place}": "taken 1" for place in range(LENGTH)} | {f"later {key}": "delayed 1"}
    return [] if found == expected else [f"{key} was not stopped, but has {found}"]
