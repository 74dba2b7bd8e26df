from __future__ import annotations

import asyncio
import json
import logging

from coterie.cli.logs import JsonFormatter, TextFormatter
from coterie.telemetry import Context, turn_context


def _record(message: str) -> logging.LogRecord:
    record = logging.LogRecord("coterie.test", logging.INFO, __file__, 1, message, (), None)
    assert Context().filter(record)
    return record


def test_a_line_of_a_turn_says_whose_turn_it_is() -> None:
    with turn_context(agent="ada"), turn_context(message="m1", turn=7):
        record = _record("at work")

    line = json.loads(JsonFormatter().format(record))
    assert (line["agent"], line["messageId"], line["turn"], line["message"]) == ("ada", "m1", "7", "at work")
    assert TextFormatter().format(record).endswith(" [ada] [m1] [7] at work")


def test_outside_of_turns_nothing_is_added() -> None:
    with turn_context(agent="ada"):
        pass
    assert json.loads(JsonFormatter().format(_record("quiet"))).keys() == {"time", "level", "logger", "message"}


async def test_tasks_of_a_turn_carry_it_and_others_do_not() -> None:
    async def work(agent: str) -> logging.LogRecord:
        with turn_context(agent=agent):
            return await asyncio.create_task(asyncio.to_thread(_record, "x"))

    records = await asyncio.gather(work("ada"), work("bob"))
    assert [json.loads(JsonFormatter().format(record))["agent"] for record in records] == ["ada", "bob"]


def test_what_a_name_holds_can_do_no_harm() -> None:
    with turn_context(agent="a\n\x1b[0m"):
        record = _record("x")
    assert "\n" not in TextFormatter().format(record)
    assert "\x1b" not in json.loads(JsonFormatter().format(record))["agent"]
