"""What was said: `history`, as an agent's model sees it, and `export`, as the person does."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.completion import agent_ids
from coterie.cli.options import HOME, Dir, Json
from coterie.cli.output import say, say_json

AgentArgument = Annotated[
    str, typer.Argument(metavar="AGENT", help="The id of an agent.", show_default=False, autocompletion=agent_ids)
]


class Format(StrEnum):
    MD = "md"
    JSON = "json"


def history(agent: AgentArgument, dir: Dir = HOME, json: Json = False) -> None:  # noqa: A002
    """Show what an agent remembers, in the roles that its model sees. Works beside a running society."""
    import asyncio

    from coterie.cli import logs

    logs.stay_quiet()
    rows = asyncio.run(_history(dir, agent))
    if json:
        say_json({"agent": agent, "items": rows})
        return
    for row in rows:
        _print(row)


def export(
    agent: AgentArgument,
    format: Annotated[  # noqa: A002
        Format | None, typer.Option("--format", help="How to write it.", show_default="md, or json with --json")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; standard output when not given.")
    ] = None,
    dir: Dir = HOME,  # noqa: A002
    json: Json = False,
) -> None:
    """Write your whole conversation with an agent. Works beside a running society."""
    import asyncio

    from coterie.cli import logs

    if json and to is None and format is Format.MD:
        raise typer.BadParameter("Markdown is no JSON: leave out one of them, or name a file with --to")
    logs.stay_quiet()
    form = format or (Format.JSON if json else Format.MD)
    written = asyncio.run(_export(dir, agent, form))
    if to is None:
        # Word for word, for a file or another program: what steers a terminal is taken out only where there is one.
        _write_out(written)
        return
    to.write_text(written, encoding="utf-8")
    if json:
        say_json({"agent": agent, "file": str(to), "format": form.value, "size": len(written.encode())})
    else:
        say(f"Wrote {to}.")


async def _history(folder: Path, agent_id: str) -> list[dict[str, Any]]:
    from coterie.admin.inspect import Inspection
    from coterie.agent.context import Prompts
    from coterie.cli.recipients import check_agent
    from coterie.cli.roster import directory_of
    from coterie.errors import CoterieError
    from coterie.web.schemas import HistoryItem

    async with Inspection.open(folder) as stored:
        await check_agent(stored.store, agent_id)
        rows = [HistoryItem.of(row).to_dict() for row in await stored.store.history(agent_id)]
        directory = await directory_of(stored)
    try:
        prompt = Prompts(directory).of(directory.profile(agent_id))
    except CoterieError:  # it was ended, or the files describe it no more
        return rows
    return [{"seq": 0, "turn": 0, "role": "system", "content": prompt}, *rows]


def _print(row: Mapping[str, Any]) -> None:
    from json import dumps

    who = f"{row['role']} ({row['from']})" if "from" in row else row["role"]
    lines = str(row["content"]).split("\n") if row["content"] else []
    calls = [f"→ {call['name']} {dumps(call['arguments'], ensure_ascii=False)}" for call in row.get("calls", ())]
    say(f"[{who}]")
    for line in (*lines, *calls):
        say(f"  {line.expandtabs(4)}")


async def _export(folder: Path, agent_id: str, form: Format) -> str:
    import json

    from coterie.admin.inspect import Inspection, as_markdown, whole_thread
    from coterie.cli.recipients import check_agent
    from coterie.clock import SystemClock, to_wire

    async with Inspection.open(folder) as stored:
        agent = await check_agent(stored.store, agent_id)
        messages = await whole_thread(stored.store, agent_id)
    if form is Format.MD:
        return as_markdown(agent, messages)
    told = {
        "agent": {"id": agent.id, "name": agent.name},
        "exportedAt": to_wire(SystemClock().now()),
        "messages": [message.to_wire() for message in messages],
    }
    return json.dumps(told, ensure_ascii=False, indent=2) + "\n"


def _write_out(text: str) -> None:
    import sys

    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    for line in text.splitlines():
        say(line)
