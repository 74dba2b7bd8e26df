"""Whole societies: a loop of agents ends at the budget of its task, and a task counts what its models counted."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from coterie import Message, Society
from coterie.errors import Lagged
from coterie.messages import PERSON
from coterie.store import Page
from coterie.tasks import MessageNode, Task, TurnNode
from coterie.testing import ModelServer
from coterie.testing.model_server import ReceivedRequest, Reply, Says, count_tokens
from tests.engines import Postgres

from .harness import scaled_timeout
from .test_cascades import asking, may_act, to

TIMEOUT_SECONDS = 240
"""Ends a test that hangs."""
STOPPED_WITHIN_SECONDS = 2.0
LIMIT = 100
"""Turns of a task, by default."""


def write_home(folder: Path, server: ModelServer, agents: tuple[str, ...], url: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    where = f"[store]\nurl = {json.dumps(url)}\n" if url else ""
    names = "".join(f"[agents.{name}]\n" for name in agents)
    (folder / "coterie.toml").write_text(f"{where}[shutdown]\ndrain_seconds = 0\n{names}")
    services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
    (folder / "llmservices.json").write_text(json.dumps({"services": services}))
    return folder


def ping_pong(request: ReceivedRequest) -> Reply:
    """Answer every message by a message to the other agent."""
    other = {"ada": "bob", "bob": "ada"}[asking(request)]
    return Says(calls=(to(other),)) if may_act(request) else ""


@asynccontextmanager
async def workers(homes: list[Path]) -> AsyncIterator[None]:
    """Processes that run the society's agents."""
    started = []
    for home in homes:
        command = (sys.executable, "-m", "coterie", "worker", str(home))
        process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-3)
        assert process.stdout
        while not (line := await process.stdout.readline()).startswith(b"Ready"):
            assert line, "the worker never got ready"
        started.append(process)
    try:
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in started))


