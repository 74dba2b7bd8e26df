"""How a command fails: one sentence that names the remedy, and an exit code. 1: a problem. 2: wrong usage."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from coterie.cli.options import wants_json
from coterie.cli.output import say_aside, say_json
from coterie.errors import ConfigError, CoterieError, Refused


class OneSentence(TyperGroup):
    """Every command runs inside it, so whatever a command raises is told here and nowhere else."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if _is_typers_own(error) or isinstance(error, BrokenPipeError):
                raise
            tell(error, as_json=wants_json(ctx))
            raise typer.Exit(1) from None


def _is_typers_own(error: Exception) -> bool:
    """Usage errors and exits carry their exit code; their words are typer's."""
    return hasattr(error, "exit_code") or isinstance(error, typer.Abort)


def tell(error: Exception, *, as_json: bool = False) -> None:
    code, sentences = _explain(error)
    if as_json:
        say_json({"error": code, "message": "; ".join(sentences)})
    for sentence in sentences:
        say_aside(f"Error: {sentence}")


def _explain(error: Exception) -> tuple[str, list[str]]:
    match error:
        case Refused():
            return error.code, [error.message]
        case ConfigError():
            # Those that do not stop it are for `coterie check` to tell.
            fatal = [str(problem) for problem in error.problems if problem.fatal]
            return "config_error", fatal or [str(problem) for problem in error.problems]
        case CoterieError():
            return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower(), [str(error)]
        case OSError() if error.filename is not None:
            named = f"{os.fsdecode(error.filename)} cannot be used ({error.strerror})"
            return "os_error", [f"{named}: check its name and its permissions"]
        case OSError():
            return "os_error", [f"the operating system refused ({error.strerror}): mend that, then try again"]
    return "unexpected", [_unexpected(error)]


def _unexpected(error: Exception) -> str:
    incident = os.urandom(4).hex()
    if os.environ.get("COTERIE_DEBUG") != "1":
        return (
            f"something went wrong that nobody planned for ({type(error).__name__}, incident {incident}):"
            " run it again with COTERIE_DEBUG=1 to see where, and report what it says"
        )
    import logging

    logging.getLogger(__name__).error("incident %s", incident, exc_info=error)
    return f"something went wrong that nobody planned for (incident {incident}): report it with the traceback above"


def end_output(code: int) -> int:
    """What was written is out, or the exit code says otherwise."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not code:
            say_aside(f"Error: the output could not be written ({error.strerror}): choose another place for it")
        # Python flushes again on its way out and would complain, about a failure that was told or a reader who left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
