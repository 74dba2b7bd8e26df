"""A turn that crashes the runtime each time is quarantined; all other agents work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .harness import ForkServer
from .scenarios import make_home
from .verifier import find_violations, open_database

pytestmark = pytest.mark.slow

EXPLODE = """
import os
from coterie import tool

@tool(effect="pure")
async def look_closely() -> str:
    "End the process; may be repeated."
    os._exit(3)

@tool
async def fire() -> str:
    "End the process; must not be repeated."
    os._exit(3)
"""
CALLS = {"closely": ["look_closely", {}], "fire": ["fire", {}]}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "society"
    make_home(folder)
    (folder / "tools.py").write_text(EXPLODE)
    return folder


def converse(server: ForkServer, home: Path, *said: tuple[str, str], slow: str = "") -> dict[str, Any]:
    return server.run("converse", home, said=said, calls=CALLS, slow=[slow])


@pytest.mark.parametrize("words", ["look closely", "this is deadly"], ids=["by a tool", "by the model"])
def test_a_turn_that_kills_the_runtime_is_quarantined_after_three_crashes_and_others_continue(
    words: str, fork_server: ForkServer, home: Path
) -> None:
    said = [("ada", words), ("bob", "how do you do?")]

    # Bob's turn runs each time that ada's turn kills the runtime.
    assert [converse(fork_server, home, *said, slow="bob")["status"] for _ in range(3)] == [3, 3, 3]
    survived = converse(fork_server, home, *said, ("ada", "and now?"))

    assert survived["status"] == 0, survived
    notices = [text for sender, text in survived["returned"] if sender == "system"]
    assert len(notices) == 1 and "quarantined" in notices[0]
    assert [sender for sender, _ in survived["returned"] if sender != "system"].count("bob") == 1
    assert survived["returned"].count(["ada", "heard by ada"]) == 1  # before or after bob: the order is not specified
    with open_database(home) as db:
        assert find_violations(db) == []
        hidden = db.execute("SELECT json_extract(m.payload, '$.text') FROM history h JOIN messages m"
                            " ON m.id = h.message_id WHERE h.hidden")  # fmt: skip
        assert hidden.fetchall() == [(words,)]


def test_messages_behind_a_quarantined_turn_get_three_attempts_of_their_own(
    fork_server: ForkServer, home: Path
) -> None:
    for _ in range(3):
        converse(fork_server, home, ("ada", "this is deadly"))
    fork_server.run("send", home, text="deadly as well")

    assert [converse(fork_server, home)["status"] for _ in range(3)] == [3, 3, 3]
    assert [sender for sender, _ in converse(fork_server, home)["returned"]] == ["system", "system"]


def test_an_unsafe_call_is_not_repeated_so_it_crashes_the_runtime_once(fork_server: ForkServer, home: Path) -> None:
    assert converse(fork_server, home, ("ada", "fire"))["status"] == 3

    survived = converse(fork_server, home, ("ada", "fire"))

    assert survived["returned"] == [["ada", "heard by ada"]]
    with open_database(home) as db:
        assert db.execute("SELECT state FROM calls").fetchall() == [("unknown",)]
        assert db.execute("SELECT count(*) FROM history WHERE hidden").fetchone() == (0,)


def test_graceful_stops_do_not_count_as_crashes_of_a_turn(fork_server: ForkServer, home: Path) -> None:
    for _ in range(5):
        stopped = fork_server.run("stop_in_the_middle", home)
        assert stopped["returned"] == "llm", stopped

    assert converse(fork_server, home)["returned"] == [["ada", "heard by ada"]]
