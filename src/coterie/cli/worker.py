"""`coterie worker`: one more process whose agents work, on a society that PostgreSQL keeps. It serves nobody."""

from __future__ import annotations

import typer

from coterie.cli.options import HOME, MaybeDir, Place


def worker(place: Place = None, dir: MaybeDir = None) -> None:  # noqa: A002
    """Let agents of a shared society work here, too, until Ctrl-C or SIGTERM. Needs a PostgreSQL as store.url."""
    import asyncio

    from coterie.cli import logs, serving
    from coterie.cli.serve import fast_loop

    logs.start()
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        raise typer.Exit(runner.run(serving.work((place or dir or HOME).resolve())))
