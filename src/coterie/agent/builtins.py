"""The built-in tools: agents, messages, artifacts, roles, and the specification of `send_message`.

The runner executes `send_message` itself, because its message is stored in the transaction of the call's result.
"""

from __future__ import annotations

import codecs
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from coterie.agent.service import AgentDirectory, AgentService
from coterie.agent.tools import Tool, ToolContext, ToolResult, error_result, get_tool, tool
from coterie.bus import MessageBus
from coterie.clock import to_rfc3339
from coterie.errors import Refused
from coterie.llm.service import Direction
from coterie.llm.types import ToolSpec
from coterie.messages import MAX_QUICK_REPLIES, Envelope, describe_receipt, make_envelope
from coterie.store import Store
from coterie.text import one_line
from coterie.turn import SEND_MESSAGE_TOOL

MAX_READ_BYTES = 64 << 10
"""Bytes that one call of `read_artifact` reads."""
MAX_LISTED = 50
_EMPTY = "application/x-empty"


def built_in_tools(directory: AgentDirectory, bus: MessageBus, store: Store) -> tuple[Tool, ...]:
    return (*agent_tools(directory), *message_tools(bus, store), *artifact_tools())


def agent_tools(directory: AgentDirectory) -> tuple[Tool, ...]:
    """Return the tools that list agents and their capabilities (003 R4)."""

    @tool(effect="pure")
    async def list_agents() -> dict[str, Any]:
        """List the agents you can write to, with what each one's model takes in and gives out."""
        return {"agents": [_describe_agent(directory, agent_id) for agent_id in directory]}

    @tool(effect="pure")
    async def find_agents(
        capability: Annotated[str, "Such as vision, audio, file, text, structured_output or tool_calling."],
        direction: Annotated[Direction, "What its model takes in, or what it gives out."] = "input",
    ) -> dict[str, Any]:
        """Find the agents whose models have a capability: for example who can look at a picture for you."""
        return {"agents": list(await directory.with_capability(capability, direction))}

    return _tools_of(list_agents, find_agents)


def message_tools(bus: MessageBus, store: Store) -> tuple[Tool, ...]:
    @tool(effect="pure")
    async def list_delayed(*, ctx: ToolContext) -> dict[str, Any]:
        """List the messages you have sent that are still to be delivered, by due time."""
        messages = await store.delayed(sender=ctx.agent_id, limit=MAX_LISTED)
        return {
            "messages": [
                {
                    "messageId": message.id,
                    "to": message.to,
                    "scheduledDeliveryTime": to_rfc3339(message.deliver_at),
                    "text": one_line(message.payload.get("text", ""), 200),
                }
                for message in messages
            ]
        }

    @tool(effect="idempotent")
    async def withdraw_message(
        messageId: Annotated[str, "The id that send_message gave you."],  # noqa: N803
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Take back a message of yours, as long as its recipient has not taken it up."""
        message = await bus.withdraw(messageId, by=ctx.agent_id)
        return {"messageId": message.id, "state": message.state}

    return _tools_of(list_delayed, withdraw_message)


def artifact_tools() -> tuple[Tool, ...]:
    @tool(effect="idempotent")
    async def put_artifact(
        filename: Annotated[str, "What to call the file, with its ending."],
        text: Annotated[str | None, "The content, for a text file."] = None,
        base64: Annotated[str | None, "The content in base64, for any other file."] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any] | ToolResult:
        """Keep a file. Send it to others by its artifactRef, in payload.attachments of send_message."""
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
        offset: Annotated[int, "The byte to begin at: nextOffset of the last call."] = 0,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any] | ToolResult:
        """Read a text file that you made or were sent, 64 KiB a call. Pictures, sound and others cannot be read so."""
        artifact = await ctx.artifacts.describe(artifactRef)
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
        """List the newest files that you may read: those you made, and those that messages brought you."""
        return {"artifacts": [artifact.to_dict() for artifact in await ctx.artifacts.latest(MAX_LISTED)]}

    put, read, listing = _tools_of(put_artifact, read_artifact, list_artifacts)
    # A piece must fit the result even if JSON escapes each of its bytes.
    return put, replace(read, max_result_bytes=8 * MAX_READ_BYTES), listing


def _describe_agent(directory: AgentDirectory, agent_id: str) -> dict[str, Any]:
    can = directory.capabilities_of(agent_id)
    name = directory.profile(agent_id).name or agent_id
    return {"id": agent_id, "name": name, "input": sorted(can.input), "output": sorted(can.output)}


def _decode_piece(data: bytes, *, last: bool) -> tuple[str, int]:
    """Return the text in `data` and its size in bytes, without an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=last)
    return text, len(data) - len(decoder.getstate()[0])


