"""List and control agents: `agents`, `stop`, `pause`, `resume`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, Json, Token, complete_agent
from coterie.cli.output import format_status, no_such_agent, print_json, print_line, print_table, run_quietly

if TYPE_CHECKING:
    from coterie.admin.inspect import Inspection
    from coterie.agent.service import AgentDirectory
    from coterie.agents import Agent
    from coterie.cli.client import Client
    from coterie.store import Store, Worker

COLUMNS = ("AGENT", "NAME", "STATE", "SERVICE", "WAITING", "UNREAD", "WORKER", "WHY")
OPTIONAL_COLUMNS = ("WORKER", "WHY")
"""Left out if they are empty."""
PARALLEL_REQUESTS = 32
PAGE_SIZE = 200
Order = Literal["stop", "pause", "resume"]
_RESULTS = {"stop": "was told to stop", "pause": "is paused; its mail waits", "resume": "goes on"}


def agents(dir: Dir = DEFAULT_FOLDER, json: Json = False) -> None:  # noqa: A002
    """List the agents, each below the one that made it. Works beside a running society."""
    found, workers = run_quietly(_read_agents(dir))
    if json:
        print_json({"items": found, "workers": [worker.to_dict() for worker in workers]})
        return
    rows = [_row(agent, depth) for agent, depth in _sort_as_tree(found)]
    if rows:
        shown = [n for n, name in enumerate(COLUMNS) if name not in OPTIONAL_COLUMNS or any(row[n] for row in rows)]
        print_table([COLUMNS[n] for n in shown], [[row[n] for n in shown] for row in rows])
    else:
        print_line("There are no agents.")
    if workers:
        print_line(f"Processes: {', '.join(f'{worker.name} ({worker.claims:,} at work)' for worker in workers)}")


async def _read_agents(folder: Path) -> tuple[list[dict[str, Any]], Sequence[Worker]]:
    from coterie.admin.inspect import Inspection

    async with Inspection.open(folder) as stored:
        directory = await read_directory(stored)
        unread = {thread.agent_id: thread.unread for thread in (await stored.store.snapshot()).threads}
        holder = await stored.worker_names()
        found: list[Agent] = []
        while page := await stored.store.agents(found[-1].id if found else "", PAGE_SIZE):
            found += page
        items = [
            _to_json(agent, directory, unread.get(agent.id, 0), holder(agent))
            for agent in found
            if agent.kind == "agent"
        ]
        return items, await stored.store.workers()


async def read_directory(stored: Inspection) -> AgentDirectory:
    """Profiles and services of the agents of a society that need not run."""
    from coterie.agent.service import AgentDirectory, AgentService
    from coterie.agent_runtime import load_services, read_profiles
    from coterie.clock import SystemClock
    from coterie.config import read_config
    from coterie.llm.learned_limits import LearnedLimits

    folder = stored.folder
    profiles, _ = read_profiles(read_config(folder.path), folder)
    limits = LearnedLimits(SystemClock(), folder.data / "refusals.json")
    directory = AgentDirectory(load_services(folder), limits, profiles)
    await AgentService(stored.store, directory).refresh_directory()
    return directory


async def find_agent(store: Store, name: str, *, or_person: bool = False) -> Agent:
    """Find an agent in the stored society; `Refused` with a suggestion if there is none of that name."""
    from coterie.errors import Refused
    from coterie.text import to_storable

    kinds = ("agent", "person") if or_person else ("agent",)
    agent = await store.agent(to_storable(name))
    if agent and agent.kind in kinds:
        return agent
    known = [agent.id for agent in await store.agents() if agent.kind in kinds]
    raise Refused("unknown_recipient" if or_person else "unknown_agent", no_such_agent(name, known))


def _to_json(agent: Agent, directory: AgentDirectory, unread: int, worker: str | None) -> dict[str, Any]:
    from coterie.errors import CoterieError
    from coterie.web.schemas import AgentStatus

    service, parent = None, agent.parent
    try:
        parent = directory.profile(agent.id).parent or parent
        service = directory.service_of(agent.id).id
    except CoterieError:
        pass  # terminated, or no longer described by the files
    return {
        "id": agent.id,
        "name": agent.name,
        **AgentStatus.of(agent).to_dict(),
        "service": service,
        "parent": parent,
        "waiting": agent.waiting,
        "delayed": agent.delayed,
        "unread": unread,
        "worker": worker,
    }


def _sort_as_tree(agents: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Each agent behind its parent, with its depth. Agents whose parent is unknown are at the top."""
    ids = {agent["id"] for agent in agents}
    children: dict[str | None, list[Mapping[str, Any]]] = {}
    for agent in agents:
        children.setdefault(agent["parent"] if agent["parent"] in ids else None, []).append(agent)
    tree: list[tuple[Mapping[str, Any], int]] = []

    def add_children(parent: str | None, depth: int) -> None:
        for agent in children.pop(parent, ()):
            tree.append((agent, depth))
            add_children(agent["id"], depth + 1)

    add_children(None, 0)
    for parent in list(children):  # a cycle of parents, which coterie.toml can describe
        add_children(parent, 0)
    return tree


