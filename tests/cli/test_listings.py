"""`agents`, `delayed` and `history` speak HTTP: to the running server, or to a private one that changes nothing."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from coterie.config import ADDRESS_FILE
from coterie.society import Society
from coterie.store import worker_name
from tests.engines import Postgres

from .commands import coterie
from .environment import AGENTS, Environment

LISTINGS = [("agents",), ("delayed",), ("history", "ada")]


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file. The last reader of a WAL database leaves an empty WAL and an index of it."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.endswith(("-wal", "-shm"))]
    return {str(file): sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_asks_the_running_server(env: Environment, listing: tuple[str, ...]) -> None:
    env.serve()

    failure = coterie(*listing, "--token", "wrong", "--dir", env.folder).failure

    assert failure.startswith("the running server does not accept this token")


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_of_a_society_that_nobody_runs_changes_nothing(env: Environment, listing: tuple[str, ...]) -> None:
    coterie("send", "ada", "for now", "--dir", env.folder)
    coterie("send", "ada", "due long ago", "--delay", "1ms", "--dir", env.folder)
    before = contents(env.folder)

    assert coterie(*listing, "--dir", env.folder).code == 0

    assert contents(env.folder) == before
    assert env.model.requests == []
    assert coterie("delayed", "--json", "--dir", env.folder).json["count"] == 1


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_works_beside_a_program_without_a_server(env: Environment, listing: tuple[str, ...]) -> None:
    society = env.run(Society.start(env.folder))
    try:
        done = coterie(*listing, "--json", "--dir", env.folder)
    finally:
        env.run(society.stop())

    assert (done.code, done.stderr) == (0, "")
    assert "items" in done.json


@pytest.mark.parametrize("change", [{"url": "http://192.0.2.1:8642"}, {"version": "99.0.0"}])
def test_a_listing_works_beside_a_server_that_commands_cannot_use(env: Environment, change: dict[str, str]) -> None:
    env.serve()
    note = env.folder / "data" / ADDRESS_FILE
    note.write_text(json.dumps(json.loads(note.read_text()) | change))

    assert [agent["id"] for agent in coterie("agents", "--json", "--dir", env.folder).json["items"]] == ["ada", "bob"]


def test_the_fields_of_an_agent_are_the_same_with_and_without_a_server(either: Environment) -> None:
    coterie("send", "bob", "x", "--delay", "1h", "--dir", either.folder)

    ada, bob = coterie("agents", "--json", "--dir", either.folder).json["items"]

    assert ada | {"since": None} == {
        "id": "ada", "name": "Ada", "description": "", "state": "idle", "since": None, "service": "main",
        "parent": None, "waiting": 0, "delayed": 0, "unread": 0, "worker": None,
    }  # fmt: skip
    assert (bob["parent"], bob["delayed"]) == ("ada", 1)
    assert coterie("agents", "--json", "--dir", either.folder).json["workers"] == []


def test_unread_messages_are_counted(either: Environment) -> None:
    either.script("Fine.")
    coterie("send", "ada", "How are you?", "--wait", "--dir", either.folder)

    items = coterie("agents", "--json", "--dir", either.folder).json["items"]

    assert {agent["id"]: agent["unread"] for agent in items} == {"ada": 1, "bob": 0}


def test_an_agent_at_work_whose_process_was_killed_has_a_worker_that_is_gone(env: Environment) -> None:
    coterie("send", "ada", "x", "--dir", env.folder)
    with closing(sqlite3.connect(env.folder / "data" / "coterie.db")) as db, db:
        db.execute("UPDATE agents SET worker = 'some', state = 'llm' WHERE id = 'ada'")

    ada, bob = coterie("agents", "--json", "--dir", env.folder).json["items"]

    assert (ada["worker"], bob["worker"]) == ("gone", None)


def test_a_long_history_is_read_page_by_page_to_its_end(either: Environment) -> None:
    coterie("send", "bob", "x", "--delay", "1h", "--dir", either.folder)
    with closing(sqlite3.connect(either.folder / "data" / "coterie.db")) as db, db:
        db.executemany(
            "INSERT INTO history (agent_id, seq, turn_no, role, content) VALUES ('ada', ?1, 1, 'assistant', ?1)",
            [(n,) for n in range(1, 451)],
        )

    system, *rows = coterie("history", "ada", "--json", "--dir", either.folder).json["items"]

    assert system["role"] == "system"
    assert [row["content"] for row in rows] == [f"{n}" for n in range(1, 451)]


def test_a_damaged_file_is_named_in_one_sentence(env: Environment) -> None:
    coterie("send", "ada", "x", "--dir", env.folder)
    (env.folder / "coterie.toml").write_text("[agents.ada\n")

    assert "coterie.toml" in coterie("agents", "--dir", env.folder).failure


def test_a_society_on_another_machines_server_is_listed_from_its_database(
    env: Environment, shared: Postgres, tmp_path: Path
) -> None:
    text = f"[store]\nurl = {json.dumps(shared.url(tmp_path))}\n{AGENTS}"
    (env.folder / "coterie.toml").write_text(text)
    elsewhere = tmp_path / "elsewhere"  # the same society; no server has left its address there
    elsewhere.mkdir()
    for name in ("coterie.toml", "llmservices.json"):
        (elsewhere / name).write_text((env.folder / name).read_text())
    env.serve()
    env.script("Fine.")
    coterie("send", "ada", "How are you?", "--wait", "--dir", env.folder)
    coterie("send", "ada", "later", "--delay", "1h", "--dir", env.folder)

    listed = coterie("agents", "--json", "--dir", elsewhere).json
    history = coterie("history", "ada", "--json", "--dir", elsewhere).json["items"]

    assert [(agent["id"], agent["service"], agent["unread"]) for agent in listed["items"]] == [
        ("ada", "main", 1),
        ("bob", "main", 0),
    ]
    assert [worker["name"] for worker in listed["workers"]] == [worker_name()]  # the server, not the command
    assert [row["role"] for row in history] == ["system", "user", "assistant"]
    assert coterie("delayed", "--json", "--dir", elsewhere).json["count"] == 1
