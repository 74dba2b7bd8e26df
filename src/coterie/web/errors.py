"""Errors as answers: RFC 9457 problem documents with a `code`. What went wrong inside stays in the log."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from coterie.errors import Refused, StoreError, StoreUnavailable
from coterie.ids import new_id

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 1
_CODES = {400: "request_invalid", 404: "not_found", 405: "method_not_allowed"}
_SENTENCES = {
    404: "there is nothing at this address: GET /openapi.json lists what there is",
    405: "this address does not take that method: GET /openapi.json lists what it takes",
}
SHOWN = 50
"""Places of an invalid request that are named."""


class Rejected(HTTPException):
    """A request that is refused for its form, before anybody looks at what it wants."""

    def __init__(
        self, status: int, code: str, sentence: str, *, headers: Mapping[str, str] | None = None, **details: Any
    ) -> None:
        self.code, self.details = code, details
        super().__init__(status, sentence, headers)


def as_response(error: Rejected) -> Response:
    return problem(error.status_code, error.code, error.detail, headers=error.headers, **error.details)


def problem(
    status: int, code: str, sentence: str, *, headers: Mapping[str, str] | None = None, **details: Any
) -> Response:
    body = {
        "type": "about:blank",
        "title": _title(status),
        "status": status,
        "detail": sentence,
        "code": code,
        **details,
    }
    headers = dict(headers or {})
    if status in (429, 503, 507):
        headers.setdefault("Retry-After", str(RETRY_SECONDS))
    return Response(msgspec.json.encode(body), status, headers, MEDIA_TYPE)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def unexpected(error: BaseException) -> Response:
    """Only a name for it goes out; the rest is in the log, under that name."""
    incident = new_id()
    log.error("incident %s", incident, exc_info=error)
    return problem(500, "internal_error", "something went wrong inside: the log has it under this id", id=incident)


def install(app: FastAPI) -> None:
    """Every error that leaves a route becomes a problem document. Unexpected ones are the gate's."""
    for kind, tell in ((Refused, _refused), (StoreError, _store_error), (RequestValidationError, _invalid)):
        app.add_exception_handler(kind, tell)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _os_error)


async def _refused(_: Request, error: Any) -> Response:
    return problem(error.status, error.code, error.message, **error.details)


async def _store_error(_: Request, error: Any) -> Response:
    if not isinstance(error, StoreUnavailable):
        return unexpected(error)
    return problem(507 if error.full else 503, "store_full" if error.full else "store_unavailable", str(error))


async def _os_error(_: Request, error: Any) -> Response:
    """A file that a route writes itself, such as llmservices.json."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return problem(507, "store_full", "the disk is full: free some space; nothing was changed")


async def _invalid(_: Request, error: Any) -> Response:
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return problem(400, "json_invalid", "the body is not JSON")
    # The value itself is not repeated: it may be long, or a secret.
    places = [{"place": ".".join(map(str, each["loc"])), "message": each["msg"]} for each in found[:SHOWN]]
    sentence = "; ".join(f"{each['place']}: {each['message']}" for each in places[:3])
    return problem(422, "request_invalid", sentence, places=places)


async def _http_error(_: Request, error: Any) -> Response:
    if isinstance(error, Rejected):
        return as_response(error)
    status = error.status_code
    code = _CODES.get(status) or _title(status).lower().replace(" ", "_")
    return problem(status, code, _SENTENCES.get(status, error.detail), headers=error.headers)
