"""Requests of A2A clients as messages and tasks of the society. Nothing is kept here: all state is in the store.

The states of both are the same: working, waiting (input required), done (completed), failed, stopped (canceled).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.request_handler import RequestHandler, validate_request_params
from a2a.types import a2a_pb2 as a2a
from a2a.utils.constants import PROTOCOL_VERSION_1_0, TransportProtocol
from a2a.utils.errors import (
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.struct_pb2 import Value
from google.protobuf.timestamp_pb2 import Timestamp

from coterie import __version__, agents
from coterie.errors import Refused
from coterie.ids import new_id
from coterie.messages import PERSON, Message, Receipt, message_id_of
from coterie.push_configs import PushConfig, is_allowed
from coterie.society import Society
from coterie.task_following import TaskFollowing, TaskProgress, find_obstacle, find_shared_answer, is_open_question
from coterie.tasks import MessageNode, Task, TaskState, TaskTree
from coterie.web import schemas
from coterie.web.caller_scope import CallerScope
from coterie.web.routing import parse_cursor

STATES: dict[TaskState, a2a.TaskState] = {
    "working": a2a.TASK_STATE_WORKING,
    "waiting": a2a.TASK_STATE_INPUT_REQUIRED,
    "done": a2a.TASK_STATE_COMPLETED,
    "failed": a2a.TASK_STATE_FAILED,
    "stopped": a2a.TASK_STATE_CANCELED,
}
TERMINAL = ("done", "failed", "stopped")
DEFAULT_PAGE, MAX_PAGE = 50, 100
MAX_RAW_BYTES = 4_000_000
"""The largest file that is part of a message. Larger ones are named by their address."""
MAX_TASKS = 1_000
_MEDIA = {"vision": ("image/png", "image/jpeg"), "audio": ("audio/wav", "audio/mpeg"), "file": ("application/pdf",)}
"""Media types that stand for a capability of a model."""
TEXT = ("text/plain", "application/json")

Event = a2a.Task | a2a.TaskStatusUpdateEvent | a2a.TaskArtifactUpdateEvent | a2a.Message


class SocietyRequestHandler(RequestHandler):
    def __init__(
        self, society: Society, following: TaskFollowing, cards: Cards, on_push_config: Callable[[], None]
    ) -> None:
        """`on_push_config` is called after a push notification config was stored."""
        self._society, self._following = society, following
        self.cards, self._on_push_config = cards, on_push_config

    # Sending

    @validate_request_params
    async def on_message_send(self, params: a2a.SendMessageRequest, context: ServerCallContext) -> a2a.Task:
        length = _history_length(params.configuration)
        message = await self._send(params, context)
        if not params.configuration.return_immediately:
            async with aclosing(self._following.follower(message).follow(None)) as updates:
                async for _ in updates:
                    pass
        return await self._read(_scope(context), message.task or message.id, length)

    @validate_request_params
    async def on_message_send_stream(
        self, params: a2a.SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        message = await self._send(params, context)
        async for event in self._stream(_scope(context), message):
            yield event

    @validate_request_params
    async def on_subscribe_to_task(
        self, params: a2a.SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        scope = _scope(context)
        tree = await self._tree(scope, params.id, context)
        if tree.task.state in TERMINAL:
            raise UnsupportedOperationError(f"the task has ended ({tree.task.state}): get it instead")
        async for event in self._stream(scope, await self._first(tree)):
            yield event

    async def _stream(self, scope: CallerScope, message: Message) -> AsyncGenerator[Event, None]:
        """The task, then its progress, its answers as artifacts, and its last status."""
        task_id = message.task or message.id
        first = await self._read(scope, task_id, None)
        yield first
        sent = {artifact.artifact_id for artifact in first.artifacts}
        if first.status.state not in (a2a.TASK_STATE_WORKING, a2a.TASK_STATE_SUBMITTED):
            return
        async with aclosing(self._following.follower(message).follow(None)) as updates:
            async for update in updates:
                if isinstance(update, TaskProgress):
                    said = _agent_message(task_id, message.to, [a2a.Part(text=update.text)], new_id())
                    status = a2a.TaskStatus(state=a2a.TASK_STATE_WORKING, message=said, timestamp=self._now())
                    yield a2a.TaskStatusUpdateEvent(task_id=task_id, context_id=message.to, status=status)
        last = await self._read(scope, task_id, None)
        for artifact in last.artifacts:
            if artifact.artifact_id not in sent:
                yield a2a.TaskArtifactUpdateEvent(
                    task_id=task_id, context_id=last.context_id, artifact=artifact, last_chunk=True
                )
        yield a2a.TaskStatusUpdateEvent(task_id=task_id, context_id=last.context_id, status=last.status)

    async def _send(self, params: a2a.SendMessageRequest, context: ServerCallContext) -> Message:
        scope, given = _scope(context), params.message
        push = params.configuration.task_push_notification_config
        if params.configuration.HasField("task_push_notification_config"):
            self._check_push(push)
        try:
            agent = await scope.agent(context.state["agent"])
            # The name of the key first: programs do not share ids of messages.
            client_id = f"a2a {scope.caller.key or ''} {agent.id} {given.message_id}"
            message = await self._sent_before(client_id)
            if message is None:
                payload = await self._payload(given, client_id)
                receipt = await self._deliver(scope, agent.id, given, payload, client_id)
                message = await self._society.store.message(receipt.message_id)
        except Refused as refused:
            raise InvalidParamsError(refused.message, {"code": refused.code}) from refused
        if message is None:
            raise TaskNotFoundError("the conversation was cleared meanwhile")
        if params.configuration.HasField("task_push_notification_config"):
            await self._put_push(message.task or message.id, push)
        return message

    async def _sent_before(self, client_id: str) -> Message | None:
        """The message, if the client repeats it. The task that it belongs to may have ended meanwhile."""
        store = self._society.store
        return await store.message(message_id_of(store.info.secret, client_id))

    async def _deliver(
        self, scope: CallerScope, agent_id: str, given: a2a.Message, payload: dict[str, Any], client_id: str
    ) -> Receipt:
        question: Message | None = None
        if given.task_id:
            tree = await scope.task(given.task_id)
            if not _is_of(tree.task, agent_id):
                raise TaskNotFoundError(f"{agent_id} has no such task")
            question = await self._open_question(scope, tree)
            if question is None and tree.task.state in TERMINAL:
                ended = f"the task has ended ({tree.task.state}): send the message without taskId"
                raise UnsupportedOperationError(ended)
        caller = scope.caller.key
        options: Sequence[str] = (question.payload.get("quickReplies") or ()) if question else ()
        return await self._society.bus.send(
            sender=PERSON,
            to=question.sender if question else agent_id,
            payload=payload,
            client_id=client_id,
            in_reply_to=question.id if question else None,
            option=options.index(payload["text"]) if payload["text"] in options else None,
            via=caller,
        )

    async def _open_question(self, scope: CallerScope, tree: TaskTree) -> Message | None:
        """The newest question of the task that the client may answer."""
        found = await self._society.store.messages_by_id(
            [node.id for node in tree.nodes if isinstance(node, MessageNode) and node.to == PERSON and node.question]
        )
        open_ones = [one for one in found.values() if is_open_question(one) and scope.caller.may_answer(one)]
        return max(open_ones, key=lambda message: message.seq, default=None)

    async def _payload(self, given: a2a.Message, client_id: str) -> dict[str, Any]:
        texts, refs = [], []
        for number, part in enumerate(given.parts):
            match part.WhichOneof("content"):
                case "text":
                    texts.append(part.text)
                case "raw":
                    key = f"{client_id} {number} {hashlib.sha256(part.raw).hexdigest()}"
                    stored = await self._society.artifacts.put(part.raw, part.filename or None, key)
                    refs.append(stored.ref)
                case "url":
                    texts.append(f"{part.filename or 'File'}: {part.url}")
                case "data":
                    texts.append(json.dumps(_plain(MessageToDict(part.data)), ensure_ascii=False, sort_keys=True))
        if not texts and not refs:
            raise Refused("payload_invalid", "the message has no part with content")
        payload: dict[str, Any] = {"text": "\n\n".join(texts)}
        return payload | ({"attachments": [{"artifactRef": ref} for ref in refs]} if refs else {})

    # Tasks

    @validate_request_params
    async def on_get_task(self, params: a2a.GetTaskRequest, context: ServerCallContext) -> a2a.Task:
        tree = await self._tree(_scope(context), params.id, context)
        return await self._render(tree, _history_length(params))

    @validate_request_params
    async def on_list_tasks(self, params: a2a.ListTasksRequest, context: ServerCallContext) -> a2a.ListTasksResponse:
        agent_id = context.state["agent"]
        size = params.page_size if params.HasField("page_size") else DEFAULT_PAGE
        if not 1 <= size <= MAX_PAGE:
            raise InvalidParamsError(f"pageSize must be from 1 to {MAX_PAGE}, got {size}")
        before = parse_cursor(params.page_token)
        if params.page_token and before is None:
            raise InvalidParamsError("pageToken is not one of this list")
        length = _history_length(params)
        states = {number: name for name, number in STATES.items()}
        if (params.status and params.status not in states) or params.context_id not in ("", agent_id):
            return a2a.ListTasksResponse(page_size=size)
        found = await _scope(context).tasks(state=states.get(params.status), agent=agent_id, limit=MAX_TASKS)
        found = [task for task in found if _is_of(task, agent_id)]
        if params.HasField("status_timestamp_after"):
            after = params.status_timestamp_after.ToMilliseconds()
            found = [task for task in found if task.last_at.timestamp() * 1000 >= after]
        rest = [task for task in found if before is None or task.seq < before]
        shown = [await self._read(_scope(context), task.id, length) for task in rest[:size]]
        return a2a.ListTasksResponse(
            tasks=shown,
            next_page_token=str(rest[size - 1].seq) if len(rest) > size else "",
            page_size=size,
            total_size=len(found),
        )

    @validate_request_params
    async def on_cancel_task(self, params: a2a.CancelTaskRequest, context: ServerCallContext) -> a2a.Task:
        scope = _scope(context)
        tree = await self._tree(scope, params.id, context)
        if tree.task.state in TERMINAL:
            raise TaskNotCancelableError(f"the task has ended already ({tree.task.state})")
        await self._society.stop_task(tree.task.id)
        return await self._read(scope, tree.task.id, None)

    async def on_get_extended_agent_card(
        self, params: a2a.GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> a2a.AgentCard:
        try:
            return await self.cards.of_agent(_scope(context), context.state["agent"])
        except Refused as refused:
            raise InvalidParamsError(refused.message) from refused

    async def _tree(self, scope: CallerScope, task_id: str, context: ServerCallContext) -> TaskTree:
        try:
            tree = await scope.task(task_id)
        except Refused as refused:
            raise TaskNotFoundError(refused.message) from refused
        if not _is_of(tree.task, context.state["agent"]):
            raise TaskNotFoundError(f"{context.state['agent']} has no such task")
        return tree

    async def _first(self, tree: TaskTree) -> Message:
        first = await self._society.store.message(tree.task.id)
        if first is None:
            raise TaskNotFoundError("the first message of the task was deleted")
        return first

    async def _read(self, scope: CallerScope, task_id: str, history_length: int | None) -> a2a.Task:
        try:
            return await self._render(await scope.task(task_id), history_length)
        except Refused as refused:
            raise TaskNotFoundError(refused.message) from refused

    # Rendering

    async def _render(self, tree: TaskTree, history_length: int | None) -> a2a.Task:
        """The task with what was said between the client and agents, as history, and answers as artifacts."""
        task = tree.task
        ids = [
            node.id for node in tree.nodes if isinstance(node, MessageNode) and PERSON in (node.sender, node.to)
        ]  # fmt: skip
        found = await self._society.store.messages_by_id(ids)
        said = sorted(
            (one for one in found.values() if one.state not in ("withdrawn", "dead")), key=lambda one: one.seq
        )  # fmt: skip
        if task.state == "done" and not any(one.to == PERSON for one in said):
            shared = await find_shared_answer(self._society.store, task.id, task)
            said += [shared] if shared else []
        history = [await self._message(task, one) for one in said]
        answers = [one for one in said if one.to == PERSON and not one.payload.get("quickReplies")]
        status = a2a.TaskStatus(state=STATES[task.state], timestamp=_timestamp(task))
        last = next((one for one in reversed(said) if one.to == PERSON), None)
        if last is not None and task.state in ("waiting", "failed"):
            status.message.CopyFrom(await self._message(task, last))
        elif task.state == "working" and (problem := await find_obstacle(self._society.store, tree)):
            status.message.CopyFrom(_agent_message(task.id, _context_id(task), [a2a.Part(text=problem)], new_id()))
        if history_length is not None:
            history = history[-history_length:] if history_length else []
        artifacts = [
            a2a.Artifact(artifact_id=one.id, name="answer", parts=await self._parts(one))
            for one in answers
            if task.state != "failed" or one is not last
        ]
        return a2a.Task(id=task.id, context_id=_context_id(task), status=status, artifacts=artifacts, history=history)

    async def _message(self, task: Task, message: Message) -> a2a.Message:
        is_user = message.sender == PERSON
        rendered = a2a.Message(
            message_id=message.id,
            context_id=_context_id(task),
            task_id=task.id,
            role=a2a.ROLE_USER if is_user else a2a.ROLE_AGENT,
            parts=await self._parts(message),
        )
        if not is_user:
            rendered.metadata["from"] = message.sender
        if options := message.payload.get("quickReplies"):
            rendered.metadata["quickReplies"] = list(options)
        return rendered

    async def _parts(self, message: Message) -> list[a2a.Part]:
        """The text, as data too if it is a JSON object, and the files."""
        text = str(message.payload.get("text", ""))
        parts = [a2a.Part(text=text, media_type="text/plain")] if text else []
        if (data := _read_data(text)) is not None:
            parts.append(a2a.Part(data=data, media_type="application/json"))
        for file in message.payload.get("attachments") or ():
            part = a2a.Part(filename=str(file.get("filename", "")), media_type=str(file.get("mimeType", "")))
            part.url = self.cards.artifact_url(file["artifactRef"])
            if file.get("size", 0) <= MAX_RAW_BYTES:
                with suppress(Refused):  # its bytes are gone, as its address says
                    part.raw = await self._society.artifacts.read(file["artifactRef"])
            parts.append(part)
        return parts

    def _now(self) -> Timestamp:
        stamp = Timestamp()
        stamp.FromDatetime(self._following.clock.now())
        return stamp

    # Push notifications

    @validate_request_params
    async def on_create_task_push_notification_config(
        self, params: a2a.TaskPushNotificationConfig, context: ServerCallContext
    ) -> a2a.TaskPushNotificationConfig:
        tree = await self._tree(_scope(context), params.task_id, context)
        self._check_push(params)
        return await self._put_push(tree.task.id, params)

    @validate_request_params
    async def on_get_task_push_notification_config(
        self, params: a2a.GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> a2a.TaskPushNotificationConfig:
        for config in await self._push_configs(params.task_id, context):
            if config.id == params.id:
                return config
        raise TaskNotFoundError("the task has no such push notification config")

    @validate_request_params
    async def on_list_task_push_notification_configs(
        self, params: a2a.ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> a2a.ListTaskPushNotificationConfigsResponse:
        return a2a.ListTaskPushNotificationConfigsResponse(configs=await self._push_configs(params.task_id, context))

    @validate_request_params
    async def on_delete_task_push_notification_config(
        self, params: a2a.DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        tree = await self._tree(_scope(context), params.task_id, context)
        await self._society.store.delete_push_config(tree.task.id, params.id)

    async def render_notification(self, task_id: str) -> dict[str, Any] | None:
        """The body of a push notification about the task; None: it was deleted."""
        tree = await self._society.store.task_tree(task_id)
        if tree is None:
            return None
        body: dict[str, Any] = MessageToDict(a2a.StreamResponse(task=await self._render(tree, None)))
        return body

    def _check_push(self, config: a2a.TaskPushNotificationConfig) -> None:
        allowed = self._society.config.doors.push
        if not allowed:
            raise PushNotificationNotSupportedError("push notifications are off: the owner allows no address")
        if not is_allowed(config.url, allowed):
            raise InvalidParamsError("the owner does not allow push notifications to this address (doors.push)")

    async def _put_push(
        self, task_id: str, config: a2a.TaskPushNotificationConfig
    ) -> a2a.TaskPushNotificationConfig:  # fmt: skip
        stored = a2a.TaskPushNotificationConfig()
        stored.CopyFrom(config)
        stored.task_id, stored.id = task_id, config.id or new_id()
        data = json.dumps(MessageToDict(stored))
        try:
            await self._society.store.put_push_config(PushConfig(task=task_id, id=stored.id, config=data))
        except Refused as refused:
            raise InvalidParamsError(refused.message, {"code": refused.code}) from refused
        self._on_push_config()
        return stored

    async def _push_configs(self, task_id: str, context: ServerCallContext) -> list[a2a.TaskPushNotificationConfig]:
        tree = await self._tree(_scope(context), task_id, context)
        found = await self._society.store.push_configs(tree.task.id)
        return [ParseDict(json.loads(one.config), a2a.TaskPushNotificationConfig()) for one in found]


# Agent cards: what an agent is for, what it reads and writes, and where it is reached


class Cards:
    def __init__(self, society: Society, url: str) -> None:
        self._society, self._url = society, url

    async def of_agent(self, scope: CallerScope, agent_id: str | None) -> a2a.AgentCard:
        agent = await scope.agent(agent_id or "")
        skill = self._skill(agent)
        return self._card(agent.name, skill.description, agent.id, [skill])

    async def of_society(self, scope: CallerScope, _: str | None = None) -> a2a.AgentCard:
        """The card of the society: its first agent receives what is sent there; each agent is a skill."""
        found = await scope.offered_agents()
        if not found:
            raise Refused("unknown_agent", "there is no agent for you")
        order = {entry.id: number for number, entry in enumerate(self._society.config.agents)}
        first = min(found, key=lambda agent: (order.get(agent.id, len(order)), agent.id))
        about = f"A society of {len(found)} agents. {first.name} receives what is sent here. Each skill is an agent."
        return self._card("Coterie", about, first.id, [self._skill(agent) for agent in found])

    def artifact_url(self, ref: str) -> str:
        """The address of a file that is too large for a message."""
        return f"{self._url}/api/v1/artifacts/{ref}"

    def _card(self, name: str, about: str, agent_id: str, skills: list[a2a.AgentSkill]) -> a2a.AgentCard:
        address, has_push = f"{self._url}/a2a/{agent_id}", bool(self._society.config.doors.push)
        bearer = a2a.HTTPAuthSecurityScheme(scheme="Bearer", description="The token of a key: coterie keys add NAME")
        return a2a.AgentCard(
            name=name,
            description=about,
            version=__version__,
            supported_interfaces=[
                a2a.AgentInterface(url=address, protocol_binding=binding, protocol_version=PROTOCOL_VERSION_1_0)
                for binding in (TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON)
            ],
            capabilities=a2a.AgentCapabilities(streaming=True, push_notifications=has_push, extended_agent_card=True),
            security_schemes={"bearer": a2a.SecurityScheme(http_auth_security_scheme=bearer)},
            security_requirements=[a2a.SecurityRequirement(schemes={"bearer": a2a.StringList()})],
            default_input_modes=sorted({mode for skill in skills for mode in skill.input_modes}),
            default_output_modes=sorted({mode for skill in skills for mode in skill.output_modes}),
            skills=skills,
        )

    def _skill(self, agent: agents.Agent) -> a2a.AgentSkill:
        about = schemas.Agent.in_society(self._society, agent)
        reads = about.capabilities.input if about.capabilities else []
        writes = about.capabilities.output if about.capabilities else []
        return a2a.AgentSkill(
            id=agent.id,
            name=agent.name,
            description=about.description or f"The agent {agent.name}. Its own card: {self._url}/a2a/{agent.id}",
            tags=sorted({*reads, *writes}) or ["text"],
            input_modes=_modes(reads),
            output_modes=_modes(writes),
        )


def _modes(capabilities: list[str]) -> list[str]:
    return [*TEXT, *(mode for name in sorted(capabilities) for mode in _MEDIA.get(name, ()))]


# Helpers


def _scope(context: ServerCallContext) -> CallerScope:
    scope: CallerScope = context.state["scope"]
    return scope


def _history_length(given: a2a.SendMessageConfiguration | a2a.GetTaskRequest | a2a.ListTasksRequest) -> int | None:
    """How many messages of a history are wanted; None: all."""
    if not given.HasField("history_length"):
        return None
    if given.history_length < 0:
        raise InvalidParamsError(f"historyLength must be 0 or more, got {given.history_length}")
    return int(given.history_length)


def _agent_message(task_id: str, agent_id: str, parts: list[a2a.Part], message_id: str) -> a2a.Message:
    return a2a.Message(
        message_id=message_id, context_id=agent_id, task_id=task_id, role=a2a.ROLE_AGENT, parts=parts
    )  # fmt: skip


def _timestamp(task: Task) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(task.last_at)
    return stamp


def _is_of(task: Task, agent_id: str) -> bool:
    """True if the task is between the client and this agent: either may have sent its first message."""
    return agent_id in (task.to, task.sender)


def _context_id(task: Task) -> str:
    """An agent has one memory, so all its tasks have one context."""
    return task.agent


def _plain(value: Any) -> Any:
    """The JSON value with whole numbers as int: A2A transmits every number as a float."""
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _read_data(text: str) -> Value | None:
    """The text as data, if it is a JSON object that A2A can transmit: no huge number, no deep nesting."""
    if not text.startswith("{"):
        return None
    try:
        return ParseDict(msgspec.json.decode(text), Value())
    except (msgspec.MsgspecError, ParseError, ValueError, OverflowError, RecursionError):
        return None