async def until(society: Society, holds: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until `holds()` is true; checked after every event."""
    while True:
        with suppress(Lagged):  # there are many events
            async with society.bus.watch(queue=100_000) as watcher:
                while not (found := await holds()):
                    await anext(watcher)
                return found


async def read_task(society: Society, task_id: str) -> Task:
    return (await society.store.tasks_by_id([task_id]))[task_id]


async def budget_question(society: Society, task_id: str, after: str | None = None) -> Message:
    """Wait for the next budget question; no model is asked any more."""

    async def asked() -> Message | None:
        task = await read_task(society, task_id)
        is_new = task.state == "waiting" and task.budget_question not in (None, after)
        return await society.store.message(task.budget_question or "") if is_new else None

    found: Message = await until(society, asked)
    return found


async def loop_until_the_budget_ends(society: Society, server: ModelServer, in_flight: int) -> None:
    task_id = (await society.send(to="ada", text="go")).task
    first = await budget_question(society, task_id)
    task = await read_task(society, task_id)
    assert LIMIT < task.turns <= LIMIT + 1 + in_flight
    assert LIMIT <= len({(one.agent_id, one.turn_no) for one in await worked(society, task_id)}) <= LIMIT + in_flight
    assert [one.id for one in await society.store.open_questions()] == [first.id]
    assert (first.payload["budget"]["reason"], first.payload["budget"]["limit"]) == ("turns", LIMIT)
    assert first.payload["budget"]["agents"] == ["ada", "bob"]
    assert task.requests == len(server.requests)

    await society.send(to=first.sender, text="Continue", in_reply_to=first.id, option=0)
    second = await budget_question(society, task_id, after=first.id)
    task = await read_task(society, task_id)
    assert (task.budgets, 2 * LIMIT < task.turns <= 2 * LIMIT + 2 + in_flight) == (2, True)
    assert [one.id for one in await society.store.open_questions()] == [second.id]

    await society.store.continue_task(task_id)
    await server.wait_for_request(len(server.requests) + 5)
    began = time.monotonic()
    stopped = await society.store.stop_task(task_id)
    assert stopped.turns + stopped.messages > 0

    async def is_quiet() -> bool:
        return all(one.state == "idle" for one in await society.store.agents())

    await until(society, is_quiet)
    assert time.monotonic() - began < scaled_timeout(STOPPED_WITHIN_SECONDS)
    requests = len(server.requests)
    task = await read_task(society, task_id)
    assert (task.state, task.active, task.queued, task.questions) == ("stopped", 0, 0, 0)
    assert await society.store.open_questions() == []
    assert await society.store.messages(Page(), state="delayed") == []
    # The loop is over, and the agents answer other requests.
    server.default = "here I am"
    answer = await society.ask("ada", "are you there?")
    assert answer.text == "here I am"
    assert len(server.requests) == requests + 1
    assert [violation async for violation in society.store.violations()] == []
    assert server.refused == []


async def worked(society: Society, task_id: str) -> list[TurnNode]:
    """The turns of a task that asked a model."""
    tree = await society.store.task_tree(task_id)
    assert tree is not None
    return [one for one in tree.nodes if isinstance(one, TurnNode) and one.requests]


async def test_two_agents_that_answer_each_message_by_a_message_end_with_one_question(tmp_path: Path) -> None:
    async with ModelServer() as server, asyncio.timeout(TIMEOUT_SECONDS):
        server.default = ping_pong
        async with Society.open(write_home(tmp_path / "home", server, ("ada", "bob"))) as society:
            await loop_until_the_budget_ends(society, server, in_flight=0)


@pytest.mark.slow
async def test_their_loop_ends_with_one_question_on_three_worker_processes(shared: Postgres, tmp_path: Path) -> None:
    async with ModelServer() as server, asyncio.timeout(TIMEOUT_SECONDS):
        server.default = ping_pong
        url = shared.url(tmp_path)
        homes = [write_home(tmp_path / f"home{number}", server, ("ada", "bob"), url) for number in range(4)]
        async with Society.open(homes[0], work=False) as society, workers(homes[1:]):
            await loop_until_the_budget_ends(society, server, in_flight=2)


FIVE = ("ada", "bob", "cyd", "dan", "eve")
MESSAGES = 40


async def test_a_task_over_five_agents_counts_every_token_that_the_model_counted(tmp_path: Path) -> None:
    """Ada asks the four others in turn, who answer; each answer makes her ask the next one."""
    asked = said = 0

    def answer(request: ReceivedRequest) -> Reply:
        nonlocal asked, said
        text = "" if asking(request) == "ada" else f"{asking(request)} is done"
        said += count_tokens(text.encode())
        if text:
            return text
        if may_act(request) and asked >= (MESSAGES - 2) // 2:
            said += count_tokens(b"done") - count_tokens(b"")
            return "done"
        if not may_act(request):
            return ""
        asked += 1
        return Says(calls=(to(FIVE[1 + asked % 4]),))

    async with ModelServer() as server, asyncio.timeout(TIMEOUT_SECONDS):
        server.default = answer
        async with Society.open(write_home(tmp_path / "home", server, FIVE)) as society:
            task_id = (await society.send(to="ada", text="go")).task

            async def is_done() -> bool:
                return (await read_task(society, task_id)).state == "done"

            await until(society, is_done)
            tree = await society.store.task_tree(task_id)
            assert tree is not None
            task = tree.task
            counted = sum(count_tokens(request.raw) for request in server.requests)
            messages = [one for one in tree.nodes if isinstance(one, MessageNode)]
            turns = [one for one in tree.nodes if isinstance(one, TurnNode)]
            assert len(messages) == task.messages == MESSAGES
            assert (task.agents, len(turns), task.requests) == (5, task.turns, len(server.requests))
            assert task.input_tokens == counted
            assert sum(one.input_tokens for turn in turns for one in turn.requests) == counted
            assert task.output_tokens == said == sum(one.output_tokens for turn in turns for one in turn.requests)
            assert [one.created_at for one in messages] == sorted(one.created_at for one in messages)
            parents = {one.parent for one in messages}
            assert None in parents and parents - {None} <= {one.id for one in messages}
            assert {one.sender for one in messages} == {PERSON, *FIVE}
            assert [violation async for violation in society.store.violations()] == []
