"""The log on standard error: lines for people on a terminal, JSON lines for log collectors elsewhere."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from coterie.cli.output import escape_controls
from coterie.clock import to_rfc3339
from coterie.telemetry import LogContextFilter, log_context_of

_JSON_KEYS = {"agent": "agent", "message": "messageId", "turn": "turn"}
"""`message` is the text of the line itself."""


def start() -> None:
    """Write everything that Coterie logs, and the warnings of other libraries."""
    logging.raiseExceptions = False  # a log that cannot be written must not fill the log
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    handler.addFilter(LogContextFilter())
    logging.getLogger("coterie").setLevel(logging.DEBUG if is_debugging() else logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # made only when debugging
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # senders could fill the log with what they send
    _silence_mcp()


def silence() -> None:
    """Write no log, unless COTERIE_DEBUG=1 asks for everything."""
    if is_debugging():
        start()
        return
    for name in ("coterie", "asyncio", "uvicorn"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    _silence_mcp()


def _silence_mcp() -> None:
    # The MCP SDK logs what servers send, keys included. Coterie logs the useful part itself.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)


def is_debugging() -> bool:
    return os.environ.get("COTERIE_DEBUG") == "1"


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        context = "".join(f"[{escape_controls(value)}] " for value in log_context_of(record).values())
        lines = [f"{time} {level}{context}{escape_controls(record.getMessage())}", *_error_lines(self, record)]
        return "\n    ".join(lines)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": to_rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_controls(record.getMessage()),
            **{_JSON_KEYS[key]: escape_controls(value) for key, value in log_context_of(record).items()},
        }
        if lines := _error_lines(self, record):
            line["error"] = "\n".join(lines)
        return json.dumps(line, ensure_ascii=False)


def _error_lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    if not is_debugging():
        error = record.exc_info[1]
        return [escape_controls(f"{type(error).__name__}: {error}")]
    return [escape_controls(line) for line in formatter.formatException(record.exc_info).splitlines()]
