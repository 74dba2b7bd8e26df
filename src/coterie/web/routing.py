"""A FastAPI router whose handlers take and return msgspec structs, and the OpenAPI document made from their types.

FastAPI itself supports pydantic models only. Here a handler's parameter `body` is the JSON body, decoded as its type,
and a returned struct is encoded as the answer. A handler may also return a Starlette response.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Annotated, Any, cast, get_args, get_origin

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.responses import Response

from coterie.clock import Clock
from coterie.errors import HTTP_STATUS, Refused
from coterie.society import Society
from coterie.web import markdown
from coterie.web.schemas import REFERENCE, OpenAIErrorDocument, ProblemDocument, Schema

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
BYTES_SCHEMA = {"type": "string", "format": "binary"}

Responses = dict[int | str, dict[str, Any]]
"""FastAPI's `responses`: descriptions by status."""

Limit = Annotated[int, Query(ge=1, le=200, description="How many items at most.")]
Id = Annotated[str, Query(max_length=200)]
Cursor = Annotated[str, Query(max_length=200, description="The `next` of the page before.")]


# Dependencies are coroutines, because FastAPI runs plain functions in a thread.


async def _society(request: Request) -> Society:
    return cast(Society, request.app.state.society)


async def _clock(request: Request) -> Clock:
    return cast(Clock, request.app.state.clock)


SocietyDep = Annotated[Society, Depends(_society)]
ClockDep = Annotated[Clock, Depends(_clock)]


class Router(APIRouter):
    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        signature = inspect.signature(endpoint, eval_str=True)
        answer, body = signature.return_annotation, signature.parameters.get("body")
        status, responses = options.get("status_code") or 200, options.get("responses") or {}
        if body:
            responses = BODY_PROBLEMS | responses
            is_required = body.default is inspect.Parameter.empty
            options["openapi_extra"] = described_body(JSON, _reference(_types(body)[1]), required=is_required)
        if isinstance(answer, type) and issubclass(answer, Schema):
            responses = {status: {"content": described_content(answer)}} | responses
        else:
            options["response_class"] = Response
        options |= {"responses": responses, "response_model": None}
        super().add_api_route(path, _adapted(endpoint, signature, status), **options)


def _types(body: inspect.Parameter) -> tuple[Any, type[Schema]]:
    """The type to decode and the one to describe: `Annotated[dict[str, Any], Described]`, or one type for both."""
    if get_origin(body.annotation) is Annotated:
        decoded, described = get_args(body.annotation)
        return decoded, described
    return body.annotation, body.annotation


def _adapted(endpoint: Callable[..., Any], signature: inspect.Signature, status: int) -> Callable[..., Any]:
    """The endpoint as FastAPI calls it: with `request` instead of `body`, returning a response."""
    parameters = dict(signature.parameters)
    body, takes_request = parameters.pop("body", None), "request" in parameters
    decoder = msgspec.json.Decoder(_types(body)[0]) if body else None
    is_optional = body is not None and body.default is not inspect.Parameter.empty
    parameters["request"] = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)

    @functools.wraps(endpoint)
    async def adapted(*, request: Request, **arguments: Any) -> Response:
        if takes_request:
            arguments["request"] = request
        if decoder:
            data = await request.body()
            if data or not is_optional:
                arguments["body"] = _decode(decoder, data)
        answer = await endpoint(**arguments)
        if isinstance(answer, Response):
            return answer
        return Response(status_code=204) if answer is None else json_response(answer, status)

    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters.values()]
    adapted.__signature__ = inspect.Signature(keyword_only, return_annotation=Response)  # type: ignore[attr-defined]
    return adapted


_encode = msgspec.json.Encoder().encode


