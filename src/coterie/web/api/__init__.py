"""The API, one noun to a file."""

from __future__ import annotations

from fastapi import APIRouter

from coterie.web.api import (
    agents,
    artifacts,
    dead_letters,
    delayed,
    events,
    messages,
    overview,
    services,
    snapshot,
    society,
    threads,
)

ROUTERS: list[APIRouter] = [
    messages.router,
    events.router,
    snapshot.router,
    threads.router,
    agents.router,
    delayed.router,
    overview.router,
    dead_letters.router,
    services.router,
    society.router,
    artifacts.router,
]
"""Mounted under /api/v1, in this order: what is asked for most stands first."""
