"""Requests of an MCP server to the agent's model during a call ("sampling"), if the owner allows them.

The model sees only what the server sends, not the conversation of the agent. Each call has a limited number of
requests, one at a time, of limited length.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from base64 import b64decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coterie.agent.tools import ToolContext
from coterie.errors import CoterieError
from coterie.llm.service import (
    AssistantMessage,
    Attachment,
    ChatMessage,
    Completion,
    ModelRequest,
    Sampling,
    SystemMessage,
    TextPart,
    UserMessage,
)
from coterie.text import one_line, to_storable

if TYPE_CHECKING:  # imported only where a server is connected
    import mcp

log = logging.getLogger(__name__)

MAX_REQUESTS = 10
"""Of one tool call."""
MAX_TOKENS = 4096
"""Of one answer. A server that asks for more gets an answer that ends there."""
MAX_REQUEST_CHARACTERS = 400_000
REFUSED = -1
"""The specification's error code for a request that the person or the owner rejected."""
_INVALID, _FAILED = -32602, -32603


class _Unusable(Exception):
    """The request cannot be made; the message says why."""

    def __init__(self, message: str, code: int = _INVALID) -> None:
        self.code = code
        super().__init__(message)


class Sampler:
    """Answers the requests of one tool call. `ctx`: its context, with the agent's model."""

    def __init__(self, server: str, ctx: ToolContext) -> None:
        self._server, self._ctx = server, ctx
        self._requests, self._one_at_a_time = 0, asyncio.Lock()

    async def answer(self, params: Any) -> mcp.types.CreateMessageResult | mcp.types.ErrorData:
        from mcp.types import CreateMessageResult, ErrorData, TextContent

        try:
            async with self._one_at_a_time:
                request = await self._build(params)
                assert self._ctx.sample is not None  # noqa: S101 - _build refuses otherwise
                answer = await self._ctx.sample(request)
        except _Unusable as error:
            log.warning("a request of the MCP server %s to a model was refused: %s", self._server, error)
            return ErrorData(code=error.code, message=str(error))
        except (CoterieError, OSError) as error:
            log.warning("a request of the MCP server %s to a model failed: %s", self._server, error)
            return ErrorData(code=_FAILED, message=one_line(str(error), 500))
        text, reason = _cut_at_stop(answer, params.stop_sequences or ())
        content = TextContent(type="text", text=text)
        return CreateMessageResult(
            role="assistant", content=content, model=answer.model or answer.service, stop_reason=reason
        )

    async def _build(self, params: Any) -> ModelRequest:
        if self._ctx.sample is None:
            raise _Unusable("this call has no model to ask", REFUSED)
        self._requests += 1
        if self._requests > MAX_REQUESTS:
            raise _Unusable(f"a tool call may ask the model at most {MAX_REQUESTS} times", REFUSED)
        if params.tools:
            raise _Unusable("tools in sampling requests are not supported: leave them out")
        if params.max_tokens < 1:
            raise _Unusable(f"maxTokens must be at least 1, got {params.max_tokens}")
        messages = [await self._message(one, number) for number, one in enumerate(params.messages)]
        if not messages:
            raise _Unusable("messages must not be empty")
        if params.system_prompt:
            messages.insert(0, SystemMessage(to_storable(params.system_prompt)))
        if sum(map(_size, messages)) > MAX_REQUEST_CHARACTERS:
            raise _Unusable(f"the messages have more than {MAX_REQUEST_CHARACTERS:,} characters")
        sampling = Sampling(temperature=params.temperature, max_tokens=min(params.max_tokens, MAX_TOKENS))
        return ModelRequest(messages=tuple(messages), sampling=sampling)

    async def _message(self, message: Any, number: int) -> ChatMessage:
        parts = [await self._part(block, f"{number}.{index}") for index, block in enumerate(message.content_as_list)]
        if message.role != "assistant":
            return UserMessage(tuple(parts))
        return AssistantMessage("\n".join(part.text for part in parts if isinstance(part, TextPart)))

    async def _part(self, block: Any, name: str) -> TextPart | Attachment:
        match block.type:
            case "text":
                return TextPart(to_storable(block.text))
            case "image" | "audio":
                return await self._attachment(block, name)
        raise _Unusable(f"content of the type {one_line(block.type, 40)} is not supported: use text, image or audio")

    async def _attachment(self, block: Any, name: str) -> Attachment:
        """Store a picture or sound as a file, from which the router takes what the agent's model can read."""
        try:
            data = b64decode(block.data, validate=True)
        except (ValueError, binascii.Error):
            raise _Unusable(f"the data of message {name} is no base64") from None
        key = f"{self._ctx.idempotency_key}/sampling/{self._requests}/{name}"
        kept = await self._ctx.artifacts.put(data, f"{self._server}-{block.type}", key=key)
        return Attachment(
            artifact_ref=kept.ref, type=kept.type, filename=kept.filename, mime_type=kept.mime_type, size=kept.size
        )


def _size(message: ChatMessage) -> int:
    match message:
        case UserMessage(parts):
            return sum(len(part.text) for part in parts if isinstance(part, TextPart))
        case SystemMessage(text) | AssistantMessage(text):
            return len(text)
    return 0


def _cut_at_stop(answer: Completion, stop_sequences: Sequence[str]) -> tuple[str, str]:
    """Return the text up to the first stop sequence, and why it ends. Not every service knows stop sequences."""
    ends = [end for stop in stop_sequences if stop and (end := answer.text.find(stop)) >= 0]
    if ends:
        return answer.text[: min(ends)], "stopSequence"
    return answer.text, "maxTokens" if answer.finish_reason == "length" else "endTurn"
