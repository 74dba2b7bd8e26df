from __future__ import annotations

from datetime import timedelta

import pytest

from coterie.cli.options import parse_duration_ms
from coterie.cli.output import format_duration


@pytest.mark.parametrize(
    ("text", "ms"),
    [("500ms", 500), ("10s", 10_000), ("5m", 300_000), ("2h", 7_200_000), ("1d", 86_400_000), ("1.5S", 1500)],
)
def test_a_duration_is_a_number_and_its_unit(text: str, ms: float) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "1y", "1e3s", "10 s", "1s2", "٣s", "nan"])
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 500ms, 10s, 5m, 2h or 1d"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("duration", "words"),
    [
        (timedelta(seconds=-5), "now"),
        (timedelta(0), "now"),
        (timedelta(milliseconds=1), "1 s"),
        (timedelta(seconds=61), "1 min 1 s"),
        (timedelta(hours=2), "2 h"),
        (timedelta(days=3, hours=1, minutes=59), "3 d 1 h"),
        (timedelta(days=3, minutes=59), "3 d"),
    ],
)
def test_a_countdown_shows_its_two_largest_units(duration: timedelta, words: str) -> None:
    assert format_duration(duration) == words
