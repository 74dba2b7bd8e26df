"""Run a society and open its panel: `serve`, `worker`, `open`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, DirArgument, Json, OptionalDir, Token
from coterie.cli.output import print_json, print_line, run_quietly


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

    from coterie.cli import logs, server

    logs.start()
    folder = (place or dir or DEFAULT_FOLDER).resolve()
    options = server.ServeOptions(folder=folder, host=host, port=port, token=token or None)
    raise typer.Exit(asyncio.run(server.run_server(options)))


def worker(place: DirArgument = None, dir: OptionalDir = None) -> None:  # noqa: A002
    """Let agents of a shared society work here, too, until Ctrl-C or SIGTERM. Needs a PostgreSQL as store.url."""
    import asyncio

    from coterie.cli import logs, server

    logs.start()
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
