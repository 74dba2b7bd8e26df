"""The ASGI application: all routes behind the middleware."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coterie.clock import Clock, SystemClock
from coterie.society import Society
from coterie.task_following import TaskFollowing
from coterie.web import auth, metrics, sse, static_files
from coterie.web.a2a import door as a2a_door
from coterie.web.addresses import Addresses, ClientAddresses, addresses
from coterie.web.api import agents, artifacts, definitions, keys, messages, services, storage, tasks, threads
from coterie.web.api.artifacts import Uploads
from coterie.web.auth import Access
from coterie.web.errors import install_error_handlers
from coterie.web.mcp import door as mcp_door
from coterie.web.middleware import SecurityMiddleware
from coterie.web.openai import chat, responses
from coterie.web.openai.asking import Asking
from coterie.web.openapi import describe
from coterie.web.routing import Router
from coterie.web.sse import Hub

ROUTERS: list[Router] = [
    messages.router,
    sse.router,
    agents.router,
    threads.router,
    tasks.router,
    services.router,
    definitions.router,
    artifacts.router,
    keys.router,
    storage.router,
    auth.links,
    chat.router,
    responses.router,
    metrics.router,
    auth.router,
    static_files.router,
]
"""Busiest first: Starlette tries them in this order."""
ShutdownHook = Callable[[int], Awaitable[None]]
"""Called on a graceful stop while the store is open, with the number of delayed messages that were delivered early."""


def build_app(
    society: Society,
    access: Access,
    *,
    where: Addresses | None = None,
    clock: Clock | None = None,
) -> Starlette:
    """`where`: the addresses that the server answers at; default: the configured ones."""
    server = society.config.server
    app = Starlette()
    app.router.redirect_slashes = False
    state = app.state
    state.society, state.access = society, access
    state.where = where or addresses(server.host, server.port, server.public_url, server.allowed_hosts)
    state.clock = clock or SystemClock()
    state.health = metrics.Health(society.store, society.disk)
    state.uploads = Uploads(society.artifacts.max_file_bytes)
    state.hub = Hub(society, society.live, state.clock)
    following = TaskFollowing(society.store, society.bus, society.live, state.clock)
    state.following = following
    state.asking = Asking(society, state.clock)
    mcp = mcp_door.McpDoor(society, following)
    # MCP before the watch: a call that the stop ends must not return what there is of its answer.
    state.on_shutdown = list[ShutdownHook]([state.hub.shut_down, mcp.shut_down, following.watch.shut_down])
    state.metrics = metrics.Metrics(society, lambda: len(state.hub))
    install_error_handlers(app)
    app.router.routes.append(Route("/openapi.json", _get_openapi))
    for router in ROUTERS:
        app.router.routes += router.routes
    app.router.routes.append(Route(mcp_door.PATH, mcp, methods=[*mcp_door.METHODS]))
    state.a2a = a2a = a2a_door.A2aDoor(society, following, state.where.url)
    state.on_shutdown.append(a2a.push.shut_down)
    for path, methods in a2a_door.PATHS.items():
        app.router.routes.append(Route(path, a2a, methods=[*methods]))
    app.add_middleware(
        SecurityMiddleware,
        access=access,
        where=state.where,
        clock=state.clock,
        health=state.health,
        observe=state.metrics.observe_request,
        disk=society.disk,
        keys=society.store,
        doors=lambda: society.config.doors,
        clients=ClientAddresses(server.trusted_proxies),
    )
    return app


@functools.cache
def openapi_document() -> dict[str, Any]:
    return describe(operation for router in ROUTERS for operation in router.operations)


async def _get_openapi(request: Request) -> Response:
    return JSONResponse(openapi_document())
