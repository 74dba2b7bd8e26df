"""A router whose handlers take and return msgspec structs, on Starlette.

The signature of a handler says what it reads: parameters of its path, query parameters, headers (`Header`), what the
application keeps (`State`), and `body`, the JSON body decoded as its type. A returned struct is encoded as the answer;
a handler may also return a Starlette response. `web/openapi` describes the routes.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coterie.clock import Clock
from coterie.errors import Refused
from coterie.society import Society
from coterie.text import to_storable
from coterie.web.openapi import JSON, Handler, Operation, Parameter, Responses, described_body, reference
from coterie.web.schemas import ErrorPlace, Schema

# What a parameter of a handler is read from


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter with another name than the handler's. Others need no mark."""

    alias: str


@dataclass(frozen=True, slots=True)
class Header:
    """A header. Its name is that of the parameter, with hyphens."""

    alias: str | None = None
    is_described: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """Something that the application or the middleware keeps."""

    read: Callable[[Request], Any]


API = "/api/v1"
"""Prefix of the paths that panel and command line use."""
Limit = Annotated[int, Meta(ge=1, le=200, description="How many items at most.")]
Id = Annotated[str, Meta(max_length=200)]
Cursor = Annotated[str, Meta(max_length=200, description="The `next` of the page before.")]
SocietyDep = Annotated[Society, State(lambda request: request.app.state.society)]
ClockDep = Annotated[Clock, State(lambda request: request.app.state.clock)]


class InvalidRequest(Exception):
    """Parameters or a body that are not of the described type."""

    def __init__(self, *places: ErrorPlace) -> None:
        self.places = places
        super().__init__("; ".join(f"{place.place}: {place.message}" for place in places))


class InvalidJson(Exception):
    """A body that is not JSON."""


