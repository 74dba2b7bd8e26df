"""The built-in tools: agents, messages, artifacts, roles, and the specification of `send_message`.

Every request of an agent contains the descriptions of its tools, so they are short.

The runner executes `send_message` itself, because its message is stored in the transaction of the call's result.
"""

from __future__ import annotations

import codecs
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from coterie.agent.service import AgentDirectory, AgentService
from coterie.agent.tools import Tool, ToolContext, ToolResult, error_result, file_result, get_tool, tool
from coterie.bus import MessageBus
from coterie.clock import to_rfc3339
from coterie.errors import Refused
from coterie.llm.service import Direction, ToolSpec
from coterie.messages import MAX_QUICK_REPLIES, Envelope, make_envelope
from coterie.plan import SEND_MESSAGE_TOOL
from coterie.store import Store
from coterie.text import one_line

MAX_READ_BYTES = 64 << 10
"""Bytes that one call of `read_artifact` reads."""
MAX_LISTED = 50
_EMPTY = "application/x-empty"


def built_in_tools(directory: AgentDirectory, bus: MessageBus, store: Store) -> tuple[Tool, ...]:
    return (*agent_tools(directory), *message_tools(bus, store), *artifact_tools())


def built_in_names() -> frozenset[str]:
    """Names of all built-in tools, with `send_message`."""
    unused: Any = None  # the functions only keep what they are made with
    tools = (*built_in_tools(unused, unused, unused), *agent_management_tools(unused))
    return frozenset((SEND_MESSAGE_TOOL, *(built_in.name for built_in in tools)))


def agent_tools(directory: AgentDirectory) -> tuple[Tool, ...]:
    """Return the tools that list agents and their capabilities (003 R4)."""

    @tool(effect="pure")
    async def list_agents() -> dict[str, Any]:
        """List agents."""
        return {"agents": [_describe_agent(directory, agent_id) for agent_id in directory]}

    @tool(effect="pure")
    async def find_agents(
        capability: str,
        direction: Direction | None = None,
    ) -> dict[str, Any]:
        """Find agents by capability, such as vision."""
        found = list(await directory.with_capability(capability, direction or "input"))
        about = {agent_id: text for agent_id in found if (text := directory.description_of(agent_id))}
        return {"agents": found} | ({"descriptions": about} if about else {})

    return _tools_of(list_agents, find_agents)


def message_tools(bus: MessageBus, store: Store) -> tuple[Tool, ...]:
    @tool(effect="pure")
    async def list_delayed(*, ctx: ToolContext) -> dict[str, Any]:
        """List delayed messages."""
        messages = await store.delayed(sender=ctx.agent_id, limit=MAX_LISTED)
        return {
            "messages": [
                {
                    "messageId": message.id,
                    "to": message.to,
                    "scheduledDeliveryTime": to_rfc3339(message.deliver_at),
                    "text": one_line(message.payload.get("text", ""), 200),
                }
                | ({"every": message.every, "scheduleId": message.schedule_id} if message.schedule_id else {})
                for message in messages
            ]
        }

    @tool(effect="idempotent")
    async def withdraw_message(
        messageId: str,  # noqa: N803
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Take back an unread message, or end a schedule."""
        if await store.schedule(messageId):
            schedule = await bus.end_schedule(messageId, by=ctx.agent_id)
            return {"scheduleId": schedule.id, "state": schedule.state}
        message = await bus.withdraw(messageId, by=ctx.agent_id)
        return {"messageId": message.id, "state": message.state}

    return _tools_of(list_delayed, withdraw_message)


def artifact_tools() -> tuple[Tool, ...]:
    @tool(effect="idempotent")
    async def put_artifact(
        filename: str,
        text: str | None = None,
        base64: str | None = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any] | ToolResult:
        """Store a file of text or base64."""
        match text, base64:
            case str(), None:
                data = text.encode("utf-8", "replace")
            case None, str():
                try:
                    data = b64decode(base64, validate=True)
                except ValueError as error:
                    return error_result("bad_arguments", f"base64: {error}")
            case _:
                return error_result("bad_arguments", "give either text or base64")
        return (await ctx.artifacts.put(data, filename, key=ctx.idempotency_key)).to_dict()

    @tool(effect="pure")
    async def read_artifact(
        artifactRef: str,  # noqa: N803
        offset: Annotated[int | None, "nextOffset"] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any] | ToolResult:
        """Read a text file, picture or sound."""
        offset = offset or 0
        artifact = await ctx.artifacts.describe(artifactRef)
        if artifact.type != "file":
            return file_result(artifact)
        if not artifact.mime_type.startswith("text/") and artifact.mime_type != _EMPTY:
            return error_result(
                "not_text", f"{artifact.filename} is {artifact.mime_type}: only text can be read this way"
            )
        if not 0 <= offset <= artifact.size:
            return error_result(
                "bad_arguments", f"offset must be 0 to {artifact.size}, the size of the file, got {offset}"
            )
        data = b"".join([piece async for piece in ctx.artifacts.open(artifactRef, offset, offset + MAX_READ_BYTES)])
        text, used = _decode_piece(data, last=offset + len(data) >= artifact.size)
        ends = offset + used
        more = {"nextOffset": ends} if ends < artifact.size else {}
        return {"filename": artifact.filename, "size": artifact.size, "text": text} | more

    @tool(effect="pure")
    async def list_artifacts(*, ctx: ToolContext) -> dict[str, Any]:
        """List your files."""
        return {"artifacts": [artifact.to_dict() for artifact in await ctx.artifacts.latest(MAX_LISTED)]}

    put, read, listing = _tools_of(put_artifact, read_artifact, list_artifacts)
    # A piece must fit the result even if JSON escapes each of its bytes.
    return put, replace(read, max_result_bytes=8 * MAX_READ_BYTES), listing


def _describe_agent(directory: AgentDirectory, agent_id: str) -> dict[str, Any]:
    can = directory.capabilities_of(agent_id)
    name = directory.profile(agent_id).name or agent_id
    about = directory.description_of(agent_id)
    known = {"id": agent_id, "name": name} | ({"description": about} if about else {})
    return known | {"input": sorted(can.input), "output": sorted(can.output)}


def _decode_piece(data: bytes, *, last: bool) -> tuple[str, int]:
    """Return the text in `data` and its size in bytes, without an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=last)
    return text, len(data) - len(decoder.getstate()[0])


