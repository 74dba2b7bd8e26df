"""A worker with many agents in hand is stopped, loses them all to another, and goes on as if nothing had happened."""

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

from coterie.llm.types import Completion, ModelRequest, TextDelta, ToolCall, UserMessage

from .fake_model import ToolEffects, fake_models
from .harness import Child
from .requests import compared, wrong_requests
from .shared_cycles import LEASE, LONG, furnish, held_by, is_stopped, within
from .shared_workload import conditions, wait_until_idle_and_copy
from .verifier import find_damage, open_database
from .witness import Reader, Witness
from .work_verifier import wrong_answers, wrong_effects, wrong_histories, wrong_letters
from .workload import start_society

MOMENTS = ("asking", "calling")
"""What all of its agents are in the middle of: a question to the model, or a call that cannot be undone."""


class Together:
    """Whoever comes here waits for the others. With the last of them the process is stopped; woken, they all go on."""

    def __init__(self, many: int) -> None:
        self._missing, self._woken = many, asyncio.Event()

    async def meet(self) -> None:
        self._missing -= 1
        if not self._missing:
            os.kill(os.getpid(), signal.SIGSTOP)
            self._woken.set()
        await self._woken.wait()


class Doer:
    """Told to work, it does so once; then it says that it is done."""

    id = "doer"

    def __init__(self, before: Together | None = None) -> None:
        self._before = before

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        if self._before:
            await self._before.meet()
        if isinstance(request.messages[-1], UserMessage):
            yield Completion(text="", calls=(ToolCall(id="c", name="fire", arguments={"n": 0}),))
        else:
            yield Completion(text="done")

    async def close(self) -> None:
        pass


def haunt(folder: str, url: str, agents: int) -> dict[str, Any]:
    """A zombie for each moment: what was seen, and everything wrong with what is left."""
    names, seen = tuple(f"agent-{n}" for n in range(agents)), Counter[str]()
    home, reader = Path(folder), Reader(Path(folder) / "witness")
    for place in ("zombie", "heir"):
        furnish(home / place, url, names)
    for moment in MOMENTS:
        with _child(_hold, home, names, moment) as zombie:
            assert within(LONG, functools.partial(is_stopped, zombie)), f"they are never all {moment}"
            (worker,) = [note["worker"] for note in reader.notes() if note.get("hired") == zombie]
            seen["held"] += held_by(url, worker)
            with _child(_inherit, home):
                assert within(LONG, functools.partial(_has_lost_all, url, worker)), "nobody took over"
                os.kill(zombie, signal.SIGCONT)
                assert within(LONG, functools.partial(_was_turned_away, reader, zombie, agents)), "some were let write"
        seen["fenced"] += _fenced(reader, zombie)
    assert not Child(functools.partial(_rest, home)).end(), "there was no rest"
    return {"seen": dict(seen), "problems": _problems(home / "heir", reader)}


@contextmanager
def _child(work: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """Its pid, for as long as the block runs."""
    child = Child(functools.partial(work, *arguments))
    try:
        yield child.pid
    finally:
        child.kill()
        child.end()


def _has_lost_all(url: str, worker: str) -> bool:
    return not held_by(url, worker)


def _was_turned_away(reader: Reader, pid: int, times: int) -> bool:
    return _fenced(reader, pid) >= times


def _fenced(reader: Reader, pid: int) -> int:
    return sum("fenced" in note and note["pid"] == pid for note in reader.notes())


def _problems(home: Path, reader: Reader) -> list[str]:
    with open_database(home) as db:
        found = find_damage(db)
        db.row_factory = sqlite3.Row
        found += wrong_histories(db) + wrong_answers(db) + wrong_letters(db) + wrong_effects(db, reader.notes())
    found += wrong_requests(reader.notes())
    return found + [violation for note in reader.notes() for violation in note.get("violations", ())]


# What the forks do


def _hold(home: Path, names: tuple[str, ...], moment: str, ready: int) -> None:
    """Never in doubt that it has what it claimed, so that nothing but the fence keeps it from writing."""
    asyncio.run(_ask_all(home, names, moment, Witness(home / "witness")))


async def _ask_all(home: Path, names: tuple[str, ...], moment: str, witness: Witness) -> None:
    ToolEffects.witness, together = witness, Together(len(names))
    do = ToolEffects.run

    async def meet_and_do(*deed: Any) -> str:
        done = await do(*deed)
        await together.meet()
        return done

    doer = Doer(together if moment == "asking" else None)
    with (
        conditions(witness, LEASE, sure=True),
        compared(home / "zombie", witness) as comparing,
        fake_models(lambda _: comparing(doer)),
        patch.object(ToolEffects, "run", meet_and_do if moment == "calling" else do),
    ):
        society = await start_society(home / "zombie", witness)
        assert society._runtime
        witness.note(hired=os.getpid(), worker=society._runtime._scheduler.worker)
        await asyncio.gather(*(society.send(to=name, text="work") for name in names))
        await asyncio.Event().wait()


def _inherit(home: Path, ready: int) -> None:
    asyncio.run(_work(home, Witness(home / "witness")))


async def _work(home: Path, witness: Witness) -> None:
    ToolEffects.witness = witness
    with (
        conditions(witness, LEASE, sure=False),
        compared(home / "heir", witness) as comparing,
        fake_models(lambda _: comparing(Doer())),
    ):
        await start_society(home / "heir", witness)
        await asyncio.Event().wait()


def _rest(home: Path, ready: int) -> None:
    witness = Witness(home / "witness")
    with conditions(witness, LEASE, sure=False):
        asyncio.run(wait_until_idle_and_copy(home / "heir", 0, witness))
