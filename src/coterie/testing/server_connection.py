"""Server side of an HTTP/1.1 connection that can also misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    """By lower-case name."""
    raw: bytes = field(repr=False)

    @property
    def body(self) -> Any:
        """Decoded JSON; raises ValueError if it is none."""
        return json.loads(self.raw)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body["messages"])

    @property
    def last_text(self) -> str:
        """Text parts of the last message."""
        content = self.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return "\n\n".join(part["text"] for part in content or () if part["type"] == "text")


async def receive_request(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    """Return the next request on a connection; None if the client closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ", 2)
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return ReceivedRequest(method=method, path=path, headers=headers, raw=raw)


class ServerConnection:
    """Writes a response: whole by `respond`, or streamed by `begin`, `send` or `event`, and `end`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._chunked = False
        self.reusable = False
        """The response ended correctly, so the connection can be used again."""

    async def respond(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        sent = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
        await self._write(_head(status, sent) + body)
        self.reusable = sent["content-length"] == str(len(body))

    async def begin(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Send the head of a chunked response."""
        self._chunked = True
        await self._write(_head(status, {"content-type": content_type, "transfer-encoding": "chunked"}))

    async def send(self, data: bytes) -> None:
        await self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def event(self, payload: object) -> None:
        """Send one server-sent event: a string unchanged, anything else as JSON."""
        data = payload if isinstance(payload, str) else json.dumps(payload)
        await self.send(f"data: {data}\n\n".encode("utf-8", "surrogatepass"))

    async def end(self) -> None:
        await self._write(b"0\r\n\r\n")
        self.reusable = True

    async def wait_for_close(self) -> None:
        """Send nothing until the client closes the connection."""
        await self._reader.read()

    def reset(self) -> None:
        """Reset the connection, so that the client gets an error instead of end of file."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
