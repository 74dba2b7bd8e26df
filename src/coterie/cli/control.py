"""What an agent is told to do about its work: `stop`, `pause`, `resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from coterie.cli.options import HOME, Dir, Json, Token
from coterie.cli.output import say, say_json
from coterie.cli.past import AgentArgument

Order = Literal["stop", "pause", "resume"]
_DONE = {"stop": "was told to stop", "pause": "is paused; its mail waits", "resume": "goes on"}


def stop(agent: AgentArgument, dir: Dir = HOME, token: Token = None, json: Json = False) -> None:  # noqa: A002
    """End what an agent is doing. Its mail is kept."""
    _tell("stop", agent, dir, token, json)


def pause(agent: AgentArgument, dir: Dir = HOME, token: Token = None, json: Json = False) -> None:  # noqa: A002
    """Let an agent rest until it is resumed. Its mail waits."""
    _tell("pause", agent, dir, token, json)


def resume(agent: AgentArgument, dir: Dir = HOME, token: Token = None, json: Json = False) -> None:  # noqa: A002
    """Let a paused or blocked agent go on."""
    _tell("resume", agent, dir, token, json)


def _tell(order: Order, agent_id: str, folder: Path, token: str | None, as_json: bool) -> None:
    import asyncio

    from coterie.cli import logs

    logs.stay_quiet()
    state, at_work = asyncio.run(_order(order, agent_id, folder, token))
    if as_json:
        say_json({"id": agent_id, "state": state})
    elif order == "stop" and not at_work:
        say(f"{agent_id} was doing nothing.")
    else:
        say(f"{agent_id} {_DONE[order]}.")


async def _order(order: Order, agent_id: str, folder: Path, token: str | None) -> tuple[str, bool]:
    """The state it is in then, and whether it was at work before."""
    from urllib.parse import quote

    from coterie.cli.finding import find_server
    from coterie.cli.recipients import check_agent
    from coterie.inspection import Inspection
    from coterie.runtime import Society
    from coterie.web import wire

    if client := find_server(folder, token):
        async with client, Inspection.open(folder) as stored:
            before = await check_agent(stored.store, agent_id)
            after = await client.post(f"/agents/{quote(agent_id)}/{order}")
            return str(after["state"]), wire.state(before)["state"] == "active"
    async with Society.visit(folder) as society:
        await check_agent(society.store, agent_id)
        if order == "pause":
            await society.pause(agent_id)
        elif order == "resume":
            await society.resume(agent_id)
        now = await check_agent(society.store, agent_id)
        # Nobody is at work in a society that does not run.
        return str(wire.state(now)["state"]), False
