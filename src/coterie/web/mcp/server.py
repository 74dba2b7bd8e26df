"""The MCP server of a society: dispatches tool calls, serves artifacts as resources, and stops tasks when cancelled.

Each request is handled with the rights of its own caller, also within one session.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import mcp.types as types
from mcp import MCPError
from mcp.server.caching import CacheHint
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import INVALID_PARAMS
from mcp.types.version import MODERN_PROTOCOL_VERSIONS
from msgspec import UNSET

from coterie import __version__
from coterie.artifacts import Artifact
from coterie.errors import Refused, StoreError
from coterie.messages import PERSON, Message
from coterie.society import Society
from coterie.task_following import TaskFollowing
from coterie.web import schemas, task_schemas
from coterie.web.auth import caller_of
from coterie.web.caller_scope import CallerScope
from coterie.web.mcp import tools
from coterie.web.mcp.calls import Call, Context, WaitingCalls
from coterie.web.mcp.tasks import EXTENSION, TaskMethods, TaskParams, UpdateParams, wants_handle
from coterie.web.middleware import MAX_DOOR_BODY_BYTES

NAME = "coterie"
INSTRUCTIONS = (
    "A society of agents. list_agents says who they are. send gives one of them a message and waits for what comes of"
    " it; the agent remembers the conversation. Longer work goes on as a task: task_status, stop_task. Files go in with"
    " put_artifact and come out as resources."
)
PAGE_SIZE = 100
SESSION_IDLE_SECONDS = 1800.0
MAX_SESSIONS = 1000
MAX_CANCELLED = 1000
MAX_UNREAD = 20_000
"""Unread messages that are searched for those of a program."""
RESOURCE_NOT_FOUND = -32002
"""Before protocol revision 2026-07-28."""
STOPPING = "the society is stopping; what was sent is stored and goes on after the next start: call again then"

Handler = Callable[[Call, Any, types.CallToolRequestParams], Awaitable[Any]]
CallId = tuple[str | None, types.RequestId | None]
"""Session and request."""


class SocietyMcpServer(Server[Any]):
    """The SDK's server. The tasks extension is offered in the protocol revision that it belongs to."""

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> types.ServerCapabilities:
        offered = {EXTENSION: dict[str, Any]()} if protocol_version in MODERN_PROTOCOL_VERSIONS else None
        found = super().get_capabilities(
            notification_options, experimental_capabilities, extensions, protocol_version=protocol_version
        )
        return found.model_copy(update={"extensions": offered})


def make_session_manager(
    society: Society, following: TaskFollowing, stopping: asyncio.Event
) -> tuple[StreamableHTTPSessionManager, Callable[[], Awaitable[None]]]:
    """Return the manager, and what to call after its end.

    `stopping`: set before all sessions are ended; what is cancelled then was not cancelled by a client.
    """
    calls = WaitingCalls(society, following)
    handlers = McpHandlers(society, calls, stopping)
    manager = StreamableHTTPSessionManager(
        handlers.make_server(),
        # Host and origin were checked by the middleware, for all addresses alike.
        security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        session_idle_timeout=SESSION_IDLE_SECONDS,
        max_request_body_size=MAX_DOOR_BODY_BYTES,
        max_sessions=MAX_SESSIONS,
    )
    return manager, calls.close


