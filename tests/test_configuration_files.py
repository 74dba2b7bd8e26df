"""A society that leaves PostgreSQL for SQLite takes its configuration along, from the database into files."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tomllib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coterie.admin.configuration_files import render_files
from coterie.agent_definitions import NewAgent
from coterie.config import read_config
from coterie.configuration import Document
from coterie.errors import StoreUnusable
from coterie.society import Society
from coterie.store_url import replace_store_url
from coterie.testing import ModelServer
from tests.cli.commands import Result, coterie_process
from tests.engines import Postgres
from tests.test_shared_configuration import KEY, SOON, running, service
from tests.test_shared_configuration import home as write_home

LIMITS = "[limits]\nmax_rounds = 7\n[limits.task]\nturns = 9\n"


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as server:
        yield server


@pytest.fixture
def url(shared: Postgres, tmp_path: Path) -> str:
    return shared.url(tmp_path)


@pytest.fixture
async def home(url: str, tmp_path: Path, model: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A society in PostgreSQL with an agent of its files and one that was created in the panel."""
    monkeypatch.setenv("MAIN_KEY", KEY)
    folder = write_home(tmp_path / "home", url, "[agents.ada]\n" + LIMITS, service(model, apiKey="${MAIN_KEY}"))
    async with running(folder) as society:
        await society.definitions.create(
            [NewAgent(id="zoe", fields={"name": "Zoe", "prompt": 'You "count".\nSlowly.'})]
        )
    return folder


async def command(*args: str | Path) -> Result:
    # In a process: the commands set signal handlers, and some run a loop of their own.
    return await asyncio.to_thread(coterie_process, *args)


async def check_zoe(folder: Path, model: ModelServer) -> None:
    """Check that the agent from the database works there, with SQLite."""
    with closing(sqlite3.connect(folder / "data" / "coterie.db")) as db:
        assert db.execute("SELECT key FROM meta WHERE key LIKE 'configuration%'").fetchall() == []
    async with running(folder) as society:
        assert society.store.info.engine == "sqlite"
        assert (await society.ask("zoe", "How many?", timeout=SOON)).text == "ok"
        request = await model.wait_for_request(1)
        assert 'You "count".\nSlowly.' in request.body["messages"][0]["content"]
        assert request.headers["authorization"] == f"Bearer {KEY}"
        assert (society.config.limits.max_rounds, society.config.limits.task.turns) == (7, 9)


async def test_an_agent_created_in_the_database_works_after_a_copy_to_sqlite(
    home: Path, url: str, tmp_path: Path, model: ModelServer
) -> None:
    done = await command("copy", url, tmp_path / "new")

    assert done.code == 0, done.stderr
    assert "they are now in coterie.toml and llmservices.json" in done.stdout
    assert "They need these keys, in the environment or in data/secrets.json: MAIN_KEY." in done.stdout
    assert KEY not in done.stdout
    await check_zoe(tmp_path / "new", model)


async def test_an_agent_created_in_the_database_works_after_a_restore_to_sqlite(
    home: Path, tmp_path: Path, model: ModelServer
) -> None:
    assert (await command("backup", "--dir", home, "--to", tmp_path / "a.tar")).code == 0
    done = await command("restore", tmp_path / "a.tar", "--dir", tmp_path / "new", "--store", "sqlite")

    assert done.code == 0, done.stderr
    assert "they are now in coterie.toml." in done.stdout and "MAIN_KEY" in done.stdout
    assert read_config(tmp_path / "new").shutdown.drain_seconds == 0, "other tables of the file stay"
    await check_zoe(tmp_path / "new", model)


async def test_a_backup_restored_to_postgresql_keeps_the_configuration_in_the_database(
    home: Path, shared: Postgres, tmp_path: Path
) -> None:
    assert (await command("backup", "--dir", home, "--to", tmp_path / "a.tar")).code == 0
    second = shared.url(tmp_path / "second")
    done = await command("restore", tmp_path / "a.tar", "--dir", tmp_path / "new", "--store", second)
    assert done.code == 0 and "they are now in" not in done.stdout
    async with running(tmp_path / "new", work=False) as society:
        assert {entry.id for entry in society.config.agents} == {"ada", "zoe"}


async def test_a_copy_keeps_what_the_target_folder_said_before_under_another_name(
    home: Path, url: str, tmp_path: Path, model: ModelServer
) -> None:
    target = tmp_path / "new"
    target.mkdir()
    before = "# mine\n[server]\nport = 8777  # ours\n\n[agents.bob]\n"
    (target / "coterie.toml").write_text(before)
    (target / "llmservices.json").write_text(json.dumps({"about": "mine", "services": []}))

    done = await command("copy", url, target, "--json")

    assert (done.json["files"], done.json["keys"]) == (["coterie.toml", "llmservices.json"], ["MAIN_KEY"])
    assert (target / "coterie.toml.old").read_text() == before
    text = (target / "coterie.toml").read_text()
    assert text.startswith("# mine\n[server]\nport = 8777  # ours\n") and set(tomllib.loads(text)["agents"]) == {
        "ada",
        "zoe",
    }
    assert json.loads((target / "llmservices.json").read_text())["about"] == "mine"
    await check_zoe(target, model)


