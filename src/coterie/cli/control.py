"""What an agent is told to do about its work: `stop`, `pause`, `resume`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie.cli.completion import agent_ids
from coterie.cli.options import HOME, Dir, Json, Token
from coterie.cli.output import say, say_json

if TYPE_CHECKING:
    from coterie.agents import Agent
    from coterie.cli.client import Client
    from coterie.society import Society
    from coterie.store import Store

MaybeAgent = Annotated[
    str | None,
    typer.Argument(metavar="AGENT", help="The id of an agent.", autocompletion=agent_ids, show_default=False),
]
All = Annotated[bool, typer.Option("--all", help="Everybody at once.")]
Order = Literal["stop", "pause", "resume"]
Told = tuple[str, bool]
"""The state that an agent is in then, and whether it was at work before."""
AT_ONCE = 32
_DONE = {"stop": "was told to stop", "pause": "is paused; its mail waits", "resume": "goes on"}


def _command(order: Order, what: str) -> Callable[..., None]:
    def command(
        agent: MaybeAgent = None,
        all: All = False,  # noqa: A002
        dir: Dir = HOME,  # noqa: A002
        token: Token = None,
        json: Json = False,
    ) -> None:
        _tell(order, agent, all, dir, token, json)

    command.__name__, command.__doc__ = order, what
    return command


stop = _command("stop", "End what an agent is doing. Its mail is kept.")
pause = _command("pause", "Let an agent rest until it is resumed. Its mail waits.")
resume = _command("resume", "Let a paused or blocked agent go on.")


def _tell(order: Order, agent_id: str | None, everybody: bool, folder: Path, token: str | None, as_json: bool) -> None:
    import asyncio

    from coterie.cli import logs

    if (agent_id is None) != everybody:
        raise typer.BadParameter("name one agent, or say --all")
    logs.stay_quiet()
    told = asyncio.run(_give(order, agent_id, folder, token))
    if as_json:
        states = [{"id": one, "state": state} for one, (state, _) in told.items()]
        say_json({"items": states} if everybody else states[0])
        return
    for one, (state, at_work) in told.items():
        say(f"{one} {_what_became(order, state, at_work, everybody)}.")


def _what_became(order: Order, state: str, at_work: bool, everybody: bool) -> str:
    if order == "stop" and not at_work:
        return "was doing nothing"
    if everybody and order == "pause" and state == "active":
        return "ends its step, then pauses; its mail waits"
    if everybody and order == "resume" and state == "paused":
        return "stays paused: it was paused by itself"
    return _DONE[order]


async def _give(order: Order, agent_id: str | None, folder: Path, token: str | None) -> dict[str, Told]:
    """To that agent, or to everybody."""
    from coterie.admin.inspect import Inspection
    from coterie.cli.finding import find_server
    from coterie.society import Society

    whole = agent_id is None and order != "stop"
    if client := find_server(folder, token):
        async with client, Inspection.open(folder) as stored:
            if whole:
                await client.post(f"/{order}")
                return await _states(stored.store)
            return await _each(stored.store, agent_id, lambda one: _ask_server(client, stored.store, order, one))
    async with Society.visit(folder) as society:
        if whole:
            await (society.pause_all() if order == "pause" else society.resume_all())
            return await _states(society.store)
        return await _each(society.store, agent_id, lambda one: _order(society, order, one))


async def _states(store: Store) -> dict[str, Told]:
    """Of everybody, after an order to the whole society."""
    from coterie.web.schemas import AgentStatus

    return {one.id: (AgentStatus.of(one).state, False) for one in await _everybody(store)}


async def _each(store: Store, agent_id: str | None, tell: Callable[[str], Awaitable[Told]]) -> dict[str, Told]:
    import asyncio

    if agent_id is not None:
        return {agent_id: await tell(agent_id)}
    told: dict[str, Told] = {}
    # Those who still work may make others meanwhile.
    while left := [one.id for one in await _everybody(store) if one.id not in told]:
        for some in (left[at : at + AT_ONCE] for at in range(0, len(left), AT_ONCE)):
            told |= zip(some, await asyncio.gather(*map(tell, some)), strict=True)
    return told


async def _everybody(store: Store) -> list[Agent]:
    agents: list[Agent] = []
    while page := await store.agents(agents[-1].id if agents else ""):
        agents += page
    return [agent for agent in agents if agent.kind == "agent" and agent.state != "terminated"]


async def _ask_server(client: Client, stored: Store, order: Order, agent_id: str) -> Told:
    from urllib.parse import quote

    from coterie.cli.recipients import check_agent
    from coterie.web.schemas import AgentStatus

    before = await check_agent(stored, agent_id)
    after = await client.post(f"/agents/{quote(agent_id)}/{order}")
    return str(after["state"]), AgentStatus.of(before).state == "active"


async def _order(society: Society, order: Order, agent_id: str) -> Told:
    from coterie.cli.recipients import check_agent
    from coterie.web.schemas import AgentStatus

    await check_agent(society.store, agent_id)
    if order == "pause":
        await society.pause(agent_id)
    elif order == "resume":
        await society.resume(agent_id)
    now = await check_agent(society.store, agent_id)
    # Nobody is at work in a society that does not run.
    return AgentStatus.of(now).state, False
