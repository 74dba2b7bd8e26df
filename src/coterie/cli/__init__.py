"""The command line. What a command needs besides its options is imported when it runs, so that help comes at once."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie import __version__, failpoints
from coterie.cli.agents import agents
from coterie.cli.care import backup, restore, verify
from coterie.cli.chat import chat
from coterie.cli.check import check
from coterie.cli.control import pause, resume, stop
from coterie.cli.delayed import delayed
from coterie.cli.failures import OneSentence, end_output, tell
from coterie.cli.init import init
from coterie.cli.moving import copy, migrate
from coterie.cli.open import open_panel
from coterie.cli.output import forgiving_streams
from coterie.cli.past import export, history
from coterie.cli.send import send
from coterie.cli.serve import serve
from coterie.cli.worker import worker

app = typer.Typer(
    cls=OneSentence,
    name="coterie",
    help="Run a society of LLM agents that you talk to.",
    epilog="Start with: coterie serve",
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    # Help drawn by rich takes a third of a second; a traceback drawn by it is still a traceback.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    init, serve, check, open_panel, send, chat, agents, delayed, history, export, stop, pause, resume, verify, backup,
    restore, migrate, copy, worker,
):  # fmt: skip
    app.command(command.__name__.removesuffix("_panel"))(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> int:
    failpoints.arm()
    forgiving_streams()
    try:
        app(prog_name="coterie")
    except SystemExit as end:
        return end_output(end.code if isinstance(end.code, int) else 1)
    except Exception as error:  # outside every command: the help itself could not be written
        tell(error)
        return end_output(1)
    return end_output(0)