async def test_a_copy_changes_no_file_if_the_configuration_cannot_be_written_there(
    home: Path, url: str, tmp_path: Path
) -> None:
    target = tmp_path / "new"
    target.mkdir()
    (target / "coterie.toml").write_text("agents = {ada = {}}\n")

    done = await command("copy", url, target)

    assert "correct that file or move it away, then copy again" in done.failure
    assert [path.name for path in target.iterdir() if path.name != "data"] == ["coterie.toml"]
    assert not (target / "data" / "coterie.db").exists()


async def test_a_copy_from_sqlite_takes_no_configuration_to_postgresql(
    home: Path, url: str, shared: Postgres, tmp_path: Path
) -> None:
    await command("copy", url, tmp_path / "new")
    # As copied by an earlier version.
    with closing(sqlite3.connect(tmp_path / "new" / "data" / "coterie.db")) as db, db:
        db.execute("INSERT INTO meta VALUES ('configuration', '{}'), ('configuration_version', '4')")
    second = shared.url(tmp_path / "second")
    assert (await command("copy", tmp_path / "new", second)).code == 0
    file = tmp_path / "new" / "coterie.toml"
    file.write_text(replace_store_url(file.read_text(), second))
    async with Society.open(tmp_path / "new", work=False) as society:
        assert (await society.configuration.read())[0] == "1"
        assert {entry.id for entry in society.config.agents} == {"ada", "zoe"}


DOCUMENT: Document = {
    "agents": {
        "ada": {"prompt": "You count.", "answer_schema": '{"type":"object"}', "tools": ["look", "!x"]},
        "bob": {"extra_body": {"seed": 7, "a b": {"c": [1, {"d": True}]}}, "temperature": 0.5, "parent": "ada"},
    },
    "remote": {"far": {"card": "https://example.org/card.json", "headers": {"Authorization": "Bearer ${FAR_KEY}"}}},
    "limits": {"max_rounds": 7, "task": {"turns": 9, "cost": 0.5}},
    "interruption": {"interrupt": "stream"},
    "store": {"keep_days": 30},
}
FILES = {
    "no file": "",
    "other agents": "[agents.cyd] # gone\n[agents.ada]\nname = 'A'\n[remote.near]\ncard = 'https://example.org/c'\n",
    "named files": "[agents.ada]\nprompt_file = 'ada.md' # long\nanswer_schema = 'figures.json'\n",
    "other limits": "[limits] #\nmax_rounds = 8\nmailbox = 5\n[limits.task]\ntokens = 5\n[artifacts]\nshared = true",
    "the same limits": "[limits]\nmax_rounds = 7\ntask = {turns = 9, cost = 0.5}\n[mcp.files]\ncommand = 'x'\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_files_with_any_content_become_the_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "ada.md").write_text("You count.")
    (tmp_path / "figures.json").write_text('{ "type": "object" }')
    (tmp_path / "coterie.toml").write_text(text)
    plain: dict[str, Any] = tomllib.loads(render_files(DOCUMENT, tmp_path, "")["coterie.toml"].decode())
    kept = {name: table for name, table in tomllib.loads(text).items() if name == "mcp"}
    if "prompt_file" in text:
        assert plain["agents"]["ada"]["prompt_file"] == "ada.md"
        plain["agents"]["ada"] = DOCUMENT["agents"]["ada"]
    assert {name: table for name, table in plain.items() if table} == DOCUMENT | kept
    (tmp_path / "coterie.toml").write_bytes(render_files(DOCUMENT, tmp_path, "")["coterie.toml"])
    assert render_files(DOCUMENT, tmp_path, "") == {}


@pytest.mark.parametrize("store", [{}, {"keep_days": 30}])
def test_how_long_data_is_kept_is_written_beside_the_other_settings_of_the_store(store: Any, tmp_path: Path) -> None:
    text = "[store]\ndurability = 'relaxed' # as before\nkeep_gb = 5.0\n"
    (tmp_path / "coterie.toml").write_text(text)
    changed = render_files({"store": store}, tmp_path, "")["coterie.toml"].decode()
    assert tomllib.loads(changed)["store"] == {"durability": "relaxed"} | store
    assert "# as before" in changed


def test_only_the_assistant_is_left_of_other_agents_if_the_database_has_none(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
    changed = render_files({}, tmp_path, "")["coterie.toml"].decode()
    assert tomllib.loads(changed) == {"agents": {"assistant": {"name": "Assistant"}}}


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text("[agents.ada\n")
    with pytest.raises(StoreUnusable, match=r"coterie\.toml.*: do this"):
        render_files(DOCUMENT, tmp_path, "do this")
