"""Every failpoint in the code, killed at and raised at: what was acknowledged stays, all else can be asked again."""

from __future__ import annotations

import ast
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.messages import PERSON
from coterie.stores.sqlite.migrate import SCHEMA

from .harness import ForkServer
from .requests import seen_of_requests, wrong_requests
from .scenarios import make_home
from .verifier import find_damage, open_database
from .witness import read_notes
from .work_verifier import wrong_answers, wrong_effects, wrong_histories, wrong_letters

SENT = {**dict.fromkeys(("first", "second", "file", "late", "work"), "taken"), "gone": "withdrawn"}
"""What `every_door` sends, and what becomes of it."""


def modules_of_a_running_society() -> set[Path]:
    """Every module of ours that the runtime imports, directly or not: only what is loaded can be hit."""
    root, found = Path(coterie.__file__).parent, set[Path]()
    wanted = ["coterie.society"]
    while wanted:
        place = root.parent.joinpath(*wanted.pop().split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file in found or not file.exists():
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coterie"):
                wanted += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def names_in_the_code() -> list[str]:
    names = set()
    for file in modules_of_a_running_society():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "hit":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{file.name}:{node.lineno}: a failpoint's name is written out"
                names.add(str(name.value))
    return sorted(names)


NAMES = names_in_the_code()


@pytest.fixture(scope="module")
def meetings(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often each failpoint is met on a walk through every door."""
    home = tmp_path_factory.mktemp("dry") / "society"
    make_home(home)
    counted = fork_server.run("every_door", home, arm=",".join(f"{name}:1000000:kill" for name in NAMES))
    hits: dict[str, int] = counted["returned"]["hits"]
    return hits


def chosen(meetings: dict[str, int], name: str) -> list[int]:
    """The first meeting, one in the middle and a late one: the last, where the next walk is sure to come that far.

    Writers that meet share a commit, so a walk has a few commits more or less than the one before it.
    """
    met = meetings.get(name, 0)
    assert met, f"no door leads past the failpoint {name!r}: extend scenarios.every_door"
    return sorted({1, (met + 1) // 2, met * 3 // 4 if name.startswith(("commit.", "flush.")) else met})


def state_of(home: Path) -> dict[str, Any]:
    with open_database(home) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version < SCHEMA.newest:
            assert version or not db.execute("SELECT * FROM sqlite_schema").fetchall(), "half a migration"
            return {}
        assert find_damage(db) == []
        return dict(db.execute(_SENT))


def assert_all_arrived_and_was_answered_once(home: Path) -> None:
    with open_database(home) as db:
        assert find_damage(db) == []
        assert sorted(db.execute(_SENT).fetchall()) == sorted(SENT.items())
        db.row_factory = sqlite3.Row
        assert wrong_histories(db) == wrong_answers(db) == wrong_letters(db) == []
        notes = read_notes(home.parent / "witness")
        assert wrong_effects(db, notes) == wrong_requests(notes) == []
        assert seen_of_requests(notes)["requests compared"] >= len(SENT)


_SENT = f"SELECT json_extract(payload, '$.text'), state FROM messages WHERE sender = '{PERSON}'"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_after_a_kill_everything_acknowledged_is_there_and_everything_can_be_asked_again(
    name: str, fork_server: ForkServer, meetings: dict[str, int], tmp_path: Path
) -> None:
    for nth in chosen(meetings, name):
        home = tmp_path / str(nth) / "society"
        make_home(home)

        killed = fork_server.run("every_door", home, arm=f"{name}:{nth}:kill")
        assert killed["status"] == -9, killed

        acknowledged = {note["acked"] for note in read_notes(home.parent / "witness") if "acked" in note}
        assert acknowledged <= state_of(home).keys()

        again = fork_server.run("every_door", home)
        assert "returned" in again, again
        assert again["returned"]["violations"] == []
        assert_all_arrived_and_was_answered_once(home)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_after_an_error_nobody_planned_for_the_same_process_goes_on_and_asking_again_succeeds(
    name: str, fork_server: ForkServer, meetings: dict[str, int], tmp_path: Path
) -> None:
    for nth in chosen(meetings, name):
        home = tmp_path / str(nth) / "society"
        make_home(home)

        walked = fork_server.run("every_door", home, arm=f"{name}:{nth}:raise", tries=2)

        assert walked["status"] == 0, walked
        assert "returned" in walked, walked["traceback"]
        assert walked["returned"]["hits"][name] >= nth
        assert walked["returned"]["violations"] == []
        assert_all_arrived_and_was_answered_once(home)


def test_the_failpoints_of_store_and_turns_are_found_in_the_code() -> None:
    assert {
        *("open.checked", "migrate.statement", "migrate.before_commit", "commit.before", "commit.after"),
        *("flush.before_messages", "flush.before_agents", "flush.done", "promote.selected", "promote.moved"),
        "artifact.before_rename",
        *("turn.claimed", "turn.asking", "turn.answered", "turn.calling", "turn.ran", "turn.fenced", "turn.replied"),
        *("turn.group_closed", "turn.before_save"),
    } <= set(NAMES)
