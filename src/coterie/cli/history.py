"""Read what was said: `history` as the agent's model sees it, `export` as the person sees it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.agents import find_agent, read_directory
from coterie.cli.options import DEFAULT_FOLDER, AgentArgument, Dir, Json
from coterie.cli.output import print_json, print_line, run_quietly


class Format(StrEnum):
    MD = "md"
    JSON = "json"


def history(agent: AgentArgument, dir: Dir = DEFAULT_FOLDER, json: Json = False) -> None:  # noqa: A002
    """Show what an agent remembers, in the roles that its model sees. Works beside a running society."""
    rows = run_quietly(_read_history(dir, agent))
    if json:
        print_json({"agent": agent, "items": rows})
        return
    for row in rows:
        _print_row(row)


def export(
    agent: AgentArgument,
    format: Annotated[  # noqa: A002
        Format | None, typer.Option("--format", help="How to write it.", show_default="md, or json with --json")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; standard output when not given.")
    ] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    json: Json = False,
) -> None:
    """Write your whole conversation with an agent. Works beside a running society."""
    import sys

    if json and to is None and format is Format.MD:
        raise typer.BadParameter("Markdown is no JSON: leave out one of them, or name a file with --to")
    chosen = format or (Format.JSON if json else Format.MD)
    text = run_quietly(_read_export(dir, agent, chosen))
    if to is not None:
        to.write_text(text, encoding="utf-8")
        if json:
            print_json({"agent": agent, "file": str(to), "format": chosen.value, "size": len(text.encode())})
        else:
            print_line(f"Wrote {to}.")
    elif sys.stdout.isatty():
        for line in text.splitlines():
            print_line(line)
    else:
        typer.echo(text, nl=False)  # unchanged: a file or a program is not controlled by escapes


async def _read_history(folder: Path, agent_id: str) -> list[dict[str, Any]]:
    from coterie.admin.inspect import Inspection
    from coterie.agent.context import SystemPrompts
    from coterie.errors import CoterieError
    from coterie.web.schemas import HistoryItem

    async with Inspection.open(folder) as stored:
        await find_agent(stored.store, agent_id)
        rows = [HistoryItem.of(row).to_dict() for row in await stored.store.history(agent_id)]
        directory = await read_directory(stored)
    try:
        prompt = SystemPrompts(directory).render(directory.profile(agent_id))
    except CoterieError:  # terminated, or no longer described by the files
        return rows
    return [{"seq": 0, "turn": 0, "role": "system", "content": prompt}, *rows]


def _print_row(row: Mapping[str, Any]) -> None:
    from json import dumps

    lines = str(row["content"]).split("\n") if row["content"] else []
    calls = [f"→ {call['name']} {dumps(call['arguments'], ensure_ascii=False)}" for call in row.get("calls", ())]
    print_line(f"[{row['role']} ({row['from']})]" if "from" in row else f"[{row['role']}]")
    for line in (*lines, *calls):
        print_line(f"  {line.expandtabs(4)}")


async def _read_export(folder: Path, agent_id: str, chosen: Format) -> str:
    import json

    from coterie.admin.inspect import Inspection, read_thread, render_markdown
    from coterie.clock import SystemClock, to_rfc3339

    async with Inspection.open(folder) as stored:
        agent = await find_agent(stored.store, agent_id)
        messages = await read_thread(stored.store, agent_id)
    if chosen is Format.MD:
        return render_markdown(agent, messages)
    document = {
        "agent": {"id": agent.id, "name": agent.name},
        "exportedAt": to_rfc3339(SystemClock().now()),
        "messages": [message.to_dict() for message in messages],
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"
