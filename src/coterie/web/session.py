"""From a link that is good once to the cookie of a page."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from coterie.web.access import Access, AccessDep
from coterie.web.client_address import budget_of
from coterie.web.problems import problem

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
    if wait := access.guesses.take(budget_of(request.scope)):
        headers = {"Retry-After": str(math.ceil(wait))}
        return problem(429, "too_many_requests", f"too many attempts: wait {math.ceil(wait)} s", headers=headers)
    sentence = "this link was used already or is too old: make a new one with coterie open"
    return problem(401, "code_invalid", sentence, headers={"WWW-Authenticate": "Bearer"})
