"""A society with a scripted model on a real server, for the clients that people use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from coterie.clock import SystemClock
from coterie.keys import make_key
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.server import listen, port_of
from tests.agent.stage import Stage, stage
from tests.web.conftest import TOKEN


@dataclass
class Door:
    here: Stage
    url: str

    async def key(self, name: str = "program", agents: Any = None, doors: Any = None) -> str:
        """The token of a new key."""
        key, token = make_key(name, agents, doors)
        await self.here.society.store.add_key(key)
        return token


@asynccontextmanager
async def open_door(folder: Path, **options: Any) -> AsyncIterator[Door]:
    """`options`: those of `stage`."""
    async with stage(folder, **options) as here:
        listeners, clock = listen("127.0.0.1", 0), SystemClock()
        port = port_of(listeners)
        access = Access(TOKEN, here.society.store.info.log_id, clock)
        app = build_app(here.society, access, where=addresses("127.0.0.1", port), clock=clock)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server.serve(listeners))
        try:
            yield Door(here, f"http://127.0.0.1:{port}")
        finally:
            for shut_down in app.state.on_shutdown:
                await shut_down(0)
            server.should_exit = True
            await serving
