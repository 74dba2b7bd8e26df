"""The server's end of one HTTP/1.1 exchange, for servers that must be able to misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    """By lower-case name."""
    raw: bytes = field(repr=False)

    @property
    def body(self) -> Any:
        """The JSON in it; ValueError where there is none."""
        return json.loads(self.raw)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body["messages"])

    @property
    def last_text(self) -> str:
        """What was said last, text parts only."""
        content = self.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return "\n\n".join(part["text"] for part in content or () if part["type"] == "text")


async def receive(reader: asyncio.StreamReader) -> Received | None:
    """The next request on a connection; None when the client has gone."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ", 2)
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method=method, path=path, headers=headers, raw=raw)


class Wire:
    """What a reply is written to: a whole response at once, or a head and then pieces, in whatever order and pace."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._chunked = False
        self.reusable = False
        """The exchange ended as HTTP wants it: the connection can carry another."""

    async def respond(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        given = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
        await self._write(_head(status, given) + body)
        self.reusable = given["content-length"] == str(len(body))

    async def begin(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Head of a chunked response."""
        self._chunked = True
        await self._write(_head(status, {"content-type": content_type, "transfer-encoding": "chunked"}))

    async def send(self, data: bytes) -> None:
        await self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def event(self, payload: object) -> None:
        """One server-sent event; a string goes out as it is, anything else as JSON."""
        data = payload if isinstance(payload, str) else json.dumps(payload)
        await self.send(f"data: {data}\n\n".encode("utf-8", "surrogatepass"))

    async def end(self) -> None:
        await self._write(b"0\r\n\r\n")
        self.reusable = True

    async def silence(self) -> None:
        """Say nothing until the client gives up."""
        await self._reader.read()

    def reset(self) -> None:
        """Break the connection so that the client gets an error and no end of file."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
