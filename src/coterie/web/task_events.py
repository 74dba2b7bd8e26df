"""Events `task.changed`: the newest summary of a task, at most once per `INTERVAL` and task.

A busy task changes many times a second. So a change in the log only marks the task, and the summary is read when it is
sent. These events have no id: a summary is the state of the moment, not an entry of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from coterie.clock import Clock
from coterie.society import Society
from coterie.store import Event
from coterie.web.event_payloads import frame
from coterie.web.task_schemas import Task

INTERVAL = timedelta(milliseconds=250)
GATHER = timedelta(milliseconds=50)
"""Changes within this time after the first one are sent together."""
CHUNK = 50
"""Tasks read at once."""
RECENT_EVENTS = 1_000
_FIRST_MESSAGE = ("message.", "delayed.")
"""Events of messages. A task that starts, or ends before its first message is read, has no event of its own."""


class ChangedTasks:
    """Tasks whose summary clients do not have yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed: dict[str, float] = {}
        """When each task may be sent, on the monotonic clock."""
        self._sent: dict[str, float] = {}

    def add(self, task_ids: Iterable[str]) -> bool:
        """Return True if there is any."""
        now = self._clock.monotonic()
        for task_id in task_ids:
            last = self._sent.get(task_id)
            due = now if last is None else max(now, last + INTERVAL.total_seconds())
            self._changed.setdefault(task_id, due)
        return bool(self._changed)

    def until_due(self) -> timedelta | None:
        """Time until the first summary may be sent; None: nothing has changed."""
        if not self._changed:
            return None
        return timedelta(seconds=max(0.0, min(self._changed.values()) - self._clock.monotonic()))

    def take_due(self) -> list[str]:
        """Remove and return the tasks that may be sent now."""
        now = self._clock.monotonic()
        due = [task_id for task_id, at in self._changed.items() if at <= now]
        self._sent = {task_id: at for task_id, at in self._sent.items() if at + INTERVAL.total_seconds() > now}
        for task_id in due:
            del self._changed[task_id]
            self._sent[task_id] = now
        return due


def changed_tasks(events: Iterable[Event]) -> list[str]:
    """Ids of the tasks that the events change or may start, each once. Some are ids of messages that start no task."""
    return list(
        dict.fromkeys(
            event.subject for event in events if event.kind == "task.changed" or event.kind.startswith(_FIRST_MESSAGE)
        )
    )


async def task_frames(society: Society, task_ids: Sequence[str]) -> list[bytes]:
    """Frames of the ids that are tasks. At most `CHUNK` ids."""
    found = await society.store.tasks_by_id(task_ids)
    return [
        frame("task.changed", Task.of(society, found[task_id]).to_dict()) for task_id in task_ids if task_id in found
    ]


async def recently_changed(society: Society, position: int) -> list[str]:
    """Tasks that changed shortly before a position of the log.

    Their last summary may not have been sent when the client at that position was disconnected.
    """
    events = await society.store.events(max(0, position - RECENT_EVENTS), RECENT_EVENTS)
    events = [event for event in events if event.seq <= position]
    if not events:
        return []
    oldest = events[-1].at - 2 * (INTERVAL + GATHER)
    return changed_tasks(event for event in events if event.at >= oldest)
