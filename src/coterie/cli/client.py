"""HTTP client of a society: of the server that runs it, or of a private one that this command starts for itself."""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import quote, urlsplit

import httpx

from coterie import __version__
from coterie.agents import AGENT_ID
from coterie.cli.output import no_such_agent
from coterie.config import ServerAddress, ServerSettings, read_address, read_config
from coterie.errors import (
    HTTP_STATUS,
    ConfigError,
    Refused,
    ServerStopping,
    ServerUnusable,
    StoreOwned,
    StoreUnavailable,
)
from coterie.messages import PERSON
from coterie.sse_parser import SseParser
from coterie.stores.open import is_shared, owner_pid, require_society
from coterie.text import to_storable
from coterie.web.addresses import is_loopback

if TYPE_CHECKING:
    from coterie.society import Society

API = "/api/v1"
CONNECT_TIMEOUT_SECONDS = 2.0
RESPONSE_TIMEOUT_SECONDS = 30.0
STREAM_TIMEOUT_SECONDS = 35.0
"""Longest silence on the event stream. The server pings every 15 seconds."""
PAGE_SIZE = 200
TOKEN_FILE = "token"  # noqa: S105 - as in coterie.web.auth, whose import would load Starlette
Response = httpx.Response
PrivateMode = Literal["read", "store", "work"]
"""What a private society does: `read` changes nothing, `store` stores messages, `work` also lets agents answer."""
_STORE_ERRORS = ("store_full", "store_unavailable")


@dataclass(frozen=True, slots=True)
class ServerEvent:
    id: str | None
    kind: str
    data: Mapping[str, Any]


class Client:
    def __init__(self, address: ServerAddress, token: str, *, is_private: bool = False) -> None:
        """`is_private`: the server belongs to this command, and no agent was at work before."""
        if not token.isascii() or not token.isprintable():
            raise ServerUnusable("the token cannot be sent: it must be letters, digits and signs without spaces")
        self.is_private = is_private
        self._address = address
        self._http = httpx.AsyncClient(
            base_url=address.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(RESPONSE_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS),
            # A proxy of the environment must not see the token.
            trust_env=False,
            # A server on this machine speaks plain HTTP. Without this httpx loads all root certificates, in 40 ms.
            verify=address.url.startswith("https:") or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, **params: str | int | None) -> Any:
        given = {key: value for key, value in params.items() if value is not None}
        return await self._request("GET", path, params=given)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._request("POST", path, **_json({} if body is None else body))

    async def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._request("PATCH", path, **_json(body))

    async def delete(self, path: str) -> Any:
        return await self._request("DELETE", path)

    async def upload(self, file: Path) -> str:
        """Store the file as an artifact and return its reference."""
        with file.open("rb") as opened:
            artifact = await self._request("POST", "/artifacts", files={"file": (to_storable(file.name), opened)})
        return str(artifact["artifactRef"])

    async def pages(self, path: str, **params: str | int | None) -> AsyncGenerator[Mapping[str, Any], None]:
        """All pages of a list that continues with `after`."""
        after = None
        while True:
            page = await self.get(path, **{"limit": PAGE_SIZE, "after": after} | params)
            yield page
            after = page["next"]
            if after is None:
                return

    async def agents(self) -> Sequence[Mapping[str, Any]]:
        """All agents by id, without the person."""
        return [agent async for page in self.pages("/agents") for agent in page["items"]]

    async def agent(self, agent_id: str) -> Mapping[str, Any]:
        """One agent; `Refused` with a suggestion if there is none of that name."""
        with suppress(Refused):
            if AGENT_ID.fullmatch(agent_id):
                agent: Mapping[str, Any] = await self.get(f"/agents/{quote(agent_id)}")
                return agent
        raise Refused("unknown_agent", no_such_agent(agent_id, [agent["id"] for agent in await self.agents()]))

    async def check_recipient(self, name: str) -> None:
        """`Refused` with a suggestion if neither an agent nor the person has that name."""
        if name == PERSON:
            return
        try:
            await self.agent(name)
        except Refused:
            known = sorted([PERSON, *(agent["id"] for agent in await self.agents())])
            raise Refused("unknown_recipient", no_such_agent(name, known)) from None

    async def events(self, after: str | None = None) -> AsyncGenerator[ServerEvent, None]:
        """Events behind the one with id `after`, until the server or the connection ends."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        timeout = httpx.Timeout(STREAM_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS)
        parser = SseParser()
        try:
            async with self._http.stream("GET", f"{API}/events", headers=headers, timeout=timeout) as response:
                if response.is_error:
                    await response.aread()
                self._check_response(response)
                async for chunk in response.aiter_bytes():
                    for event in parser.feed(chunk):
                        yield ServerEvent(event.id, event.type, json.loads(event.data))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    @asynccontextmanager
    async def open_stream(self, method: str, path: str, *, silence: float, **request: Any) -> AsyncIterator[Response]:
        """A response of any address of the server, not read yet. `silence`: the longest one, in seconds.

        `ServerUnusable` if the connection is lost, also while the response is read.
        """
        timeout = httpx.Timeout(silence, connect=CONNECT_TIMEOUT_SECONDS)
        try:
            async with self._http.stream(method, path, timeout=timeout, **request) as response:
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    async def _request(self, method: str, path: str, **request: Any) -> Any:
        try:
            response = await self._http.request(method, API + path, **request)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        self._check_response(response)
        return response.json() if response.content else None

    def _unreachable(self, error: httpx.TransportError) -> ServerUnusable:
        reason = "does not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
        return ServerUnusable(
            f"process {self._address.pid} runs this society, but its server at {self._address.url} {reason}:"
            " try again, or stop that process"
        )

    def _check_response(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        if response.status_code == 401:
            raise ServerUnusable(
                "the running server does not accept this token: give the one it was started with by --token or"
                " COTERIE_TOKEN"
            )
        try:
            problem = response.json()
            code, detail, incident = str(problem["code"]), str(problem["detail"]), problem.get("id")
        except (ValueError, KeyError, TypeError):
            code, detail = str(response.status_code), "it gave no reason: it may be another program than Coterie"
            incident = None
        if code == "stopping":
            raise ServerStopping(detail)
        if code in HTTP_STATUS:
            raise Refused(code, detail)
        if code in _STORE_ERRORS:
            raise StoreUnavailable(detail, full=code == "store_full")
        if code == "internal_error":
            log = f"its log has the details under {incident}"
            hint = "run it again with COTERIE_DEBUG=1 to see where" if self.is_private else log
            raise ServerUnusable(f"an unexpected error in the server: {hint}")
        raise ServerUnusable(f"the running server refused: {detail} ({code})")


def _json(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a request with this body. Bytes of the command line that are no UTF-8 are replaced."""
    content = to_storable(json.dumps(body, ensure_ascii=False)).encode()
    return {"content": content, "headers": {"Content-Type": "application/json"}}


