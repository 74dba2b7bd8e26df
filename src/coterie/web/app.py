"""The application: routes put together behind the gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI

from coterie import __version__
from coterie.clock import Clock, SystemClock
from coterie.society import Society
from coterie.web import auth, errors, metrics, static_files
from coterie.web.addresses import Addresses, ClientAddresses, addresses
from coterie.web.api import ROUTERS
from coterie.web.auth import Access
from coterie.web.metrics import HttpMeter
from coterie.web.middleware import Gate
from coterie.web.sse import Hub
from coterie.web.uploads import Uploads

API = "/api/v1"
LastWords = Callable[[int], Awaitable[None]]
"""Called on a graceful stop, while the store is still open, with the number of messages that went out early."""


def build_app(
    society: Society,
    door: Access,
    *,
    where: Addresses | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """`where`: the addresses it answers under, if other than the configured ones."""
    server = society.config.server
    app = FastAPI(
        title="Coterie",
        version=__version__,
        summary="A society of LLM agents that people talk to.",
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    state = app.state
    state.society, state.access = society, door
    state.where = where or addresses(server.host, server.port, server.public_url, server.allowed_hosts)
    state.health, state.meter = metrics.Health(society.store, society.disk), HttpMeter()
    state.uploads = Uploads(society.artifacts.max_file_bytes)
    state.on_shutdown = list[LastWords]()
    state.clock = clock or SystemClock()
    state.hub = Hub(society, society.live, state.clock)
    state.on_shutdown.append(state.hub.shut)
    state.stream_clients = lambda: len(state.hub)
    state.numbers = metrics.Numbers(society, state.meter, lambda: int(state.stream_clients()))
    errors.install(app)
    # Routers are asked one after the other, so the busy ones come first.
    for router in (*ROUTERS, auth.links):
        app.include_router(router, prefix=API)
    for router in (metrics.router, auth.router, static_files.router):
        app.include_router(router)
    app.add_middleware(
        Gate,
        access=door,
        where=state.where,
        clock=state.clock,
        health=state.health,
        meter=state.meter,
        disk=society.disk,
        clients=ClientAddresses(server.trusted_proxies),
    )
    return app
