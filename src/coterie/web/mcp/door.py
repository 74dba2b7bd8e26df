"""The address /mcp: passes requests to the SDK's session manager, which is started with the first request.

The SDK is imported then, too: its import takes longer than the start of a server.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from coterie.society import Society
from coterie.task_following import TaskFollowing
from coterie.web.auth import caller_of

if TYPE_CHECKING:
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

PATH = "/mcp"
METHODS = ("GET", "POST", "DELETE")


class McpDoor:
    """An ASGI application behind the security middleware, which checks host, token, origin and limits."""

    def __init__(self, society: Society, following: TaskFollowing) -> None:
        self._society, self._following = society, following
        self._lock = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None
        self._running: asyncio.Task[None] | None = None
        self._close: Callable[[], Awaitable[None]] | None = None
        self._stopping = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        manager = self._manager or await self._start()
        scope["user"] = self._user(caller_of(Request(scope)).key)
        # Spaces around a value are not part of it (RFC 9110); the parser leaves those after it.
        scope["headers"] = [(name, value.strip()) for name, value in scope["headers"]]
        await manager.handle_request(scope, receive, send)

    def _user(self, key: str | None) -> AuthenticatedUser:
        """The SDK lets only the user that opened a session use it. It needs no token for that."""
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
        from mcp.server.auth.provider import AccessToken

        return AuthenticatedUser(AccessToken(token="", client_id=f"key {key or ''}", scopes=[]))

    async def _start(self) -> StreamableHTTPSessionManager:
        async with self._lock:
            if self._manager is None:
                # In a thread: the import takes half a second, in which other requests must be answered.
                server = await asyncio.to_thread(importlib.import_module, "coterie.web.mcp.server")
                manager: StreamableHTTPSessionManager
                manager, self._close = server.make_session_manager(self._society, self._following, self._stopping)
                ready = asyncio.Event()
                # A task of its own: the manager's task group must be entered and left by the same task.
                self._running = asyncio.create_task(self._run(manager, ready), name="coterie-mcp-sessions")
                await ready.wait()
                self._manager = manager
            return self._manager

    async def _run(self, manager: StreamableHTTPSessionManager, ready: asyncio.Event) -> None:
        async with manager.run():
            ready.set()
            await self._stopping.wait()

    async def shut_down(self, _: int = 0) -> None:
        """End all sessions. Tasks of agents are not stopped: the next start continues them."""
        self._stopping.set()
        if self._running and self._close:
            await self._running
            await self._close()
