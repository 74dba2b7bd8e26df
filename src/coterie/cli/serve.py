"""`coterie serve`: the society runs, and answers over HTTP, until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import HOME, MaybeDir, Place

if TYPE_CHECKING:
    import asyncio


def serve(
    place: Place = None,
    dir: MaybeDir = None,  # noqa: A002
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

    from coterie.cli import logs, serving

    logs.start()
    wanted = serving.Wanted(folder=(place or dir or HOME).resolve(), host=host, port=port, token=token or None)
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        raise typer.Exit(runner.run(serving.run(wanted)))


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop comes with uvicorn where it can be built; elsewhere the standard loop does the same."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
