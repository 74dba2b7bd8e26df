"""Service provider for an agent elsewhere that speaks A2A (extra `coterie[a2a]`). Its answers replace those of a model.

This module stores nothing. The A2A message has the id of our message, so a repeated request asks once: a task that has
the message already is followed instead. A question of the remote agent becomes a call of `send_message`; one more
argument of that call names the remote task, so the history shows which task an answer belongs to.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientError, A2AClientTimeoutError, AgentCardResolutionError
from a2a.types import a2a_pb2 as a2a
from a2a.utils.constants import AGENT_CARD_WELL_KNOWN_PATH
from a2a.utils.errors import A2AError, InternalError
from google.protobuf.json_format import MessageToDict

from coterie.clock import Clock, SystemClock
from coterie.llm.service import (
    STOPPED,
    AssistantMessage,
    Completion,
    InlineFile,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    ServiceError,
    TextDelta,
    TextPart,
    ToolCall,
    ToolMessage,
    TransientError,
    UserMessage,
)
from coterie.messages import validate_quick_replies
from coterie.plan import SEND_MESSAGE_TOOL
from coterie.redaction import redact
from coterie.text import one_line

log = logging.getLogger(__name__)

BINDINGS = ["JSONRPC", "HTTP+JSON"]
REMOTE_TASK = "remoteTask"
"""Argument of a call that asks a question: the id of the task there. Sending ignores it."""
CANCEL = "Cancel"
"""The only quick reply of a question without options. It cancels the remote task."""
CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
FIRST_POLL, MAX_POLL = timedelta(milliseconds=200), timedelta(seconds=10)
CANCEL_ATTEMPTS, CANCEL_PAUSE = 5, timedelta(seconds=2)
CLOSE_SECONDS = 5.0
_RUNNING = (a2a.TASK_STATE_UNSPECIFIED, a2a.TASK_STATE_SUBMITTED, a2a.TASK_STATE_WORKING)
_FAILED = {
    a2a.TASK_STATE_FAILED: "failed",
    a2a.TASK_STATE_REJECTED: "was rejected",
    a2a.TASK_STATE_CANCELED: "was cancelled there",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A message to the remote agent that it has not answered."""

    id: str
    sender: str
    text: str
    files: tuple[InlineFile, ...]
    task: str = ""
    """The remote task whose question it answers; empty: none."""
    cancels: bool = False


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """The answer of the remote agent to one message."""

    to: str
    text: str
    files: tuple[InlineFile, ...] = ()
    question_of: str = ""
    """The remote task, if it asks something."""
    options: tuple[str, ...] = ()


