"""Stands between a society and its PostgreSQL, on loopback, and does what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from psycopg.conninfo import conninfo_to_dict

COMMIT, LOGGED = b"COMMIT\0", b"INSERT INTO events"
"""Of a batch that has written something, and of nothing else: signs of life are told again anyway."""
"""How the question ends that is answered with what cannot be taken back."""


class Proxy:
    """In a thread of its own, so that it goes on whatever the test does."""

    def __init__(self, server: str, seed: int = 0) -> None:
        wanted = conninfo_to_dict(server)
        self._upstream = (str(wanted.get("host") or "127.0.0.1"), int(str(wanted.get("port") or 5432)))
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0.0
        """How many commits lose their answer, or never arrive."""
        self.swallows = False
        """Whatever anybody says, nobody hears it."""
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)  # here it would meet callers who are leaving there
        self._run(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url(self, url: str) -> str:
        """The way through here to what `url` names."""
        parts = urlsplit(url)
        kept = {name: values[0] for name, values in parse_qs(parts.query).items() if name not in ("host", "port")}
        query = "&".join(f"{name}={quote(value)}" for name, value in kept.items())
        user = parts.netloc.rpartition("@")[0] or "postgres"
        return f"postgresql://{user.rstrip(':')}@127.0.0.1:{self.port}{parts.path}?{query}"

    def heal(self) -> None:
        """Whoever was swallowed up finds the line dead, and a new one works."""
        self.swallows = False
        self._run(self._hang_up())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _hang_up(self) -> None:
        for writer in [*self._open]:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            theirs, ours = await self._call_up()
            self._open |= {writer, ours}
            silent = asyncio.Event()
            tasks = [
                asyncio.ensure_future(self._ask(reader, ours, silent)),
                asyncio.ensure_future(self._answer(theirs, writer, silent)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (writer, ours):
                self._open.discard(end)
                end.transport.abort()

    async def _call_up(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._upstream
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def _ask(self, reader: asyncio.StreamReader, ours: asyncio.StreamWriter, silent: asyncio.Event) -> None:
        while data := await reader.read(1 << 16):
            if self.swallows:
                self.seen["swallowed"] += 1
                continue
            if data.endswith(COMMIT) and LOGGED in data and self._rng.random() < self.cuts:
                if self._rng.random() < 0.5:
                    self.seen["commits that never arrived"] += 1
                    return
                silent.set()
            ours.write(data)
            await ours.drain()

    async def _answer(self, theirs: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event) -> None:
        while data := await theirs.read(1 << 16):
            if silent.is_set():  # it is done, and nobody is told
                self.seen["answers that were lost"] += 1
                return
            if self.swallows:
                self.seen["swallowed"] += 1
                continue
            writer.write(data)
            await writer.drain()
