"""An agent whose stored state says idle although mail waits for it is woken, and that is logged."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from coterie.society import Society
from coterie.testing import FakeClock
from coterie.testing.model_server import ModelServer
from tests.conftest import PEOPLE
from tests.engines import Engine, Postgres
from tests.faults.harness import scaled_timeout

from .steps import RULES, ask, claim_agent, history_lines, says, state

FORGET = {
    "idle": "UPDATE agents SET state = 'idle', runnable_at = NULL WHERE id = 'ada'",
    "idle, not counted": "UPDATE agents SET state = 'idle', runnable_at = NULL, waiting = 0, waiting_bytes = 0"
    " WHERE id = 'ada'",
    "ready, never due": "UPDATE agents SET runnable_at = NULL WHERE id = 'ada'",
}


@pytest.mark.parametrize("damage", FORGET)
async def test_a_forgotten_agent_is_woken_with_all_its_mail_and_logged(
    engine: Engine, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    for text in ("one", "two"):
        await ask(store, text=text)
    with engine.behind(tmp_path / "data") as db:
        db.execute(FORGET[damage])
    assert await store.claim_ready("w", RULES, 5) == []

    assert await store.wake_forgotten() == ["ada"]
    assert await store.wake_forgotten() == []
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.startswith("ada was idle although 2 messages wait")
    claim = await claim_agent(store)
    assert await history_lines(store) == ["user: one", "user: two"]
    await store.advance(claim, says("done"), RULES)
    assert await state(store) == "idle"
    assert [violation async for violation in store.violations()] == []
    await store.close()


async def test_agents_in_a_correct_state_are_left_alone(engine: Engine, tmp_path: Path, clock: FakeClock) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    assert await store.wake_forgotten() == []
    await ask(store)
    assert await store.wake_forgotten() == []
    await store.advance(await claim_agent(store), says("an answer that the person has not read"), RULES)
    await store.withdraw(await ask(store, text="never mind"), "user")
    await store.pause("bob")
    await ask(store, "bob")
    assert await store.wake_forgotten() == []
    await store.close()


async def test_a_running_society_answers_the_mail_of_a_forgotten_agent_within_seconds(
    engine: Engine, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    url = f'[store]\nurl = "{engine.url(tmp_path)}"\n' if isinstance(engine, Postgres) else ""
    (tmp_path / "coterie.toml").write_text(f"{url}[agents.ada]\n[agents.bob]\n")
    async with ModelServer() as server:
        services = f'{{"services": [{{"id": "main", "baseURL": "{server.base_url}", "model": "m"}}]}}'
        (tmp_path / "llmservices.json").write_text(services)
        async with Society.open(tmp_path, clock=clock) as society:
            await society.pause("ada")
            await society.send(to="ada", text="are you there?")
            with engine.behind(tmp_path if engine.name == "postgres" else tmp_path / "data") as db:
                db.execute("UPDATE agents SET state = 'idle', hold = 0 WHERE id = 'ada'")
            async with asyncio.timeout(scaled_timeout(30)):
                inbox = society.inbox()
                answer = asyncio.ensure_future(anext(inbox))
                while not answer.done():
                    await clock.advance(seconds=1)
                    await asyncio.sleep(0)
                assert (await answer).sender == "ada"
                await inbox.aclose()
    assert any("ada was idle although 1 messages wait" in record.getMessage() for record in caplog.records)
