"""The ASGI application: all routes behind the middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.routing import Route

from coterie import __version__
from coterie.clock import Clock, SystemClock
from coterie.society import Society
from coterie.task_stream import TaskStreams
from coterie.task_watch import TaskWatch
from coterie.web import auth, metrics, openai, static_files
from coterie.web.a2a import door as a2a_door
from coterie.web.addresses import Addresses, ClientAddresses, addresses
from coterie.web.api import ROUTERS
from coterie.web.api.artifacts import Uploads
from coterie.web.auth import Access
from coterie.web.errors import OPENAI, install_error_handlers
from coterie.web.mcp import door as mcp_door
from coterie.web.middleware import SecurityMiddleware
from coterie.web.openai.asking import Asking
from coterie.web.routing import install_openapi, operation_id
from coterie.web.sse import Hub

API = "/api/v1"
ShutdownHook = Callable[[int], Awaitable[None]]
"""Called on a graceful stop while the store is open, with the number of delayed messages that were delivered early."""


def build_app(
    society: Society,
    access: Access,
    *,
    where: Addresses | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """`where`: the addresses that the server answers at; default: the configured ones."""
    server = society.config.server
    app = FastAPI(
        title="Coterie",
        version=__version__,
        summary="A society of LLM agents that people talk to.",
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    state = app.state
    state.society, state.access = society, access
    state.where = where or addresses(server.host, server.port, server.public_url, server.allowed_hosts)
    state.clock = clock or SystemClock()
    state.health = metrics.Health(society.store, society.disk)
    state.uploads = Uploads(society.artifacts.max_file_bytes)
    state.hub = Hub(society, society.live, state.clock)
    watch = TaskWatch(society.bus, state.clock)
    state.task_streams = TaskStreams(society.store, watch, society.live, state.clock)
    state.asking = Asking(society, state.clock)
    mcp = mcp_door.McpDoor(society, watch, state.clock)
    # MCP before the watch: a call that the stop ends must not return what there is of its answer.
    state.on_shutdown = list[ShutdownHook]([state.hub.shut_down, mcp.shut_down, watch.shut_down])
    state.metrics = metrics.Metrics(society, lambda: len(state.hub))
    install_error_handlers(app)
    install_openapi(app)
    for router in (*ROUTERS, auth.links):
        app.include_router(router, prefix=API)
    for router in openai.ROUTERS:
        app.include_router(router, prefix=OPENAI)
    for router in (metrics.router, auth.router, static_files.router):
        app.include_router(router)
    app.router.routes.append(Route(mcp_door.PATH, mcp, methods=[*mcp_door.METHODS], include_in_schema=False))
    state.a2a = a2a = a2a_door.A2aDoor(society, watch, state.clock, state.where.url)
    state.on_shutdown.append(a2a.push.shut_down)
    for path, methods in a2a_door.PATHS.items():
        app.router.routes.append(Route(path, a2a, methods=[*methods], include_in_schema=False))
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
