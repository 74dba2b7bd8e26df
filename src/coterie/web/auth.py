"""Authentication: the owner's token, one-time links, the cookie that a browser gets for a link, and the caller.

`web/middleware` finds out who sends a request and what that caller may use; routes get the `Caller`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
from pathlib import Path
from typing import Annotated, Any, cast

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from coterie.clock import Clock
from coterie.errors import CoterieError
from coterie.files import is_readable_by_others, write_private
from coterie.keys import DOORS, Door, Key
from coterie.messages import Message
from coterie.rate_limit import RateLimiter
from coterie.web.addresses import client_key
from coterie.web.errors import problem
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Router, State
from coterie.web.schemas import SessionCode, SessionLink

log = logging.getLogger(__name__)

FILENAME = "token"
SECRET_BYTES = 24
"""192 random bits, for tokens and links."""
MIN_TOKEN_CHARACTERS = 16
"""A correct token is never rate limited, so only its length protects it from guessing."""
CODE_LIFETIME_SECONDS = 600.0
MAX_CODES = 64
"""Valid links at a time; one more invalidates the oldest."""
GUESS_BURST = 20
COOKIE_LIFETIME_SECONDS = 400 * 86400
"""The longest that browsers allow."""


class Caller(Struct, frozen=True):
    """Who sends a request: the owner, or a program with a key."""

    key: str | None = None
    """Name of the key, for `via` of messages. None: the owner."""
    agents: frozenset[str] | None = None
    """Agents that it may reach. None: all."""
    doors: frozenset[Door] = frozenset(DOORS)

    @classmethod
    def of(cls, key: Key) -> Caller:
        agents = None if key.agents is None else frozenset(key.agents)
        return cls(key=key.name, agents=agents, doors=frozenset(key.doors))

    @property
    def is_owner(self) -> bool:
        return self.key is None

    def may_reach(self, agent_id: str) -> bool:
        return self.agents is None or agent_id in self.agents

    def may_see(self, first: Message) -> bool:
        """True if it may see the task that begins with `first`: the owner sees all, a program its own."""
        return self.is_owner or (first.via == self.key and self.may_reach(first.to))

    def may_answer(self, question: Message) -> bool:
        """A program decides neither about approvals nor about budgets."""
        return self.is_owner or not ("approval" in question.payload or "budget" in question.payload)


OWNER = Caller()


class Access:
    def __init__(self, token: str, society_id: str, clock: Clock, *, secure: bool = False) -> None:
        """`secure`: the panel is served over https, so the cookie is sent over https only."""
        self._token, self._clock = token.encode(), clock
        self._codes: dict[bytes, float] = {}
        self.secure = secure
        self.guesses = RateLimiter(clock, burst=GUESS_BURST, per_second=1.0)
        """Limits wrong tokens, cookies and codes per client."""
        self.cookie_name = f"coterie-{hashlib.sha256(society_id.encode()).hexdigest()[:16]}"
        # Derived from the token: valid after a restart, invalid once the token changes.
        self._cookie = hmac.new(self._token, b"cookie " + society_id.encode(), "sha256").hexdigest()

    def __repr__(self) -> str:
        return f"Access({self.cookie_name})"

    def is_token(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self._token)

    def is_cookie(self, value: bytes) -> bool:
        return hmac.compare_digest(value, self._cookie.encode())

    def new_code(self) -> str:
        """A one-time code, valid for ten minutes."""
        code = secrets.token_urlsafe(SECRET_BYTES)
        while len(self._codes) >= MAX_CODES:
            self._codes.pop(next(iter(self._codes)))
        self._codes[_digest(code)] = self._clock.monotonic() + CODE_LIFETIME_SECONDS
        return code

    def has_code(self, code: str) -> bool:
        """True while `redeem` would accept the code."""
        return self._codes.get(_digest(code), -math.inf) >= self._clock.monotonic()

    def redeem(self, code: str) -> str | None:
        """Use up a code: the value of `Set-Cookie`, or None if the code is not valid."""
        # Looked up by hash, so that the time of the lookup reveals nothing about valid codes.
        expires = self._codes.pop(_digest(code), None)
        if expires is None or expires < self._clock.monotonic():
            return None
        attributes = f"Path=/; Max-Age={COOKIE_LIFETIME_SECONDS}; HttpOnly; SameSite=Strict"
        return f"{self.cookie_name}={self._cookie}; {attributes}{'; Secure' if self.secure else ''}"


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "replace")).digest()


def load_token(data: Path, given: str | None) -> str:
    """The token that was `given`, else the one in the folder `data`, created if missing."""
    if given is not None:
        if len(given) < MIN_TOKEN_CHARACTERS:
            log.warning("the token has %d characters: use %d random ones or more", len(given), MIN_TOKEN_CHARACTERS)
        return check_token(given, "--token or COTERIE_TOKEN")
    path = data / FILENAME
    try:
        stored = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        stored = ""
    if not stored:
        stored = secrets.token_urlsafe(SECRET_BYTES)
        write_private(path, f"{stored}\n".encode())
    elif is_readable_by_others(path):
        path.chmod(0o600)
        log.warning("%s was readable by others and is private now: delete it to get a new token", path)
    return check_token(stored, str(path))


def check_token(token: str, source: str) -> str:
    """The token; `CoterieError` if an HTTP header cannot contain it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CoterieError(f"the token in {source} is invalid: use ASCII letters, digits and signs without spaces")
    return token


AccessDep = Annotated[Access, State(lambda request: request.app.state.access)]


def caller_of(request: Request) -> Caller:
    """Who sends the request, as the middleware found out."""
    return cast(Caller, request.scope["state"]["caller"])


CallerDep = Annotated[Caller, State(caller_of)]


router = Router(tags=["session"])
links = Router(prefix=API, tags=["session"], responses=COMMON_PROBLEMS)


@router.post(
    "/session",
    status_code=303,
    summary="Exchange a one-time code for the browser's cookie",
    responses={
        303: {"description": "Redirect to the panel"},
        **COMMON_PROBLEMS,
        **problems(_401="`code_invalid`"),
    },
)
async def create_session(request: Request, access: AccessDep, body: Annotated[Any, SessionCode] = None) -> Response:
    code = body.get("code") if isinstance(body, dict) else None
    return exchange_code(request, access, code if isinstance(code, str) else "")


@links.post("/links", status_code=201, summary="Create a one-time link for one browser")
async def create_link(request: Request, access: AccessDep) -> SessionLink:
    return SessionLink(url=one_time_link(request.app.state.where.url, access))


def one_time_link(url: str, access: Access) -> str:
    return f"{url}/?code={access.new_code()}"


def exchange_code(request: Request, access: Access, code: str) -> Response:
    """Redirect to the panel with its cookie if the code is valid. Invalid codes are rate limited."""
    # The code is checked before the limit, so that an attacker's guesses never lock out the owner.
    if cookie := access.redeem(code):
        return RedirectResponse("/", 303, {"Set-Cookie": cookie})
    if wait := access.guesses.try_acquire(client_key(request.scope)):
        headers = {"Retry-After": str(math.ceil(wait))}
        return problem(429, "too_many_requests", f"too many attempts: wait {math.ceil(wait)} s", headers=headers)
    detail = "this link was used already or has expired: make a new one with coterie open"
    return problem(401, "code_invalid", detail, headers={"WWW-Authenticate": "Bearer"})
