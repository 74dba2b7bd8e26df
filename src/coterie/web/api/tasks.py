"""Tasks: list, tree, stop, continue; and what happened while the person was away."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta

from coterie.messages import PERSON
from coterie.tasks import TaskState
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Cursor, Id, Limit, Router, SocietyDep, invalid_query, position
from coterie.web.task_schemas import Away, AwayCounts, AwayThread, StoppedTask, Task, TaskPage, TaskTree

router = Router(prefix=API, tags=["tasks"], responses=COMMON_PROBLEMS)

MAX_AWAY = 20
"""Tasks in each list of `/away`."""


@router.get("/tasks", summary="List tasks, newest first")
async def list_tasks(
    society: SocietyDep,
    state: TaskState | None = None,
    agent: Id | None = None,
    person: Id | None = None,
    cursor: Cursor | None = None,
    limit: Limit = 50,
) -> TaskPage:
    """With `agent`: those that it got the first message of or worked on. With `person`: those of this person."""
    before = position(cursor, "cursor")
    if person not in (None, PERSON):  # a society has one person
        return TaskPage(items=[], next=None)
    found = await society.tasks(state=state, agent=agent, before=before, limit=limit)
    return TaskPage(
        items=[Task.of(society, task) for task in found], next=str(found[-1].seq) if len(found) == limit else None
    )


@router.get("/tasks/{task_id}", summary="Get a task with its messages and turns", responses=problems("unknown_task"))
async def get_task(task_id: str, society: SocietyDep) -> TaskTree:
    """The id of any message of the task finds it."""
    return TaskTree.of_tree(society, await society.task(task_id))


@router.post(
    "/tasks/{task_id}/stop",
    summary="Stop everything that runs or would run for a task",
    responses=problems("unknown_task"),
)
async def stop_task(task_id: str, society: SocietyDep) -> StoppedTask:
    """What tools have done stays done. The second time it does nothing."""
    stopped = await society.stop_task(task_id)
    return StoppedTask(turns=stopped.turns, messages=stopped.messages, questions=stopped.questions)


@router.post(
    "/tasks/{task_id}/continue",
    summary="Grant a task one more budget",
    responses=problems("unknown_task", "task_stopped"),
)
async def continue_task(task_id: str, society: SocietyDep) -> Task:
    """It also answers the question whether the task may go on."""
    return Task.of(society, await society.continue_task(task_id))


@router.get("/away", tags=["overview"], summary="Get what happened since a moment")
async def get_away(
    society: SocietyDep,
    since: Annotated[str, Meta(max_length=50, description="RFC 3339, such as 2030-01-01T08:00:00Z.")],
) -> Away:
    moment = _parse_time(since)
    found = await society.store.away(moment, MAX_AWAY)
    threads = [AwayThread(agent=agent, unread=count) for agent, count in sorted(found.unread.items())]
    return Away(
        since=since,
        finished=[Task.of(society, task) for task in found.finished],
        failed=[Task.of(society, task) for task in found.failed],
        waiting=[Task.of(society, task) for task in found.waiting],
        counts=AwayCounts(
            finished=found.counts.get("done", 0),
            failed=found.counts.get("failed", 0),
            waiting=found.counts.get("waiting", 0),
        ),
        messages=sum(found.unread.values()),
        threads=threads,
    )


def _parse_time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise invalid_query("not a time in the form of RFC 3339, such as 2030-01-01T08:00:00Z", "since") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
