"""Errors as answers: RFC 9457 problem documents with a `code`; below /v1 in the form of OpenAI's API.

Details of internal errors go only to the log.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coterie.errors import Refused, StoreError, StoreUnavailable
from coterie.ids import new_id
from coterie.web.openapi import PROBLEM_JSON
from coterie.web.routing import InvalidJson, InvalidRequest

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
OPENAI = "/v1"
"""Addresses below it answer in the form of OpenAI's API."""
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
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

    def response(self, path: str) -> Response:
        """`path`: the address of the request; it decides the form of the error."""
        return error_response(path, self.status_code, self.code, self.detail, headers=self.headers, **self.more)


def error_response(
    path: str, status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    """An error as the clients of this address expect it: in the form of OpenAI's API below /v1, else a problem."""
    if path == OPENAI or path.startswith(f"{OPENAI}/"):
        return openai_error(status, code, detail, headers=headers, param=more.get("param"))
    return problem(status, code, detail, headers=headers, **more)


def openai_error(
    status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None, param: str | None = None
) -> Response:
    """An error in the form of OpenAI's API."""
    status = 400 if status == 422 else status
    if status == 409:  # OpenAI's clients would send the request again
        headers = {"x-should-retry": "false"} | dict(headers or {})
    kind = _OPENAI_TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Response(msgspec.json.encode(body), status, _retry_headers(status, headers), "application/json")


def _retry_headers(status: int, headers: Mapping[str, str] | None) -> dict[str, str]:
    headers = dict(headers or {})
    if status in (429, 503, 507):
        headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    return headers


def problem(status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> Response:
    """A `schemas.ProblemDocument`; `more`: further fields of it."""
    body = {"type": "about:blank", "title": _title(status), "status": status, "detail": detail, "code": code, **more}
    return Response(msgspec.json.encode(body), status, _retry_headers(status, headers), PROBLEM_JSON)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def internal_error(error: BaseException, path: str) -> Response:
    """Log the error under a new id; the answer has only the id."""
    incident = new_id()
    log.error("incident %s", incident, exc_info=error)
    detail = f"internal error: the log has the details under {incident if path.startswith(OPENAI) else 'this id'}"
    return error_response(path, 500, "internal_error", detail, id=incident)


def install_error_handlers(app: Starlette) -> None:
    """Turn expected errors of routes into problem documents. The middleware handles unexpected ones."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(StoreError, _store_error)
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(InvalidJson, _invalid_json)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _os_error)


async def _refused(request: Request, error: Any) -> Response:
    return error_response(request.scope["path"], error.status, error.code, error.message, **error.details)


async def _store_error(request: Request, error: Any) -> Response:
    path = request.scope["path"]
    if not isinstance(error, StoreUnavailable):
        return internal_error(error, path)
    status, code = (507, "store_full") if error.full else (503, "store_unavailable")
    return error_response(path, status, code, str(error))


async def _os_error(request: Request, error: Any) -> Response:
    """A full disk: some routes write files themselves, such as llmservices.json."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    path = request.scope["path"]
    return error_response(path, 507, "store_full", "the disk is full: free some space; nothing was changed")


async def _invalid_request(request: Request, error: Any) -> Response:
    # Values are not repeated: they may be long, or secret.
    places = error.places[:MAX_PLACES]
    detail = "; ".join(f"{place.place}: {place.message}" for place in places[:3])
    return error_response(request.scope["path"], 422, "request_invalid", detail, places=places)


async def _invalid_json(request: Request, error: Any) -> Response:
    return error_response(request.scope["path"], 400, "json_invalid", "the body is not JSON")


async def _http_error(request: Request, error: Any) -> Response:
    path = request.scope["path"]
    if isinstance(error, RequestRejected):
        return error.response(path)
    status = error.status_code
    code = _CODES.get(status) or _title(status).lower().replace(" ", "_")
    return error_response(path, status, code, _DETAILS.get(status, error.detail), headers=error.headers)
