"""A scripted model server: real HTTP on loopback, and strict validation of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Set
from typing import Any, Self

from coterie.testing.dialects import check_openai_chat, check_strict_alternation
from coterie.testing.replies import (
    Calls,
    CustomReply,
    ReceivedRequest,
    Reply,
    Says,
    ServerConnection,
    Status,
    count_tokens,
    receive_request,
    send_reply,
)

__all__ = ["Calls", "CustomReply", "ModelServer", "ReceivedRequest", "Reply", "Says", "ServerConnection", "Status"]

ALL_CAPABILITIES = frozenset({"vision", "audio", "file", "tool_calling"})
_CAPABILITY_BY_PART = {"image_url": "vision", "input_audio": "audio", "file": "file"}


class ModelServer:
    """Speaks OpenAI chat completions at `base_url` while its context lasts.

        async with ModelServer() as server:
            server.script("Hello!", Says(calls=(Calls("look_up", {"city": "Oslo"}),)), Status(429))

    Scripted replies are sent in order, then `default`; a callable gets the request and returns the reply. An invalid
    request is refused as a real service would do, whatever the script says; the errors are kept in `refused`.
    """

    def __init__(
        self,
        *,
        models: Set[str] = frozenset(),
        api_key: str | None = None,
        capabilities: Set[str] = ALL_CAPABILITIES,
        alternate: bool = False,
        context_tokens: int | None = None,
        unknown_keys: Set[str] = frozenset(),
    ) -> None:
        """`models` empty: accept any. `unknown_keys`: request keys to refuse, such as `stream_options`."""
        self.default: Reply | Callable[[ReceivedRequest], Reply] = "ok"
        self.requests: list[ReceivedRequest] = []
        self.refused: list[str] = []
        self.connections = 0
        """Number of connections ever accepted."""
        self.base_url = ""
        self._models, self._api_key, self._capabilities = models, api_key, capabilities
        self._alternate, self._context_tokens, self._unknown_keys = alternate, context_tokens, unknown_keys
        self._script: deque[Reply | Callable[[ReceivedRequest], Reply]] = deque()
        self._request_arrived = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None  # noqa: S101
        self._server.close()
        await self.close_connections()
        await self._server.wait_closed()

    async def close_connections(self) -> None:
        """Abort all connections."""
        ending = list(self._connections)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def script(self, *replies: Reply | Callable[[ReceivedRequest], Reply]) -> None:
        self._script.extend(replies)

    async def wait_for_request(self, count: int = 1) -> ReceivedRequest:
        """Wait for the `count`-th request, counted from 1, and return it."""
        async with self._request_arrived:
            await self._request_arrived.wait_for(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        self._connections.add(task)
        self.connections += 1
        try:
            # Many tests close the client in the middle of a reply.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while request := await receive_request(reader):
                    connection = ServerConnection(reader, writer)
                    await self._answer(request, connection)
                    if not connection.reusable:
                        break
        except asyncio.CancelledError:
            # The server is closing: drop unsent data.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: ReceivedRequest, connection: ServerConnection) -> None:
        async with self._request_arrived:
            self.requests.append(request)
            self._request_arrived.notify_all()
        refusal = self._check_request(request)
        if refusal:
            self.refused.append(str(refusal.error))
            await send_reply(refusal, request, connection)
            return
        reply = self._script.popleft() if self._script else self.default
        await send_reply(reply(request) if callable(reply) else reply, request, connection)

    def _check_request(self, request: ReceivedRequest) -> Status | None:
        """Return the error of a real service, in its order of checks; None if the request is valid."""
        if request.method != "POST" or request.path != "/v1/chat/completions":
            return Status(404, f"Invalid URL ({request.method} {request.path})")
        if self._api_key is not None and request.headers.get("authorization") != f"Bearer {self._api_key}":
            shown = request.headers.get("authorization", "").removeprefix("Bearer ")
            return Status(401, f"Incorrect API key provided: {shown}.", code="invalid_api_key")
        try:
            body = request.body
        except (ValueError, RecursionError):
            return Status(400, "We could not parse the JSON body of your request.")
        return self._check_body(body, count_tokens(request.raw))

    def _check_body(self, body: dict[str, Any], size: int) -> Status | None:
        model = body.get("model")
        if not model or (self._models and model not in self._models):
            return Status(404, f"The model `{model}` does not exist", code="model_not_found")
        if unknown := self._unknown_keys & body.keys():
            return Status(400, f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}")
        error = check_openai_chat(body.get("messages"), body.get("tools"))
        if not error and self._alternate:
            error = check_strict_alternation(body["messages"])
        error = error or self._check_capabilities(body)
        if error:
            return Status(400, error)
        if self._context_tokens and size > self._context_tokens:
            message = f"This model's maximum context length is {self._context_tokens} tokens, you sent {size}."
            return Status(400, message, code="context_length_exceeded")
        return None

    def _check_capabilities(self, body: dict[str, Any]) -> str | None:
        if body.get("tools") and "tool_calling" not in self._capabilities:
            return f"{body['model']} does not support tools"
        contents = (message["content"] for message in body["messages"])
        parts = (part["type"] for content in contents if isinstance(content, list) for part in content)
        refused = next(
            (kind for kind in parts if _CAPABILITY_BY_PART.get(kind, kind) not in {*self._capabilities, "text"}), None
        )
        return refused and f"Invalid content type. {refused} is only supported by certain models."
