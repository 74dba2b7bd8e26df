"""Options that several commands share: folder, token, JSON output, durations, agent names with shell completion."""

from __future__ import annotations

import os
import re
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_FOLDER = Path("coterie-home")
_AS_JSON = "coterie.json"
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")


def _remember_json(context: typer.Context, wanted: bool) -> bool:
    context.meta[_AS_JSON] = wanted
    return wanted


def wants_json(context: typer.Context) -> bool:
    """True if the command was given --json; its errors are JSON then, too."""
    return bool(context.meta.get(_AS_JSON))


def _parse_folder(text: str) -> Path:
    # An empty name is probably an unset shell variable, not the current folder.
    if not text:
        raise typer.BadParameter("expected the name of a folder, got nothing")
    return Path(text)


def parse_duration_ms(text: str) -> float:
    """Parse `500ms`, `10s`, `5m`, `2h` or `1d`; ValueError says what was expected."""
    match = _DURATION.fullmatch(text.strip().lower())
    if not match:
        raise ValueError(f"expected a duration such as 500ms, 10s, 5m, 2h or 1d, got {text!r}")
    return float(match[1]) * _UNIT_MS[match[2]]


def _parse_duration(text: str) -> float:
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def duration_option(help_text: str) -> typer.models.OptionInfo:
    """An option whose value is a duration in milliseconds."""
    option: typer.models.OptionInfo = typer.Option(metavar="DURATION", parser=_parse_duration, help=help_text)
    return option


def complete_agent(context: typer.Context, incomplete: str) -> list[str]:
    """Agent ids for shell completion, read from the folder. Never fails."""
    folder = Path(context.params.get("dir") or os.environ.get("COTERIE_DIR") or DEFAULT_FOLDER)
    known = _stored_agents(folder) or _configured_agents(folder)
    return [name for name in known if name.startswith(incomplete)]


def _stored_agents(folder: Path) -> list[str]:
    import sqlite3  # not coterie.stores: its import would delay every completion

    database = folder / "data" / "coterie.db"
    with suppress(sqlite3.Error, OSError):
        if database.exists():
            with closing(sqlite3.connect(f"file:{database.resolve()}?mode=ro", uri=True, timeout=0.2)) as db:
                rows = db.execute("SELECT id FROM agents WHERE kind = 'agent' AND state <> 'terminated' ORDER BY id")
                return [str(row[0]) for row in rows]
    return []


def _configured_agents(folder: Path) -> list[str]:
    """Agents of a society that has not run yet."""
    import tomllib

    with suppress(OSError, ValueError), (folder / "coterie.toml").open("rb") as file:
        agents = tomllib.load(file).get("agents")
        return sorted(agents) if isinstance(agents, dict) and agents else ["assistant"]
    return []


_dir = typer.Option(
    "--dir",
    envvar="COTERIE_DIR",
    metavar="DIR",
    help="The society's folder; ./coterie-home if not given.",
    show_default=False,
    parser=_parse_folder,
)
Dir = Annotated[Path, _dir]
OptionalDir = Annotated[Path | None, _dir]
DirArgument = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="The same as --dir.", show_default=False, parser=_parse_folder)
]
AgentArgument = Annotated[
    str, typer.Argument(metavar="AGENT", help="The id of an agent.", show_default=False, autocompletion=complete_agent)
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="COTERIE_TOKEN",
        metavar="TOKEN",
        help="Token of the running server; data/token if not given.",
        show_default=False,
    ),
]
Turns = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        envvar="COTERIE_TURNS",
        min=1,
        help="How many turns run here at once, those that wait for a model included.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", callback=_remember_json, help="Write JSON, for programs.")]