class RemoteAgentService:
    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        card: str,
        headers: Mapping[str, str],
        secrets: Iterable[str] = (),
        society: str = "",
        clock: Clock | None = None,
    ) -> None:
        """`card`: address of the agent card. `society`: an id of the society; the remote context depends on it."""
        self._id, self._card_url, self._secrets = id, card, tuple(secrets)
        self._context_id = str(uuid5(NAMESPACE_URL, f"{card} {society}"))
        self._clock = clock or SystemClock()
        # Redirects are not followed: the key is for this address.
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.AsyncClient(headers=dict(headers), timeout=timeout, follow_redirects=False)
        self._client: Client | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        tasks: list[str] = []
        try:
            answers = [await self._ask(incoming, tasks) for incoming in find_unanswered(request)]
        except asyncio.CancelledError as cancelled:
            if STOPPED in cancelled.args:
                self._cancel_later(tasks)
            raise
        except (A2AError, httpx.HTTPError) as error:
            self._client = None  # its card may have changed
            raise self._to_service_error(error) from error
        yield self._completion(answers)

    async def close(self) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_SECONDS)
        await self._http.aclose()

    async def read_card(self) -> a2a.AgentCard:
        """Read the agent card. `ServiceError`: it cannot be used."""
        try:
            return await self._read_card()
        except (A2AError, httpx.HTTPError) as error:
            raise self._to_service_error(error) from error

    async def _read_card(self) -> a2a.AgentCard:
        url = urlsplit(self._card_url)
        path = url.path if url.path.endswith(".json") else f"{url.path.rstrip('/')}{AGENT_CARD_WELL_KNOWN_PATH}"
        origin = f"{url.scheme}://{url.netloc}"
        card = await A2ACardResolver(self._http, origin, path).get_agent_card()
        # A card may name any address. The key must not go to another host than the owner wrote.
        own = [one for one in card.supported_interfaces if one.url == origin or one.url.startswith(f"{origin}/")]
        if not own:
            named = ", ".join(one_line(one.url, 80) for one in card.supported_interfaces) or "no address"
            message = f'the card of remote agent "{self._id}" names {named}, but only {origin} gets the key'
            raise PermanentError(f"{message}: use the card at the address that it names", category="request")
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(own)
        return card

    async def _connect(self) -> Client:
        if self._client is None:
            config = ClientConfig(httpx_client=self._http, supported_protocol_bindings=BINDINGS)
            try:
                self._client = ClientFactory(config).create(await self._read_card())
            except ValueError as error:
                message = f'remote agent "{self._id}" offers no binding of A2A that is known here: {error}'
                raise PermanentError(message, category="request") from error
        return self._client

    # Asking

    async def _ask(self, incoming: Incoming, tasks: list[str]) -> RemoteAnswer:
        """Send the message unless the remote agent has it, and wait for the answer. Adds its task to `tasks`."""
        client = await self._connect()
        if incoming.cancels:
            self._cancel_later([incoming.task])
            return RemoteAnswer(incoming.sender, "I asked to cancel the task.")
        known = await self._find(client, incoming)
        seen = set[str]()
        if known is not None and (known.status.state != a2a.TASK_STATE_INPUT_REQUIRED or not incoming.task):
            tasks.append(known.id)
            found: a2a.Task | a2a.Message = known
        else:
            seen = {artifact.artifact_id for artifact in known.artifacts} if known else seen
            found = await self._send(client, incoming, tasks)
        pause = FIRST_POLL
        while isinstance(found, a2a.Task) and found.status.state in _RUNNING:
            await self._clock.sleep(pause)
            pause = min(MAX_POLL, pause * 2)
            found = await client.get_task(a2a.GetTaskRequest(id=found.id))
        if isinstance(found, a2a.Message):
            return RemoteAnswer(incoming.sender, *_content(found.parts))
        return self._answer(found, incoming, seen)

    async def _find(self, client: Client, incoming: Incoming) -> a2a.Task | None:
        """Return the task whose question the message answers, or that has the message. None: it was not sent."""
        if incoming.task:
            return await client.get_task(a2a.GetTaskRequest(id=incoming.task))
        try:
            listed = await client.list_tasks(a2a.ListTasksRequest(context_id=self._context_id))
        except A2AClientError:
            raise
        except A2AError:  # it does not list tasks: a server that keeps the ids of messages needs none
            return None
        found = next((task for task in listed.tasks if _position(task, incoming.id) is not None), None)
        return found and await client.get_task(a2a.GetTaskRequest(id=found.id))  # lists leave artifacts out

    async def _send(self, client: Client, incoming: Incoming, tasks: list[str]) -> a2a.Task | a2a.Message:
        """Send the message and follow the stream. Returns what was last known of its task."""
        message = a2a.Message(message_id=incoming.id, role=a2a.ROLE_USER, task_id=incoming.task)
        if not incoming.task:
            message.context_id = self._context_id
        message.parts.extend([a2a.Part(text=incoming.text)] if incoming.text else [])
        message.parts.extend(
            a2a.Part(raw=file.data, filename=file.filename, media_type=file.mime_type) for file in incoming.files
        )
        message.metadata["from"] = incoming.sender
        configuration = a2a.SendMessageConfiguration(return_immediately=True)
        sending = client.send_message(a2a.SendMessageRequest(message=message, configuration=configuration))
        events = cast(AsyncGenerator[a2a.StreamResponse, None], sending)
        event = await self._start(events)
        task_id = ""
        try:
            while event is not None:
                if event.HasField("message"):
                    return event.message
                update = event.status_update if event.HasField("status_update") else event.artifact_update
                task_id = task_id or event.task.id or update.task_id
                if task_id not in tasks:
                    tasks.append(task_id)
                status = event.task.status if event.HasField("task") else event.status_update.status
                if status.state not in _RUNNING:
                    break
                event = await anext(events, None)
        except (A2AClientError, httpx.HTTPError):
            if not task_id:
                raise
            log.info('the stream of remote agent "%s" broke: its task is read instead', self._id)
        finally:
            await events.aclose()
        if not task_id:
            raise MalformedResponse(f'remote agent "{self._id}" answered with neither a task nor a message')
        return await client.get_task(a2a.GetTaskRequest(id=task_id))

    async def _start(self, events: AsyncGenerator[a2a.StreamResponse, None]) -> a2a.StreamResponse | None:
        """Return the first event of a stream. After a stop, a background task cancels the task it names."""
        first = asyncio.ensure_future(anext(events, None))
        try:
            return await asyncio.shield(first)
        except asyncio.CancelledError as cancelled:
            self._in_background(self._end_start(first, events, is_stopped=STOPPED in cancelled.args))
            raise

    async def _end_start(
        self,
        first: asyncio.Future[a2a.StreamResponse | None],
        events: AsyncGenerator[a2a.StreamResponse, None],
        *,
        is_stopped: bool,
    ) -> None:
        if not is_stopped:
            first.cancel()
        try:
            event = await first
            if is_stopped and event is not None:
                await self._cancel(event.task.id or event.status_update.task_id)
        except (A2AError, httpx.HTTPError, asyncio.CancelledError) as error:
            log.debug('remote agent "%s" did not take the message: %r', self._id, error)
        finally:
            await events.aclose()

    def _answer(self, task: a2a.Task, incoming: Incoming, seen: set[str]) -> RemoteAnswer:
        """The answer that an ended or waiting task has for the message."""
        state, (status_text, status_files) = task.status.state, _content(task.status.message.parts)
        if state == a2a.TASK_STATE_INPUT_REQUIRED:
            text, options = status_text or "Please say more.", _options(task.status.message)
            return RemoteAnswer(incoming.sender, text, status_files, task.id, options)
        if state == a2a.TASK_STATE_AUTH_REQUIRED:
            message = f'remote agent "{self._id}" wants an authorization: {status_text or "it does not say which"}'
            raise PermanentError(message, category="auth")
        if state != a2a.TASK_STATE_COMPLETED:
            reason = f": {status_text}" if status_text else ""
            message = f'the task of remote agent "{self._id}" {_FAILED.get(state, "ended in an unknown state")}{reason}'
            raise PermanentError(redact(message, self._secrets), category="content")
        at = _position(task, incoming.id)
        later = [one for one in task.history[at + 1 :] if one.role == a2a.ROLE_AGENT] if at is not None else []
        artifacts = [artifact for artifact in task.artifacts if artifact.artifact_id not in seen]
        # After an answer to a question, the artifacts may hold text from before it.
        parts = [part for one in (later if incoming.task and later else artifacts) for part in one.parts]
        text, files = _content(parts or [part for one in later for part in one.parts])
        if not text and not files:
            text, files = status_text, status_files
        return RemoteAnswer(incoming.sender, text or "Done.", files)

    def _completion(self, answers: Sequence[RemoteAnswer]) -> Completion:
        files = tuple(file for answer in answers for file in answer.files)
        if not any(answer.question_of for answer in answers):
            text = "\n\n".join(answer.text for answer in answers)
            return Completion(text=redact(text, self._secrets), service=self._id, files=files)
        # Text beside calls is not sent, so the answers to other messages are messages of their own.
        calls = [
            ToolCall(
                id=f"call_{number}",
                name=SEND_MESSAGE_TOOL,
                arguments={"to": answer.to, "payload": {"text": redact(answer.text, self._secrets)}}
                | ({"quickReplies": [*answer.options], REMOTE_TASK: answer.question_of} if answer.question_of else {}),
            )
            for number, answer in enumerate(answers)
        ]
        return Completion(text="", calls=tuple(calls), service=self._id, finish_reason="tool_calls")

    # Stopping

    def _cancel_later(self, tasks: Sequence[str]) -> None:
        """Cancel the remote tasks in the background: the turn that waited for them was stopped."""
        for task_id in tasks:
            self._in_background(self._cancel(task_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"coterie-cancel-{self._id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _cancel(self, task_id: str) -> None:
        for _ in range(CANCEL_ATTEMPTS):
            try:
                await (await self._connect()).cancel_task(a2a.CancelTaskRequest(id=task_id))
                return
            except (A2AClientError, httpx.HTTPError, ServiceError) as error:
                log.warning('the task %s of remote agent "%s" is not cancelled yet: %s', task_id, self._id, error)
            except A2AError:
                return  # it has ended
            await self._clock.sleep(CANCEL_PAUSE)

    # Errors

    def _to_service_error(self, error: Exception) -> ServiceError:
        who, cause = f'remote agent "{self._id}"', error if isinstance(error, httpx.HTTPError) else error.__cause__
        text = one_line(redact(str(error), self._secrets), 300)
        status = getattr(error, "status_code", None)
        if isinstance(cause, httpx.HTTPStatusError):
            status = cause.response.status_code
        found: ServiceError
        if isinstance(error, A2AClientTimeoutError) or isinstance(cause, httpx.TimeoutException):
            found = TransientError(f"{who} did not answer within {READ_SECONDS:g} s", reason="timeout")
        elif status in (401, 403):
            found = PermanentError(f"{who} refuses the key: check `headers` in coterie.toml", category="auth")
        elif status in (408, 429) or (status or 0) >= 500:
            found = TransientError(f"{who} answered with status {status}", reason="busy")
        elif status is not None:
            hint = ", which is not followed" if 300 <= status < 400 else ""
            found = PermanentError(f"{who} answered with status {status}{hint}: check its address", category="model")
        elif isinstance(cause, httpx.HTTPError):
            found = TransientError(f"{who} cannot be reached: {text}", reason="unreachable")
        elif isinstance(error, InternalError):
            found = TransientError(f"{who} failed: {text}", reason="busy")
        elif isinstance(error, AgentCardResolutionError):
            found = PermanentError(f"{who} has no usable card: {text}", category="model")
        elif isinstance(error, A2AClientError):
            found = MalformedResponse(f"{who} gave an answer that cannot be used: {text}")
        else:
            found = PermanentError(f"{who} refused the message: {text}", category="content")
        found.status = status
        return found


def find_unanswered(request: ModelRequest) -> list[Incoming]:
    """The messages since the agent's last answer, oldest first."""
    asked: dict[str, ToolCall] = {}
    """By the id of our question."""
    open_calls: dict[str, ToolCall] = {}
    """By recipient: the last question, until the recipient writes."""
    calls: dict[str, ToolCall] = {}
    found: list[Incoming] = []
    for message in request.messages:
        match message:
            case AssistantMessage(calls=made):
                found = []
                calls = {call.id: call for call in made if _remote_task(call)}
                open_calls |= {str(call.arguments.get("to")): call for call in calls.values()}
            case ToolMessage(call_id, text) if call_id in calls:
                with suppress(ValueError, KeyError, TypeError):
                    asked[json.loads(text)["messageId"]] = calls[call_id]
            case UserMessage(source=source) if source is not None:
                implied = open_calls.pop(source.sender, None)
                call, text = asked.get(source.in_reply_to or "", implied), _plain_text(message)
                found.append(
                    Incoming(
                        id=source.message_id,
                        sender=source.sender,
                        text=text,
                        files=tuple(part for part in message.parts if isinstance(part, InlineFile)),
                        task=_remote_task(call) if call else "",
                        cancels=call is not None and [text] == call.arguments.get("quickReplies") == [CANCEL],
                    )
                )
    return found


def _remote_task(call: ToolCall) -> str:
    """The remote task whose question the call asks; empty: none."""
    return str(call.arguments.get(REMOTE_TASK) or "")


def _plain_text(message: UserMessage) -> str:
    """The text of the message without the lines around it, which are for models."""
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    lines = "\n".join(text for text in texts if not text.startswith('{"attachment"')).split("\n")
    return "\n".join(lines[1:-1])


def _position(task: a2a.Task, message_id: str) -> int | None:
    return next((at for at, one in enumerate(task.history) if one.message_id == message_id), None)


def _options(message: a2a.Message) -> tuple[str, ...]:
    """The quick replies of a question; one that cancels if it has none that can be used."""
    given = MessageToDict(message.metadata).get("quickReplies")
    with suppress(Exception):
        if options := validate_quick_replies(given):
            return tuple(options)
    return (CANCEL,)


def _content(parts: Iterable[Any]) -> tuple[str, tuple[InlineFile, ...]]:
    """The text of parts, and their files. Data becomes JSON in the text, unless the text before it is the same JSON."""
    texts, files = list[str](), list[InlineFile]()
    for part in parts:
        match part.WhichOneof("content"):
            case "text":
                texts.append(part.text)
            case "data":
                data = MessageToDict(part.data)
                if not texts or _json(texts[-1]) != data:
                    texts.append(json.dumps(data, ensure_ascii=False))
            case "url":
                texts.append(f"{part.filename or 'File'}: {part.url}")
            case "raw":
                name, kind = part.filename or "file", part.media_type or "application/octet-stream"
                files.append(InlineFile(type="file", filename=name, mime_type=kind, data=part.raw))
    return "\n\n".join(texts), tuple(files)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
