"""A proxy between a society and PostgreSQL that drops answers and connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Self
from urllib.parse import parse_qs, quote, urlsplit

from psycopg.conninfo import conninfo_to_dict

COMMIT, LOGGED = b"COMMIT\0", b"INSERT INTO events"
"""The end of a batch, and the statement of a batch with changes. Heartbeats have no events and are not cut."""


class Proxy:
    """Runs in its own thread, independent of the test's event loop."""

    def __init__(self, server: str, seed: int = 0) -> None:
        wanted = conninfo_to_dict(server)
        self._upstream = (str(wanted.get("host") or "127.0.0.1"), int(str(wanted.get("port") or 5432)))
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0.0
        """Share of commits whose answer is lost or which do not arrive."""
        self.drops_data = False
        """Drop all data in both directions."""
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)  # in the proxy thread, which owns the connections
        self._run(self._reset_connections())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url(self, url: str) -> str:
        """Return `url` with the address of this proxy."""
        parts = urlsplit(url)
        kept = {name: values[0] for name, values in parse_qs(parts.query).items() if name not in ("host", "port")}
        query = "&".join(f"{name}={quote(value)}" for name, value in kept.items())
        user = parts.netloc.rpartition("@")[0] or "postgres"
        return f"postgresql://{user.rstrip(':')}@127.0.0.1:{self.port}{parts.path}?{query}"

    def heal(self) -> None:
        """Reset all connections and pass data again."""
        self.drops_data = False
        self._run(self._reset_connections())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _reset_connections(self) -> None:
        for writer in [*self._open]:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            upstream_reader, upstream_writer = await self._connect_upstream()
            self._open |= {writer, upstream_writer}
            loses_answer = asyncio.Event()
            tasks = [
                asyncio.ensure_future(self._forward_requests(reader, upstream_writer, loses_answer)),
                asyncio.ensure_future(self._forward_answers(upstream_reader, writer, loses_answer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (writer, upstream_writer):
                self._open.discard(end)
                end.transport.abort()

    async def _connect_upstream(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._upstream
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def _forward_requests(
        self, reader: asyncio.StreamReader, upstream_writer: asyncio.StreamWriter, loses_answer: asyncio.Event
    ) -> None:
        while data := await reader.read(1 << 16):
            if self.drops_data:
                self.seen["dropped"] += 1
                continue
            if data.endswith(COMMIT) and LOGGED in data and self._rng.random() < self.cuts:
                if self._rng.random() < 0.5:
                    self.seen["commits that never arrived"] += 1
                    return
                loses_answer.set()
            upstream_writer.write(data)
            await upstream_writer.drain()

    async def _forward_answers(
        self, upstream_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, loses_answer: asyncio.Event
    ) -> None:
        while data := await upstream_reader.read(1 << 16):
            if loses_answer.is_set():  # committed, and the answer is lost
                self.seen["answers that were lost"] += 1
                return
            if self.drops_data:
                self.seen["dropped"] += 1
                continue
            writer.write(data)
            await writer.drain()
