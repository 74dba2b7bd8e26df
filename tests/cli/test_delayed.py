from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import pytest

from coterie.cli.output import local_time
from coterie.society import Society

from .commands import coterie
from .conftest import DAY_MS, delayed, schedule
from .environment import Terminal


def test_delayed_messages_are_listed_by_due_time_with_a_countdown(folder: Path) -> None:
    coterie("send", "assistant", "the later one", "--delay", "2d", "--dir", folder)
    coterie("send", "assistant", "the sooner one", "--delay", "90m", "--dir", folder)

    heading, sooner, later = coterie("delayed", "--dir", folder).stdout.splitlines()

    assert heading.split() == ["DUE", "IN", "FROM", "TO", "TEXT"]
    assert "1 h 29 min" in sooner or "1 h 30 min" in sooner
    assert sooner.rstrip().endswith("the sooner one")
    assert "1 d 23 h" in later or "2 d" in later


def test_an_export_marks_messages_that_a_stop_delivered_early(folder: Path) -> None:
    async def send_and_stop() -> None:
        async with Society.open(folder, work=False) as society:
            await society.send(to="assistant", text="now")
            await society.send(to="assistant", text="later", delay_ms=DAY_MS)

    asyncio.run(send_and_stop())
    now, later = coterie("export", "assistant", "--dir", folder, "--json").json["messages"]
    headings = [line for line in coterie("export", "assistant", "--dir", folder).stdout.splitlines() if "##" in line]

    assert headings[0] == f"## You, {now['deliveredAt']}"
    assert headings[1] == f"## You, {later['deliveredAt']} (delivered early, due {later['deliverAt']})"
    assert (now["early"], later["early"]) == (False, True)


def test_json_output_has_the_messages_and_their_total_count(folder: Path) -> None:
    schedule(folder, 3)

    listing = coterie("delayed", "--dir", folder, "--limit", "2", "--json").json

    assert listing["count"] == 3
    assert [item["id"] for item in listing["items"]] == [m.id for m in delayed(folder)[:2]]
    assert 0 < listing["items"][0]["dueInMs"] <= 86_400_000


def test_a_long_list_is_read_through_all_pages(folder: Path) -> None:
    schedule(folder, 1201)

    listing = coterie("delayed", "--dir", folder, "--limit", "5000", "--json").json

    assert [item["id"] for item in listing["items"]] == [m.id for m in delayed(folder)]


def test_messages_over_the_limit_are_counted(folder: Path) -> None:
    schedule(folder, 60)

    assert "50 of 60 shown" in coterie("delayed", "--dir", folder).stdout


def test_delayed_messages_can_be_filtered_by_recipient(folder: Path) -> None:
    schedule(folder, 1)

    assert coterie("delayed", "--recipient", "user", "--dir", folder, "--json").json == {"count": 0, "items": []}
    assert coterie("delayed", "--recipient", "user", "--dir", folder).stdout == "No delayed messages to user.\n"
    assert 'did you mean "assistant"' in coterie("delayed", "--recipient", "assistent", "--dir", folder).failure


def test_control_characters_in_a_text_reach_neither_the_terminal_nor_the_layout(folder: Path) -> None:
    coterie("send", "assistant", "a\x1b[2Jb\nc\r[bold]d", "--delay", "1h", "--dir", folder)

    done = coterie("delayed", "--dir", folder)

    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert "[bold]d" in done.stdout


def test_a_society_that_has_not_run_is_reported(folder: Path) -> None:
    assert "has not run yet" in coterie("delayed", "--dir", folder).failure


@pytest.mark.slow
def test_watch_updates_the_countdown_until_ctrl_c(folder: Path) -> None:
    coterie("send", "assistant", "the tea", "--delay", "2h", "--dir", folder)

    with Terminal("delayed", "--watch", "--dir", folder) as terminal:
        terminal.wait_for("1 h 59 min")
        terminal.wait_for("1 h 59 min")
        terminal.type("\x03")

        assert terminal.wait_for_exit() == 0


def test_recurring_messages_are_listed_paused_changed_and_ended(folder: Path) -> None:
    sent = coterie(
        "send", "assistant", "Stand up", "--every", "weekdays 08:00", "--time-zone", "Asia/Tokyo", "--dir", folder
    )
    assert sent.stdout.startswith("Recurring for assistant, first due ")
    heading, row = coterie("delayed", "--dir", folder).stdout.splitlines()
    assert heading.split() == ["DUE", "IN", "FROM", "TO", "EVERY", "TEXT"]
    assert "weekdays 08:00 Asia/Tokyo" in row

    (found,) = coterie("schedules", "--json", "--dir", folder).json["items"]
    short = found["id"][:12]
    assert short in coterie("schedules", "--dir", folder).stdout
    paused = coterie("schedules", "--pause", short, "--dir", folder)
    assert paused.stdout == "weekdays 08:00 Asia/Tokyo is paused.\n"
    assert coterie("delayed", "--dir", folder).stdout == "No delayed messages.\n"
    changed = coterie("schedules", "--change", short, "--every", "daily 09:00 UTC", "--dir", folder, "--json")
    assert (changed.json["every"], changed.json["state"]) == ("daily 09:00 UTC", "paused")
    assert coterie("schedules", "--resume", short, "--dir", folder).stdout.startswith("daily 09:00 UTC, next due ")
    assert coterie("schedules", "--end", short, "--dir", folder).stdout == "daily 09:00 UTC is ended.\n"
    assert coterie("schedules", "--dir", folder).stdout == "No recurring messages.\n"
    assert "no recurring message has an id" in coterie("schedules", "--end", short, "--dir", folder).failure


def test_the_next_time_of_a_recurring_message_is_that_of_a_moved_occurrence(folder: Path) -> None:
    async def send_and_move() -> None:
        async with Society.open_offline(folder) as society:
            receipt = await society.send(to="assistant", text="Stand up", every="daily 09:00", time_zone="UTC")
            await society.bus.reschedule(receipt.message_id, 3 * DAY_MS)

    asyncio.run(send_and_move())
    (moved,) = delayed(folder)
    assert moved.deliver_at is not None
    assert local_time(moved.deliver_at) in coterie("schedules", "--dir", folder).stdout
    (found,) = coterie("schedules", "--json", "--dir", folder).json["items"]
    assert datetime.fromisoformat(found["nextAt"]) == moved.deliver_at
    assert datetime.fromisoformat(found["deliverAt"]) < moved.deliver_at
    paused = coterie("schedules", "--pause", found["id"], "--dir", folder, "--json").json
    assert (paused["deliverAt"], paused["nextAt"]) == (None, None)


def test_a_recurrence_that_cannot_be_read_is_a_problem_and_a_contradiction_is_wrong_usage(folder: Path) -> None:
    assert "every cannot be read" in coterie("send", "assistant", "x", "--every", "often", "--dir", folder).failure
    for options in (
        ["send", "assistant", "x", "--every", "1h", "--wait"],
        ["schedules", "--pause", "a", "--end", "b"],
        ["schedules", "--change", "a"],
    ):
        assert coterie(*options, "--dir", folder).code == 2
