"""Events of the log as a page is told them: each is looked up when it is sent, many at a time.

Every row of the log becomes exactly one event, so that a client can tell from `prev` whether it missed any. What an
event names and is no longer there is told as `{"id": …, "gone": true}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import to_rfc3339
from coterie.events import Event
from coterie.messages import Message
from coterie.society import Society
from coterie.store import CallRecord, Page
from coterie.web import wire

RECENT_PLANS = 20
"""Where the call that an event names is looked for, among the latest of its agent."""
ARGUMENTS = 200
"""Characters of a call's arguments and of its result that are shown."""

_encode = msgspec.json.Encoder().encode
_MESSAGE = ("message.", "delayed.", "quick_replies.")


def frame(kind: str, data: Mapping[str, Any], event_id: str | None = None) -> bytes:
    """One event as it goes over the wire."""
    place = f"id: {event_id}\n" if event_id is not None else ""
    return b"".join((f"{place}event: {kind}\ndata: ".encode(), _encode(data), b"\n\n"))


class Teller:
    def __init__(self, society: Society, epoch: str, draft_of: Mapping[str, str]) -> None:
        """`draft_of`: the streamed reply that a message was stored as."""
        self._society, self._epoch, self._draft_of = society, epoch, draft_of

    async def tell(self, events: Sequence[Event], prev: int) -> list[tuple[int, bytes]]:
        """The frames of `events`, which follow on event `prev`."""
        known = await self._look_up(events)
        frames = []
        for event in events:
            data = {"prev": prev} | known.told(event) | _kept(event)
            frames.append((event.seq, frame(event.kind, data, f"{self._epoch}.{event.seq}")))
            prev = event.seq
        return frames

    async def _look_up(self, events: Sequence[Event]) -> _Known:
        store = self._society.store
        messages = _subjects(events, _MESSAGE)
        agents, made = _subjects(events, ("agent.",)), _subjects(events, ("agent.upsert",))
        artifacts = _subjects(events, ("artifact.",))
        at_work = {subject.partition("/")[0] for subject in _subjects(events, ("tool.",))}
        return _Known(
            self._society,
            self._draft_of,
            await store.messages_by_id(messages) if messages else {},
            await store.agents_by_id(agents) if agents else {},
            await store.unread(made) if made else {},
            await store.artifacts(artifacts) if artifacts else {},
            {agent: await store.waiting(agent) for agent in _subjects(events, ("queue.",))},
            {agent: await self._calls(agent) for agent in sorted(at_work)},
        )

    async def _calls(self, agent_id: str) -> Mapping[str, CallRecord]:
        plans = await self._society.store.runs(Page(limit=RECENT_PLANS), agent_id)
        return {call.call_id: call for plan in plans for call in plan.calls}


class _Known:
    """What a few events name."""

    def __init__(
        self,
        society: Society,
        draft_of: Mapping[str, str],
        messages: Mapping[str, Message],
        agents: Mapping[str, Agent],
        unread: Mapping[str, int],
        artifacts: Mapping[str, Artifact],
        queues: Mapping[str, Sequence[Message]],
        calls: Mapping[str, Mapping[str, CallRecord]],
    ) -> None:
        self._society, self._draft_of = society, draft_of
        self._messages, self._agents, self._unread, self._artifacts = messages, agents, unread, artifacts
        self._queues, self._calls = queues, calls

    def told(self, event: Event) -> dict[str, Any]:
        subject = event.subject
        match event.kind:
            case "message.created" | "message.updated":
                return self._message(subject)
            case "delayed.scheduled" | "delayed.moved" | "delayed.delivered" | "delayed.withdrawn":
                return self._delayed(subject)
            case "quick_replies.changed":
                answer = self._messages[subject].answer if subject in self._messages else None
                return {"messageId": subject, "answer": answer and answer.to_dict()}
            case "queue.changed":
                items = wire.messages(self._queues[subject])
                return {"agent": subject, "items": items, "taken": [], "withdrawnCalls": 0}
            case "agent.upsert":
                agent = self._agents.get(subject)
                return wire.agent(self._society, agent, self._unread[subject]) if agent else _gone(subject)
            case "agent.state":
                agent = self._agents.get(subject)
                return {"id": subject, **wire.state(agent), "waiting": agent.waiting} if agent else _gone(subject)
            case "agent.removed":
                return {"id": subject}
            case "tool.started" | "tool.ended":
                return self._call(subject, ended=event.kind == "tool.ended")
            case "artifact.created":
                artifact = self._artifacts.get(subject)
                return artifact.to_dict() if artifact else _gone(subject)
            case "read" | "thread.cleared":
                return {"thread": subject}
            case "problem":
                return {"agent": subject}
            case "society.state":
                return {}

    def _message(self, message_id: str) -> dict[str, Any]:
        message = self._messages.get(message_id)
        if message is None:
            return _gone(message_id)
        told = {"id": message_id, "message": wire.message(message)}
        draft_id = self._draft_of.get(message_id)
        return told | {"draftId": draft_id} if draft_id else told

    def _delayed(self, message_id: str) -> dict[str, Any]:
        told = self._message(message_id)
        if message := self._messages.get(message_id):
            told |= {
                "from": message.sender,
                "to": message.to,
                "deliverAt": to_rfc3339(message.deliver_at),
                "deliveredAt": to_rfc3339(message.delivered_at),
                "early": message.early,
                "preview": wire.preview(message),
            }
        return told

    def _call(self, subject: str, *, ended: bool) -> dict[str, Any]:
        agent, _, call_id = subject.partition("/")
        told: dict[str, Any] = {"agent": agent, "callId": call_id}
        call = self._calls.get(agent, {}).get(call_id)
        if call is None:
            return told
        told |= {"name": call.name, "args": call.arguments[:ARGUMENTS], "startedAt": to_rfc3339(call.started_at)}
        if not ended:
            return told
        took = call.ended_at - call.started_at if call.started_at and call.ended_at else None
        told |= {"ok": call.state == "done", "state": call.state, "ms": took and round(took.total_seconds() * 1000)}
        if ref := wire.artifact_of(call.result):
            told["artifactRef"] = ref
        return told | ({} if call.state == "done" else {"error": call.result[:ARGUMENTS]})


def _subjects(events: Iterable[Event], prefixes: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(event.subject for event in events if event.kind.startswith(prefixes)))


def _kept(event: Event) -> dict[str, Any]:
    """What the log itself holds, because nobody could look it up."""
    return msgspec.json.decode(event.data, type=dict[str, Any]) if event.data else {}


def _gone(name: str) -> dict[str, Any]:
    return {"id": name, "gone": True}