def _row(agent: Mapping[str, Any], depth: int) -> tuple[str, ...]:
    return (
        f"{'  ' * (depth - 1)}└ {agent['id']}" if depth else agent["id"],
        agent["name"],
        format_status(agent["state"], agent.get("phase"), agent.get("tool")),
        agent["service"] or "none",
        f"{agent['waiting']:,}",
        f"{agent['unread']:,}",
        agent["worker"] or "",
        agent.get("why") or "",
    )


def _control_command(order: Order, description: str) -> Callable[..., None]:
    def command(
        agent: Annotated[
            str | None,
            typer.Argument(
                metavar="AGENT", help="The id of an agent.", autocompletion=complete_agent, show_default=False
            ),
        ] = None,
        all: Annotated[bool, typer.Option("--all", help="Everybody at once.")] = False,  # noqa: A002
        dir: Dir = DEFAULT_FOLDER,  # noqa: A002
        token: Token = None,
        json: Json = False,
    ) -> None:
        if (agent is None) != all:
            raise typer.BadParameter("name one agent, or say --all")
        results = run_quietly(_control(order, agent, dir, token))
        if json:
            states = [{"id": agent_id, "state": state} for agent_id, (state, _) in results.items()]
            print_json({"items": states} if all else states[0])
            return
        for agent_id, (state, was_active) in results.items():
            print_line(f"{agent_id} {_describe_result(order, state, was_active, all)}.")

    command.__name__, command.__doc__ = order, description
    return command


stop = _control_command("stop", "End what an agent is doing. Its mail is kept.")
pause = _control_command("pause", "Let an agent rest until it is resumed. Its mail waits.")
resume = _control_command("resume", "Let a paused or blocked agent go on.")


def _describe_result(order: Order, state: str, was_active: bool, is_for_all: bool) -> str:
    if order == "stop" and not was_active:
        return "was doing nothing"
    if is_for_all and order == "pause" and state == "active":
        return "ends its step, then pauses; its mail waits"
    if is_for_all and order == "resume" and state == "paused":
        return "stays paused: it was paused by itself"
    return _RESULTS[order]


async def _control(
    order: Order, agent_id: str | None, folder: Path, token: str | None
) -> Mapping[str, tuple[str, bool]]:
    """Control one agent, or all if `agent_id` is None. Return each one's new state, and if it was active before."""
    import asyncio

    from coterie.cli.client import connect

    results: dict[str, tuple[str, bool]] = {}
    async with connect(folder, token) as client:
        if agent_id is not None:
            return {agent_id: await _control_one(client, order, agent_id)}
        if order != "stop":
            await client.post(f"/{order}")
            return {agent["id"]: (agent["state"], False) for agent in await _living_agents(client)}
        # Agents that are still at work may create others meanwhile.
        while left := [agent["id"] for agent in await _living_agents(client) if agent["id"] not in results]:
            for start in range(0, len(left), PARALLEL_REQUESTS):
                batch = left[start : start + PARALLEL_REQUESTS]
                stopped = await asyncio.gather(*(_control_one(client, order, agent_id) for agent_id in batch))
                results |= zip(batch, stopped, strict=True)
    return results


async def _living_agents(client: Client) -> list[Mapping[str, Any]]:
    return [agent for agent in await client.agents() if agent["state"] != "terminated"]


async def _control_one(client: Client, order: Order, agent_id: str) -> tuple[str, bool]:
    before = await client.agent(agent_id)
    if client.is_private and order == "stop":
        return before["state"], False  # no agent was at work
    after = await client.post(f"/agents/{agent_id}/{order}")
    return after["state"], before["state"] == "active"
