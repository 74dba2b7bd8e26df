"""Agents: who they are, what they do, what they remember."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from coterie.agent.context import SystemPrompts
from coterie.errors import CoterieError
from coterie.llm.service import Direction
from coterie.society import Society
from coterie.web import shapes, wire
from coterie.web.api.overview import number
from coterie.web.endpoint import BODY, COMMON, Cursor, Id, Limit, SocietyDep, answer, gives, listing, nothing, problems

router = APIRouter(prefix="/agents", tags=["agents"], responses=COMMON)

_ONE = gives(shapes.Agent)
_KNOWN = problems("unknown_agent")
_WORKING = problems("unknown_agent", "recipient_terminated")


@router.get("", summary="By id", responses=gives(shapes.Agents))
async def everybody(
    society: SocietyDep,
    capability: Id | None = None,
    direction: Direction = "input",
    after: Cursor | None = None,
    limit: Limit = 50,
) -> Response:
    """With `capability`: those whose model has it."""
    if capability is not None:
        able = sorted(await society.agents.with_capability(capability, direction))
        wanted = [one for one in able if one > (after or "")]
        found = await society.store.agents_by_id(wanted[:limit])
        page = [found[one] for one in wanted[:limit] if one in found]
        following = wanted[limit - 1] if len(wanted) > limit else None
    else:
        stored = await society.store.agents(after or "", limit + 1)
        page = [one for one in stored[:limit] if one.kind == "agent"]
        following = stored[limit - 1].id if len(stored) > limit else None
    return listing([wire.agent(society, one) for one in page], following)


@router.post(
    "",
    status_code=201,
    summary="Make an agent",
    responses=gives(shapes.Agent, 201)
    | BODY
    | problems(
        "id_taken", "payload_invalid", "unknown_service", "unknown_agent", "recipient_terminated",
        _422="`request_invalid`",
    ),
)  # fmt: skip
async def create(wanted: shapes.NewAgent, society: SocietyDep) -> Response:
    made = await society.create_agent(
        id=wanted.id,
        name=wanted.name,
        prompt=wanted.prompt,
        service=wanted.service,
        tools=wanted.tools,
        parent=wanted.parent,
    )
    return answer(await _shown(society, made.id), 201)


@router.get("/{agent_id}", summary="One agent", responses=_ONE | _KNOWN)
async def one(agent_id: str, society: SocietyDep) -> Response:
    return answer(await _shown(society, agent_id))


@router.get(
    "/{agent_id}/history",
    summary="What the agent remembers, in the roles that its model sees",
    responses=gives(shapes.History) | _KNOWN,
)
async def history(agent_id: str, society: SocietyDep, after: Cursor | None = None, limit: Limit = 50) -> Response:
    wire.known(await society.store.agent(agent_id), agent_id)
    rows = (await society.store.history(agent_id, number(after) or 0))[: limit + 1]
    told = [] if after else _told_first(society, agent_id)
    told += [wire.said(row) for row in rows]
    return listing(told[:limit], told[limit - 1]["seq"] if len(told) > limit else None)


def _told_first(society: Society, agent_id: str) -> list[dict[str, Any]]:
    try:
        prompt = SystemPrompts(society.agents).render(society.agents.profile(agent_id))
    except CoterieError:  # it was terminated, or nobody is at work here
        return []
    return [{"seq": 0, "turn": 0, "role": "system", "content": prompt}]


@router.post("/{agent_id}/stop", summary="End what it is doing; its mail is kept", responses=_ONE | _WORKING)
async def stop(agent_id: str, society: SocietyDep) -> Response:
    wire.known(await society.store.agent(agent_id), agent_id)
    if not society.stop_turn(agent_id):
        await society.stop_waiting(agent_id)
    return answer(await _shown(society, agent_id))


@router.post("/{agent_id}/pause", summary="It ends its turn and rests; its mail waits", responses=_ONE | _WORKING)
async def pause(agent_id: str, society: SocietyDep) -> Response:
    await society.pause(agent_id)
    return answer(await _shown(society, agent_id))


@router.post("/{agent_id}/resume", summary="It takes up its mail, or tries again", responses=_ONE | _WORKING)
async def resume(agent_id: str, society: SocietyDep) -> Response:
    await society.resume(agent_id)
    return answer(await _shown(society, agent_id))


@router.delete(
    "/{agent_id}",
    status_code=204,
    response_class=Response,
    summary="Terminate it, and all it made",
    responses=_WORKING,
)
async def terminate(agent_id: str, society: SocietyDep) -> Response:
    await society.terminate_agent(agent_id)
    return nothing()


async def _shown(society: Society, agent_id: str) -> dict[str, Any]:
    return wire.agent(society, wire.known(await society.store.agent(agent_id), agent_id))
