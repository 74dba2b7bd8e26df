"""Agents, services and limits of a society in PostgreSQL: one configuration for all its processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.agent_definitions import NewAgent
from coterie.clock import Clock, SystemClock, to_ms
from coterie.configuration import Document, FilesRole
from coterie.errors import ConfigError, Refused
from coterie.society import Society
from coterie.stores.postgres import PostgresStore
from coterie.testing import FakeClock, ModelServer
from coterie.web.app import build_app
from coterie.web.auth import Access
from tests.engines import Postgres

TOKEN = "a-token-of-the-tests-0123456789abcdef"
KEY = "sk-main-0123456789abcdef"
SOON = 180


def home(folder: Path, url: str, toml: str = "", services: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "coterie.toml").write_text(f"{toml}\n[store]\nurl = {json.dumps(url)}\n[shutdown]\ndrain_seconds = 0\n")
    if services is not None:
        (folder / "llmservices.json").write_text(json.dumps({"services": services}))
    else:
        (folder / "data").mkdir(exist_ok=True)
    return folder


@asynccontextmanager
async def running(
    folder: Path, *, files: FilesRole = "write", work: bool = True, clock: Clock | None = None
) -> AsyncIterator[Society]:
    society = await Society.start(folder, files=files, work=work, clock=clock)
    try:
        async with asyncio.timeout(SOON):
            yield society
    finally:
        await society.stop()


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as server:
        yield server


def service(model: ModelServer, **more: Any) -> list[dict[str, Any]]:
    return [{"id": "main", "baseURL": model.base_url, "model": "m", **more}]


def stored(shared: Postgres, folder: Path) -> str:
    with shared.behind(folder) as db:
        return "\n".join(value for _, value in db.execute("SELECT key, value FROM meta"))


def set_prompt(prompt: str, agent: str = "ada") -> Any:
    def change(document: Document) -> None:
        document["agents"][agent]["prompt"] = prompt

    return change


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "coterie apply" in record.getMessage()]


async def test_a_worker_without_files_has_the_agents_of_the_server_and_each_change_from_its_next_turn_on(
    shared: Postgres, tmp_path: Path, model: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAIN_KEY", KEY)
    url = shared.url(tmp_path)
    (tmp_path / "server").mkdir()
    (tmp_path / "server/ada.md").write_text("You count.")
    (tmp_path / "server/figures.json").write_text('{"type": "object"}')
    toml = "[agents.ada]\nprompt_file = 'ada.md'\n[agents.bob]\nanswer_schema = 'figures.json'\n"
    server_home = home(tmp_path / "server", url, toml, service(model, apiKey="${MAIN_KEY}"))
    async with running(home(tmp_path / "early", url), files="never") as early:
        assert await early.store.agents() == [] and not len(early.agents), "a worker adds nobody"
        async with running(server_home, work=False) as server:
            answer = await early.ask("ada", "How many?", timeout=SOON)
            request = await model.wait_for_request(1)
            assert answer.text == "ok" and "You count." in request.body["messages"][0]["content"]
            assert request.headers["authorization"] == f"Bearer {KEY}"
            assert early.agents.profile("bob").answer_schema == '{"type": "object"}'
            assert {agent.id for agent in await early.store.agents()} == {"user", "ada", "bob"}

            for number in range(2, 6):  # the next turn comes before any poll
                await server.configuration.change(set_prompt(f"You count to {number}."))
                await server.send(to="ada", text="How many?")
                request = await model.wait_for_request(number)
                assert f"You count to {number}." in request.body["messages"][0]["content"]
        assert KEY not in stored(shared, tmp_path)


async def test_old_data_is_deleted_by_the_rule_of_the_server_whichever_process_runs_first(
    shared: Postgres, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shared.url(tmp_path)
    monkeypatch.setattr(PostgresStore, "open", partial(PostgresStore.open, time=lambda: to_ms(clock.now())))
    server_home = home(tmp_path / "server", url, "[agents.ada]\n")
    text = (server_home / "coterie.toml").read_text().replace("[store]\n", "[store]\nkeep_days = 1\n")
    (server_home / "coterie.toml").write_text(text)
    async with running(server_home, work=False, clock=clock) as first:
        await first.send(to="ada", text="withdrawn")
        (message,) = await first.store.waiting("ada")
        await first.bus.withdraw(message.id)
    # The worker's hour begins ten minutes earlier, so it is the one that deletes.
    async with running(home(tmp_path / "worker", url), files="never", work=False, clock=clock) as worker:
        await clock.jump(minutes=10)
        async with running(server_home, work=False, clock=clock) as server:
            runs = set()
            for _ in range(48 * 6):
                await clock.jump(minutes=10)
                await clock.advance(seconds=1)
                runs.add((await server.retention.figures()).last_prune)
            assert len(runs) > 40
            assert await server.store.message(message.id) is None
            assert worker.config.store.keep_days == server.config.store.keep_days == 1
            assert worker.config.store.url == url, "the address of the store stays with each machine"


async def test_a_broken_coterie_toml_on_one_machine_does_not_stop_its_turns_or_the_changes_of_others(
    shared: Postgres, tmp_path: Path, model: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = shared.url(tmp_path)
    server_home = home(tmp_path / "server", url, "[agents.ada]\nprompt = 'You count.'\n", service(model))
    worker_home = home(tmp_path / "worker", url)
    async with running(server_home, work=False) as server, running(worker_home, files="never") as worker:
        readable = (worker_home / "coterie.toml").read_text()
        (worker_home / "coterie.toml").write_text("[agents.ada\n")
        for number in (2, 3):
            await server.configuration.change(set_prompt(f"You count to {number}."))
            answer = await worker.ask("ada", "How many?", timeout=SOON)
            request = await model.wait_for_request(number - 1)
            assert answer.text == "ok" and f"You count to {number}." in request.body["messages"][0]["content"]
            warnings = [
                one.getMessage() for one in caplog.records if "coterie.toml: cannot be read" in one.getMessage()
            ]
            assert len(warnings) == number - 1, "one for each version"
        problems = await worker.configuration.change(set_prompt("You count to 4."))
        assert [one.location for one in problems if one.fatal] == ["coterie.toml"]
        with pytest.raises(ConfigError):
            await worker.configuration.reload()
        (worker_home / "coterie.toml").write_text(readable)
        assert not [one for one in await worker.configuration.reload() if one.fatal]


async def test_a_configuration_that_this_version_cannot_read_leaves_the_applied_one(
    shared: Postgres, tmp_path: Path, model: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = home(tmp_path / "a", shared.url(tmp_path), "[agents.ada]\nprompt = 'You count.'\n", service(model))
    async with running(folder) as society:
        stored = await society.store.configuration()
        newer = json.loads(stored.document) | {"limits": {"upload_mb": "what a later version writes"}}
        version = await society.store.write_configuration(json.dumps(newer), stored.version, [])
        for number in (1, 2):
            answer = await society.ask("ada", "How many?", timeout=SOON)
            request = await model.wait_for_request(number)
            assert answer.text == "ok" and "You count." in request.body["messages"][0]["content"]
        assert society.configuration.settings.version == str(stored.version)
        (warning,) = [one.getMessage() for one in caplog.records if "limits.upload_mb" in one.getMessage()]
        assert f"version {version} of the configuration" in warning


async def test_files_that_differ_do_not_count_until_they_are_applied(
    shared: Postgres, tmp_path: Path, model: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = shared.url(tmp_path)
    first = home(tmp_path / "first", url, "[agents.ada]\nname = 'Ada'\n", service(model))
    second = home(tmp_path / "second", url, "[agents.ada]\nname = 'Countess'\n[agents.bob]\n", service(model))
    async with running(first, work=False) as society:
        async with running(second, work=False) as other:
            assert [entry.name for entry in other.config.agents] == ["Ada"]
            assert await other.store.agent("bob") is None
        (warning,) = warnings_of(caplog)
        assert (
            'agents.ada.name: "Ada" in the database, "Countess" in the files; agents.bob: only in the files' in warning
        )
        assert "coterie apply --dry-run" in warning

        # The difference stays a problem while the configuration changes, until the files are applied.
        async with running(second, work=False) as other:
            await other.configuration.change(lambda document: document["agents"]["ada"].update(role="poet"))
            (still,) = other.configuration.health.problems
            assert "coterie apply" in still.message and "(version 2)" in still.message
            await other.configuration.change(lambda document: document["agents"]["ada"].pop("role"))
        await society.configuration.reload()

        # The owner changes the files of the server that wrote the configuration: they count at once.
        home(first, url, "[agents.ada]\nname = 'Ada'\n[agents.cyd]\n", service(model))
        caplog.clear()
        await society.configuration.reload()
        assert [entry.id for entry in society.config.agents] == ["ada", "cyd"] and not warnings_of(caplog)

        # A change elsewhere does not make the unchanged files of this server a conflict, but a change of both does.
        await society.configuration.change(lambda document: document["agents"].pop("cyd"))
        problems = await society.configuration.reload()
        assert [entry.id for entry in society.config.agents] == ["ada"]
        assert not [problem for problem in problems if "coterie apply" in problem.message]
        home(first, url, "[agents.ada]\nname = 'Ada'\n[agents.dan]\n", service(model))
        (conflict,) = [one for one in await society.configuration.reload() if "coterie apply" in one.message]
        assert "agents.dan: only in the files" in conflict.message and await society.store.agent("dan") is None


async def test_a_service_that_is_set_up_at_one_server_is_in_the_database_without_its_key(
    shared: Postgres, tmp_path: Path, model: ModelServer
) -> None:
    url = shared.url(tmp_path)
    async with (
        running(home(tmp_path / "a", url, "[agents.ada]\n", service(model))) as first,
        running(home(tmp_path / "b", url)) as second,
    ):
        await first.setup.put("other", {"baseURL": model.base_url, "model": "m"}, KEY)
        assert KEY in (tmp_path / "a/data/secrets.json").read_text() and KEY not in stored(shared, tmp_path)
        assert json.loads((tmp_path / "a/llmservices.json").read_text())["services"] == service(model)

        await second.configuration.follow()
        assert [view.entry.id for view in second.setup.list()] == ["main", "other"]
        assert second.services.get("other").missing_key == "OTHER_API_KEY"
        # Which services are in use is read, too: the agent may have been created a moment ago.
        await first.create_agent(id="zoe", service="other")
        with pytest.raises(Refused) as refusal:
            await second.setup.delete("other")
        assert refusal.value.code == "service_in_use"
        # A server that has not heard of the change yet refuses nothing: it reads it first.
        await first.setup.delete("main")
        await second.setup.put("third", {"baseURL": model.base_url, "model": "m"})
        assert [entry.id for entry in second.services] == ["other", "third"]
        version, document = await second.configuration.read()
        assert [entry["id"] for entry in document["services"]] == ["other", "third"]
        with pytest.raises(Refused, match="changed meanwhile"):
            await second.configuration.change(set_prompt("x"), expected_version=str(int(version) - 1))
        with pytest.raises(ConfigError, match=r"agents\.ada\.max_tokens"):
            await second.configuration.change(lambda document: document["agents"]["ada"].update(max_tokens=0))
        assert (await second.configuration.read())[0] == version


@pytest.mark.parametrize(
    ("entry", "place"),
    [({"apiKey": KEY}, "apiKey"), ({"headers": {"Authorization": f"Bearer {KEY}"}}, "headers.Authorization")],
)
async def test_a_key_that_is_written_out_does_not_go_to_the_database(
    shared: Postgres, tmp_path: Path, model: ModelServer, entry: Mapping[str, Any], place: str
) -> None:
    folder = home(tmp_path / "a", shared.url(tmp_path), "[agents.ada]\n", service(model, **entry))
    with pytest.raises(ConfigError) as error:
        await Society.start(folder)
    assert f"services[0].{place}" in str(error.value) and KEY not in str(error.value)
    assert KEY not in stored(shared, tmp_path)


async def test_of_two_servers_that_create_the_same_agent_at_once_one_answers_409(
    shared: Postgres, tmp_path: Path, model: ModelServer
) -> None:
    url = shared.url(tmp_path)
    async with (
        running(home(tmp_path / "a", url, "[agents.ada]\n", service(model))) as first,
        running(home(tmp_path / "b", url)) as second,
    ):
        for number in range(3):
            answers = await asyncio.gather(*(create(society, f"zoe{number}") for society in (first, second)))
            assert sorted(answers) == [(201, None), (409, "id_taken")]


async def create(society: Society, agent_id: str) -> tuple[int, str | None]:
    app = build_app(society, Access(TOKEN, society.store.info.log_id, SystemClock()), clock=SystemClock())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8642", headers=headers) as client:
        answer = await client.post("/api/v1/agents", json={"id": agent_id, "prompt": society.store.info.log_id})
        return answer.status_code, answer.json().get("code")


async def test_agents_made_in_the_page_are_in_the_database_and_not_in_the_files(
    shared: Postgres, tmp_path: Path, model: ModelServer
) -> None:
    url = shared.url(tmp_path)
    async with (
        running(home(tmp_path / "a", url, services=service(model))) as first,
        running(home(tmp_path / "b", url)) as second,
    ):
        before = (tmp_path / "a/coterie.toml").read_text()
        seen = (await second.definitions.read()).version
        assert await first.definitions.create([NewAgent(fields={"name": "Ada", "prompt": "You count."})]) == ["ada"]
        await second.send(to="ada", text="How many?")
        assert "You count." in (await model.wait_for_request()).body["messages"][0]["content"]
        await second.configuration.follow()
        assert {entry.id for entry in second.config.agents} == {"assistant", "ada"}
        with pytest.raises(Refused) as refusal:
            await second.definitions.change("ada", {"name": "Countess"}, seen)
        assert refusal.value.code == "definitions_changed"
        with pytest.raises(Refused, match=r"ada\.service|ada\.tools|expected") as refusal:
            await second.definitions.change("ada", {"tools": "not a list"})
        assert refusal.value.code == "agent_invalid"
        await second.definitions.retire("assistant")
        with pytest.raises(Refused) as refusal:
            await second.definitions.retire("ada")
        assert refusal.value.code == "last_agent"
        (change, *_) = await second.definitions.changes()
        await second.definitions.undo(change.id)
        await first.configuration.follow()
        assert [entry.id for entry in first.config.agents] == ["ada", "assistant"]
        assert (tmp_path / "a/coterie.toml").read_text() == before
