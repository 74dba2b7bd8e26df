"""The gate in front of every route: who asks, under which name, from which page, and how much of it.

Plain ASGI around the whole application, so that no route can forget any of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.clock import Clock
from coterie.files import DiskMonitor
from coterie.rate_limit import RateLimiter
from coterie.web.addresses import Addresses, ClientAddresses, budget_of
from coterie.web.auth import Access
from coterie.web.connections import KNOWN
from coterie.web.errors import Rejected, as_response, unexpected
from coterie.web.metrics import Health, HttpMeter

Who = Literal["bearer", "cookie"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    "connect-src 'self'; frame-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; "
    "require-trusted-types-for 'script'"
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
"""On every answer; one that a route sets itself stands."""
OURS = frozenset(name for name, _ in HEADERS)
HEALTH = frozenset({"/healthz", "/readyz"})
SESSION = "/session"
PUBLIC = HEALTH | {"/", SESSION}
UPLOADS = "/api/v1/artifacts"
EVENTS = "/api/v1/events"
INPUT = frozenset({UPLOADS, "/api/v1/messages"})
"""What comes in from outside and stays."""
BODY_BYTES = 2 << 20
SESSION_BYTES = 4 << 10
"""The body of a request that anybody may send: one code."""
RATE = 20_000.0
"""Requests a second, and at once, of one client who has the token: more than the society can answer."""
STRANGERS_RATE, STRANGERS_BURST = 200.0, 1_000.0
"""Of one who has not: a page with all its files, many times over."""


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        where: Addresses,
        clock: Clock,
        health: Health,
        meter: HttpMeter,
        disk: DiskMonitor,
        clients: ClientAddresses | None = None,
    ) -> None:
        self._app, self._access, self._where, self._health = app, access, where, health
        self._clock, self._meter, self._disk = clock, meter, disk
        self._clients = clients or ClientAddresses()
        self._rates = RateLimiter(clock, burst=RATE, per_second=RATE)
        self._strangers = RateLimiter(clock, burst=STRANGERS_BURST, per_second=STRANGERS_RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        began, status = self._clock.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = message["headers"]
                message["headers"] = [*own, *(HEADERS if OURS.isdisjoint([h[0] for h in own]) else _missing(own))]
            await send(message)

        try:
            receive = self._admit(scope, receive)
            await self._app(scope, receive, answer)
        except Rejected as rejection:
            await as_response(rejection)(scope, receive, answer)
        except ClientDisconnect:
            pass  # nobody is there to be told
        except Exception as error:
            told = unexpected(error)
            if not status:
                await told(scope, receive, answer)
        finally:
            self._meter.note(scope, status, self._clock.monotonic() - began)

    def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """`Rejected`, or the way to read the body."""
        headers = dict(scope["headers"])
        path, method = scope["path"], scope["method"]
        self._check_host(scope, headers)
        self._clients.resolve(scope)
        if self._health.draining and path not in HEALTH:
            raise Rejected(503, "stopping", "the society is stopping: try again shortly", headers=_CLOSE)
        who = self._who(scope["headers"])
        if connection := scope.get("extensions", {}).get(KNOWN):
            connection["set"](who is not None)
        budget = budget_of(scope)
        is_public = path in PUBLIC or path.startswith("/static/")
        # The secret is compared first: what others did from the same address cannot refuse a right one.
        if who:
            _hold_back(self._rates.try_acquire(budget))
        elif not is_public and self._brings_secret(headers):
            _hold_back(self._access.guesses.try_acquire(budget))
        if not who and not self._may_bring_code(scope):
            _hold_back(self._strangers.try_acquire(budget))
        if not who and not is_public:
            sentence = "this needs the token of the society: data/token has it, coterie open makes a link for a browser"
            raise Rejected(401, "unauthorized", sentence, headers={"WWW-Authenticate": "Bearer"})
        if (method not in ("GET", "HEAD") or path == EVENTS) and self._is_foreign(headers, method, who):
            raise Rejected(403, "foreign_origin", "this was asked from a page that is not ours")
        if method in ("GET", "HEAD"):
            return receive
        if method == "POST" and path in INPUT and self._disk.is_low():
            raise Rejected(507, "store_full", self._disk.status_message)
        return _checked_body(headers, path, method, receive)

    def _check_host(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        known = headers.get(b"host", b"").lower() in self._where.hosts
        if known and [name for name, _ in scope["headers"]].count(b"host") == 1:
            return
        sentence = "this server is not asked for under that name: add it to server.allowed_hosts in coterie.toml"
        raise Rejected(421, "unknown_host", sentence)

    def _who(self, headers: Iterable[tuple[bytes, bytes]]) -> Who | None:
        """How the right secret was brought; None without one."""
        by_cookie = False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                if scheme.lower() == b"bearer" and self._access.knows_token(token.strip()):
                    return "bearer"
            elif name == b"cookie":
                # Each of that name: a server on another port of the same host can set a second one.
                by_cookie = by_cookie or any(map(self._access.knows_cookie, self._cookies(value)))
        return "cookie" if by_cookie else None

    def _cookies(self, line: bytes) -> Iterator[bytes]:
        """The values of our cookie in a `Cookie` header."""
        wanted = self._access.cookie_name.encode()
        for pair in line.split(b";"):
            name, _, value = pair.strip().partition(b"=")
            if name == wanted:
                yield value

    def _brings_secret(self, headers: dict[bytes, bytes]) -> bool:
        return b"authorization" in headers or any(True for _ in self._cookies(headers.get(b"cookie", b"")))

    def _may_bring_code(self, scope: Scope) -> bool:
        """True for a request whose one-time code is right, or can only be read from its body."""
        if scope["method"] == "POST" and scope["path"] == SESSION:
            return True
        if scope["path"] != "/" or b"code=" not in scope["query_string"]:
            return False
        codes = parse_qs(scope["query_string"].decode("latin-1")).get("code", [])
        return any(map(self._access.has_code, codes))

    def _is_foreign(self, headers: dict[bytes, bytes], method: str, who: Who | None) -> bool:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None and origin not in self._where.origins:
            return True
        if site not in (None, b"same-origin", b"none"):
            return True
        if who != "cookie" or origin is not None or site == b"same-origin":
            return False
        # A cookie comes by itself, so the browser has to say that our own page asks. On plain http beyond loopback
        # browsers say nothing when a page reads from where it came, and only then: every write names its origin.
        silent = site is None and method == "GET" and headers[b"host"].lower() not in self._where.trusted
        return not silent


_CLOSE = {"Connection": "close"}


def _missing(own: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    names = {name for name, _ in own}
    return [header for header in HEADERS if header[0] not in names]


def _hold_back(seconds: float) -> None:
    if seconds > 0:
        wait = str(math.ceil(seconds))
        raise Rejected(429, "too_many_requests", f"too many requests: wait {wait} s", headers={"Retry-After": wait})


def _checked_body(headers: dict[bytes, bytes], path: str, method: str, receive: Receive) -> Receive:
    chunked = b"transfer-encoding" in headers
    length = int(headers.get(b"content-length", b"0"))
    if not chunked and not length:
        return receive
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    uploads = path == UPLOADS and method == "POST"
    wanted = b"multipart/form-data" if uploads else b"application/json"
    if kind != wanted:
        raise Rejected(415, "unsupported_media_type", f"the body must be {wanted.decode()}")
    if uploads:
        return receive  # its own limit is kept where it is read
    limit = SESSION_BYTES if path == SESSION else BODY_BYTES
    if length > limit:
        raise too_large(limit)
    return _counted(receive, limit) if chunked else receive


def too_large(limit: int) -> Rejected:
    sentence = f"the body is larger than {limit:,} bytes, the most allowed: upload files to {UPLOADS}"
    return Rejected(413, "body_too_large", sentence)


def _counted(receive: Receive, limit: int) -> Receive:
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large(limit)
        return message

    return counted