@dataclass(slots=True, kw_only=True)
class Router:
    """Collects the operations of one resource."""

    prefix: str = ""
    tags: Sequence[str] = ()
    responses: Responses = field(default_factory=dict)
    """Of each operation, besides its own."""
    is_described: bool = True
    operations: list[Operation] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)

    def get(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return functools.partial(self._add, "GET", path, **options)

    def post(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return functools.partial(self._add, "POST", path, **options)

    def put(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return functools.partial(self._add, "PUT", path, **options)

    def patch(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return functools.partial(self._add, "PATCH", path, **options)

    def delete(self, path: str, **options: Any) -> Callable[[Handler], Handler]:
        return functools.partial(self._add, "DELETE", path, **options)

    def _add(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        status_code: int = 200,
        summary: str | None = None,
        tags: Sequence[str] = (),
        responses: Responses | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Handler:
        """`body`: OpenAPI's `requestBody`, of a handler that reads the body itself."""
        path = self.prefix + path
        signature = inspect.signature(handler, eval_str=True)
        answer = signature.return_annotation
        operation = Operation(
            method=method,
            path=path,
            handler=handler,
            parameters=_parameters(path, signature),
            body=body or _describe_body(signature.parameters.get("body")),
            answer=answer if isinstance(answer, type) and issubclass(answer, Schema) else None,
            status=status_code,
            summary=summary,
            tags=(*self.tags, *tags),
            responses={**self.responses, **(responses or {})},
            is_described=self.is_described,
        )
        self.operations.append(operation)
        route = Route(path, _endpoint(operation, signature), methods=[method], name=handler.__name__)
        assert route.methods is not None  # noqa: S101
        route.methods.discard("HEAD")  # Starlette adds it to GET; a stream would begin
        self.routes.append(route)
        return handler


def _parameters(path: str, signature: inspect.Signature) -> list[Parameter]:
    in_path = set(re.findall(r"{(\w+)", path))
    found = []
    for argument, parameter in signature.parameters.items():
        marks = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
        mark = next((one for one in marks if isinstance(one, Query | Header | State)), None)
        if argument in ("request", "body") or isinstance(mark, State):
            continue
        name, source = argument, "path" if argument in in_path else "query"
        if isinstance(mark, Query):
            name = mark.alias
        elif isinstance(mark, Header):
            name, source = mark.alias or argument.replace("_", "-"), "header"
        found.append(
            Parameter(
                argument=argument,
                name=name,
                source=source,  # type: ignore[arg-type]
                type=parameter.annotation,
                default=parameter.default,
                is_described=not isinstance(mark, Header) or mark.is_described,
            )
        )
    return found


def _state(signature: inspect.Signature) -> dict[str, Callable[[Request], Any]]:
    """The parameters that the application or the middleware keeps, and how to read each."""
    return {
        name: mark.read
        for name, parameter in signature.parameters.items()
        if get_origin(parameter.annotation) is Annotated
        for mark in get_args(parameter.annotation)[1:]
        if isinstance(mark, State)
    }


def _body_types(body: inspect.Parameter) -> tuple[Any, type[Schema]]:
    """The type to decode and the one to describe: `Annotated[dict[str, Any], Described]`, or one type for both."""
    if get_origin(body.annotation) is Annotated:
        decoded, described = get_args(body.annotation)
        return decoded, described
    return body.annotation, body.annotation


def _describe_body(body: inspect.Parameter | None) -> Mapping[str, Any] | None:
    if body is None:
        return None
    is_required = body.default is inspect.Parameter.empty
    return described_body(JSON, reference(_body_types(body)[1]), required=is_required)


def _endpoint(operation: Operation, signature: inspect.Signature) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that Starlette calls."""
    handler, parameters, status = operation.handler, operation.parameters, operation.status
    state, takes_request = _state(signature), "request" in signature.parameters
    body = signature.parameters.get("body")
    decoder = msgspec.json.Decoder(_body_types(body)[0]) if body else None
    is_optional = body is not None and body.default is not inspect.Parameter.empty

    async def endpoint(request: Request) -> Response:
        arguments = _read_parameters(parameters, request) if parameters else {}
        for name, read in state.items():
            arguments[name] = read(request)
        if takes_request:
            arguments["request"] = request
        if decoder:
            data = await request.body()
            if data or not is_optional:
                arguments["body"] = _decode(decoder, data)
        answer = await handler(**arguments)
        if isinstance(answer, Response):
            return answer
        return Response(status_code=204) if answer is None else json_response(answer, status)

    return endpoint


def _read_parameters(parameters: Sequence[Parameter], request: Request) -> dict[str, Any]:
    arguments, invalid = dict[str, Any](), list[ErrorPlace]()
    for parameter in parameters:
        try:
            arguments[parameter.argument] = _read_parameter(parameter, request)
        except msgspec.ValidationError as error:
            invalid.append(ErrorPlace(place=f"{parameter.source}.{parameter.name}", message=_plain(error)))
    if invalid:
        raise InvalidRequest(*invalid)
    return arguments


def _read_parameter(parameter: Parameter, request: Request) -> Any:
    if parameter.source == "path":
        value = request.path_params[parameter.name]
    else:
        values = request.query_params if parameter.source == "query" else request.headers
        value = values.get(parameter.name)
    if value is not None:
        return msgspec.convert(to_storable(value), parameter.type, strict=False)
    if parameter.is_required:
        raise msgspec.ValidationError("missing")
    return parameter.default


_encode = msgspec.json.Encoder().encode


def json_response(value: Schema, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type=JSON)


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    if rb"\u0000" in data:  # NUL, which PostgreSQL cannot store
        return _decode_leniently(decoder.type, data)
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid_body(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(decoder.type, data)
    except RecursionError as error:
        raise Refused("payload_invalid", "the body is nested too deep") from error


def _decode_leniently(kind: Any, data: bytes) -> Any:
    """Decode JSON whose texts have characters that cannot be stored, and replace these.

    JavaScript writes half a character where it cuts a text; msgspec refuses that.
    """
    try:
        return msgspec.convert(_storable(json.loads(data, parse_constant=_refuse_constant)), kind)
    except msgspec.ValidationError as error:
        raise _invalid_body(error) from error
    except (ValueError, RecursionError) as error:
        raise InvalidJson(str(error)) from error


def _storable(value: Any) -> Any:
    match value:
        case str():
            return to_storable(value)
        case list():
            return [_storable(item) for item in value]
        case dict():
            return {to_storable(key): _storable(item) for key, item in value.items()}
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _invalid_body(error: msgspec.ValidationError) -> InvalidRequest:
    message, _, path = str(error).partition(" - at `$")
    return InvalidRequest(ErrorPlace(place=f"body{path.rstrip('`')}", message=message))


def _plain(error: msgspec.ValidationError) -> str:
    """The message without "got `str`": all parameters are text."""
    return str(error).removesuffix(", got `str`")


def invalid_query(message: str, *names: str) -> InvalidRequest:
    return InvalidRequest(ErrorPlace(place=".".join(("query", *names)), message=message))


def parse_cursor(cursor: str) -> int | None:
    """The position that a cursor stands for; None if it is not a number."""
    return int(cursor) if cursor.isascii() and cursor.isdecimal() and len(cursor) < 19 else None


def position(cursor: str | None, name: str) -> int | None:
    """The position that the query parameter of this name stands for."""
    if cursor is None:
        return None
    if (found := parse_cursor(cursor)) is None:
        raise invalid_query("not a position in this list: pass the `next` of the page before", name)
    return found


def etag_matches(header: str | None, etag: str) -> bool:
    """Whether the header `If-None-Match` names the tag."""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return "*" in tags or etag in tags
