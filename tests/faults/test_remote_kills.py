"""A society is killed while an agent elsewhere works for it: the answer comes all the same, and was asked for once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.agent.held_answer import HeldAnswer
from tests.doors.conftest import open_door
from tests.doors.test_remote_agents import sent_there
from tests.engines import Engine, Postgres

from .harness import scaled_timeout
from .test_door_kills import TOKEN, Served


async def survive(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    here, there = folder / "here", folder / "there"
    here.mkdir()
    there.mkdir()
    store = f'[store]\nurl = "{engine.url(here)}"\nlease_seconds = 1\n' if isinstance(engine, Postgres) else ""
    async with open_door(there) as door, asyncio.timeout(scaled_timeout(60 + 10 * kills)):
        monkeypatch.setenv("ANNA_TOKEN", await door.key("here", agents=["ada"], doors=["a2a"]))
        remote = (
            f'[remote.anna]\ncard = "{door.url}/a2a/ada"\nheaders = {{ Authorization = "Bearer ${{ANNA_TOKEN}}" }}\n'
        )
        (here / "coterie.toml").write_text(f"{store}[agents.local]\n{remote}")
        served = Served(here)
        await served.start()
        try:
            for number in range(kills):
                held = HeldAnswer("Answer", f" {number}")
                door.here.server.default = held
                async with client(served) as http:
                    message = {"to": "anna", "payload": {"text": f"Question {number}"}}
                    assert (await http.post("/api/v1/messages", json=message)).is_success
                await door.here.server.wait_for_request(number + 1)
                await served.kill()
                held.may_end.set()
                await served.start()
                async with client(served) as http:
                    while f"Answer {number}" not in (await http.get("/api/v1/threads/anna/messages")).text:
                        await asyncio.sleep(0.1)
        finally:
            await served.kill()
        assert await sent_there(door) == [f"Question {number}" for number in range(kills)]
        assert len(door.here.server.requests) == kills


def client(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)


async def test_an_answer_from_elsewhere_survives_a_kill(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await survive(engine, tmp_path, monkeypatch, 1)


@pytest.mark.full
async def test_answers_from_elsewhere_survive_fifty_kills(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await survive(engine, tmp_path, monkeypatch, 50)