# Find or start the society


@asynccontextmanager
async def connect(folder: Path, token: str | None = None, *, private: PrivateMode = "store") -> AsyncIterator[Client]:
    """Connect to the server that runs the society, or else start a private one until the end of the block.

    With `read` the private one also runs beside a process that commands cannot talk to: a program without a server, a
    server that starts or stops, or one of another version.
    """
    try:
        client = find_server(folder, token)
    except (StoreOwned, ServerUnusable):
        if private != "read":
            raise
        client = None
    if client is not None:
        async with client:
            yield client
        return
    async with _open_society(folder, private) as society, _serve_privately(society) as client:
        try:
            async with client:
                yield client
        except ServerUnusable:
            if society.broken.done():
                raise society.broken.result() from None
            raise


@asynccontextmanager
async def _open_society(folder: Path, mode: PrivateMode) -> AsyncIterator[Society]:
    from coterie.society import Society

    if mode != "work":
        opening = Society.open_read_only(folder) if mode == "read" else Society.open_offline(folder)
        async with opening as society:
            yield society
        return
    society = await Society.start(folder, files="first")
    try:
        yield society
    finally:
        # The end of a command is no stop of the society: delayed messages keep their time.
        await society.stop(quick=True)


@asynccontextmanager
async def _serve_privately(society: Society) -> AsyncIterator[Client]:
    """Serve on a free loopback port, with a token that no other process learns."""
    from coterie.cli.server import SocietyServer

    token = secrets.token_urlsafe()
    server = SocietyServer.bind(ServerSettings(port=0), token)
    await server.start(society, token)
    try:
        yield Client(ServerAddress(url=server.addresses.local, pid=os.getpid()), token, is_private=True)
    finally:
        await server.end_streams()
        await server.stop()


def find_server(folder: Path, token: str | None = None) -> Client | None:
    """Client of the server that runs the society in `folder`; None if no process runs it.

    The server leaves its address in the society's folder, and its token beside it.
    """
    society = require_society(folder)
    pid, address = owner_pid(society), read_address(society.data)
    if pid is None and not (address and _is_shared(folder) and _listens(address)):
        return None
    if address is None or pid not in (None, address.pid):
        # Another command, a program, or a server that does not listen yet.
        remedy = "end it, and run coterie serve, which several commands can use at once"
        raise StoreOwned(folder, pid if pid and pid > 0 else None, remedy)
    _check_address(address)
    return Client(address, token or address.token or _read_token(society.data))


def _is_shared(folder: Path) -> bool:
    """True if PostgreSQL keeps the society: then no process owns the folder, and a server may run all the same."""
    with suppress(ConfigError):
        return is_shared(read_config(folder))
    return False


def _listens(address: ServerAddress) -> bool:
    """False for an address that a crashed server left behind, even if its process id is in use again."""
    url = urlsplit(address.url)
    try:
        os.kill(address.pid, 0)
        socket.create_connection((url.hostname or "", url.port or 80), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _check_address(address: ServerAddress) -> None:
    host = urlsplit(address.url).hostname or ""
    if not is_loopback(host):
        raise ServerUnusable(
            f"the server listens on {host} only, which commands do not use: set server.host to 127.0.0.1 or 0.0.0.0"
        )
    if address.version.split(".")[:2] != __version__.split(".")[:2]:
        raise ServerUnusable(
            f"the server is coterie {address.version}, this command is coterie {__version__}: restart the server"
        )


def _read_token(data: Path) -> str:
    path = data / TOKEN_FILE
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        raise ServerUnusable(
            f"the token of the running server is not in {path}: give it with --token or COTERIE_TOKEN"
        ) from None