class McpHandlers:
    def __init__(self, society: Society, calls: WaitingCalls, stopping: asyncio.Event) -> None:
        self._society, self._calls, self._stopping = society, calls, stopping
        self._tasks = TaskMethods(self._calls)
        self._listed = tools.list_tools()
        self._running: dict[CallId, Call] = {}
        self._cancelled: dict[CallId, Call] = {}
        """Calls that were interrupted. The notification that says why is handled after the interruption."""
        self._handlers: dict[str, Handler] = {
            "list_agents": self._list_agents,
            "find_agents": self._find_agents,
            "send": self._send,
            "read_inbox": self._read_inbox,
            "answer_question": self._answer_question,
            "task_status": self._task_status,
            "list_tasks": self._list_tasks,
            "stop_task": self._stop_task,
            "read_artifact": self._read_artifact,
            "put_artifact": self._put_artifact,
        }

    def make_server(self) -> Server[Any]:
        server = SocietyMcpServer(
            NAME,
            version=__version__,
            title="Coterie",
            instructions=INSTRUCTIONS,
            cache_hints={
                "prompts/list": CacheHint(ttl_ms=60_000, scope="private"),
                "tools/list": CacheHint(ttl_ms=3_600_000, scope="public"),
                "resources/templates/list": CacheHint(ttl_ms=3_600_000, scope="public"),
                "resources/read": CacheHint(ttl_ms=3_600_000, scope="private"),
            },
            get_tool_input_schema={tool.name: tool.input_schema for tool in self._listed}.get,
            on_list_tools=self._tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._resources,
            on_list_resource_templates=self._templates,
            on_read_resource=self._read_resource,
            on_list_prompts=self._prompts,
            on_get_prompt=self._get_prompt,
        )
        for method, params, handler in (
            ("tasks/get", TaskParams, self._tasks.get),
            ("tasks/update", UpdateParams, self._tasks.update),
            ("tasks/cancel", TaskParams, self._tasks.cancel),
        ):
            server.add_request_handler(method, params, self._task_method(handler))
        # Derived from the society's secret: valid in every process, and after a restart.
        key = hmac.new(self._society.store.info.secret, b"mcp request state", "sha256").digest()
        security = RequestStateSecurity(keys=[key], bind_principal=lambda context: _caller_name(context))
        server.middleware.append(RequestStateBoundary(security, default_audience=NAME))
        server.middleware.append(self._watch_cancellations)
        return server

    def _scope(self, context: Context) -> CallerScope:
        assert context.request is not None  # noqa: S101 - this server is reached over HTTP only
        return CallerScope(self._society, caller_of(context.request))

    # Tools

    async def _tools(self, _: Context, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._listed)

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> Any:
        entry = tools.TOOLS.get(params.name)
        if entry is None:
            raise MCPError(INVALID_PARAMS, f"there is no tool {params.name!r}: tools/list has all tools")
        call = Call(context, self._scope(context))
        call_id = _call_id(context, context.request_id)
        self._running[call_id] = call
        try:
            args = tools.parse_arguments(entry, params.arguments)
            return await self._handlers[entry.name](call, args, params)
        except Refused as refused:
            return tools.failure(refused)
        except StoreError as error:
            reason = STOPPING if self._stopping.is_set() else str(error)
            return types.CallToolResult(content=[tools.text_block(reason)], is_error=True)
        except asyncio.CancelledError:
            self._remember_cancelled(call_id, call)
            if call.is_modern:  # the client has closed the response, which is how it cancels in this revision
                await self._stop_cancelled(call)
            raise
        finally:
            self._running.pop(call_id, None)

    async def _list_agents(self, call: Call, _: tools.ListAgents, __: Any) -> types.CallToolResult:
        return await self._agent_list(call, [agent.id for agent in await call.scope.agents()])

    async def _find_agents(self, call: Call, args: tools.FindAgents, _: Any) -> types.CallToolResult:
        able = set(await self._society.agents.with_capability(args.capability, args.direction))
        return await self._agent_list(call, [agent.id for agent in await call.scope.agents() if agent.id in able])

    async def _agent_list(self, call: Call, ids: list[str]) -> types.CallToolResult:
        found = await self._society.store.agents_by_id(ids)
        agents = [schemas.Agent.in_society(self._society, found[one]) for one in ids if one in found]
        return tools.structured(tools.AgentList(agents=agents))

    async def _send(self, call: Call, args: tools.Send, params: types.CallToolRequestParams) -> Any:
        message = await self._calls.resumed(call, params) or await self._sent(call, self._calls.send(call, args))
        call.message = message
        if args.wait_seconds != 0 and message.state != "delayed" and wants_handle(call):
            return self._tasks.handle(message)
        return await self._calls.wait(call, message, args.wait_seconds, params)

    async def _sent(self, call: Call, sending: Awaitable[Message]) -> Message:
        """Send a message to the end, even if the call is cancelled meanwhile: only then its task can be stopped."""
        with anyio.CancelScope(shield=True):
            message = call.message = await sending
            if call.is_cancelled:
                await self._stop_cancelled(call)
        await anyio.lowlevel.checkpoint()  # raises here if the call was cancelled
        return message

    async def _answer_question(
        self, call: Call, args: tools.AnswerQuestion, params: types.CallToolRequestParams
    ) -> Any:  # fmt: skip
        message = await self._calls.resumed(call, params) or await self._sent(call, self._calls.answer(call, args))
        call.message = message
        if args.wait_seconds != 0 and wants_handle(call):
            return self._tasks.handle(message)
        return await self._calls.wait(call, message, args.wait_seconds, params)

    async def _read_inbox(self, call: Call, args: tools.ReadInbox, _: Any) -> types.CallToolResult:
        if args.agent is not None:
            await call.scope.agent(args.agent)
        after = 0 if args.after is None else (await call.scope.question(args.after)).seq
        visible = await self._unread(call, args.agent, after, args.limit + 1)
        shown = visible[: args.limit]
        if args.mark_read and call.scope.caller.is_owner:
            for message in shown:
                await self._society.mark_read(message)
        received = [tools.AgentMessage.of(message) for message in shown]
        inbox = tools.Inbox(messages=received, more=len(visible) > len(shown))
        return tools.structured(
            inbox, *(tools.message_blocks(received) or [tools.text_block("There are no unread messages.")])
        )

    async def _unread(self, call: Call, agent: str | None, after: int, limit: int) -> Sequence[Message]:
        """Unread messages that the caller may see, oldest first."""
        asked = tools.MAX_LISTED
        while True:
            waiting = await self._society.store.waiting(PERSON, asked)
            wanted = [one for one in waiting if one.seq > after and agent in (None, one.sender)]
            visible = await call.scope.visible(wanted)
            if len(visible) >= limit or len(waiting) < asked or asked >= MAX_UNREAD:
                return visible[:limit]
            asked *= 4

    async def _task_status(self, call: Call, args: tools.TaskStatus, _: Any) -> types.CallToolResult:
        tree = await call.scope.task(args.task)
        first = await self._society.store.message(tree.task.id)
        if first is None:
            raise Refused("unknown_task", "the first message of the task was deleted")
        outcome = await self._calls.wait_once(call, first, args.wait_seconds)
        if args.wait_seconds or outcome.task is None:
            tree = await call.scope.task(args.task)
        received = [tools.AgentMessage.of(message) for message in outcome.messages]
        nodes = task_schemas.TaskTree.of_tree(self._society, tree).nodes if args.tree else []
        task = task_schemas.Task.of(self._society, tree.task)
        status = tools.Status(task=task, messages=received, nodes=nodes, problem=outcome.problem or UNSET)
        summary = f"[task {task.id}: {task.state}; {task.messages} messages, {task.turns} turns]"
        return tools.structured(status, *tools.message_blocks(received), tools.text_block(outcome.problem or summary))

    async def _list_tasks(self, call: Call, args: tools.ListTasks, _: Any) -> types.CallToolResult:
        found = await call.scope.tasks(state=args.state, agent=args.agent, limit=args.limit)
        return tools.structured(tools.TaskList(tasks=[task_schemas.Task.of(self._society, task) for task in found]))

    async def _stop_task(self, call: Call, args: tools.StopTask, _: Any) -> types.CallToolResult:
        tree = await call.scope.task(args.task)
        ended = await self._society.stop_task(tree.task.id)
        return tools.structured(
            task_schemas.StoppedTask(turns=ended.turns, messages=ended.messages, questions=ended.questions)
        )

    # Artifacts

    async def _read_artifact(self, call: Call, args: tools.ReadArtifact, _: Any) -> types.CallToolResult:
        artifact = await call.scope.artifact(args.artifact_ref)
        content = await self._content(artifact)
        return tools.structured(tools.StoredArtifact.of(artifact), _content_block(artifact, content))

    async def _put_artifact(self, call: Call, args: tools.PutArtifact, _: Any) -> types.CallToolResult:
        artifact = await self._society.artifacts.put(tools.decode_content(args), args.filename)
        return tools.structured(tools.StoredArtifact.of(artifact))

    async def _resources(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:  # fmt: skip
        after = params.cursor if params else None
        try:
            found = await self._scope(context).artifacts(after, PAGE_SIZE)
        except Refused as refused:
            raise MCPError(INVALID_PARAMS, "the cursor is not one of this list") from refused
        return types.ListResourcesResult(
            resources=[
                types.Resource(
                    uri=tools.URI + artifact.ref,
                    name=artifact.filename,
                    mime_type=artifact.mime_type,
                    size=artifact.size,
                )
                for artifact in found
            ],
            next_cursor=found[-1].ref if len(found) == PAGE_SIZE else None,
        )

    async def _templates(
        self, _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:  # fmt: skip
        template = types.ResourceTemplate(
            uri_template=f"{tools.URI}{{artifactRef}}",
            name="artifact",
            title="A file of the society",
            description="A file that was attached to a message, or that an agent made.",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def _read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:  # fmt: skip
        uri = str(params.uri)
        try:
            artifact = await self._scope(context).artifact(uri.removeprefix(tools.URI))
            content = await self._content(artifact)
        except Refused as refused:
            is_modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
            code = INVALID_PARAMS if is_modern or refused.code != "unknown_artifact" else RESOURCE_NOT_FOUND
            raise MCPError(code, refused.message, {"uri": uri}) from refused
        return types.ReadResourceResult(contents=[_resource_contents(artifact, content)])

    async def _content(self, artifact: Artifact) -> bytes:
        if artifact.size > tools.MAX_READ_BYTES:
            raise Refused(
                "artifact_too_large",
                f"the file has {artifact.size:,} bytes: GET /api/v1/artifacts/{artifact.ref} streams it",
            )
        return await self._society.artifacts.read(artifact.ref)

    # Prompts: one for each agent, which clients show as commands

    async def _prompts(
        self, context: Context, _: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:  # fmt: skip
        found = []
        for agent in await self._scope(context).offered_agents():
            about = schemas.Agent.in_society(self._society, agent).description
            found.append(
                types.Prompt(
                    name=agent.id,
                    title=f"Ask {agent.name}",
                    description=about or f"Send a message to {agent.name} and show the answer.",
                    arguments=[types.PromptArgument(name="text", description="The message.", required=True)],
                )
            )
        return types.ListPromptsResult(prompts=found)

    async def _get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        try:
            agent = await self._scope(context).agent(params.name)
        except Refused as refused:
            raise MCPError(INVALID_PARAMS, refused.message) from refused
        text = (params.arguments or {}).get("text", "")
        if not text.strip():
            raise MCPError(INVALID_PARAMS, "the argument text is missing: it is the message for the agent")
        request = f"Send this message to the agent {agent.id} with the tool send, and show me the answer:\n\n{text}"
        content = types.TextContent(type="text", text=request)
        return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=content)])

    # Cancellation and the tasks extension

    def _task_method(self, handler: Callable[[Call, Any], Awaitable[dict[str, Any]]]) -> Any:
        async def handle(context: Context, params: Any) -> dict[str, Any]:
            try:
                return await handler(Call(context, self._scope(context)), params)
            except Refused as refused:
                raise MCPError(INVALID_PARAMS, refused.message) from refused

        return handle

    async def _watch_cancellations(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Stop the task of a call that its client cancels. A client that only goes away cancels nothing."""
        if ctx.request_id is None and ctx.method == "notifications/cancelled" and ctx.params:
            call_id = _call_id(ctx, ctx.params.get("requestId"))
            call = self._running.get(call_id) or self._cancelled.pop(call_id, None)
            if call:
                call.is_cancelled = True
                await self._stop_cancelled(call)
        return await call_next(ctx)

    def _remember_cancelled(self, call_id: CallId, call: Call) -> None:
        self._cancelled[call_id] = call
        while len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.pop(next(iter(self._cancelled)))

    async def _stop_cancelled(self, call: Call) -> None:
        if call.message is None or self._stopping.is_set():
            return
        with anyio.CancelScope(shield=True):
            try:
                await self._society.stop_task(call.message.task or call.message.id)
            except (Refused, StoreError):  # it has not started, or the society stops
                return


def _caller_name(context: Context) -> str:
    assert context.request is not None  # noqa: S101
    return caller_of(context.request).key or ""


def _call_id(context: Context, request_id: Any) -> CallId:
    headers = context.request.headers if context.request is not None else {}
    return headers.get("mcp-session-id"), request_id


def _content_block(artifact: Artifact, content: bytes) -> types.ContentBlock:
    encoded = base64.b64encode(content).decode
    if artifact.type == "image":
        return types.ImageContent(type="image", data=encoded(), mime_type=artifact.mime_type)
    if artifact.type == "audio":
        return types.AudioContent(type="audio", data=encoded(), mime_type=artifact.mime_type)
    return types.EmbeddedResource(type="resource", resource=_resource_contents(artifact, content))


def _resource_contents(
    artifact: Artifact, content: bytes
) -> types.TextResourceContents | types.BlobResourceContents:  # fmt: skip
    uri = tools.URI + artifact.ref
    if artifact.mime_type.startswith("text/"):
        return types.TextResourceContents(
            uri=uri, mime_type=artifact.mime_type, text=content.decode("utf-8", "replace")
        )
    return types.BlobResourceContents(uri=uri, mime_type=artifact.mime_type, blob=base64.b64encode(content).decode())
