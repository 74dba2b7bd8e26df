"""The OpenAPI document: paths from the operations of the routers, bodies from their msgspec types."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from coterie import __version__
from coterie.errors import HTTP_STATUS
from coterie.web import markdown
from coterie.web.schemas import REFERENCE, OpenAIErrorDocument, ProblemDocument, Schema

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
BYTES_SCHEMA = {"type": "string", "format": "binary"}

Handler = Callable[..., Awaitable[Any]]
Responses = dict[int, dict[str, Any]]
"""Descriptions of answers by status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the path, of the query, or a header."""

    argument: str
    """Its name in the handler."""
    name: str
    source: Literal["path", "query", "header"]
    type: Any
    default: Any = inspect.Parameter.empty
    is_described: bool = True

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    parameters: Sequence[Parameter]
    body: Mapping[str, Any] | None
    """OpenAPI's `requestBody`."""
    answer: type[Schema] | None
    status: int
    summary: str | None
    tags: Sequence[str]
    responses: Responses
    is_described: bool


# Parts of operations


def reference(schema: type[Schema]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(name=schema.__name__)}


def described_content(schema: type[Schema]) -> dict[str, Any]:
    return {JSON: {"schema": reference(schema)}}


def described_body(media_type: str, schema: Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"required": required, "content": {media_type: {"schema": schema}}}


def problems(*codes: str, **more: str) -> Responses:
    """Describe errors by the codes of `Refused`; others by status, as `_401="…"`."""
    codes_by_status: dict[int, list[str]] = {}
    for code in codes:
        codes_by_status.setdefault(HTTP_STATUS[code], []).append(f"`{code}`")
    for status, text in more.items():
        codes_by_status.setdefault(int(status.removeprefix("_")), []).append(text)
    content = {PROBLEM_JSON: {"schema": reference(ProblemDocument)}}
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
"""Any operation may answer with these."""
BODY_PROBLEMS = problems(_400="`json_invalid`", _413="`body_too_large`", _415="`unsupported_media_type`")


def openai_problems(*statuses: int) -> Responses:
    """Describe errors in the form of OpenAI's API."""
    content = {JSON: {"schema": reference(OpenAIErrorDocument)}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


# The document


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        if operation.is_described:
            paths.setdefault(operation.path, {})[operation.method.lower()] = _describe_operation(operation)
    kinds = [markdown.Node, *_subclasses(Schema)]
    (node, *_), components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    # msgspec repeats the union of all nodes at each use.
    components = _replaced(components, node, {"$ref": REFERENCE.format(name="MarkdownNode")})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Coterie",
            "summary": "A society of LLM agents that people talk to.",
            "version": __version__,
        },
        "paths": paths,
        "components": {"schemas": components | {"MarkdownNode": node}},
    }


def _describe_operation(operation: Operation) -> dict[str, Any]:
    first, *words = operation.handler.__name__.split("_")
    found = {
        "tags": list(operation.tags),
        "summary": operation.summary,
        "description": inspect.getdoc(operation.handler),
        "operationId": first + "".join(word.capitalize() for word in words),
        "parameters": [_describe_parameter(one) for one in operation.parameters if one.is_described],
        "requestBody": operation.body,
        "responses": _describe_responses(operation),
    }
    return {name: value for name, value in found.items() if value}


def _describe_parameter(parameter: Parameter) -> dict[str, Any]:
    schema = msgspec.json.schema(parameter.type)
    about = {"description": schema.pop("description")} if "description" in schema else {}
    if not parameter.is_required and parameter.default is not None:
        schema["default"] = parameter.default
    return {"name": parameter.name, "in": parameter.source, "required": parameter.is_required, "schema": schema} | about


def _describe_responses(operation: Operation) -> dict[str, Any]:
    own: dict[str, Any] = {"description": "Successful Response"}
    if operation.answer:
        own["content"] = described_content(operation.answer)
    problems_of_body = BODY_PROBLEMS if operation.body else {}
    responses: dict[int, Any] = {operation.status: own, **problems_of_body}
    for status, response in operation.responses.items():
        responses[status] = {"description": HTTPStatus(status).phrase} | responses.get(status, {}) | dict(response)
    return {str(status): responses[status] for status in sorted(responses)}


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
