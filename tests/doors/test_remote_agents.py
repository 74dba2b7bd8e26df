"""Agents elsewhere as participants: two societies that talk over A2A, and the SDK's own server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import JSONResponse

from coterie import Society
from coterie.agent_runtime import with_remote_agents
from coterie.config import SocietyFolder, read_config
from coterie.configuration import read_files
from coterie.errors import ConfigError
from coterie.llm.config import ServiceRegistry
from coterie.stores.sqlite import writer
from coterie.testing import Calls, Says
from coterie.testing.model_server import ReceivedRequest, Reply
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import Stage, each
from tests.doors.conftest import Door, open_door
from tests.engines import Engine, Postgres

ASKS = Calls("send_message", {"to": "user", "payload": {"text": "Which colour?"}, "quickReplies": ["red", "blue"]})


@asynccontextmanager
async def here_and_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, store: str = ""
) -> AsyncIterator[tuple[Stage, Door]]:
    """A society whose agent anna is the agent ada of another one. `store`: the table [store] of the first."""
    (folder / "there").mkdir()
    (folder / "here").mkdir()
    async with open_door(folder / "there") as there:
        monkeypatch.setenv("ANNA_TOKEN", await there.key("here", agents=["ada"], doors=["a2a"]))
        async with open_here(folder / "here", f"{there.url}/a2a/ada", store=store) as here:
            yield here, there


@asynccontextmanager
async def open_here(folder: Path, card: str, *, store: str = "") -> AsyncIterator[Stage]:
    remote = f'[remote.anna]\ncard = "{card}"\nheaders = {{ Authorization = "Bearer ${{ANNA_TOKEN}}" }}\n'
    (folder / "coterie.toml").write_text(f"{store}\n[agents.local]\n{remote}")
    async with Society.open(folder) as society:
        nothing: Any = None
        yield Stage(society, nothing, folder)


async def sent_there(there: Door) -> list[str]:
    thread = await there.here.society.store.thread("ada", limit=200)
    return [message.payload["text"] for message in thread if message.sender == "user"]


async def test_a_message_goes_out_and_its_answer_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with here_and_there(tmp_path, monkeypatch) as (here, there), asyncio.timeout(300):
        there.here.server.default = "It is 42."
        question = await here.say("What is it?", "anna")
        (answer,) = await here.heard()
        assert (answer.sender, answer.payload["text"]) == ("anna", "It is 42.")
        assert (answer.in_reply_to, answer.task) == (question, question)
        assert (await here.society.task(question)).task.state == "done"
        assert await sent_there(there) == ["What is it?"]


async def test_a_question_there_is_a_question_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with here_and_there(tmp_path, monkeypatch) as (here, there), asyncio.timeout(300):
        there.here.server.default = each(ada=[Says(calls=(ASKS,)), "", "Blue it is."])
        task = await here.say("Paint", "anna")
        (asked,) = await here.heard()
        assert (asked.payload["text"], asked.payload["quickReplies"]) == ("Which colour?", ["red", "blue"])
        await here.ended(task)
        assert (await here.society.task(task)).task.state == "waiting"
        await here.say("blue", "anna", in_reply_to=asked.id, option=1)
        (_, answer) = await here.heard(2)
        assert (answer.payload["text"], answer.task) == ("Blue it is.", task)
        await here.ended(task)
        assert (await here.society.task(task)).task.state == "done"
        assert len(await there.here.society.tasks()) == 1
        (_, chosen) = [one for one in await there.here.society.store.thread("ada", limit=9) if one.sender == "user"]
        assert (chosen.payload["text"], chosen.option) == ("blue", 1)


async def test_a_stop_here_cancels_the_task_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with here_and_there(tmp_path, monkeypatch) as (here, there), asyncio.timeout(300):
        there.here.server.default = HeldAnswer()
        task = await here.say("Work", "anna")
        await there.here.server.wait_for_request()
        (running,) = await there.here.society.tasks()
        await here.society.stop_task(task)
        await there.here.ended(running.id)
        assert (await there.here.society.task(running.id)).task.state == "stopped"
        assert (await here.society.task(task)).task.state == "stopped"


async def test_a_message_goes_out_only_when_it_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    may_flush = threading.Event()

    def slow(handle: int) -> None:
        is_here = "/here/" in os.readlink(f"/proc/self/fd/{handle}")
        if is_here:
            assert may_flush.wait(60)
        fdatasync(handle)
        if is_here:
            order.append("flushed")

    def answer(request: ReceivedRequest) -> Reply:
        order.append("received")
        may_flush.set()
        return "It is 42."

    async with here_and_there(tmp_path, monkeypatch) as (here, there), asyncio.timeout(300):
        there.here.server.default = answer
        flush = here.society.store.flush

        async def released() -> None:
            may_flush.set()
            await flush()

        await flush()
        fdatasync = writer.fdatasync
        monkeypatch.setattr(writer, "fdatasync", slow)
        monkeypatch.setattr(here.society.store, "flush", released)
        await here.say("What is it?", "anna")
        await here.heard()
        assert order.index("flushed") < order.index("received")


def sends_a_file(request: ReceivedRequest) -> Reply:
    """A model that makes a file, sends it with "Here." and ends."""
    results = [one for one in request.body["messages"] if one["role"] == "tool"]
    if not results:
        return Says(calls=(Calls("put_artifact", {"filename": "plan.txt", "text": "A plan"}),))
    ref = json.loads(results[0]["content"])["artifactRef"]
    sent = {"to": "user", "payload": {"text": "Here.", "attachments": [{"artifactRef": ref}]}}
    return Says(calls=(Calls("send_message", sent),)) if len(results) == 1 else Says("")


async def test_files_go_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with here_and_there(tmp_path, monkeypatch) as (here, there), asyncio.timeout(300):
        there.here.server.default = sends_a_file
        chart = await here.society.artifacts.put(b"A map", "map.txt")
        await here.say("Plan it", "anna", attachments=[chart.ref])
        (answered,) = await here.heard()
        assert answered.payload["text"] == "Here."
        (file,) = answered.payload["attachments"]
        assert await here.society.artifacts.read(file["artifactRef"]) == b"A plan"
        (asked,) = [one for one in await there.here.society.store.thread("ada", limit=9) if one.sender == "user"]
        (given,) = asked.payload["attachments"]
        assert await there.here.society.artifacts.read(given["artifactRef"]) == b"A map"


async def test_the_answer_arrives_with_a_note_if_its_file_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with here_and_there(tmp_path, monkeypatch) as (here, there), asyncio.timeout(300):
        there.here.server.default = sends_a_file
        here.society.artifacts.set_max_file_bytes(len(b"A plan") - 1)
        task = await here.say("Plan it", "anna")
        (answered,) = await here.heard()
        note = "[The file plan.txt was not kept: the file is larger than 5 bytes, the most allowed.]"
        assert answered.payload == {"text": f"Here.\n\n{note}"}
        await here.ended(task)
        assert (await here.society.task(task)).task.state == "done"
        assert await sent_there(there) == ["Plan it"]


async def test_a_society_that_stops_while_it_waits_gets_the_answer_asked_once(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    store = f'[store]\nurl = "{engine.url(tmp_path / "data")}"' if isinstance(engine, Postgres) else ""
    async with open_door(tmp_path / "there") as there, asyncio.timeout(300):
        monkeypatch.setenv("ANNA_TOKEN", await there.key("here", agents=["ada"], doors=["a2a"]))
        held = HeldAnswer()
        there.here.server.default = held
        async with open_here(tmp_path / "here", f"{there.url}/a2a/ada", store=store) as here:
            question = await here.say("Work", "anna")
            await there.here.server.wait_for_request()
            await here.society.abandon()
        (running,) = await there.here.society.tasks()
        assert running.state == "working"  # the end of a process is no stop
        held.may_end.set()
        async with open_here(tmp_path / "here", f"{there.url}/a2a/ada", store=store) as here:
            (answer,) = await here.heard()
            assert (answer.payload["text"], answer.in_reply_to) == ("The answer begins and ends.", question)
        assert await sent_there(there) == ["Work"]


async def test_an_agent_that_cannot_be_reached_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("ANNA_TOKEN", "a-key-of-the-tests-0123456789")
    async with open_here(tmp_path, f"http://127.0.0.1:{port}/a2a/ada") as here, asyncio.timeout(300):
        await here.say("Hello", "anna")
        await here.state("anna", "wait_retry")
        anna = await here.society.store.agent("anna")
        assert anna is not None and "cannot be reached" in (anna.state_reason or "")


async def test_a_wrong_key_blocks_the_agent_and_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("ANNA_TOKEN", "cot_a-wrong-key-of-the-tests-0123456789")
    async with (
        open_door(tmp_path / "there") as there,
        open_here(tmp_path / "here", f"{there.url}/a2a/ada") as here,
        asyncio.timeout(300),
    ):
        await here.say("Hello", "anna")
        await here.state("anna", "blocked")
        anna = await here.society.store.agent("anna")
        assert anna is not None and "refuses the key" in (anna.state_reason or "")
        assert "wrong-key" not in str(here.society.services.get("remote.anna").to_dict())


async def test_the_key_goes_only_to_the_host_of_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNA_TOKEN", "a-key-of-the-tests-0123456789")
    asked: list[str] = []

    async def card(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        interface = {"url": f"http://localhost:{port}/other", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
        await JSONResponse({"name": "Anna", "supportedInterfaces": [interface]})(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(card, log_level="critical", lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve([listener]))
    async with open_here(tmp_path, f"http://127.0.0.1:{port}/anna") as here, asyncio.timeout(300):
        await here.say("Hello", "anna")
        await here.state("anna", "blocked")
        anna = await here.society.store.agent("anna")
        assert anna is not None and "gets the key" in (anna.state_reason or "")
    server.should_exit = True
    await serving
    assert asked == ["/anna/.well-known/agent-card.json"]


def test_wrong_entries_are_reported_without_their_values(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text(
        """
