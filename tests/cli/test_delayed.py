from __future__ import annotations

from pathlib import Path

import pytest

from .commands import coterie
from .conftest import delayed, schedule
from .environment import Terminal


def test_delayed_messages_are_listed_by_due_time_with_a_countdown(folder: Path) -> None:
    coterie("send", "assistant", "the later one", "--delay", "2d", "--dir", folder)
    coterie("send", "assistant", "the sooner one", "--delay", "90m", "--dir", folder)

    heading, sooner, later = coterie("delayed", "--dir", folder).stdout.splitlines()

    assert heading.split() == ["DUE", "IN", "FROM", "TO", "TEXT"]
    assert "1 h 29 min" in sooner or "1 h 30 min" in sooner
    assert sooner.rstrip().endswith("the sooner one")
    assert "1 d 23 h" in later or "2 d" in later


def test_a_program_gets_the_messages_and_how_many_there_are(folder: Path) -> None:
    schedule(folder, 3)

    listing = coterie("delayed", "--dir", folder, "--limit", "2", "--json").json

    assert listing["count"] == 3
    assert [item["id"] for item in listing["items"]] == [m.id for m in delayed(folder)[:2]]
    assert 0 < listing["items"][0]["dueInMs"] <= 86_400_000


def test_a_long_list_is_read_page_by_page_to_its_end(folder: Path) -> None:
    schedule(folder, 1201)

    listing = coterie("delayed", "--dir", folder, "--limit", "5000", "--json").json

    assert [item["id"] for item in listing["items"]] == [m.id for m in delayed(folder)]


def test_what_is_not_shown_is_counted(folder: Path) -> None:
    schedule(folder, 60)

    assert "50 of 60 shown" in coterie("delayed", "--dir", folder).stdout


def test_only_one_recipients_messages_can_be_asked_for(folder: Path) -> None:
    schedule(folder, 1)

    assert coterie("delayed", "--recipient", "user", "--dir", folder, "--json").json == {"count": 0, "items": []}
    assert coterie("delayed", "--recipient", "user", "--dir", folder).stdout == "No delayed messages to user.\n"
    assert 'did you mean "assistant"' in coterie("delayed", "--recipient", "assistent", "--dir", folder).failure


def test_a_text_cannot_steer_the_terminal_or_forge_a_row(folder: Path) -> None:
    coterie("send", "assistant", "a\x1b[2Jb\nc\r[bold]d", "--delay", "1h", "--dir", folder)

    done = coterie("delayed", "--dir", folder)

    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert "[bold]d" in done.stdout


def test_a_society_that_never_ran_says_so(folder: Path) -> None:
    assert "has not run yet" in coterie("delayed", "--dir", folder).failure


@pytest.mark.slow
def test_on_a_terminal_the_countdown_goes_on_until_ctrl_c(folder: Path) -> None:
    coterie("send", "assistant", "the tea", "--delay", "2h", "--dir", folder)

    with Terminal("delayed", "--watch", "--dir", folder) as terminal:
        terminal.sees("1 h 59 min")
        terminal.sees("1 h 59 min")
        terminal.type("\x03")

        assert terminal.ends() == 0
