"""Log lines of a turn have its agent, message and turn number."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.cli.logs import JsonFormatter
from coterie.telemetry import LogContextFilter
from coterie.testing import Calls, Says, Status
from tests.agent.stage import stage


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.addFilter(LogContextFilter())
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@contextmanager
def log_of(*loggers: str) -> Iterator[list[dict[str, Any]]]:
    recorder = Recorder()
    for name in loggers:
        logging.getLogger(name).addHandler(recorder)
    try:
        yield recorder.lines
    finally:
        for name in loggers:
            logging.getLogger(name).removeHandler(recorder)


async def test_every_log_line_of_a_turn_has_its_agent_message_and_turn(tmp_path: Path) -> None:
    with log_of("coterie.agent", "coterie.llm") as lines:
        async with stage(tmp_path) as here:
            (tmp_path / "tools.py").write_text("from coterie import tool\n@tool\ndef trip() -> str:\n    1 / 0\n")
            await here.society.reload()
            here.server.script(Says(calls=(Calls("trip", {}),)), Status(401))
            lines.clear()
            asked = await here.say("go")
            await here.state("ada", "blocked")

    about = {(line.get("agent"), line.get("messageId"), line.get("turn")) for line in lines}
    assert about == {("ada", asked, "1")}
    assert any("trip failed" in line["message"] for line in lines)
    assert any("got no answer" in line["message"] for line in lines)
