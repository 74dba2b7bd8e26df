"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HOME = Path("coterie-home")
_AS_JSON = "coterie.json"


def _remember(context: typer.Context, wanted: bool) -> bool:
    context.meta[_AS_JSON] = wanted
    return wanted


def a_duration(text: str | None) -> str | None:
    """For options that take one: what cannot be read is wrong usage."""
    from coterie.cli import durations

    try:
        if text is not None:
            durations.to_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def a_folder(text: str) -> Path:
    """An empty name is most likely a variable of the shell that was never set, and not meant for this very folder."""
    if not text:
        raise typer.BadParameter("expected the name of a folder, got nothing")
    return Path(text)


def wants_json(context: typer.Context) -> bool:
    """Whoever reports a failure needs to know, too."""
    return bool(context.meta.get(_AS_JSON))


_dir = typer.Option(
    "--dir",
    envvar="COTERIE_DIR",
    metavar="DIR",
    help="The society's folder; ./coterie-home when not given.",
    show_default=False,
    parser=a_folder,
)
Dir = Annotated[Path, _dir]
MaybeDir = Annotated[Path | None, _dir]
Place = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="The same as --dir.", show_default=False, parser=a_folder)
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="COTERIE_TOKEN", metavar="TOKEN", help="Of the running server; otherwise data/token.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", callback=_remember, help="Write JSON, for programs.")]
