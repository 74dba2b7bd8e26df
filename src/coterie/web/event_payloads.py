"""Server-sent events for rows of the event log: each payload is read from the store when the event is sent.

Every row becomes exactly one event, so that a client detects missed events from `prev`: the position of the event
before. The payload of an event about an object that no longer exists is `{"id": …, "gone": true}`.

Rows of the kind `task.changed` are the exception. A busy task changes many times a second, so such a row only marks the
task (`ChangedTasks`), and an event has the newest summary of a task, at most once per `TASK_INTERVAL` and task. It has
no id: a summary is the state of the moment, not an entry of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import Clock, to_rfc3339
from coterie.messages import Message, Schedule
from coterie.society import Society
from coterie.store import Event, Page
from coterie.turn_store import CallRecord
from coterie.web import schemas
from coterie.web.task_schemas import Task as TaskSummary

RECENT_PLANS = 20
"""Plans of an agent that are searched for the tool call of an event."""
SHOWN_CHARACTERS = 200
"""Of a tool call's arguments and error."""
TASK_INTERVAL = timedelta(milliseconds=250)
TASK_GATHER_TIME = timedelta(milliseconds=50)
"""Changes of tasks within this time after the first one are sent together."""
TASK_CHUNK = 50
"""Tasks read at once."""
RECENT_EVENTS = 1_000

_encode = msgspec.json.Encoder().encode
_MESSAGE = ("message.", "delayed.", "quick_replies.")
_FIRST_MESSAGE = ("message.", "delayed.")
"""Events of messages. A task that starts, or ends before its first message is read, has no event of its own."""


def frame(kind: str, data: Mapping[str, Any], event_id: str | None = None) -> bytes:
    """One event in the format of `text/event-stream`."""
    id_line = f"id: {event_id}\n" if event_id is not None else ""
    return b"".join((f"{id_line}event: {kind}\ndata: ".encode(), _encode(data), b"\n\n"))


def has_frame(event: Event) -> bool:
    return event.kind != "task.changed"


