from __future__ import annotations

import json
import logging
import sys

import pytest

from coterie.cli.logs import JsonFormatter, TextFormatter

EVIL = "two\nlines \x1b[31mred\x9b0m \u202e\u2028 é"
TAMED = r"two\nlines \x1b[31mred\x9b0m \u202e\u2028 é"


def _record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    trouble = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("coterie.test", logging.WARNING, __file__, 1, "%s", (message,), trouble)


def test_text_log_lines_have_control_characters_escaped() -> None:
    line = TextFormatter().format(_record(EVIL))

    assert line.endswith(f" warning: {TAMED}")
    assert "\n" not in line


def test_json_log_lines_have_control_characters_escaped_after_decoding() -> None:
    line = JsonFormatter().format(_record(EVIL))

    assert "\n" not in line
    decoded = json.loads(line)
    assert decoded["message"] == TAMED
    assert (decoded["level"], decoded["logger"]) == ("warning", "coterie.test")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_an_error_is_logged_with_its_traceback_in_debug_mode_only(
    formatter: logging.Formatter, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise ValueError("bad\x1b[0m")
    except ValueError:
        error = sys.exception()

    monkeypatch.setenv("COTERIE_DEBUG", "0")
    short = formatter.format(_record("failed", error))
    monkeypatch.setenv("COTERIE_DEBUG", "1")
    long = formatter.format(_record("failed", error))

    assert "ValueError: bad" in short
    assert "Traceback" not in short
    assert "Traceback" in long
    assert "\x1b" not in short + long
