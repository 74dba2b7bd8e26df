"""Due times of recurring messages, also where clocks are set forward or back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import Refused
from coterie.recurrence import MAX_COUNTED, parse_recurrence

START = datetime(2030, 1, 1, tzinfo=UTC)  # a Tuesday


def at(text: str) -> datetime:
    return datetime.fromisoformat(text + "+00:00")


def dues(every: str, now: datetime = START, count: int = 3) -> list[str]:
    """The first due times, in UTC."""
    recurrence = parse_recurrence(every)
    found = [recurrence.first(now)]
    while len(found) < count:
        found.append(recurrence.following(found[-1], found[-1]))
    return [f"{due:%m-%d %H:%M}" for due in found]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("15m", ["01-01 00:15", "01-01 00:30", "01-01 00:45"]),
        ("every 15 minutes", ["01-01 00:15", "01-01 00:30", "01-01 00:45"]),
        ("every hour", ["01-01 01:00", "01-01 02:00", "01-01 03:00"]),
        ("2 Weeks", ["01-15 00:00", "01-29 00:00", "02-12 00:00"]),
        ("daily 08:00 UTC", ["01-01 08:00", "01-02 08:00", "01-03 08:00"]),
        ("every day at 8:05 UTC", ["01-01 08:05", "01-02 08:05", "01-03 08:05"]),
        ("weekdays 08:00 Asia/Shanghai", ["01-02 00:00", "01-03 00:00", "01-04 00:00"]),
        ("weekends 23:00 UTC", ["01-05 23:00", "01-06 23:00", "01-12 23:00"]),
        ("Mon,Thursday 18:30 UTC", ["01-03 18:30", "01-07 18:30", "01-10 18:30"]),
        ("sat-mon 12:00 UTC", ["01-05 12:00", "01-06 12:00", "01-07 12:00"]),
        ("monthly 31 09:00 UTC", ["01-31 09:00", "03-31 09:00", "05-31 09:00"]),
        ("monthly last 09:00 UTC", ["01-31 09:00", "02-28 09:00", "03-31 09:00"]),
        ("*/20 9 * * 1-5 UTC", ["01-01 09:00", "01-01 09:20", "01-01 09:40"]),
    ],
)
def test_a_recurrence_is_due_as_it_says(every: str, expected: list[str]) -> None:
    assert dues(every) == expected
    assert dues(parse_recurrence(every).text) == expected  # the canonical form means the same


@pytest.mark.parametrize(
    ("every", "text"),
    [
        ("  Every  15   Minutes ", "15 minutes"),
        ("1h", "1 hour"),
        ("weekdays at 8:00 Europe/Berlin", "weekdays 08:00 Europe/Berlin"),
        ("0 8 * * mon UTC", "0 8 * * mon UTC"),
    ],
)
def test_the_canonical_form_has_the_time_zone(every: str, text: str) -> None:
    assert parse_recurrence(every).text == text


def test_the_time_zone_may_stand_beside_it() -> None:
    assert parse_recurrence("daily 08:00", "Europe/Berlin").text == "daily 08:00 Europe/Berlin"
    assert parse_recurrence("daily 08:00").zone is not None  # by default that of the machine


@pytest.mark.parametrize(
    ("every", "zone", "problem"),
    [
        (7, None, "every must be a string, got 7"),
        ("", None, "every cannot be read"),
        ("now and then", None, "every cannot be read"),
        ("30s", None, "every cannot be read"),
        ("0m", None, "an interval is a minute to ten years, got 0 minutes"),
        ("999999999w", None, "an interval is a minute to ten years"),
        ("daily 24:00", None, "24:00 is not a time of day"),
        ("noday 08:00", None, "'noday' is not a day of the week"),
        ("mon--tue 08:00", None, "is not a day of the week"),
        ("monthly 32 08:00", None, "expected a day of the month"),
        ("61 * * * *", None, "cannot be read (Bad minute)"),
        ("0 0 30 2 *", None, "the cron fields '0 0 30 2 *' cannot be read"),
        ("daily 08:00 Europe/Berlim", None, "there is no time zone 'Europe/Berlim', did you mean 'Europe/Berlin'?"),
        ("daily 08:00 ../../etc/passwd", None, "there is no time zone"),
        ("daily 08:00 Europe", None, "there is no time zone 'Europe'"),
        ("15m", "Nowhere/Land", "there is no time zone"),
        ("daily 08:00 UTC", "Europe/Berlin", "give one of them"),
        ("daily 08:00", 7, "timeZone must be the name of a time zone"),
        ("x" * 201, None, "at most 200 characters"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(every: Any, zone: Any, problem: str) -> None:
    with pytest.raises(Refused) as refusal:
        parse_recurrence(every, zone)
    assert refusal.value.code == "every_invalid"
    assert problem in refusal.value.message


def test_a_local_time_that_the_clocks_skip_is_due_right_after_the_gap() -> None:
    # Berlin goes from 02:00 to 03:00 on 31 March 2030, at 01:00 UTC.
    found = dues("daily 02:30 Europe/Berlin", at("2030-03-30T00:00"), 3)
    assert found == ["03-30 01:30", "03-31 01:00", "04-01 00:30"]


def test_a_local_time_that_the_clocks_repeat_is_due_once() -> None:
    # Berlin goes from 03:00 back to 02:00 on 27 October 2030, at 01:00 UTC.
    found = dues("daily 02:30 Europe/Berlin", at("2030-10-26T00:00"), 3)
    assert found == ["10-26 00:30", "10-27 00:30", "10-28 01:30"]


def test_in_the_repeated_hour_the_first_due_time_is_not_in_the_past() -> None:
    second_pass = at("2030-10-27T01:15")  # 02:15 for the second time
    assert dues("daily 02:30 Europe/Berlin", second_pass, 1) == ["10-28 01:30"]


def test_an_interval_counts_elapsed_time_over_a_change_of_the_clocks() -> None:
    recurrence = parse_recurrence("1d", "Europe/Berlin")
    assert recurrence.following(at("2030-03-30T08:00"), at("2030-03-30T08:00")) == at("2030-03-31T08:00")


def test_with_a_delay_the_first_one_is_not_before_it() -> None:
    daily, hours = parse_recurrence("daily 08:00 UTC"), parse_recurrence("4h")
    assert daily.first(START, timedelta(hours=8)) == START + timedelta(hours=8)
    assert daily.first(START, timedelta(hours=8, milliseconds=1)) == START + timedelta(days=1, hours=8)
    assert hours.first(START, timedelta(minutes=5)) == START + timedelta(minutes=5)


def test_what_was_missed_is_counted_up_to_a_limit() -> None:
    daily = parse_recurrence("daily 08:00 UTC")
    due = at("2030-01-01T08:00")
    assert [daily.count(due, due + timedelta(days=n)) for n in (-1, 0, 1, 9)] == [0, 0, 1, 9]
    assert parse_recurrence("15m").count(due, due + timedelta(hours=1, minutes=14)) == 4
    assert parse_recurrence("* * * * *", "UTC").count(due, due + timedelta(days=365)) == MAX_COUNTED


@given(
    st.sampled_from(
        ["daily 02:30", "weekdays 00:00", "monthly last 23:59", "sun 01:15", "30 */2 * * *", "*/7 * * * *"]
    ),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Shanghai", "Africa/Cairo"]),
    st.datetimes(datetime(2024, 1, 1), datetime(2037, 1, 1)),
)
def test_due_times_increase_and_follow_the_moment_in_every_time_zone(every: str, zone: str, naive: datetime) -> None:
    now = naive.replace(tzinfo=UTC)
    recurrence = parse_recurrence(every, zone)
    found = [recurrence.first(now)]
    for _ in range(5):
        found.append(recurrence.following(found[-1], found[-1]))
    assert found[0] > now
    assert all(later > earlier for earlier, later in pairwise(found))
    if every == "daily 02:30":
        dates = [due.astimezone(ZoneInfo(zone)).date() for due in found]
        assert all(later - earlier == timedelta(days=1) for earlier, later in pairwise(dates))