class EventSerializer:
    def __init__(self, society: Society, epoch: str, draft_ids: Mapping[str, str]) -> None:
        """`draft_ids`: by message id, the draft that the message was streamed as."""
        self._society, self._epoch, self._draft_ids = society, epoch, draft_ids

    async def frames(self, events: Sequence[Event], prev: int) -> list[tuple[int, bytes]]:
        """Position and frame of each event; `prev` is the position before the first."""
        events = [event for event in events if has_frame(event)]
        subjects = await self._load(events)
        frames = []
        for event in events:
            stored = msgspec.json.decode(event.data, type=dict[str, Any]) if event.data else {}
            data = {"prev": prev} | subjects.payload(event) | stored
            frames.append((event.seq, frame(event.kind, data, f"{self._epoch}.{event.seq}")))
            prev = event.seq
        return frames

    async def _load(self, events: Sequence[Event]) -> _Subjects:
        store = self._society.store
        if any(event.kind == "configuration.changed" for event in events):
            await self._society.configuration.follow()  # the agents of later events have their settings in it
        messages = _ids(events, _MESSAGE)
        agents, upserted = _ids(events, ("agent.",)), _ids(events, ("agent.upsert",))
        artifacts = _ids(events, ("artifact.",))
        callers = {subject.partition("/")[0] for subject in _ids(events, ("tool.",))}
        return _Subjects(
            society=self._society,
            draft_ids=self._draft_ids,
            messages=await store.messages_by_id(messages) if messages else {},
            agents=await store.agents_by_id(agents) if agents else {},
            unread=await store.unread(upserted) if upserted else {},
            artifacts=await store.artifacts(artifacts) if artifacts else {},
            schedules={schedule: await store.schedule(schedule) for schedule in _ids(events, ("schedule.",))},
            queues={agent: await store.waiting(agent) for agent in _ids(events, ("queue.",))},
            calls={agent: await self._recent_calls(agent) for agent in sorted(callers)},
        )

    async def _recent_calls(self, agent_id: str) -> Mapping[str, CallRecord]:
        plans = await self._society.store.runs(Page(limit=RECENT_PLANS), agent_id)
        return {call.call_id: call for plan in plans for call in plan.calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subjects:
    """The objects that a batch of events is about."""

    society: Society
    draft_ids: Mapping[str, str]
    messages: Mapping[str, Message]
    agents: Mapping[str, Agent]
    unread: Mapping[str, int]
    artifacts: Mapping[str, Artifact]
    schedules: Mapping[str, Schedule | None]
    queues: Mapping[str, Sequence[Message]]
    calls: Mapping[str, Mapping[str, CallRecord]]

    def payload(self, event: Event) -> dict[str, Any]:
        subject = event.subject
        match event.kind:
            case "message.created" | "message.updated":
                return self._message(subject)
            case "delayed.scheduled" | "delayed.moved" | "delayed.delivered" | "delayed.withdrawn":
                return self._delayed(subject)
            case "quick_replies.changed":
                answer = self.messages[subject].answer if subject in self.messages else None
                return {"messageId": subject, "answer": answer and schemas.Answer.of(answer)}
            case "queue.changed":
                items = schemas.Message.of_all(self.queues[subject])
                return {"agent": subject, "items": items, "taken": [], "withdrawnCalls": 0}
            case "agent.upsert":
                if agent := self.agents.get(subject):
                    return schemas.Agent.in_society(self.society, agent, self.unread[subject]).to_dict()
                return _gone(subject)
            case "agent.state":
                if agent := self.agents.get(subject):
                    return {"id": subject, **schemas.AgentStatus.of(agent).to_dict(), "waiting": agent.waiting}
                return _gone(subject)
            case "agent.removed":
                return {"id": subject}
            case "tool.started" | "tool.ended":
                return self._call(subject, ended=event.kind == "tool.ended")
            case "artifact.created":
                artifact = self.artifacts.get(subject)
                return artifact.to_dict() if artifact else _gone(subject)
            case "schedule.changed":
                schedule = self.schedules[subject]
                return schemas.Schedule.of(schedule).to_dict() if schedule else _gone(subject)
            case "read" | "unread" | "thread.cleared":
                return {"thread": subject}
            case "problem":
                return {"agent": subject}
            case "society.state" | "configuration.changed":
                return {}
            case "task.changed":
                raise AssertionError("it has no frame")

    def _message(self, message_id: str) -> dict[str, Any]:
        message = self.messages.get(message_id)
        if message is None:
            return _gone(message_id)
        payload = {"id": message_id, "message": schemas.Message.of(message)}
        draft_id = self.draft_ids.get(message_id)
        return payload | {"draftId": draft_id} if draft_id else payload

    def _delayed(self, message_id: str) -> dict[str, Any]:
        payload = self._message(message_id)
        if message := self.messages.get(message_id):
            payload |= {
                "from": message.sender,
                "to": message.to,
                "deliverAt": to_rfc3339(message.deliver_at),
                "deliveredAt": to_rfc3339(message.delivered_at),
                "early": message.early,
                "preview": schemas.preview(message),
            }
        return payload

    def _call(self, subject: str, *, ended: bool) -> dict[str, Any]:
        agent, _, call_id = subject.partition("/")
        payload: dict[str, Any] = {"agent": agent, "callId": call_id}
        call = self.calls.get(agent, {}).get(call_id)
        if call is None:
            return payload
        arguments = call.arguments[:SHOWN_CHARACTERS]
        payload |= {"name": call.name, "args": arguments, "startedAt": to_rfc3339(call.started_at)}
        if not ended:
            return payload
        took = call.ended_at - call.started_at if call.started_at and call.ended_at else None
        payload |= {"ok": call.state == "done", "state": call.state, "ms": took and round(took.total_seconds() * 1000)}
        if ref := _artifact_ref(call.result):
            payload["artifactRef"] = ref
        return payload | ({} if call.state == "done" else {"error": call.result[:SHOWN_CHARACTERS]})


class _ResultWithArtifact(msgspec.Struct, rename="camel"):
    artifact_ref: str


_decode_result = msgspec.json.Decoder(_ResultWithArtifact).decode


def _artifact_ref(result: str) -> str | None:
    """The artifact that a tool result names: the file it made, or its own text if that was too long."""
    try:
        return _decode_result(result).artifact_ref if result.startswith("{") else None
    except msgspec.DecodeError:
        return None


def _ids(events: Iterable[Event], prefixes: tuple[str, ...]) -> list[str]:
    """Subjects of the events whose kind has one of the prefixes, each once."""
    return list(dict.fromkeys(event.subject for event in events if event.kind.startswith(prefixes)))


def _gone(subject: str) -> dict[str, Any]:
    return {"id": subject, "gone": True}


# Summaries of tasks


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
            due = now if last is None else max(now, last + TASK_INTERVAL.total_seconds())
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
        self._sent = {task_id: at for task_id, at in self._sent.items() if at + TASK_INTERVAL.total_seconds() > now}
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
    """Frames of the ids that are tasks. At most `TASK_CHUNK` ids."""
    found = await society.store.tasks_by_id(task_ids)
    return [
        frame("task.changed", TaskSummary.of(society, found[task_id]).to_dict())
        for task_id in task_ids
        if task_id in found
    ]


async def recently_changed(society: Society, position: int) -> list[str]:
    """Tasks that changed shortly before a position of the log.

    Their last summary may not have been sent when the client at that position was disconnected.
    """
    events = await society.store.events(max(0, position - RECENT_EVENTS), RECENT_EVENTS)
    events = [event for event in events if event.seq <= position]
    if not events:
        return []
    oldest = events[-1].at - 2 * (TASK_INTERVAL + TASK_GATHER_TIME)
    return changed_tasks(event for event in events if event.at >= oldest)
