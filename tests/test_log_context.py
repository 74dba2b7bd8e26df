from __future__ import annotations

import asyncio
import json
import logging

from coterie.cli.logs import JsonFormatter, TextFormatter
from coterie.telemetry import LogContextFilter, log_context


def _record(message: str) -> logging.LogRecord:
    record = logging.LogRecord("coterie.test", logging.INFO, __file__, 1, message, (), None)
    assert LogContextFilter().filter(record)
    return record


def test_log_lines_of_a_turn_name_its_agent() -> None:
    with log_context(agent="ada"), log_context(message="m1", turn=7):
        record = _record("at work")

    line = json.loads(JsonFormatter().format(record))
    assert (line["agent"], line["messageId"], line["turn"], line["message"]) == ("ada", "m1", "7", "at work")
    assert TextFormatter().format(record).endswith(" [ada] [m1] [7] at work")


def test_outside_of_turns_nothing_is_added() -> None:
    with log_context(agent="ada"):
        pass
    assert json.loads(JsonFormatter().format(_record("quiet"))).keys() == {"time", "level", "logger", "message"}


async def test_tasks_of_a_turn_carry_it_and_others_do_not() -> None:
    async def work(agent: str) -> logging.LogRecord:
        with log_context(agent=agent):
            return await asyncio.create_task(asyncio.to_thread(_record, "x"))

    records = await asyncio.gather(work("ada"), work("bob"))
    assert [json.loads(JsonFormatter().format(record))["agent"] for record in records] == ["ada", "bob"]


def test_control_characters_in_log_context_are_escaped() -> None:
    with log_context(agent="a\n\x1b[0m"):
        record = _record("x")
    assert "\n" not in TextFormatter().format(record)
    assert "\x1b" not in json.loads(JsonFormatter().format(record))["agent"]
