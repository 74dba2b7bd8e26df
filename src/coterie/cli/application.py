"""The `coterie` command: its subcommands, and how an error becomes one sentence and an exit code.

A command imports what it needs when it runs, so that help appears at once.
Exit codes: 0 for success, 1 for a problem, 2 for wrong usage.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coterie import __version__, failpoints
from coterie.cli.agents import agents, clear, pause, resume, stop
from coterie.cli.keys import keys
from coterie.cli.mcp import mcp
from coterie.cli.messages import chat, delayed, export, history, send
from coterie.cli.operations import (
    apply,
    backup,
    check,
    copy,
    init,
    migrate,
    open_panel,
    prune,
    restore,
    serve,
    verify,
    worker,
)
from coterie.cli.options import wants_json
from coterie.cli.output import make_streams_tolerant, print_error, print_json
from coterie.cli.schedules import schedules
from coterie.cli.tasks import tasks
from coterie.errors import ConfigError, CoterieError, Refused


class CommandGroup(TyperGroup):
    """Runs every command, and reports what it raises."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # typer reports usage errors and exits itself; they carry their exit code.
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort | BrokenPipeError):
                raise
            report_error(error, as_json=wants_json(ctx))
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=CommandGroup,
    name="coterie",
    help="Run a society of LLM agents that you talk to.",
    epilog="Start with: coterie serve",
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    # Help formatted by rich takes a third of a second longer.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    init, serve, check, open_panel, send, chat, agents, tasks, delayed, schedules, history, export, stop, pause,
    resume, clear, verify, prune, backup, restore, migrate, copy, worker, apply, mcp,
):  # fmt: skip
    app.command(command.__name__.removesuffix("_panel"))(command)
app.add_typer(keys, name="keys")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> int:
    failpoints.arm()
    make_streams_tolerant()
    try:
        app(prog_name="coterie")
    except SystemExit as end:
        return _flush_output(end.code if isinstance(end.code, int) else 1)
    except Exception as error:  # outside every command: the help itself could not be written
        report_error(error)
        return _flush_output(1)
    return _flush_output(0)


def report_error(error: Exception, *, as_json: bool = False) -> None:
    code, sentences = _describe_error(error)
    if as_json:
        print_json({"error": code, "message": "; ".join(sentences)})
    for sentence in sentences:
        print_error(f"Error: {sentence}")


def _describe_error(error: Exception) -> tuple[str, list[str]]:
    match error:
        case Refused():
            return error.code, [error.message]
        case ConfigError():
            # `coterie check` reports the problems that do not prevent a start.
            fatal = [str(problem) for problem in error.problems if problem.fatal]
            return "config_error", fatal or [str(problem) for problem in error.problems]
        case CoterieError():
            return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower(), [str(error)]
        case OSError() if error.filename is not None:
            reason = f"{os.fsdecode(error.filename)} cannot be used ({error.strerror})"
            return "os_error", [f"{reason}: check its name and its permissions"]
        case OSError():
            return "os_error", [f"the operating system refused ({error.strerror}): fix that, then try again"]
    return "unexpected", [_describe_unexpected(error)]


def _describe_unexpected(error: Exception) -> str:
    incident = os.urandom(4).hex()
    if os.environ.get("COTERIE_DEBUG") != "1":
        return (
            f"unexpected error ({type(error).__name__}, incident {incident}):"
            " run it again with COTERIE_DEBUG=1 to see where, and report what it says"
        )
    import logging

    logging.getLogger(__name__).error("incident %s", incident, exc_info=error)
    return f"unexpected error (incident {incident}): report it with the traceback above"


def _flush_output(code: int) -> int:
    """Flush standard output and return the exit code: `code`, or 1 if the output could not be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not code:
            print_error(f"Error: the output could not be written ({error.strerror}): write to another file or device")
        # Python flushes again at exit and would report the same failure a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
