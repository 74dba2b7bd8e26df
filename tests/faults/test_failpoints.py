"""A kill and an error at every failpoint: acknowledged messages are stored, and everything can be repeated."""

from __future__ import annotations

import ast
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.messages import PERSON
from coterie.stores.sql.migrations import schema_scripts

from .harness import ForkServer
from .requests import count_requests, wrong_requests
from .scenarios import make_home
from .verifier import find_violations, open_database
from .witness import read_notes
from .work_verifier import wrong_answers, wrong_effects, wrong_histories, wrong_tool_messages

SENT = {**dict.fromkeys(("first", "second", "file", "late", "work"), "taken"), "gone": "withdrawn"}
"""What `run_all_operations` sends, and the expected state."""


def modules_of_a_running_society() -> set[Path]:
    """Modules of Coterie that the runtime imports, directly or not: only loaded modules can hit a failpoint."""
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
def hit_counts(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Number of hits of each failpoint when all operations run."""
    home = tmp_path_factory.mktemp("dry") / "society"
    make_home(home)
    counted = fork_server.run("run_all_operations", home, arm=",".join(f"{name}:1000000:kill" for name in NAMES))
    hits: dict[str, int] = counted["returned"]["hits"]
    return hits


def chosen(hit_counts: dict[str, int], name: str, *, middle: bool) -> list[int]:
    """The first hit, optionally one in the middle, and a late one: the last, if the next run is sure to get that far.

    Concurrent writes share a commit, so the number of commits varies a little between runs.
    """
    count = hit_counts.get(name, 0)
    assert count, f"no operation hits the failpoint {name!r}: extend scenarios.run_all_operations"
    late = count * 3 // 4 if name.startswith(("commit.", "flush.")) else count
    return sorted({1, late, (count + 1) // 2 if middle else 1})


def state_of(home: Path) -> dict[str, Any]:
    with open_database(home) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version < schema_scripts("sqlite").newest:
            assert version or not db.execute("SELECT * FROM sqlite_schema").fetchall(), "half a migration"
            return {}
        assert find_violations(db) == []
        return dict(db.execute(_SENT))


def assert_all_arrived_and_was_answered_once(home: Path) -> None:
    with open_database(home) as db:
        assert find_violations(db) == []
        assert sorted(db.execute(_SENT).fetchall()) == sorted(SENT.items())
        db.row_factory = sqlite3.Row
        assert wrong_histories(db) == wrong_answers(db, set()) == wrong_tool_messages(db) == []
        notes = read_notes(home.parent / "witness")
        assert wrong_effects(db, notes) == wrong_requests(notes) == []
        assert count_requests(notes)["requests compared"] >= len(SENT)


_SENT = f"SELECT json_extract(payload, '$.text'), state FROM messages WHERE sender = '{PERSON}'"


@pytest.mark.slow
@pytest.mark.parametrize("middle", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", NAMES)
def test_after_a_kill_at_any_failpoint_acknowledged_messages_are_stored_and_all_can_be_repeated(
    name: str, middle: bool, fork_server: ForkServer, hit_counts: dict[str, int], tmp_path: Path
) -> None:
    for nth in chosen(hit_counts, name, middle=middle):
        home = tmp_path / str(nth) / "society"
        make_home(home)

        killed = fork_server.run("run_all_operations", home, arm=f"{name}:{nth}:kill")
        assert killed["status"] == -9, killed

        acknowledged = {note["acked"] for note in read_notes(home.parent / "witness") if "acked" in note}
        assert acknowledged <= state_of(home).keys()

        again = fork_server.run("run_all_operations", home)
        assert "returned" in again, again
        assert again["returned"]["violations"] == []
        assert_all_arrived_and_was_answered_once(home)


@pytest.mark.slow
@pytest.mark.parametrize("middle", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", NAMES)
def test_after_an_error_at_any_failpoint_the_process_continues_and_a_retry_succeeds(
    name: str, middle: bool, fork_server: ForkServer, hit_counts: dict[str, int], tmp_path: Path
) -> None:
    for nth in chosen(hit_counts, name, middle=middle):
        home = tmp_path / str(nth) / "society"
        make_home(home)

        finished = fork_server.run("run_all_operations", home, arm=f"{name}:{nth}:raise", tries=2)

        assert finished["status"] == 0, finished
        assert "returned" in finished, finished["traceback"]
        assert finished["returned"]["hits"][name] >= nth
        assert finished["returned"]["violations"] == []
        assert_all_arrived_and_was_answered_once(home)


def test_the_failpoints_of_store_and_turns_are_found_in_the_code() -> None:
    assert {
        *("open.checked", "migrate.statement", "migrate.before_commit", "commit.before", "commit.after"),
        *("flush.before_messages", "flush.before_agents", "flush.done", "promote.selected", "promote.moved"),
        "artifact.before_rename",
        *("turn.claimed", "turn.asking", "turn.answered", "turn.calling", "turn.ran", "turn.fenced", "turn.replied"),
        *("turn.group_closed", "turn.before_save"),
    } <= set(NAMES)
