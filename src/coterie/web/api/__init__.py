"""Routes under /api/v1."""

from __future__ import annotations

from coterie.web import sse
from coterie.web.api import agents, artifacts, definitions, keys, messages, services, storage, tasks, threads
from coterie.web.routing import Router

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
]
"""Busiest first: Starlette tries them in this order."""
