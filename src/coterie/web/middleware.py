"""Security checks before every route: host, credentials, origin, rate limits, body type and size; response headers.

Plain ASGI middleware around the whole application, so that no route can miss a check. It also finds out who calls: the
owner may use everything, a program with a key only the doors of its key. `auth.CallerDep` gives routes the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.clock import Clock
from coterie.config import DoorSettings
from coterie.errors import StoreError
from coterie.files import DiskMonitor
from coterie.keys import TOKEN_PREFIX, USE_INTERVAL, Door, Key, KeyStore, token_digest
from coterie.rate_limit import RateLimiter
from coterie.web.addresses import Addresses, ClientAddresses, client_key
from coterie.web.auth import OWNER, Access, Caller
from coterie.web.connections import AUTHENTICATED
from coterie.web.errors import RequestRejected, internal_error
from coterie.web.metrics import Health

Credential = Literal["bearer", "cookie"]
Observe = Callable[[Scope, int, float], None]
"""Called after each request with its status and its duration in seconds."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    "manifest-src 'self'; connect-src 'self'; frame-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; require-trusted-types-for 'script'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)
"""On every response, unless the route sets the header itself."""
HEADER_NAMES = frozenset(name for name, _ in HEADERS)
HEALTH = frozenset({"/healthz", "/readyz"})
SESSION = "/session"
PUBLIC = HEALTH | {"/", SESSION, "/sw.js"}
UPLOADS = "/api/v1/artifacts"
EVENTS = "/api/v1/events"
STREAMS = frozenset({EVENTS, "/mcp"})
"""Addresses whose GET is a stream of events, which a page of another site must not open."""
STORED_INPUT = frozenset({UPLOADS, "/api/v1/messages"})
"""Requests that need space on the disk, besides those through doors."""
DOOR_PATHS: dict[Door, tuple[str, ...]] = {
    "openai": ("/v1",),
    "mcp": ("/mcp",),
    "a2a": ("/a2a", "/.well-known/agent-card.json"),
}
"""The addresses of each door, and all below them."""
A2A_JSON = b"application/a2a+json"
"""The media type of A2A's HTTP binding."""
MAX_BODY_BYTES = 2 << 20
MAX_DOOR_BODY_BYTES = 32 << 20
"""Through a door files come inside the JSON."""
MAX_SESSION_BYTES = 4 << 10
"""The body of an unauthenticated request: one code."""
AUTHENTICATED_RATE = 20_000.0
"""Requests per second, and burst, of one authenticated client: more than the society can answer."""
UNAUTHENTICATED_RATE, UNAUTHENTICATED_BURST = 200.0, 1_000.0
"""Enough for a page with all its files, many times over."""


class SecurityMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        where: Addresses,
        clock: Clock,
        health: Health,
        observe: Observe,
        disk: DiskMonitor,
        keys: KeyStore,
        doors: Callable[[], DoorSettings],
        clients: ClientAddresses | None = None,
    ) -> None:
        """`doors`: which doors are open now."""
        self._app, self._access, self._where, self._health = app, access, where, health
        self._clock, self._observe, self._disk = clock, observe, disk
        self._keys, self._doors = keys, doors
        self._clients = clients or ClientAddresses()
        self._authenticated = RateLimiter(clock, burst=AUTHENTICATED_RATE, per_second=AUTHENTICATED_RATE)
        self._unauthenticated = RateLimiter(clock, burst=UNAUTHENTICATED_BURST, per_second=UNAUTHENTICATED_RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        started, status = self._clock.monotonic(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = message["headers"]
                names = [name for name, _ in sent]
                message["headers"] = [
                    *sent,
                    *(HEADERS if HEADER_NAMES.isdisjoint(names) else [h for h in HEADERS if h[0] not in names]),
                ]
            await send(message)

        try:
            receive = await self._check(scope, receive)
            await self._app(scope, receive, send_with_headers)
        except RequestRejected as rejected:
            await rejected.response(scope["path"])(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass
        except Exception as error:
            response = internal_error(error, scope["path"])
            if not status:
                await response(scope, receive, send_with_headers)
        finally:
            self._observe(scope, status, self._clock.monotonic() - started)

    async def _check(self, scope: Scope, receive: Receive) -> Receive:
        """The function to read the body with; raises `RequestRejected`."""
        headers = dict(scope["headers"])
        path, method = scope["path"], scope["method"]
        self._check_host(scope, headers)
        self._clients.resolve(scope)
        if self._health.draining and path not in HEALTH:
            raise RequestRejected(503, "stopping", "the society is stopping: try again shortly", headers=_CLOSE)
        credential, caller = self._credential(scope["headers"]), OWNER
        if credential is None and (used := await self._find_key(headers)):
            credential, caller = "bearer", Caller.of(used)
        if connection := scope.get("extensions", {}).get(AUTHENTICATED):
            connection["set"](credential is not None)
        key = client_key(scope)
        is_public = path in PUBLIC or path.startswith("/static/")
        # The secret is checked first: failed attempts from an address never lock out its owner.
        if credential:
            _limit_rate(self._authenticated.try_acquire(key))
        elif not is_public and self._has_secret(headers):
            _limit_rate(self._access.guesses.try_acquire(key))
        if not credential and not self._may_have_code(scope):
            _limit_rate(self._unauthenticated.try_acquire(key))
        if not credential and not is_public:
            detail = (
                "this needs the token of the society, which data/token has, or a key: coterie open makes a link for a"
                " browser, coterie keys add a key for a program"
            )
            raise RequestRejected(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})
        door = door_of(path)
        if credential and not is_public:
            self._check_door(caller, door)
            scope.setdefault("state", {})["caller"] = caller
        if (method not in ("GET", "HEAD") or path in STREAMS) and self._is_foreign(headers, method, credential):
            raise RequestRejected(403, "foreign_origin", "the request came from a page of another site")
        if method in ("GET", "HEAD"):
            return receive
        if method == "POST" and (door or path in STORED_INPUT) and self._disk.is_low():
            raise RequestRejected(507, "store_full", self._disk.status_message)
        return _check_body(headers, path, method, receive)

    def _check_host(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        known = headers.get(b"host", b"").lower() in self._where.hosts
        if known and [name for name, _ in scope["headers"]].count(b"host") == 1:
            return
        detail = "this host name is not configured: add it to server.allowed_hosts in coterie.toml"
        raise RequestRejected(421, "unknown_host", detail)

    def _credential(self, headers: Iterable[tuple[bytes, bytes]]) -> Credential | None:
        """How the request authenticates; None: it does not."""
        by_cookie = False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                if scheme.lower() == b"bearer" and self._access.is_token(token.strip()):
                    return "bearer"
            elif name == b"cookie":
                # All cookies of that name: a server on another port of the same host can set a second one.
                by_cookie = by_cookie or any(map(self._access.is_cookie, self._cookies(value)))
        return "cookie" if by_cookie else None

    async def _find_key(self, headers: dict[bytes, bytes]) -> Key | None:
        """The key that the request sends, unless it is unknown or revoked. Stores that it is used, once a minute."""
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not (token := token.strip()).startswith(TOKEN_PREFIX):
            return None
        try:
            key = await self._keys.find_key(token_digest(token))
        except StoreError as error:
            raise RequestRejected(503, "store_unavailable", str(error)) from error
        if key and (key.used_at is None or self._clock.now() - key.used_at >= USE_INTERVAL):
            with suppress(StoreError):  # the request does not depend on it
                await self._keys.mark_key_used(key.name)
        return key

    def _check_door(self, caller: Caller, door: Door | None) -> None:
        if not caller.is_owner and door not in caller.doors:
            allowed = ", ".join(sorted(caller.doors))
            detail = f"the key {caller.key} is for other addresses: its doors are {allowed}"
            raise RequestRejected(403, "key_not_allowed", detail)
        if door and not getattr(self._doors(), door):
            detail = f"this door is switched off: the owner can set doors.{door} = true in coterie.toml"
            raise RequestRejected(404, "door_closed", detail)

    def _cookies(self, line: bytes) -> Iterator[bytes]:
        """The values of our cookie in a `Cookie` header."""
        cookie_name = self._access.cookie_name.encode()
        for pair in line.split(b";"):
            name, _, value = pair.strip().partition(b"=")
            if name == cookie_name:
                yield value

    def _has_secret(self, headers: dict[bytes, bytes]) -> bool:
        return b"authorization" in headers or any(True for _ in self._cookies(headers.get(b"cookie", b"")))

    def _may_have_code(self, scope: Scope) -> bool:
        """True if the request's one-time code is valid, or is still unread in its body."""
        if scope["method"] == "POST" and scope["path"] == SESSION:
            return True
        if scope["path"] != "/" or b"code=" not in scope["query_string"]:
            return False
        codes = parse_qs(scope["query_string"].decode("latin-1")).get("code", [])
        return any(map(self._access.has_code, codes))

    def _is_foreign(self, headers: dict[bytes, bytes], method: str, credential: Credential | None) -> bool:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None and origin not in self._where.origins:
            return True
        if site not in (None, b"same-origin", b"none"):
            return True
        if credential != "cookie" or origin is not None or site == b"same-origin":
            return False
        # Browsers send cookies with every request, so they must also name our page as the source. On plain http beyond
        # loopback they omit the source, but only for reads of the page's own server; writes always have an origin.
        omitted = site is None and method == "GET" and headers[b"host"].lower() not in self._where.trusted
        return not omitted


_CLOSE = {"Connection": "close"}


def door_of(path: str) -> Door | None:
    """The door that an address belongs to."""
    for door, beginnings in DOOR_PATHS.items():
        if path in beginnings or path.startswith(tuple(f"{beginning}/" for beginning in beginnings)):
            return door
    return None


def _limit_rate(wait_seconds: float) -> None:
    if wait_seconds > 0:
        wait = str(math.ceil(wait_seconds))
        detail = f"too many requests: wait {wait} s"
        raise RequestRejected(429, "too_many_requests", detail, headers={"Retry-After": wait})


def _check_body(headers: dict[bytes, bytes], path: str, method: str, receive: Receive) -> Receive:
    is_chunked = b"transfer-encoding" in headers
    length = int(headers.get(b"content-length", b"0"))
    if not is_chunked and not length:
        return receive
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    is_upload = path == UPLOADS and method == "POST"
    expected = b"multipart/form-data" if is_upload else b"application/json"
    is_a2a = media_type == A2A_JSON and door_of(path) == "a2a"
    if media_type != expected and not is_a2a:
        raise RequestRejected(415, "unsupported_media_type", f"the body must be {expected.decode()}")
    if is_upload:
        return receive  # `Uploads` has its own limit
    limit = MAX_SESSION_BYTES if path == SESSION else MAX_DOOR_BODY_BYTES if door_of(path) else MAX_BODY_BYTES
    if length > limit:
        raise _too_large(limit)
    return _limited(receive, limit) if is_chunked else receive


def _too_large(limit: int) -> RequestRejected:
    detail = f"the body is larger than {limit:,} bytes, the most allowed: upload files to {UPLOADS}"
    return RequestRejected(413, "body_too_large", detail)


def _limited(receive: Receive, limit: int) -> Receive:
    size = 0

    async def receive_limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(limit)
        return message

    return receive_limited
