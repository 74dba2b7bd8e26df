"""A model service that is not there: real HTTP on loopback, scripted answers, and no patience with a bad history."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Set
from typing import Any, Self

from coterie.testing.dialects import check_openai_chat, check_strict_alternation
from coterie.testing.replies import Calls, Plays, Reply, Says, Status, perform, tokens
from coterie.testing.wire import Received, Wire, receive

__all__ = ["Calls", "ModelServer", "Plays", "Received", "Reply", "Says", "Status", "Wire"]

EVERYTHING = frozenset({"vision", "audio", "file", "tool_calling"})
_PART_NEEDS = {"image_url": "vision", "input_audio": "audio", "file": "file"}


class ModelServer:
    """Speaks OpenAI chat completions at `base_url` while its context lasts.

        async with ModelServer() as server:
            server.script("Hello!", Says(calls=(Calls("look_up", {"city": "Oslo"}),)), Status(429))

    What was scripted is answered in order, then `default` for ever; a callable is asked with each request. A request
    that a real service would refuse is refused, whatever the script says, and its complaint is kept in `refused`.
    """

    def __init__(
        self,
        *,
        models: Set[str] = frozenset(),
        api_key: str | None = None,
        capabilities: Set[str] = EVERYTHING,
        alternate: bool = False,
        context_tokens: int | None = None,
        unknown_keys: Set[str] = frozenset(),
    ) -> None:
        """`models` empty: any. `unknown_keys`: of the request, those the service refuses, like `stream_options`."""
        self.default: Reply | Callable[[Received], Reply] = "ok"
        self.requests: list[Received] = []
        self.refused: list[str] = []
        self.connections = 0
        """How many were ever made."""
        self.base_url = ""
        self._models, self._api_key, self._capabilities = models, api_key, capabilities
        self._alternate, self._context_tokens, self._unknown_keys = alternate, context_tokens, unknown_keys
        self._script: deque[Reply | Callable[[Received], Reply]] = deque()
        self._arrived = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None  # noqa: S101
        self._server.close()
        await self.hang_up()
        await self._server.wait_closed()

    async def hang_up(self) -> None:
        """Ends every connection, whatever it is in the middle of."""
        ending = list(self._connections)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def script(self, *replies: Reply | Callable[[Received], Reply]) -> None:
        self._script.extend(replies)

    async def asked(self, count: int = 1) -> Received:
        """Waits for the request of that number, counted from 1, and gives it."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        self._connections.add(task)
        self.connections += 1
        try:
            # A client that goes away in the middle is what half of the tests are about.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while request := await receive(reader):
                    wire = Wire(reader, writer)
                    await self._answer(request, wire)
                    if not wire.reusable:
                        break
        except asyncio.CancelledError:
            # The server is closing; what a client has not read by now it never will.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: Received, wire: Wire) -> None:
        async with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()
        refusal = self._refusal(request)
        if refusal:
            self.refused.append(str(refusal.error))
            await perform(refusal, request, wire)
            return
        reply = self._script.popleft() if self._script else self.default
        await perform(reply(request) if callable(reply) else reply, request, wire)

    def _refusal(self, request: Received) -> Status | None:
        """What a real service would say against it, in the order in which one looks."""
        if request.method != "POST" or request.path != "/v1/chat/completions":
            return Status(404, f"Invalid URL ({request.method} {request.path})")
        if self._api_key is not None and request.headers.get("authorization") != f"Bearer {self._api_key}":
            shown = request.headers.get("authorization", "").removeprefix("Bearer ")
            return Status(401, f"Incorrect API key provided: {shown}.", code="invalid_api_key")
        try:
            body = request.body
        except (ValueError, RecursionError):
            return Status(400, "We could not parse the JSON body of your request.")
        return self._refused_body(body, tokens(request.raw))

    def _refused_body(self, body: dict[str, Any], size: int) -> Status | None:
        model = body.get("model")
        if not model or (self._models and model not in self._models):
            return Status(404, f"The model `{model}` does not exist", code="model_not_found")
        if unknown := self._unknown_keys & body.keys():
            return Status(400, f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}")
        complaint = check_openai_chat(body.get("messages"), body.get("tools"))
        if not complaint and self._alternate:
            complaint = check_strict_alternation(body["messages"])
        complaint = complaint or self._incapable(body)
        if complaint:
            return Status(400, complaint)
        if self._context_tokens and size > self._context_tokens:
            message = f"This model's maximum context length is {self._context_tokens} tokens, you sent {size}."
            return Status(400, message, code="context_length_exceeded")
        return None

    def _incapable(self, body: dict[str, Any]) -> str | None:
        if body.get("tools") and "tool_calling" not in self._capabilities:
            return f"{body['model']} does not support tools"
        contents = (message["content"] for message in body["messages"])
        parts = (part["type"] for content in contents if isinstance(content, list) for part in content)
        refused = next(
            (kind for kind in parts if _PART_NEEDS.get(kind, kind) not in {*self._capabilities, "text"}), None
        )
        return refused and f"Invalid content type. {refused} is only supported by certain models."
