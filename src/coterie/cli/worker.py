"""`coterie worker`: one more process whose agents work, on a society that PostgreSQL keeps. It serves nobody."""

from __future__ import annotations

import typer

from coterie.cli.options import HOME, MaybeDir, Place


def worker(place: Place = None, dir: MaybeDir = None) -> None:  # noqa: A002
    """Let agents of a shared society work here, too, until Ctrl-C or SIGTERM. Needs a PostgreSQL as store.url."""
    import asyncio

    from coterie.cli import logs, serving

    logs.start()
    raise typer.Exit(asyncio.run(serving.work((place or dir or HOME).resolve())))
