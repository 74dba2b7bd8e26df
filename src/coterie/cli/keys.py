"""Keys of programs: `keys add`, `keys list`, `keys revoke`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, Json, Token
from coterie.cli.output import local_time, print_json, print_line, print_table, run_quietly
from coterie.errors import Refused

if TYPE_CHECKING:
    from coterie.cli.client import Client

COLUMNS = ("NAME", "AGENTS", "DOORS", "MADE", "LAST USE", "STATE")
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="The program's name.", show_default=False)]

keys = typer.Typer(
    help="Make, list and revoke keys with which other programs reach agents.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@keys.command("add")
def add_key(
    name: KeyName,
    agents: Annotated[
        str | None, typer.Option(metavar="IDS", help="Agents it may reach, such as ada,bob; all if not given.")
    ] = None,
    doors: Annotated[
        str | None, typer.Option(metavar="DOORS", help="Some of openai, mcp and a2a; all if not given.")
    ] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """Make a key for one program and print its token, which is never shown again."""
    body = {"name": name, "agents": _names(agents), "doors": _names(doors)}
    made = run_quietly(_call(dir, token, lambda client: client.post("/keys", body)))
    if json:
        print_json(made)
        return
    print_line(made["token"])
    reach = "all agents" if made["agents"] is None else ", ".join(made["agents"])
    print_line(f"The key {name} reaches {reach} through {', '.join(made['doors'])}. Its token is not shown again.")


@keys.command("list")
def list_keys(dir: Dir = DEFAULT_FOLDER, token: Token = None, json: Json = False) -> None:  # noqa: A002
    """List keys with their last use."""
    found = run_quietly(_call(dir, token, lambda client: client.get("/keys"), private="read"))
    if json:
        print_json(found)
    elif not found["items"]:
        print_line("No keys. Make one with: coterie keys add NAME")
    else:
        print_table(COLUMNS, [_row(key) for key in found["items"]])


@keys.command("revoke")
def revoke_key(name: KeyName, dir: Dir = DEFAULT_FOLDER, token: Token = None, json: Json = False) -> None:  # noqa: A002
    """Revoke a key. Its requests are refused from now on."""
    from coterie.agents import AGENT_ID

    if not AGENT_ID.fullmatch(name):  # an empty name would be another address
        raise Refused("unknown_key", f"there is no key {name!r}: list them with coterie keys list")
    revoked = run_quietly(_call(dir, token, lambda client: client.delete(f"/keys/{name}")))
    if json:
        print_json(revoked)
    else:
        print_line(f"The key {name} is revoked.")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name for part in text.split(",") if (name := part.strip())]


def _row(key: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        key["name"],
        "all" if key["agents"] is None else ",".join(key["agents"]),
        ",".join(key["doors"]),
        _time(key["createdAt"]),
        _time(key["usedAt"]) if key["usedAt"] else "never",
        f"revoked {_time(key['revokedAt'])}" if key["revokedAt"] else "active",
    )


def _time(text: str) -> str:
    from datetime import datetime

    return local_time(datetime.fromisoformat(text))


async def _call(
    folder: Path, token: str | None, call: Callable[[Client], Awaitable[Any]], *, private: Any = "store"
) -> Any:
    from coterie.cli.client import connect

    async with connect(folder, token, private=private) as client:
        return await call(client)