def _tools_of(*functions: Callable[..., object]) -> tuple[Tool, ...]:
    return tuple(made for function in functions if (made := get_tool(function)))


SEND_MESSAGE = ToolSpec(
    name=SEND_MESSAGE_TOOL,
    description=(
        "Send a message to an agent or to the person (`user`). It arrives on its own; do not wait for an answer."
        " `payload.text` is what the recipient reads; `payload.attachments` forwards files by their artifactRef."
    ),
    parameters={
        "type": "object",
        "properties": {
            "to": {"type": "string", "description": "The id of the recipient."},
            "payload": {
                "type": "object",
                "description": 'A JSON object, such as {"text": "…", "attachments": [{"artifactRef": "…"}]}.',
            },
            "delayMs": {"type": "number", "description": "延迟投递时间（毫秒），消息将在指定时间后才进入收件人队列"},
            "quickReplies": {
                "type": "array",
                "items": {"type": "string"},
                "maxItems": MAX_QUICK_REPLIES,
                "description": (
                    "可选的快速回复建议列表，最多10个字符串。"
                    "Optional: up to 10 short answers to offer. They are suggestions: the recipient may pick one,"
                    " or ignore them and answer freely."
                ),
            },
        },
        "required": ["to", "payload"],
    },
)


async def send_message(
    bus: MessageBus, sender: str, arguments: Mapping[str, Any], *, key: str | None = None, cause: str | None = None
) -> dict[str, Any]:
    """Send a message; return its id and due time, or the error if it was refused.

    Other arguments, such as `from`, are ignored: `sender` is the sender.
    """
    try:
        receipt = await bus.send_envelope(build_envelope(sender, arguments, key=key, cause=cause))
    except Refused as refusal:
        return refusal.to_dict()
    return describe_receipt(receipt)


def build_envelope(sender: str, arguments: Mapping[str, Any], *, key: str | None, cause: str | None) -> Envelope:
    """Return the envelope of a `send_message` call. Equal keys mean the same message."""
    return make_envelope(
        sender=sender,
        to=arguments.get("to"),
        payload=arguments.get("payload"),
        delay_ms=arguments.get("delayMs"),
        quick_replies=arguments.get("quickReplies"),
        client_id=key,
        cause=cause,
    )


def agent_management_tools(agent_service: AgentService) -> tuple[Tool, ...]:
    """Return the tools that create roles, spawn agents and terminate them."""

    @tool(effect="idempotent")
    async def create_role(
        name: Annotated[str, "a-z, 0-9, _ and -"],
        prompt: Annotated[str, "What an agent of this role is told about itself."],
        tools: Annotated[
            list[str] | None,
            "Names or patterns of the tools it may use; those you have when left out, none when empty.",
        ] = None,
        service: Annotated[str | None, "The id of a model service that you may use; your own when left out."] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Describe a kind of agent, to be made with spawn_agent. It has at most the tools that you have."""
        await agent_service.create_role(name, prompt, tools, service, maker=ctx.agent_id)
        return {"role": name}

    @tool(effect="idempotent")
    async def spawn_agent(
        role: str,
        id: Annotated[str | None, "a-z, 0-9, _ and -; made up when left out."] = None,  # noqa: A002
        name: str | None = None,
        task: Annotated[str | None, "A first message to it, from you."] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Make an agent of a role. It is yours: you may terminate it when it is no longer needed."""
        agent = await agent_service.spawn(ctx.agent_id, role, id=id, name=name, key=ctx.idempotency_key)
        result: dict[str, Any] = {"id": agent.id, "name": agent.name}
        if task:
            result["messageId"] = (await ctx.send(agent.id, {"text": task})).message_id
        return result

    @tool(effect="idempotent")
    async def terminate_agent(
        id: str,  # noqa: A002
        reason: Annotated[str | None, "For the record."] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """End an agent that you made, and everybody it made."""
        return {"terminated": list(await agent_service.terminate(id, by=ctx.agent_id)), "reason": reason}

    return _tools_of(create_role, spawn_agent, terminate_agent)
