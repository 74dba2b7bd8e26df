"""A turn that crashes the runtime each time is quarantined; all other agents work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .harness import ForkServer
from .scenarios import make_home
from .verifier import find_damage, open_database

pytestmark = pytest.mark.slow

EXPLODE = """
import os
from coterie import tool

@tool(effect="pure")
async def look_closely() -> str:
    "Look, and take everybody along."
    os._exit(3)

@tool
async def fire() -> str:
    "Do it once, and take everybody along."
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
def test_a_turn_that_kills_the_runtime_is_set_aside_after_three_crashes_and_everybody_works_on(
    words: str, fork_server: ForkServer, home: Path
) -> None:
    said = [("ada", words), ("bob", "how do you do?")]

    # Bob is in the middle of his turn each time that ada's brings the runtime down.
    assert [converse(fork_server, home, *said, slow="bob")["status"] for _ in range(3)] == [3, 3, 3]
    survived = converse(fork_server, home, *said, ("ada", "and now?"))

    assert survived["status"] == 0, survived
    told = [text for sender, text in survived["returned"] if sender == "system"]
    assert len(told) == 1 and "quarantined" in told[0]
    assert [sender for sender, _ in survived["returned"] if sender != "system"].count("bob") == 1
    assert survived["returned"].count(["ada", "heard by ada"]) == 1  # before or after bob: nobody promised which
    with open_database(home) as db:
        assert find_damage(db) == []
        hidden = db.execute("SELECT json_extract(m.payload, '$.text') FROM history h JOIN messages m"
                            " ON m.id = h.message_id WHERE h.hidden")  # fmt: skip
        assert hidden.fetchall() == [(words,)]


def test_what_waits_behind_a_turn_that_was_set_aside_has_three_lives_of_its_own(
    fork_server: ForkServer, home: Path
) -> None:
    for _ in range(3):
        converse(fork_server, home, ("ada", "this is deadly"))
    fork_server.run("send", home, text="deadly as well")

    assert [converse(fork_server, home)["status"] for _ in range(3)] == [3, 3, 3]
    assert [sender for sender, _ in converse(fork_server, home)["returned"]] == ["system", "system"]


def test_what_cannot_be_undone_is_not_tried_again_so_one_crash_is_all_it_costs(
    fork_server: ForkServer, home: Path
) -> None:
    assert converse(fork_server, home, ("ada", "fire"))["status"] == 3

    survived = converse(fork_server, home, ("ada", "fire"))

    assert survived["returned"] == [["ada", "heard by ada"]]
    with open_database(home) as db:
        assert db.execute("SELECT state FROM calls").fetchall() == [("unknown",)]
        assert db.execute("SELECT count(*) FROM history WHERE hidden").fetchone() == (0,)


def test_orderly_stops_are_no_crashes_however_many_cut_off_the_same_turn(fork_server: ForkServer, home: Path) -> None:
    for _ in range(5):
        stopped = fork_server.run("stop_in_the_middle", home)
        assert stopped["returned"] == "llm", stopped

    assert converse(fork_server, home)["returned"] == [["ada", "heard by ada"]]
