"""Everything at one glance, and the place in the event log from which to go on."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from coterie.clock import to_rfc3339
from coterie.web import shapes, wire
from coterie.web.endpoint import COMMON, ClockDep, SocietyDep, answer, gives
from coterie.web.sse import epoch_of

router = APIRouter(tags=["overview"], responses=COMMON)


@router.get("/snapshot", summary="Everything at one glance", responses=gives(shapes.Snapshot))
async def snapshot(society: SocietyDep, clock: ClockDep) -> Response:
    """Open the event stream with `lastEventId=<epoch>.<seq>` and nothing in between is missed."""
    seen = await society.store.snapshot()
    unread = {thread.agent_id: thread.unread for thread in seen.threads}
    return answer(
        {
            "epoch": epoch_of(society.store.info.log_id),
            "seq": seen.seq,
            "serverTime": to_rfc3339(clock.now()),
            "paused": seen.paused,
            "agents": [wire.agent(society, one, unread.get(one.id, 0)) for one in seen.agents],
            "agentCount": seen.agent_count,
            "threads": [wire.thread(one) for one in seen.threads],
            "threadCount": seen.thread_count,
            "queues": wire.messages(seen.queues),
            "queueCount": seen.queue_count,
            "delayed": wire.messages(seen.delayed),
            "delayedCount": seen.delayed_count,
            "openQuestions": wire.messages(seen.open_questions),
            "openQuestionCount": seen.question_count,
        }
    )
