"""Changes of a history by another worker are in the next request, on every engine.

A society works with a model server that keeps every request. A second worker, on a store of its own where the engine
allows several, takes the agent's turns step by step and then leaves: the society goes on in the middle of the turn.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.clock import SystemClock
from coterie.society import Society
from coterie.stores.postgres import PostgresStore
from coterie.stores.sql.store import SqlStore
from coterie.testing import Calls, ModelServer, Says
from coterie.testing.model_server import ReceivedRequest
from coterie.turn import AskModel, Poisoned, Rest, RunCall
from coterie.turn_store import Claim, StaleClaim
from tests.engines import Engine, Postgres
from tests.faults.scenarios import wait_until_idle

from .processes import envelope
from .steps import advance, call, done, says
from .workers import ManualWorker

TOOLS = """
from pathlib import Path
from coterie import tool

@tool
async def fire() -> str:
    "Do what cannot be undone."
    with (Path(__file__).parent / "fired").open("a") as file:
        file.write("fired\\n")
    return "fired at the first server"
"""


class Two:
    """A running society, and a second worker of it."""

    def __init__(self, society: Society, store: SqlStore, model: ModelServer, folder: Path) -> None:
        self.society, self.store, self.model, self._folder = society, store, model, folder
        self._worker = ManualWorker("second")

    async def send_to_first(self, text: str) -> None:
        await self.society.send(to="ada", text=text)
        await wait_until_idle(self.society)

    async def send_to_second(self, text: str) -> Claim:
        self.store.register_worker(self._worker)
        await self.store.send(envelope("user", "ada", text))
        return await self._worker.next()

    async def release_second(self) -> list[dict[str, Any]]:
        """Release the turn of the second worker; return the messages of the next request."""
        before = len(self.model.requests)
        self.register_first()
        await self.store.release_claims("second", failed=False)
        return shown(await self.model.wait_for_request(before + 1))

    def register_first(self) -> None:
        """If both share one store, register the worker of the society again."""
        if self.store is self.society.store:
            self.store.register_worker(self.society._require_runtime()._scheduler)

    def fired(self) -> int:
        log = self._folder / "fired"
        return len(log.read_text().splitlines()) if log.exists() else 0


def shown(request: ReceivedRequest) -> list[dict[str, Any]]:
    """The messages of a request without the system message."""
    return [message for message in request.body["messages"] if message["role"] != "system"]


def words(messages: list[dict[str, Any]]) -> str:
    return json.dumps(messages)


@pytest.fixture
async def two(engine: Engine, tmp_path: Path) -> AsyncIterator[Two]:
    async with ModelServer() as model, _society(engine, tmp_path, model) as society:
        if not isinstance(engine, Postgres):
            yield Two(society, society.store, model, tmp_path / "home")
            return
        store = await PostgresStore.open(engine.url(tmp_path), SystemClock())
        yield Two(society, store, model, tmp_path / "home")
        await wait_until_idle(society)
        assert [violation async for violation in store.violations()] == []
        await store.close()


@asynccontextmanager
async def _society(engine: Engine, folder: Path, model: ModelServer) -> AsyncIterator[Society]:
    home = folder / "home"
    home.mkdir()
    toml = "[agents.ada]\n[agents.bob]\n"
    if isinstance(engine, Postgres):
        toml += f"[store]\nurl = {json.dumps(engine.url(folder))}\n"
    (home / "coterie.toml").write_text(toml)
    (home / "tools.py").write_text(TOOLS)
    entry = {"id": "main", "baseURL": model.base_url, "model": "m"}
    (home / "llmservices.json").write_text(json.dumps({"services": [entry]}))
    async with Society.open(home) as society:
        yield society


async def test_messages_read_by_another_worker_are_in_the_next_request(two: Two) -> None:
    two.model.script("the first answer")
    await two.send_to_first("FIRST")
    await two.send_to_second("SECOND")
    messages = await two.release_second()
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert "FIRST" in words(messages[:1]) and "SECOND" in words(messages[2:])


async def test_answers_of_another_worker_are_in_the_next_request(two: Two) -> None:
    await two.send_to_first("FIRST")
    claim = await advance(two.store, await two.send_to_second("SECOND"), says("said by the second"))
    assert claim.action == Rest()
    await two.send_to_second("THIRD")
    messages = await two.release_second()
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[3]["content"] == "said by the second" and "THIRD" in words(messages[4:])


async def test_an_unsafe_call_of_another_worker_runs_once_and_its_result_is_in_the_next_request(two: Two) -> None:
    two.model.default = fires_until_it_sees_a_result
    two.model.script("the first answer")
    await two.send_to_first("FIRST")
    claim = await advance(two.store, await two.send_to_second("SECOND"), says("", call("fire")))
    assert claim.action == RunCall(0)
    claim = await advance(two.store, claim, done(result="fired at the second server"))
    assert claim.action == AskModel()
    messages = await two.release_second()
    await wait_until_idle(two.society)
    assert (messages[-1]["role"], messages[-1]["content"]) == ("tool", "fired at the second server")
    assert two.fired() == 0


def fires_until_it_sees_a_result(request: ReceivedRequest) -> Says | str:
    seen = any(message["role"] == "tool" for message in shown(request))
    return "done" if seen else Says(calls=(Calls("fire", {}),))


async def test_a_conversation_cleared_by_another_worker_is_not_shown(two: Two) -> None:
    await two.send_to_first("FIRST")
    await two.store.clear_thread("ada")
    await two.send_to_second("SECOND")
    messages = await two.release_second()
    assert "FIRST" not in words(messages) and "SECOND" in words(messages)


async def test_a_cleared_conversation_is_not_shown_when_the_new_one_has_as_many_rows(two: Two) -> None:
    await two.send_to_first("FIRST")
    await two.store.clear_thread("ada")
    claim = await advance(two.store, await two.send_to_second("SECOND"), says("said by the second"))
    assert claim.action == Rest()
    two.register_first()
    await two.send_to_first("THIRD")
    messages = shown(two.model.requests[-1])
    assert "FIRST" not in words(messages) and "SECOND" in words(messages) and "THIRD" in words(messages)


async def test_a_summary_of_another_worker_replaces_the_messages_it_covers(two: Two) -> None:
    await two.send_to_first("FIRST")
    claim = await two.send_to_second("SECOND")
    compacted = await two.store.summarise(claim, 2, "WHAT WAS SAID BEFORE")
    assert (compacted.epoch, compacted.step_no) == (claim.epoch, claim.step_no)
    assert compacted.history_version > claim.history_version
    messages = await two.release_second()
    assert "FIRST" not in words(messages)
    assert words(messages).index("WHAT WAS SAID BEFORE") < words(messages).index("SECOND")


async def test_a_turn_quarantined_by_another_worker_is_not_shown(two: Two) -> None:
    await two.send_to_first("FIRST")
    claim = await advance(two.store, await two.send_to_second("SECOND"), Poisoned("it kills"))
    assert claim.action == Rest()
    await two.send_to_second("THIRD")
    messages = await two.release_second()
    assert "FIRST" in words(messages) and "SECOND" not in words(messages) and "THIRD" in words(messages)


async def test_a_worker_with_a_stale_claim_does_not_get_the_history(two: Two) -> None:
    lost = await two.send_to_second("SECOND")
    assert (await two.store.history_view("ada", lost)).version == lost.history_version
    await two.release_second()
    await wait_until_idle(two.society)
    with pytest.raises(StaleClaim):
        await two.store.history_view("ada", lost)
    with pytest.raises(StaleClaim):
        await two.store.summarise(lost, 1, "written by nobody")
