"""`coterie serve`: the society runs until it is told to stop."""

from __future__ import annotations

import typer

from coterie.cli.options import HOME, MaybeDir, Place


def serve(place: Place = None, dir: MaybeDir = None) -> None:  # noqa: A002
    """Run a society until Ctrl-C or SIGTERM. A missing folder is made, with commented templates."""
    import asyncio

    from coterie.cli import logs, serving

    logs.start()
    raise typer.Exit(asyncio.run(serving.run((place or dir or HOME).resolve())))