def json_response(value: Schema, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type=JSON)


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid_body(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_surrogates(decoder.type, data)
    except RecursionError as error:
        raise Refused("payload_invalid", "the body is nested too deep") from error


def _decode_surrogates(kind: Any, data: bytes) -> Any:
    """Decode JSON with half a character, as JavaScript writes it; msgspec refuses such text."""
    try:
        return msgspec.convert(json.loads(data, parse_constant=_refuse_constant), kind)
    except msgspec.ValidationError as error:
        raise _invalid_body(error) from error
    except (ValueError, RecursionError) as error:
        raise RequestValidationError([{"type": "json_invalid", "loc": ("body",), "msg": str(error)}]) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _invalid_body(error: msgspec.ValidationError) -> RequestValidationError:
    message, _, path = str(error).partition(" - at `$")
    return RequestValidationError([{"type": "value_error", "loc": (f"body{path.rstrip('`')}",), "msg": message}])


def invalid_query(message: str, *names: str) -> RequestValidationError:
    return RequestValidationError([{"type": "value_error", "loc": ("query", *names), "msg": message}])


def parse_cursor(cursor: str) -> int | None:
    """The position that a cursor stands for; None if it is not a number."""
    return int(cursor) if cursor.isascii() and cursor.isdecimal() and len(cursor) < 19 else None


def position(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if (found := parse_cursor(cursor)) is None:
        raise invalid_query("not a position in this list: pass the `next` of the page before", "before")
    return found


def etag_matches(header: str | None, etag: str) -> bool:
    """Whether the header `If-None-Match` names the tag."""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return "*" in tags or etag in tags


# The OpenAPI document


def _reference(schema: type[Schema]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(name=schema.__name__)}


def described_content(schema: type[Schema]) -> dict[str, Any]:
    return {JSON: {"schema": _reference(schema)}}


def described_body(media_type: str, schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """FastAPI's `openapi_extra` for a body that FastAPI does not parse."""
    return {"requestBody": {"required": required, "content": {media_type: {"schema": schema}}}}


def problems(*codes: str, **more: str) -> Responses:
    """Describe errors by the codes of `Refused`; others by status, as `_401="…"`."""
    codes_by_status: dict[int, list[str]] = {}
    for code in codes:
        codes_by_status.setdefault(HTTP_STATUS[code], []).append(f"`{code}`")
    for status, text in more.items():
        codes_by_status.setdefault(int(status.removeprefix("_")), []).append(text)
    content = {PROBLEM_JSON: {"schema": _reference(ProblemDocument)}}
    return {status: {"description": ", ".join(texts), "content": content} for status, texts in codes_by_status.items()}


COMMON_PROBLEMS = problems(
    _401="`unauthorized`",
    _403="`foreign_origin`",
    _421="`unknown_host`",
    _422="`request_invalid`",
    _429="`too_many_requests`",
    _500="`internal_error`",
    _503="`store_unavailable`, `stopping`",
    _507="`store_full`",
)
"""Any route may answer with these."""
BODY_PROBLEMS = problems(_400="`json_invalid`", _413="`body_too_large`", _415="`unsupported_media_type`")


def openai_problems(*statuses: int) -> Responses:
    """Describe errors in the form of OpenAI's API."""
    content = {JSON: {"schema": _reference(OpenAIErrorDocument)}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def operation_id(route: APIRoute) -> str:
    first, *rest = route.name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi()` describe paths with FastAPI, and all bodies with msgspec."""

    @functools.cache
    def openapi() -> dict[str, Any]:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        kinds = [markdown.Node, *_subclasses(Schema)]
        (node, *_), components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
        # msgspec repeats the union of all nodes at each use.
        components = _replaced(components, node, {"$ref": REFERENCE.format(name="MarkdownNode")})
        document["components"] = {"schemas": components | {"MarkdownNode": node}}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _subclasses(schema: type[Schema]) -> Iterator[type[Schema]]:
    for subclass in schema.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _replaced(value: Any, old: Any, new: Any) -> Any:
    if value == old:
        return new
    if isinstance(value, dict):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return [_replaced(item, old, new) for item in value] if isinstance(value, list) else value
