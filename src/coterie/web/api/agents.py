"""Agents: list, create, control, history; pausing the whole society."""

from __future__ import annotations

from typing import Any, Literal, Self

from msgspec import UNSET, UnsetType, field

from coterie import agents
from coterie.agent.context import QUARANTINED_NOTE
from coterie.errors import CoterieError, Refused
from coterie.llm.service import Direction
from coterie.society import Society
from coterie.store import Store
from coterie.text import one_line
from coterie.turn_store import HistoryRow
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Cursor, Id, Limit, Router, SocietyDep, position
from coterie.web.schemas import Agent, AgentPage, NewAgent, PayloadObject, Schema, SocietyState, Worker, WorkerPage


class HistoryCall(Schema):
    id: str
    name: str
    arguments: dict[str, Any]


class HistoryItem(Schema):
    """One entry of an agent's history, under the role that its model sees."""

    seq: int
    turn: int
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: list[HistoryCall] | UnsetType = UNSET
    call_id: str | UnsetType | None = UNSET
    hidden: bool | UnsetType = UNSET
    message_id: str | UnsetType = UNSET
    sender: str | UnsetType = field(name="from", default=UNSET)
    payload: PayloadObject = UNSET

    @classmethod
    def of(cls, row: HistoryRow) -> Self:
        item = cls(seq=row.seq, turn=row.turn_no, role=row.role, content=row.text)  # type: ignore[arg-type]
        if row.role == "assistant" and row.calls:
            item.calls = [HistoryCall(id=call.id, name=call.name, arguments=dict(call.arguments)) for call in row.calls]
        elif row.role == "tool":
            item.call_id = row.call_id
        elif row.role == "user" and (row.hidden or row.message is None):
            item.content, item.hidden = QUARANTINED_NOTE, True
        elif row.role == "user" and row.message:
            item.content = row.message.payload.get("text", "")
            item.message_id, item.sender = row.message.id, row.message.sender
            item.payload = row.message.payload
        return item


class HistoryPage(Schema):
    items: list[HistoryItem]
    next: str | None


router = Router(prefix=API, responses=COMMON_PROBLEMS)

_UNKNOWN = problems("unknown_agent")
_NOT_RUNNING = problems("unknown_agent", "recipient_terminated")


@router.get("/agents", tags=["agents"], summary="List agents, by id")
async def list_agents(
    society: SocietyDep,
    capability: Id | None = None,
    direction: Direction = "input",
    after: Cursor | None = None,
    limit: Limit = 50,
) -> AgentPage:
    """With `capability`: only agents whose model has it."""
    if capability is not None:
        ids = [
            agent_id
            for agent_id in sorted(await society.agents.with_capability(capability, direction))
            if agent_id > (after or "")
        ]
        by_id = await society.store.agents_by_id(ids[:limit])
        page = [by_id[agent_id] for agent_id in ids[:limit] if agent_id in by_id]
        following = ids[limit - 1] if len(ids) > limit else None
    else:
        stored = await society.store.agents(after or "", limit + 1)
        page = [agent for agent in stored[:limit] if agent.kind == "agent"]
        following = stored[limit - 1].id if len(stored) > limit else None
    unread = await society.store.unread([agent.id for agent in page])
    worker_of = await society.worker_names()
    items = [Agent.in_society(society, agent, unread[agent.id], worker_of(agent)) for agent in page]
    return AgentPage(items=items, next=following)


@router.post(
    "/agents",
    tags=["agents"],
    status_code=201,
    summary="Create an agent",
    responses=problems(
        "id_taken", "payload_invalid", "unknown_service", "unknown_agent", "recipient_terminated",
        _422="`request_invalid`",
    ),
)  # fmt: skip
async def create_agent(body: NewAgent, society: SocietyDep) -> Agent:
    created = await society.create_agent(
        id=body.id,
        name=body.name,
        prompt=body.prompt,
        service=body.service,
        tools=body.tools,
        parent=body.parent,
        description=body.description,
    )
    return await _read(society, created.id)


