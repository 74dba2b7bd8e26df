"""A server in its own process. Prints its port, and after a line of input the growth of its memory in bytes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from coterie.clock import SystemClock
from coterie.society import Society
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.server import WebServer, listen, port_of


def resident() -> int:
    """Current resident bytes. The peak of the process would include the imports."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def main(folder: str, token: str) -> None:
    async with Society.open(folder, work=False) as society:
        sockets = listen("127.0.0.1", 0)
        where = addresses("127.0.0.1", port_of(sockets))
        access = Access(token, society.store.info.log_id, SystemClock())
        server = WebServer(build_app(society, access, where=where), sockets)
        await server.start()
        before = peak = resident()
        print(port_of(sockets), flush=True)
        stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        while not stop.done():
            peak = max(peak, resident())
            await asyncio.sleep(0.01)
        print(peak - before, flush=True)
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
