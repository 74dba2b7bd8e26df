"""Who may come in: the token, the links that are good for one visit, and the cookie a page gets for one.

From a link that is good once to the cookie of a page.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import RedirectResponse, Response

from coterie.clock import Clock
from coterie.errors import CoterieError
from coterie.files import is_readable_by_others, write_private
from coterie.rate_limit import RateLimiter
from coterie.web.addresses import budget_of
from coterie.web.errors import problem

log = logging.getLogger(__name__)

FILE = "token"
SECRET_BYTES = 24
"""192 random bits, in a token as in a link."""
SHORT = 16
"""Characters. A right token always passes, so only its length protects it from being guessed."""
CODE_SECONDS = 600.0
CODES = 64
"""Links open at a time; a further one ends the oldest."""
GUESSES = 20
COOKIE_SECONDS = 400 * 86400
"""The longest that browsers keep one."""


class Access:
    def __init__(self, token: str, society_id: str, clock: Clock, *, secure: bool = False) -> None:
        """`secure`: people come by https, so the cookie travels no other way."""
        self._token, self._clock = token.encode(), clock
        self._codes: dict[bytes, float] = {}
        self.secure = secure
        self.guesses = RateLimiter(clock, burst=GUESSES, per_second=1.0)
        """How often one client may be wrong about a token, a cookie or a code."""
        self.cookie_name = f"coterie-{hashlib.sha256(society_id.encode()).hexdigest()[:16]}"
        # Made from the token, so that it outlives a restart and ends when the token is changed.
        self._cookie = hmac.new(self._token, b"cookie " + society_id.encode(), "sha256").hexdigest()

    def __repr__(self) -> str:
        return f"Access({self.cookie_name})"

    def knows_token(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self._token)

    def knows_cookie(self, value: bytes) -> bool:
        return hmac.compare_digest(value, self._cookie.encode())

    def new_code(self) -> str:
        """For one link: it lets one browser in, within ten minutes."""
        code = secrets.token_urlsafe(SECRET_BYTES)
        while len(self._codes) >= CODES:
            self._codes.pop(next(iter(self._codes)))
        self._codes[_digest(code)] = self._clock.monotonic() + CODE_SECONDS
        return code

    def has_code(self, code: str) -> bool:
        """True while `redeem` would accept the code."""
        return self._codes.get(_digest(code), -math.inf) >= self._clock.monotonic()

    def redeem(self, code: str) -> str | None:
        """The `Set-Cookie` line for whoever brings a code that is still good; None for anybody else."""
        # Looked up by its hash: how long that takes says nothing about the codes there are.
        good_until = self._codes.pop(_digest(code), None)
        if good_until is None or good_until < self._clock.monotonic():
            return None
        secure = "; Secure" if self.secure else ""
        return f"{self.cookie_name}={self._cookie}; Path=/; Max-Age={COOKIE_SECONDS}; HttpOnly; SameSite=Strict{secure}"


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "replace")).digest()


def keep_token(data: Path, given: str | None) -> str:
    """The token that was `given`, else the one kept in the folder `data`, made there when missing."""
    if given is not None:
        if len(given) < SHORT:
            log.warning("the token has %d characters: choose %d or more that nobody can guess", len(given), SHORT)
        return check_token(given, "--token or COTERIE_TOKEN")
    path = data / FILE
    try:
        kept = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        kept = ""
    if not kept:
        kept = secrets.token_urlsafe(SECRET_BYTES)
        write_private(path, f"{kept}\n".encode())
    elif is_readable_by_others(path):
        path.chmod(0o600)
        log.warning("%s could be read by others and is private now: delete it to get a new token", path)
    return check_token(kept, str(path))


def check_token(token: str, place: str) -> str:
    """The token, if a header can carry it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CoterieError(f"the token in {place} cannot be used: it must be letters, digits and signs without spaces")
    return token


async def _access(request: Request) -> Access:
    return cast(Access, request.app.state.access)


AccessDep = Annotated[Access, Depends(_access)]


router = APIRouter(tags=["session"])
links = APIRouter(tags=["session"])


@router.post("/session", status_code=303, summary="Exchange a one-time code for the page's cookie")
async def begin(request: Request, access: AccessDep) -> Response:
    try:
        body: Any = msgspec.json.decode(await request.body() or b"{}")
    except msgspec.DecodeError:
        return problem(400, "json_invalid", "the body is not JSON")
    code = body.get("code") if isinstance(body, dict) else None
    return exchange(request, access, code if isinstance(code, str) else "")


@links.post("/links", status_code=201, summary="Make a link that lets one browser in")
async def make_link(request: Request, access: AccessDep) -> dict[str, str]:
    return {"url": link(request.app.state.where.url, access)}


def link(url: str, access: Access) -> str:
    return f"{url}/?code={access.new_code()}"


def exchange(request: Request, access: Access, code: str) -> Response:
    """Redirect to the page with its cookie if the code is right; wrong codes are counted and slowed."""
    # The code comes first: nobody who sends wrong ones can refuse a right one.
    if cookie := access.redeem(code):
        return RedirectResponse("/", 303, {"Set-Cookie": cookie})
    if wait := access.guesses.try_acquire(budget_of(request.scope)):
        headers = {"Retry-After": str(math.ceil(wait))}
        return problem(429, "too_many_requests", f"too many attempts: wait {math.ceil(wait)} s", headers=headers)
    sentence = "this link was used already or is too old: make a new one with coterie open"
    return problem(401, "code_invalid", sentence, headers={"WWW-Authenticate": "Bearer"})