def _tools_of(*functions: Callable[..., object]) -> tuple[Tool, ...]:
    return tuple(made for function in functions if (made := get_tool(function)))


SEND_MESSAGE = ToolSpec(
    name=SEND_MESSAGE_TOOL,
    description="Send a message. An answer comes later.",
    parameters={
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "payload": {"type": "object", "description": "{text, attachments: [{artifactRef}]}"},
            "delayMs": {"type": "number", "description": "Delay in ms"},
            "unlessAnswered": {"type": "string", "description": "Your messageId"},
            "every": {"type": "string", "description": "15m, weekdays 08:00 Europe/Berlin, or cron"},
            "quickReplies": {
                "type": "array",
                "items": {"type": "string"},
                "maxItems": MAX_QUICK_REPLIES,
                "description": "Optional: up to 10 answers to offer",
            },
        },
        "required": ["to", "payload"],
    },
)


def build_envelope(sender: str, arguments: Mapping[str, Any], *, key: str | None, cause: str | None) -> Envelope:
    """Return the envelope of a `send_message` call. Equal keys mean the same message.

    Other arguments, such as `from`, are ignored: `sender` is the sender.
    """
    return make_envelope(
        sender=sender,
        to=arguments.get("to"),
        payload=arguments.get("payload"),
        delay_ms=arguments.get("delayMs"),
        quick_replies=arguments.get("quickReplies"),
        every=arguments.get("every"),
        unless_answered=arguments.get("unlessAnswered"),
        client_id=key,
        cause=cause,
    )


def agent_management_tools(agent_service: AgentService) -> tuple[Tool, ...]:
    """Return the tools that create roles, spawn agents and terminate them."""

    @tool(effect="idempotent")
    async def create_role(
        name: str,
        prompt: str,
        tools: list[str] | None = None,
        service: str | None = None,
        description: str | None = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Define a role. Default tools and service: yours."""
        await agent_service.create_role(name, prompt, tools, service, maker=ctx.agent_id, description=description or "")
        return {"role": name}

    @tool(effect="idempotent")
    async def spawn_agent(
        role: str,
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        task: str | None = None,
        description: str | None = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Create an agent of a role."""
        agent = await agent_service.spawn(
            ctx.agent_id, role, id=id, name=name, description=description, key=ctx.idempotency_key
        )
        result: dict[str, Any] = {"id": agent.id, "name": agent.name}
        if task:
            try:
                result["messageId"] = (await ctx.send(agent.id, {"text": task})).message_id
            except Refused as refusal:  # an error would hide that the agent exists
                result["taskNotSent"] = refusal.to_dict()
        return result

    @tool(effect="idempotent")
    async def terminate_agent(
        id: str,  # noqa: A002
        reason: str | None = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """End an agent you created."""
        return {"terminated": list(await agent_service.terminate(id, by=ctx.agent_id)), "reason": reason}

    return _tools_of(create_role, spawn_agent, terminate_agent)
