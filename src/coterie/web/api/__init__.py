"""Routes under /api/v1."""

from __future__ import annotations

from coterie.web.api import agents, artifacts, events, messages, services, threads
from coterie.web.routing import Router

ROUTERS: list[Router] = [
    messages.router,
    events.router,
    agents.router,
    threads.router,
    services.router,
    artifacts.router,
]
"""Busiest first: Starlette tries them in this order."""
