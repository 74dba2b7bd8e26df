"""Discovery of local model servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from coterie.llm.discovery import LOCAL_SERVERS, DiscoveredService, discover_local_servers

MODELS = json.dumps({"data": [{"id": "small"}, {"id": "large\nnext line"}, {"id": 7}]})


@asynccontextmanager
async def listening(answer: bytes | None) -> AsyncIterator[DiscoveredService]:
    """A server that sends this answer to every request; None: it sends nothing."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        if answer is None:
            await gone.wait()
        else:
            writer.write(answer)
            await writer.drain()
        writer.close()

    asked: list[bytes] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield replace(LOCAL_SERVERS[0], base_url=f"http://127.0.0.1:{port}/v1")
        assert asked == [b"GET /v1/models HTTP/1.1"]
    finally:
        gone.set()
        server.close()
        await server.wait_closed()


def response(body: str, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nconnection: close\r\n{more}content-length: {len(body)}\r\n\r\n{body}".encode()


async def test_a_local_server_is_discovered_with_its_models() -> None:
    async with listening(response(MODELS)) as server:
        (found,) = await discover_local_servers([server])
        assert found == replace(server, models=("small", "large next line"))
        assert found.to_dict()["apiKey"] is None
        assert found.to_dict()["capabilities"] is None, "only a health check knows them"


@pytest.mark.parametrize(
    "answer",
    [
        response("<html>", "200 OK"),
        response("[]"),
        response('{"data": 7}'),
        response(MODELS, "401 Unauthorized"),
        response("", "302 Found", "location: http://127.0.0.1:1/v1/models\r\n"),
        response("x" * 2_000_000),
        b"\x00\x01\x02\r\n\r\n",
    ],
)
async def test_another_program_on_the_port_is_not_discovered(answer: bytes) -> None:
    async with listening(answer) as server:
        assert await discover_local_servers([server]) == []


async def test_a_silent_server_is_skipped_after_the_timeout() -> None:
    async with listening(None) as silent, listening(response(MODELS)) as server:
        assert [found.base_url for found in await discover_local_servers([silent, server], timeout_seconds=0.5)] == [
            server.base_url
        ]


def test_the_default_ports_of_common_servers_are_probed() -> None:
    assert {server.base_url.split(":")[2] for server in LOCAL_SERVERS} == {"11434/v1", "8080/v1", "1234/v1", "8000/v1"}


def test_only_this_machine_is_probed() -> None:
    assert all(server.base_url.startswith("http://127.0.0.1:") for server in LOCAL_SERVERS)
