"""List and control recurring messages: `schedules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, Json, Token
from coterie.cli.output import local_time, print_json, print_line, print_table, run_quietly

COLUMNS = ("ID", "EVERY", "NEXT", "FROM", "TO", "TEXT")
SHOWN_ID = 12
"""Characters of an id in the table. Options accept the beginning of an id."""
TEXT_WIDTH = 60


def schedules(
    pause: Annotated[str | None, typer.Option(metavar="ID", help="Send none of it until it is resumed.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="ID", help="Let a paused one go on.")] = None,
    end: Annotated[str | None, typer.Option(metavar="ID", help="End it for good.")] = None,
    change: Annotated[str | None, typer.Option(metavar="ID", help="With --every: change when it is due.")] = None,
    every: Annotated[str | None, typer.Option(metavar="TEXT", help='Such as "weekdays 08:00".')] = None,
    time_zone: Annotated[str | None, typer.Option(metavar="NAME", help="Such as Europe/Berlin.")] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """List recurring messages, or pause, resume, change or end one. ID: the beginning of an id is enough."""
    actions = {"pause": pause, "resume": resume, "end": end, "change": change}
    given = [(name, value) for name, value in actions.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter("give one of --pause, --resume, --end and --change")
    if (change is not None) != (every is not None):
        raise typer.BadParameter("--change and --every belong together")
    if time_zone is not None and every is None:
        raise typer.BadParameter("--time-zone needs --change and --every")
    if not given:
        _list(run_quietly(_read(dir, token)), json)
        return
    action, name = given[0]
    body = {
        "pause": {"paused": True},
        "resume": {"paused": False},
        "end": None,
        "change": {"every": every, "timeZone": time_zone},
    }[action]
    changed = run_quietly(_change(dir, token, name, body))
    if json:
        print_json(changed)
    elif changed["state"] == "active":
        print_line(f"{changed['every']}, next due {_next(changed)}.")
    else:
        print_line(f"{changed['every']} is {changed['state']}.")


def _list(found: Sequence[Mapping[str, Any]], json: bool) -> None:
    from coterie.text import one_line

    if json:
        print_json({"items": found})
        return
    if not found:
        print_line("No recurring messages.")
        return
    print_table(
        COLUMNS,
        [
            (
                schedule["id"][:SHOWN_ID],
                schedule["every"],
                _next(schedule),
                schedule["from"],
                schedule["to"],
                one_line(str(schedule["payload"].get("text", "")), TEXT_WIDTH),
            )
            for schedule in found
        ],
    )


def _next(schedule: Mapping[str, Any]) -> str:
    from datetime import datetime

    next_at = schedule["nextAt"]
    return local_time(datetime.fromisoformat(next_at)) if next_at else str(schedule["state"])


async def _read(folder: Path, token: str | None) -> Sequence[Mapping[str, Any]]:
    from coterie.cli.client import connect

    async with connect(folder, token, private="read") as client:
        return [schedule async for page in client.pages("/schedules") for schedule in page["items"]]


async def _change(folder: Path, token: str | None, name: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Change the schedule whose id begins with `name`; None: end it."""
    from coterie.cli.client import connect
    from coterie.errors import Refused

    async with connect(folder, token) as client:
        found = [schedule async for page in client.pages("/schedules") for schedule in page["items"]]
        matches = [schedule for schedule in found if name and schedule["id"].startswith(name)]
        if len(matches) != 1:
            problem = f"{len(matches)} recurring messages have" if matches else "no recurring message has"
            raise Refused(
                "unknown_schedule", f"{problem} an id that begins with {name!r}: list them with coterie schedules"
            )
        path = f"/schedules/{matches[0]['id']}"
        if body is None:
            await client.delete(path)
        else:
            await client.patch(path, {key: value for key, value in body.items() if value is not None})
        changed: Mapping[str, Any] = await client.get(path)
        return changed
