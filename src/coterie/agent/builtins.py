"""The built-in tools besides `send_message`: each a few lines over a mechanism that HTTP and Python use too."""

from __future__ import annotations

import codecs
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from coterie.agent.directory import Directory
from coterie.agent.tool_context import ToolContext
from coterie.agent.tools import Tool, ToolResult, failed, tool, tool_of
from coterie.bus import MessageBus
from coterie.clock import to_wire
from coterie.llm.service import Direction
from coterie.store import Store
from coterie.text import one_line

MAX_READ = 64 << 10
"""Bytes of a file that one call reads."""
MAX_LISTED = 50
_EMPTY = "application/x-empty"


def built_in_tools(directory: Directory, bus: MessageBus, store: Store) -> tuple[Tool, ...]:
    return (*agent_tools(directory), *message_tools(bus, store), *artifact_tools())


def agent_tools(directory: Directory) -> tuple[Tool, ...]:
    """Who is there, and who can do what (003 R4)."""

    @tool(effect="pure")
    async def list_agents() -> dict[str, Any]:
        """List the agents you can write to, with what each one's model takes in and gives out."""
        return {"agents": [_card(directory, agent_id) for agent_id in directory]}

    @tool(effect="pure")
    async def find_agents(
        capability: Annotated[str, "Such as vision, audio, file, text, structured_output or tool_calling."],
        direction: Annotated[Direction, "What its model takes in, or what it gives out."] = "input",
    ) -> dict[str, Any]:
        """Find the agents whose models have a capability: for example who can look at a picture for you."""
        return {"agents": list(await directory.with_capability(capability, direction))}

    return _declared(list_agents, find_agents)


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
                    "scheduledDeliveryTime": to_wire(message.deliver_at),
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

    return _declared(list_delayed, withdraw_message)


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
                    return failed("bad_arguments", f"base64: {error}")
            case _:
                return failed("bad_arguments", "give either text or base64")
        return (await ctx.artifacts.put(data, filename, key=ctx.idempotency_key)).to_wire()

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
            return failed("not_text", f"{artifact.filename} is {artifact.mime_type}: only text can be read this way")
        if not 0 <= offset <= artifact.size:
            return failed("bad_arguments", f"offset must be 0 to {artifact.size}, the size of the file, got {offset}")
        data = b"".join([piece async for piece in ctx.artifacts.open(artifactRef, offset, offset + MAX_READ)])
        text, used = _characters(data, last=offset + len(data) >= artifact.size)
        ends = offset + used
        more = {"nextOffset": ends} if ends < artifact.size else {}
        return {"filename": artifact.filename, "size": artifact.size, "text": text} | more

    @tool(effect="pure")
    async def list_artifacts(*, ctx: ToolContext) -> dict[str, Any]:
        """List the newest files that you may read: those you made, and those that messages brought you."""
        return {"artifacts": [artifact.to_wire() for artifact in await ctx.artifacts.latest(MAX_LISTED)]}

    put, read, listing = _declared(put_artifact, read_artifact, list_artifacts)
    # What was asked for in pieces of this size is shown in them, whatever JSON makes of its characters.
    return put, replace(read, max_text=8 * MAX_READ), listing


def _card(directory: Directory, agent_id: str) -> dict[str, Any]:
    can = directory.capabilities_of(agent_id)
    name = directory.profile(agent_id).name or agent_id
    return {"id": agent_id, "name": name, "input": sorted(can.input), "output": sorted(can.output)}


def _characters(data: bytes, *, last: bool) -> tuple[str, int]:
    """The text in `data`, and how many bytes it is: a character cut in two at the end is left for the next piece."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=last)
    return text, len(data) - len(decoder.getstate()[0])


def _declared(*functions: Callable[..., object]) -> tuple[Tool, ...]:
    return tuple(made for function in functions if (made := tool_of(function)))