@router.get("/agents/{agent_id}", tags=["agents"], summary="Get an agent", responses=_UNKNOWN)
async def get_agent(agent_id: str, society: SocietyDep) -> Agent:
    return await _read(society, agent_id)


@router.get(
    "/agents/{agent_id}/history",
    tags=["agents"],
    summary="List the agent's history, in the roles that its model sees",
    responses=_UNKNOWN,
)
async def list_agent_history(
    agent_id: str, society: SocietyDep, after: Cursor | None = None, limit: Limit = 50
) -> HistoryPage:
    await find_agent(society.store, agent_id)
    rows = await society.store.history(agent_id, position(after, "after") or 0, limit + 1)
    items = [] if after else _system_prompt(society, agent_id)
    items += [HistoryItem.of(row) for row in rows]
    return HistoryPage(items=items[:limit], next=str(items[limit - 1].seq) if len(items) > limit else None)


def _system_prompt(society: Society, agent_id: str) -> list[HistoryItem]:
    try:
        prompt = society.system_prompt(agent_id)
    except CoterieError:  # the agent was terminated, or agents do not work in this process
        return []
    return [HistoryItem(seq=0, turn=0, role="system", content=prompt)]


@router.post(
    "/agents/{agent_id}/stop",
    tags=["agents"],
    summary="End the agent's turn; its mail is kept",
    responses=_NOT_RUNNING,
)
async def stop_agent(agent_id: str, society: SocietyDep) -> Agent:
    await find_agent(society.store, agent_id)
    if not society.stop_turn(agent_id):
        await society.stop_waiting(agent_id)
    return await _read(society, agent_id)


@router.post(
    "/agents/{agent_id}/pause",
    tags=["agents"],
    summary="End the agent's turn and start no other; its mail waits",
    responses=_NOT_RUNNING,
)
async def pause_agent(agent_id: str, society: SocietyDep) -> Agent:
    await society.pause(agent_id)
    return await _read(society, agent_id)


@router.post(
    "/agents/{agent_id}/resume",
    tags=["agents"],
    summary="Let a paused agent work again, or a blocked one retry",
    responses=_NOT_RUNNING,
)
async def resume_agent(agent_id: str, society: SocietyDep) -> Agent:
    await society.resume(agent_id)
    return await _read(society, agent_id)


@router.delete(
    "/agents/{agent_id}",
    tags=["agents"],
    status_code=204,
    summary="Terminate the agent and all agents that it created",
    responses=_NOT_RUNNING,
)
async def terminate_agent(agent_id: str, society: SocietyDep) -> None:
    await society.terminate_agent(agent_id)


async def _read(society: Society, agent_id: str) -> Agent:
    return Agent.in_society(society, await find_agent(society.store, agent_id))


async def find_agent(store: Store, agent_id: str) -> agents.Agent:
    """The agent; `Refused` if there is none, or if it is the person."""
    agent = await store.agent(agent_id)
    if agent is None or agent.kind == "person":
        raise Refused("unknown_agent", f'there is no agent "{one_line(agent_id)}": GET /api/v1/agents lists them')
    return agent


@router.get("/workers", tags=["society"], summary="List the processes that share the society, by name")
async def list_workers(society: SocietyDep) -> WorkerPage:
    """Empty with SQLite, where the server is the only process."""
    return WorkerPage(items=[Worker.of(worker) for worker in await society.shared_workers()], next=None)


@router.post("/pause", tags=["society"], summary="Pause every agent, present and future")
async def pause_society(society: SocietyDep) -> SocietyState:
    """No turn, model call or tool starts after the answer, in any process. A running step ends first."""
    await society.pause_all()
    return SocietyState(paused=True)


@router.post("/resume", tags=["society"], summary="Resume the society")
async def resume_society(society: SocietyDep) -> SocietyState:
    """Agents that were paused individually stay paused; blocked agents retry."""
    await society.resume_all()
    return SocietyState(paused=False)
