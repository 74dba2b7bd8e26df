"""What an owner does to the database of a society: `migrate`, `copy`."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli.care import tidy_when_terminated
from coterie.cli.options import HOME, Dir, Json
from coterie.cli.output import Progress, counted, say, say_aside, say_json


def migrate(
    dir: Dir = HOME,  # noqa: A002
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 when there is something to do.")
    ] = False,
    json: Json = False,
) -> None:
    """Bring the society's database to the schema of this version. A start does so, too."""
    from coterie.admin.migrate import migrate_society, read_schema
    from coterie.cli import logs
    from coterie.stores.open import require_society

    logs.stay_quiet()
    place = require_society(dir)
    with Progress.shown("Looking at the database"):
        found = read_schema(place) if check else migrate_society(place)
    if json:
        done = not check and not found.is_current
        say_json({"engine": found.engine, "from": found.version, "to": found.newest, "migrated": done})
    elif found.is_current:
        say(f"{found.location} has schema {found.newest}, the newest: there is nothing to do.")
    elif check:
        say(
            f"{found.location} has schema {found.version}, the newest is {found.newest}: run coterie migrate --dir {dir}"
        )
    else:
        say(f"Brought {found.location} from schema {found.version} to {found.newest}.")
    raise typer.Exit(1 if check and not found.is_current else 0)


_WHERE = "A society's folder, or the address of a PostgreSQL: postgresql://user@host/name."


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help=_WHERE, show_default=False)],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="The same; nothing may be in it yet.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Copy a society from one database to another, from SQLite to PostgreSQL or back. Nobody may run it meanwhile.

    For a folder, its coterie.toml says which database. The owner's files, the token and the keys stay where they are.
    """
    from coterie.admin.copy import StoreLocation, copy_society
    from coterie.cli import logs

    logs.stay_quiet()
    origin, goal = StoreLocation.parse(source), StoreLocation.parse(target)
    with Progress.shown("Copying") as progress, tidy_when_terminated():
        carried = copy_society(origin, goal, progress.tell)
    if carried.lost:
        say_aside(f"Warning: {counted(len(carried.lost), 'artifact')} had lost their bytes before: see coterie verify")
    if json:
        rows, lost = dict(carried.rows), list(carried.lost)
        say_json({"from": str(origin), "to": str(goal), "rows": rows, "artifacts": carried.artifacts, "lost": lost})
        return
    messages, artifacts = counted(carried.rows["messages"], "message"), counted(carried.artifacts, "artifact")
    say(f"Copied {origin} to {goal}: {messages}, {artifacts}; everything was counted and checked.")
    if goal.folder:
        say(f"It goes on there with: coterie serve {goal.folder.path}, once your own files are there, too.")
    else:
        say("It goes on there once store.url in coterie.toml names it.")
    say("Do not run both: from here on they would differ.")
