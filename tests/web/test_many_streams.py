"""Many clients of one server: those that read get every event, those that do not read disturb no other client."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.web.served import Served, served

CLIENTS, STALLED = 200, 40
MESSAGES = 80
MAX_GROWTH_BYTES = 100 << 20
"""The server buffers at most 1 MB for each of 40 clients that read nothing. The other clients buffer 128 KB here."""
CLIENT_BUFFER_BYTES = 64 << 10


def rss() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def connect(server: Served, last: str | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=CLIENT_BUFFER_BYTES)
    lines = ["GET /api/v1/events HTTP/1.1", f"Host: {host}:{port}"]
    lines += [f"{name}: {value}" for name, value in server.headers.items()]
    lines += [f"Last-Event-ID: {last}"] if last else []
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    return reader, writer


async def read_messages(reader: asyncio.StreamReader, into: list[str], count: int) -> str:
    """Append the first word of each message until `into` has `count`; return the id of the last event."""
    last = ""
    while len(into) < count:
        line = (await reader.readline()).decode().rstrip()
        if line.startswith("id: "):
            last = line[4:]
        elif line.startswith("data: "):
            data: Any = json.loads(line[6:])
            if "message" in data:
                into.append(data["message"]["payload"]["text"].split()[0])
    return last


async def until_live(server: Served, count: int) -> None:
    async with asyncio.timeout(180):
        while sum(client.is_live for client in tuple(server.app.state.hub.clients)) < count:
            await asyncio.sleep(0.01)


async def send(server: Served, texts: list[str]) -> None:
    async def run() -> None:
        for text in texts:
            await server.society.send(to="user", sender="assistant", text=text)

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), server.loop))


@pytest.mark.slow
async def test_clients_get_every_event_while_forty_of_two_hundred_do_not_read(tmp_path: Path) -> None:
    with served(tmp_path / "home") as server:
        streams = [await connect(server) for _ in range(CLIENTS)]
        await until_live(server, CLIENTS)
        for _, writer in streams[:STALLED]:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = rss()
        received: list[list[str]] = [[] for _ in streams[STALLED:]]
        texts = [f"{number} " + "x" * 16_000 for number in range(MESSAGES)]
        readers = [
            read_messages(reader, into, MESSAGES) for (reader, _), into in zip(streams[STALLED:], received, strict=True)
        ]
        async with asyncio.timeout(180):
            await asyncio.gather(send(server, texts), *readers)
        grown = rss() - before
        for _, writer in streams:
            writer.transport.abort()
    assert all(words == [text.split()[0] for text in texts] for words in received)
    assert grown < MAX_GROWTH_BYTES


@pytest.mark.slow
async def test_a_client_that_reconnects_twenty_times_gets_every_message_once(tmp_path: Path) -> None:
    with served(tmp_path / "home") as server:
        reader, writer = await connect(server)
        await until_live(server, 1)
        texts = [f"m{number}" for number in range(1000)]
        sending = asyncio.create_task(send(server, texts))
        received: list[str] = []
        async with asyncio.timeout(180):
            for count in range(50, 1001, 50):
                last = await read_messages(reader, received, count)
                writer.transport.abort()
                reader, writer = await connect(server, last)
            await sending
        writer.transport.abort()
    assert received == texts
