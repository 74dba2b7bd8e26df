"""Run a society and open its panel: `serve`, `worker`, `open`.

The log on standard error: lines for people on a terminal, JSON lines for log collectors elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, DirArgument, Json, OptionalDir, Token
from coterie.cli.output import escape_controls, print_json, print_line, run_quietly
from coterie.clock import to_rfc3339
from coterie.telemetry import LogContextFilter, log_context_of


def serve(
    place: DirArgument = None,
    dir: OptionalDir = None,  # noqa: A002
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", envvar="COTERIE_HOST", help="Listen here instead of server.host."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", envvar="COTERIE_PORT", min=0, max=65535, help="Instead of server.port; 0: one that is free."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", envvar="COTERIE_TOKEN", help="Who has it may do anything; made when not given."),
    ] = None,
) -> None:
    """Run a society until Ctrl-C or SIGTERM. A missing folder is made, with commented templates."""
    import asyncio

    from coterie.cli import server

    start()
    folder = (place or dir or DEFAULT_FOLDER).resolve()
    options = server.ServeOptions(folder=folder, host=host, port=port, token=token or None)
    raise typer.Exit(asyncio.run(server.run_server(options)))


def worker(place: DirArgument = None, dir: OptionalDir = None) -> None:  # noqa: A002
    """Let agents of a shared society work here, too, until Ctrl-C or SIGTERM. Needs a PostgreSQL as store.url."""
    import asyncio

    from coterie.cli import server

    start()
    raise typer.Exit(asyncio.run(server.run_worker((place or dir or DEFAULT_FOLDER).resolve())))


def open_panel(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    print_only: Annotated[bool, typer.Option("--print", help="Only write the link, open nothing.")] = False,
    token: Token = None,
    json: Json = False,
) -> None:
    """Open the panel of the running society in a browser, or write a link to it where there is none."""
    url = run_quietly(_make_link(dir, token))
    if json:
        print_json({"url": url})
    elif print_only or not _has_display() or not _open_browser(url):
        print_line(url)
    else:
        print_line("Opened the panel in your browser.")


async def _make_link(folder: Path, token: str | None) -> str:
    from coterie.cli.client import find_server
    from coterie.errors import ServerUnusable

    client = find_server(folder, token)
    if client is None:
        raise ServerUnusable(f"nobody runs the society in {folder}: start it with coterie serve {folder}")
    async with client:
        return str((await client.post("/links"))["url"])


def _has_display() -> bool:
    if sys.platform == "darwin" or os.environ.get("WSL_DISTRO_NAME"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open_browser(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False


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