[agents.ada]
[remote.ada]
card = "https://example.org/card.json"
[remote.bea]
card = "ftp://secret@example.org"
[remote.cid]
crad = "https://example.org/card.json"
[remote.dan]
card = "https://example.org"
headers = { Authorization = "Bearer ${A_KEY_THAT_IS_NOT_SET}" }
"""
    )
    config = read_config(tmp_path)
    assert [entry.id for entry in config.remote] == ["dan"]
    found = {problem.location: problem.message for problem in config.problems}
    assert set(found) == {f"coterie.toml: remote.{name}" for name in ("ada", "bea.card", "cid.card", "cid.crad")}
    assert "secret" not in str(found)
    services = with_remote_agents(ServiceRegistry(), config, lambda _: None)
    assert services.get("remote.dan").missing_key == "A_KEY_THAT_IS_NOT_SET"
    assert "A_KEY_THAT_IS_NOT_SET is set neither" in str(services.problems[0])


def test_a_database_gets_no_written_out_key(tmp_path: Path) -> None:
    remote = '[remote.anna]\ncard = "https://example.org"\nheaders = { Authorization = "Bearer %s" }\n'
    (tmp_path / "coterie.toml").write_text(remote % "a-real-key-0123456789")
    with pytest.raises(ConfigError, match="keys do not go to the database"):
        read_files(SocietyFolder(tmp_path))
    (tmp_path / "coterie.toml").write_text(remote % "${ANNA_TOKEN}")
    document, problems = read_files(SocietyFolder(tmp_path))
    assert not problems
    assert document["remote"]["anna"]["headers"] == {"Authorization": "Bearer ${ANNA_TOKEN}"}
