"""`coterie agents`: who there is, and what everybody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import HOME, Dir, Json
from coterie.cli.output import say, say_json, say_table

if TYPE_CHECKING:
    from coterie.agent.service import Directory
    from coterie.agents import Agent
    from coterie.store import Worker

COLUMNS = ("AGENT", "NAME", "STATE", "SERVICE", "WAITING", "UNREAD", "WORKER", "WHY")
OPTIONAL = ("WORKER", "WHY")
"""Left out where they would be empty."""


def agents(dir: Dir = HOME, json: Json = False) -> None:  # noqa: A002
    """List the agents, each below the one that made it. Works beside a running society."""
    import asyncio

    from coterie.cli import logs

    logs.stay_quiet()
    found, workers = asyncio.run(_read(dir))
    if json:
        say_json({"items": found, "workers": [one.to_wire() for one in workers]})
        return
    rows = [_row(agent, depth) for agent, depth in _as_tree(found)]
    if rows:
        shown = [n for n, name in enumerate(COLUMNS) if name not in OPTIONAL or any(row[n] for row in rows)]
        say_table([COLUMNS[n] for n in shown], [[row[n] for n in shown] for row in rows])
    else:
        say("There are no agents.")
    if workers:
        say(f"Processes: {', '.join(f'{one.name} ({one.claims:,} at work)' for one in workers)}")


async def _read(folder: Path) -> tuple[list[dict[str, Any]], Sequence[Worker]]:
    from coterie.admin.inspect import Inspection
    from coterie.cli.roster import all_agents, directory_of

    async with Inspection.open(folder) as stored:
        directory = await directory_of(stored)
        unread = {thread.agent_id: thread.unread for thread in (await stored.store.snapshot()).threads}
        holder = await stored.holders()
        found = [
            _told(agent, directory, unread.get(agent.id, 0), holder(agent)) for agent in await all_agents(stored.store)
        ]
        return found, await stored.store.workers()


def _told(agent: Agent, directory: Directory, unread: int, worker: str | None) -> dict[str, Any]:
    from coterie.errors import CoterieError
    from coterie.web.schemas import AgentStatus

    service, parent = None, agent.parent
    try:
        parent = directory.profile(agent.id).parent or parent
        service = directory.service_of(agent.id).id
    except CoterieError:
        pass  # it was ended, or the files describe neither it nor its service any more
    told = {"id": agent.id, "name": agent.name} | AgentStatus.of(agent).to_dict()
    return told | {
        "service": service,
        "parent": parent,
        "waiting": agent.waiting,
        "delayed": agent.delayed,
        "unread": unread,
        "worker": worker,
    }


def _as_tree(agents: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Each agent behind its parent, with how deep it stands; whose parent is not there stands at the top."""
    ids = {agent["id"] for agent in agents}
    below: dict[str | None, list[Mapping[str, Any]]] = {}
    for agent in agents:
        below.setdefault(agent["parent"] if agent["parent"] in ids else None, []).append(agent)
    tree: list[tuple[Mapping[str, Any], int]] = []

    def add(parent: str | None, depth: int) -> None:
        for agent in below.pop(parent, ()):
            tree.append((agent, depth))
            add(agent["id"], depth + 1)

    add(None, 0)
    for parent in list(below):  # parents of each other, as only a file can have it
        add(parent, 0)
    return tree


def _row(agent: Mapping[str, Any], depth: int) -> tuple[str, ...]:
    from coterie.cli.conversation import Stands

    return (
        f"{'  ' * (depth - 1)}└ {agent['id']}" if depth else agent["id"],
        agent["name"],
        Stands.of(agent).words,
        agent["service"] or "none",
        f"{agent['waiting']:,}",
        f"{agent['unread']:,}",
        agent["worker"] or "",
        agent.get("why") or "",
    )
