"""A society on a real server on loopback, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from coterie.clock import SystemClock
from coterie.society import Society
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.server import close, listen, port_of
from tests.web.conftest import TOKEN


@dataclass
class Served:
    url: str
    app: Starlette
    society: Society
    loop: asyncio.AbstractEventLoop

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def served(folder: Path, *, work: bool = False) -> Iterator[Served]:
    ready = threading.Event()
    found: list[Served] = []
    listeners = listen("127.0.0.1", 0)  # as `coterie serve` does: other sockets delay small packets by 40 ms
    port = port_of(listeners)
    ended = threading.Event()

    async def run() -> None:
        clock = SystemClock()
        async with Society.open(folder, work=work) as society:
            where = addresses("127.0.0.1", port)
            app = build_app(society, Access(TOKEN, society.store.info.log_id, clock), where=where, clock=clock)
            server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            serving = asyncio.create_task(server.serve(listeners))
            found.append(Served(f"http://127.0.0.1:{port}", app, society, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(ended.wait)
            await app.state.hub.shut_down(0)
            server.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(120)
        yield found[0]
    finally:
        ended.set()
        thread.join(20)
        close(listeners)
