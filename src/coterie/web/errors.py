"""Errors as answers: RFC 9457 problem documents with a `code`. Details of internal errors go only to the log."""

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
from coterie.web.routing import PROBLEM_JSON
from coterie.web.schemas import ErrorPlace

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
MAX_PLACES = 50
"""Invalid fields that an answer names."""
_CODES = {400: "request_invalid", 404: "not_found", 405: "method_not_allowed"}
_DETAILS = {
    404: "there is nothing at this address: GET /openapi.json lists all addresses",
    405: "this address does not support the method: GET /openapi.json lists the methods",
}


class RequestRejected(HTTPException):
    """A request refused by the HTTP layer, before the society handles it."""

    def __init__(
        self, status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        self.code, self.more = code, more
        super().__init__(status, detail, headers)

    def response(self) -> Response:
        return problem(self.status_code, self.code, self.detail, headers=self.headers, **self.more)


def problem(status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> Response:
    """A `schemas.ProblemDocument`; `more`: further fields of it."""
    body = {"type": "about:blank", "title": _title(status), "status": status, "detail": detail, "code": code, **more}
    headers = dict(headers or {})
    if status in (429, 503, 507):
        headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    return Response(msgspec.json.encode(body), status, headers, PROBLEM_JSON)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def internal_error(error: BaseException) -> Response:
    """Log the error under a new id; the answer has only the id."""
    incident = new_id()
    log.error("incident %s", incident, exc_info=error)
    return problem(500, "internal_error", "internal error: the log has the details under this id", id=incident)


def install_error_handlers(app: FastAPI) -> None:
    """Turn expected errors of routes into problem documents. The middleware handles unexpected ones."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(StoreError, _store_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _os_error)


async def _refused(_: Request, error: Any) -> Response:
    return problem(error.status, error.code, error.message, **error.details)


async def _store_error(_: Request, error: Any) -> Response:
    if not isinstance(error, StoreUnavailable):
        return internal_error(error)
    return problem(507 if error.full else 503, "store_full" if error.full else "store_unavailable", str(error))


async def _os_error(_: Request, error: Any) -> Response:
    """A full disk: some routes write files themselves, such as llmservices.json."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return problem(507, "store_full", "the disk is full: free some space; nothing was changed")


async def _invalid_request(_: Request, error: Any) -> Response:
    invalid = error.errors()
    if any(field["type"] == "json_invalid" for field in invalid):
        return problem(400, "json_invalid", "the body is not JSON")
    # Values are not repeated: they may be long, or secret.
    places = [
        ErrorPlace(place=".".join(map(str, field["loc"])), message=field["msg"]) for field in invalid[:MAX_PLACES]
    ]
    detail = "; ".join(f"{place.place}: {place.message}" for place in places[:3])
    return problem(422, "request_invalid", detail, places=places)


async def _http_error(_: Request, error: Any) -> Response:
    if isinstance(error, RequestRejected):
        return error.response()
    status = error.status_code
    code = _CODES.get(status) or _title(status).lower().replace(" ", "_")
    return problem(status, code, _DETAILS.get(status, error.detail), headers=error.headers)
