"""A worker with many claims is stopped, loses all of them to another worker, and is resumed."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from coterie.llm.service import Completion, ModelRequest, TextDelta, ToolCall, UserMessage

from .fake_model import ToolEffects, fake_models
from .harness import Child
from .requests import compared, wrong_requests
from .shared_cycles import LONG_SECONDS, held_by, is_stopped, make_worker_home, within
from .shared_workload import conditions, wait_until_idle_and_copy
from .verifier import find_violations, open_database
from .witness import Reader, Witness
from .work_verifier import wrong_answers, wrong_effects, wrong_histories, wrong_tool_messages
from .workload import start_society

LEASE = 1.2
"""Seconds. A shorter one may expire while fifty turns start on a loaded machine; then an agent is claimed twice."""
MOMENTS = ("asking", "calling")
"""What all turns are doing at the stop: a model request, or an unsafe tool call."""


class StopBarrier:
    """Tasks wait here for each other. The last one stops the process; after SIGCONT all continue."""

    def __init__(self, many: int) -> None:
        self._missing, self._resumed = many, asyncio.Event()

    async def wait(self) -> None:
        self._missing -= 1
        if not self._missing:
            os.kill(os.getpid(), signal.SIGSTOP)
            self._resumed.set()
        await self._resumed.wait()


class OneCallModel:
    """Model that calls one tool and then answers."""

    id = "one-call"

    def __init__(self, before: StopBarrier | None = None) -> None:
        self._before = before

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        if self._before:
            await self._before.wait()
        if isinstance(request.messages[-1], UserMessage):
            yield Completion(text="", calls=(ToolCall(id="c", name="fire", arguments={"n": 0}),))
        else:
            yield Completion(text="done")

    async def close(self) -> None:
        pass


def resume_zombies(folder: str, url: str, agents: int) -> dict[str, Any]:
    """Stop and resume a worker at each moment. Return what was seen and all problems."""
    names, seen = tuple(f"agent-{n}" for n in range(agents)), Counter[str]()
    home, reader = Path(folder), Reader(Path(folder) / "witness")
    for name in ("zombie", "successor"):
        make_worker_home(home / name, url, names)
    for moment in MOMENTS:
        with _child(_hold, home, names, moment) as zombie:
            assert within(LONG_SECONDS, functools.partial(is_stopped, zombie)), f"not all turns are {moment}"
            (worker,) = [note["worker"] for note in reader.notes() if note.get("started") == zombie]
            seen["held"] += held_by(url, worker)
            with _child(_run_successor, home):
                assert within(LONG_SECONDS, functools.partial(_has_lost_all, url, worker)), "no worker took over"
                os.kill(zombie, signal.SIGCONT)
                assert within(LONG_SECONDS, functools.partial(_was_fenced, reader, zombie, agents)), (
                    "some writes were not fenced"
                )
        seen["fenced"] += _fenced(reader, zombie)
    assert not Child(functools.partial(_finish, home)).end(), "the agents did not become idle"
    return {"seen": dict(seen), "problems": _problems(home / "successor", reader)}


@contextmanager
def _child(work: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """Run a child during the block; yield its pid."""
    child = Child(functools.partial(work, *arguments))
    try:
        yield child.pid
    finally:
        child.kill()
        child.end()


def _has_lost_all(url: str, worker: str) -> bool:
    return not held_by(url, worker)


def _was_fenced(reader: Reader, pid: int, times: int) -> bool:
    return _fenced(reader, pid) >= times


def _fenced(reader: Reader, pid: int) -> int:
    return sum("fenced" in note and note["pid"] == pid for note in reader.notes())


def _problems(home: Path, reader: Reader) -> list[str]:
    with open_database(home) as db:
        found = find_violations(db)
        db.row_factory = sqlite3.Row
        found += (
            wrong_histories(db) + wrong_answers(db, set()) + wrong_tool_messages(db) + wrong_effects(db, reader.notes())
        )
    found += wrong_requests(reader.notes())
    return found + [violation for note in reader.notes() for violation in note.get("violations", ())]


# Work of the forks


def _hold(home: Path, names: tuple[str, ...], moment: str, ready: int) -> None:
    """Never drop claims, so that only the fence stops late writes."""
    asyncio.run(_send_to_all(home, names, moment, Witness(home / "witness")))


async def _send_to_all(home: Path, names: tuple[str, ...], moment: str, witness: Witness) -> None:
    ToolEffects.witness, barrier = witness, StopBarrier(len(names))
    do = ToolEffects.run

    async def run_and_wait(*call: Any) -> str:
        done = await do(*call)
        await barrier.wait()
        return done

    model = OneCallModel(barrier if moment == "asking" else None)
    with (
        conditions(witness, LEASE, keeps_claims=True),
        compared(home / "zombie", witness) as comparing,
        fake_models(lambda _: comparing(model)),
        patch.object(ToolEffects, "run", run_and_wait if moment == "calling" else do),
    ):
        society = await start_society(home / "zombie", witness)
        assert society._runtime
        witness.note(started=os.getpid(), worker=society._runtime._scheduler.worker)
        await asyncio.gather(*(society.send(to=name, text="work") for name in names))
        await asyncio.Event().wait()


def _run_successor(home: Path, ready: int) -> None:
    asyncio.run(_work(home, Witness(home / "witness")))


async def _work(home: Path, witness: Witness) -> None:
    ToolEffects.witness = witness
    with (
        conditions(witness, LEASE, keeps_claims=False),
        compared(home / "successor", witness) as comparing,
        fake_models(lambda _: comparing(OneCallModel())),
    ):
        await start_society(home / "successor", witness)
        await asyncio.Event().wait()


def _finish(home: Path, ready: int) -> None:
    witness = Witness(home / "witness")
    with conditions(witness, LEASE, keeps_claims=False):
        asyncio.run(wait_until_idle_and_copy(home / "successor", 0, witness))
