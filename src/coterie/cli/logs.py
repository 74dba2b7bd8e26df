"""The log on standard error: lines for people on a terminal, JSON lines for whatever collects them elsewhere."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from coterie.cli.output import harmless
from coterie.clock import to_rfc3339
from coterie.telemetry import LogContextFilter, log_context_of


def start() -> None:
    """From now on everything Coterie logs is written; of other libraries, what they warn of."""
    logging.raiseExceptions = False  # a log that cannot be written is no reason to write about it
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines() if sys.stderr.isatty() else JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    handler.addFilter(LogContextFilter())
    logging.getLogger("coterie").setLevel(logging.DEBUG if debugging() else logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # made only when debugging
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # senders could fill the log with what they send
    _say_it_ourselves()


def stay_quiet() -> None:
    """For a command that says itself what went wrong; with COTERIE_DEBUG=1 everything is written all the same."""
    if debugging():
        start()
    else:
        logging.getLogger("coterie").addHandler(logging.NullHandler())
        logging.getLogger("asyncio").addHandler(logging.NullHandler())
        _say_it_ourselves()


def _say_it_ourselves() -> None:
    """The MCP SDK writes what servers say, their keys with it. What an owner needs of it we say, without them."""
    logging.getLogger("mcp").setLevel(logging.CRITICAL)


def debugging() -> bool:
    return os.environ.get("COTERIE_DEBUG") == "1"


_NAMES = {"agent": "agent", "message": "messageId", "turn": "turn"}
"""`message` is what the line says."""


class Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        about = "".join(f"[{harmless(value)}] " for value in log_context_of(record).values())
        lines = [f"{at} {level}{about}{harmless(record.getMessage())}", *_error(self, record)]
        return "\n    ".join(lines)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": to_rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": harmless(record.getMessage()),
            **{_NAMES[key]: harmless(value) for key, value in log_context_of(record).items()},
        }
        if lines := _error(self, record):
            line["error"] = "\n".join(lines)
        return json.dumps(line, ensure_ascii=False)


def _error(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    if not debugging():
        error = record.exc_info[1]
        return [harmless(f"{type(error).__name__}: {error}")]
    return [harmless(line) for line in formatter.formatException(record.exc_info).splitlines()]
