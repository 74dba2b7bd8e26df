"""`coterie open`: the panel, in a browser that is let in by a link good for one visit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import HOME, Dir, Json, Token
from coterie.cli.output import say, say_json


def open_panel(
    dir: Dir = HOME,  # noqa: A002
    show: Annotated[bool, typer.Option("--print", help="Only write the link, open nothing.")] = False,
    token: Token = None,
    json: Json = False,
) -> None:
    """Open the panel of the running society in a browser, or write a link to it where there is none."""
    import asyncio

    url = asyncio.run(_link(dir, token))
    if json:
        say_json({"url": url})
    elif show or not _has_display() or not _browse(url):
        say(url)
    else:
        say("Opened the panel in your browser.")


async def _link(folder: Path, token: str | None) -> str:
    from coterie.cli.finding import find_server
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


def _browse(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
