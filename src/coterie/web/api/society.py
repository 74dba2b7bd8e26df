"""The society as a whole: paused, or at work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from coterie.web import shapes
from coterie.web.endpoint import COMMON, SocietyDep, answer, gives

router = APIRouter(tags=["society"], responses=COMMON)


@router.post("/pause", summary="Pause every agent, present and future", responses=gives(shapes.SocietyState))
async def pause(society: SocietyDep) -> Response:
    """No turn, model call or tool begins after the answer, on any process. What is inside one ends that step."""
    await society.pause_all()
    return answer({"paused": True})


@router.post("/resume", summary="Let the society go on", responses=gives(shapes.SocietyState))
async def resume(society: SocietyDep) -> Response:
    """Agents that were paused individually stay paused; blocked ones try again."""
    await society.resume_all()
    return answer({"paused": False})
