"""List and control agents: `agents`, `stop` (also of a task), `pause`, `resume`, `clear`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coterie.cli.options import DEFAULT_FOLDER, AgentArgument, Dir, Json, Token, complete_agent
from coterie.cli.output import count_of, format_status, print_json, print_line, print_table, run_quietly, sort_as_tree

if TYPE_CHECKING:
    from coterie.cli.client import Client

COLUMNS = ("AGENT", "NAME", "STATE", "SERVICE", "WAITING", "UNREAD", "WORKER", "WHY")
OPTIONAL_COLUMNS = ("WORKER", "WHY")
"""Left out if they are empty."""
FIELDS = (
    "id", "name", "description", "state", "since", "phase", "tool", "step", "why", "service", "parent", "waiting",
    "delayed", "unread", "worker",
)  # fmt: skip
"""What --json writes about an agent."""
PARALLEL_REQUESTS = 32
Order = Literal["stop", "pause", "resume"]
_RESULTS = {"stop": "is stopping", "pause": "is paused; its mail waits", "resume": "is resumed"}


def agents(dir: Dir = DEFAULT_FOLDER, token: Token = None, json: Json = False) -> None:  # noqa: A002
    """List the agents, each below the one that made it. Works beside a running society."""
    found, workers = run_quietly(_read_agents(dir, token))
    if json:
        items = [{key: agent[key] for key in FIELDS if key in agent} for agent in found]
        print_json({"items": items, "workers": workers})
        return
    rows = [_row(agent, depth) for agent, depth in sort_as_tree(found)]
    if rows:
        shown = [n for n, name in enumerate(COLUMNS) if name not in OPTIONAL_COLUMNS or any(row[n] for row in rows)]
        print_table([COLUMNS[n] for n in shown], [[row[n] for n in shown] for row in rows])
    else:
        print_line("There are no agents.")
    if workers:
        processes = [f"{worker['name']} ({worker['claims']:,} at work)" for worker in workers]
        print_line(f"Processes: {', '.join(processes)}")


async def _read_agents(
    folder: Path, token: str | None
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The agents, and the processes that share the society."""
    from coterie.cli.client import connect

    async with connect(folder, token, private="read") as client:
        return await client.agents(), (await client.get("/workers"))["items"]


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
        all: Annotated[bool, typer.Option("--all", help="All agents.")] = False,  # noqa: A002
        dir: Dir = DEFAULT_FOLDER,  # noqa: A002
        token: Token = None,
        json: Json = False,
    ) -> None:
        if (agent is None) != all:
            raise typer.BadParameter("name one agent, or give --all")
        _run_order(order, agent, dir, token, json)

    command.__name__, command.__doc__ = order, description
    return command


def _run_order(order: Order, agent: str | None, folder: Path, token: str | None, json: bool) -> None:
    """Control one agent, or all if `agent` is None; write the result."""
    results = run_quietly(_control(order, agent, folder, token))
    if json:
        states = [{"id": agent_id, "state": state} for agent_id, (state, _) in results.items()]
        print_json({"items": states} if agent is None else states[0])
        return
    for agent_id, (state, was_active) in results.items():
        print_line(f"{agent_id} {_describe_result(order, state, was_active, agent is None)}.")


def stop(
    agent: Annotated[
        str | None,
        typer.Argument(metavar="AGENT", help="The id of an agent.", autocompletion=complete_agent, show_default=False),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="All agents.")] = False,  # noqa: A002
    task: Annotated[
        str | None, typer.Option(metavar="ID", help="Stop a whole task instead: all its turns, messages and questions.")
    ] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """End the turn of an agent; its mail is kept. With --task: stop everything that a message set off."""
    from coterie.cli.tasks import format_stopped, stop_task

    if (agent is not None) + all + (task is not None) != 1:
        raise typer.BadParameter("name one agent, or give --all or --task ID")
    if task is None:
        _run_order("stop", agent, dir, token, json)
        return
    task_id, counts = run_quietly(stop_task(dir, token, task))
    if json:
        print_json({"id": task_id, **counts})
    else:
        print_line(format_stopped(counts))


pause = _control_command("pause", "Pause an agent until it is resumed. Its mail waits.")
resume = _control_command("resume", "Resume a paused agent, or let a blocked one try again.")


def _describe_result(order: Order, state: str, was_active: bool, is_for_all: bool) -> str:
    if order == "stop" and not was_active:
        return "was not at work"
    if is_for_all and order == "pause" and state == "active":
        return "ends its step, then pauses; its mail waits"
    if order == "resume" and state == "paused":
        society = "the whole society is paused, and coterie resume --all resumes it"
        return f"stays paused: {'it was paused individually' if is_for_all else society}"
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


def clear(
    agent: AgentArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")] = False,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """Delete your conversation with an agent and all that the agent remembers. A blocked agent can go on."""
    if not yes:
        run_quietly(_find_agent(agent, dir, token))
        if not sys.stdin.isatty():
            raise typer.BadParameter("there is no terminal to ask on: give --yes", param_hint="--yes")
        question = f"Delete your conversation with {agent} and all that it remembers? This cannot be undone."
        typer.confirm(question, abort=True, err=True)
    deleted = run_quietly(_clear(agent, dir, token))
    if json:
        print_json({"id": agent, "messages": deleted})
    else:
        print_line(f"Cleared the conversation with {agent}: {count_of(deleted, 'message')} deleted.")


async def _find_agent(agent_id: str, folder: Path, token: str | None) -> None:
    from coterie.cli.client import connect

    async with connect(folder, token, private="read") as client:
        await client.agent(agent_id)


async def _clear(agent_id: str, folder: Path, token: str | None) -> int:
    """Return the number of deleted messages."""
    from coterie.cli.client import connect

    async with connect(folder, token) as client:
        await client.agent(agent_id)
        return int((await client.delete(f"/threads/{agent_id}"))["messages"])
