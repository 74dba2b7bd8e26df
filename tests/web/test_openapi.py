"""/openapi.json describes every request and every response."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coterie.web.app import openapi_document
from tests.web.served import Served, served

EVENTS, SERVICES = "/api/v1/events", "/api/v1/services/"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NOWHERE = "http://127.0.0.1:1/v1"
"""No server listens there, so requests to a generated service leave nothing on the network."""
OPEN_FIELDS = {
    "Service.extraBody",
    "Service.headers",
    "ServiceChange.extraBody",
    "ServiceChange.headers",
    "ApprovalRequest.arguments",
    "ErrorPlace.parts",
    "ErrorPlace.values",
    "ErrorText.parts",
    "ErrorText.values",
    "HistoryCall.arguments",
    "ModelResponse.metadata",
}
"""Owners and programs choose these fields, and a tool its arguments."""
HOW = settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("openapi") / "home"
    with served(folder, work=True) as running:
        yield running


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Served]:
    """A server of its own, because the test changes its services."""
    with served(tmp_path / "home", work=True) as running:
        yield running


def operations(server: Served) -> Iterator[Any]:
    for result in schemathesis.openapi.from_dict(openapi_document()).get_all_operations():
        operation = cast(Any, result).ok()
        if operation.path.startswith("/api/v1"):
            yield operation


def failures_of(operation: Any, check: Callable[[Any], None]) -> list[str]:
    @given(case=operation.as_strategy())
    @HOW
    def ask(case: Any) -> None:
        check(case)

    try:
        ask()
    except BaseException as error:
        return [f"{operation.label}: {error!r} {error}"[:1500]]
    return []


def has_own_test(operation: Any) -> bool:
    return bool(operation.path == EVENTS or operation.path.startswith(SERVICES))


@pytest.mark.slow
def test_responses_conform_to_the_description(server: Served) -> None:
    def check(case: Any) -> None:
        case.call_and_validate(base_url=server.url, headers=server.headers, checks=CHECKS)

    asked = [operation for operation in operations(server) if not has_own_test(operation)]
    failures = [failure for operation in asked for failure in failures_of(operation, check)]
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
def test_responses_about_services_conform_to_the_description(spare: Served) -> None:
    seen: set[int] = set()

    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            made_up = len(case.body) % 2 == 0
            case.body |= {"baseURL": NOWHERE} | ({"model": "m", "provider": "openai"} if made_up else {})
        answer = case.call_and_validate(base_url=spare.url, headers=spare.headers, checks=CHECKS)
        seen.add(answer.status_code)

    asked = [operation for operation in operations(spare) if operation.path.startswith(SERVICES)]
    failures = [failure for operation in asked for failure in failures_of(operation, check)]
    assert not failures, "\n\n".join(failures)
    assert len(asked) == 4 and {200, 422} <= seen


@pytest.mark.slow
def test_responses_of_the_event_stream_conform_to_the_description(server: Served) -> None:
    (operation,) = [one for one in operations(server) if one.path == EVENTS]
    seen: set[int] = set()
    refused = [
        {"Authorization": "Bearer wrong"},
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Last-Event-ID": "x" * 201},
    ]

    def check(case: Any, **more: str) -> None:
        asked = case.as_transport_kwargs(base_url=server.url, headers=server.headers | more)
        with httpx.stream("GET", asked["url"], params=asked["params"], headers=asked["headers"], timeout=120) as answer:
            seen.add(answer.status_code)
            described = operation.definition.raw["responses"][str(answer.status_code)]["content"]
            assert answer.status_code < 500
            assert answer.headers["content-type"].partition(";")[0] in described
            assert answer.headers["cache-control"] == "no-store"
            if answer.is_success:
                assert next(line for line in answer.iter_lines() if line.startswith("event:")) == "event: hello"
                return
            problem = json.loads(answer.read())
            assert {"type", "title", "status", "detail", "code"} <= problem.keys()
            assert problem["status"] == answer.status_code

    failures = failures_of(operation, check)
    for headers in refused:
        check(operation.Case(), **headers)
    assert not failures, "\n\n".join(failures)
    assert {200, 401, 403, 421, 422} <= seen


def test_every_operation_has_a_name_a_summary_and_its_common_errors(server: Served) -> None:
    names = []
    for path, method, operation in described(server):
        label = f"{method} {path}"
        names.append(operation["operationId"])
        assert re.fullmatch(r"[a-z]+([A-Z][a-z]+)*", operation["operationId"]), label
        assert operation["summary"], label
        if path.startswith("/api/v1"):
            assert {"401", "421", "429", "503"} <= set(operation["responses"]), label
    assert len(set(names)) == len(names)
    assert {"sendMessage", "uploadArtifact", "listAgents"} <= set(names)


def test_every_request_body_and_response_has_a_schema(server: Served) -> None:
    for path, method, operation in described(server):
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        answers = [answer for status, answer in operation["responses"].items() if status not in ("204", "303", "304")]
        assert all(answer.get("content") for answer in answers), f"{method} {path}"
        for body in [*bodies, *answers]:
            for media_type, content in body["content"].items():
                reference = content["schema"].get("$ref", "")
                assert reference.startswith("#/components/schemas/") or "json" not in media_type, f"{method} {path}"
                assert list(untyped(content["schema"])) == [], f"{method} {path} {media_type}"


def test_every_field_of_every_schema_has_a_type(server: Served) -> None:
    components = openapi_document()["components"]["schemas"]
    found = {f"{name}{path}" for name, schema in components.items() for path in untyped(schema)}
    assert found == OPEN_FIELDS


def test_every_schema_has_a_name_that_generators_of_clients_can_use() -> None:
    names = list(openapi_document()["components"]["schemas"])
    assert [name for name in names if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name)] == []
    assert len({name.lower() for name in names}) == len(names)
    assert not {"Response", "File", "Client"} & set(names), "names of generated code"


def described(server: Served) -> Iterator[tuple[str, str, Any]]:
    for path, methods in openapi_document()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def untyped(schema: Any, path: str = "") -> Iterator[str]:
    """Paths in a schema that allow any value, or an object of unknown fields."""
    if alternatives := [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]:
        for alternative in alternatives:
            yield from untyped(alternative, path)
    elif schema.get("type") == "object":
        if "properties" not in schema or schema.get("additionalProperties"):
            yield path
        for name, field in schema.get("properties", {}).items():
            yield from untyped(field, f"{path}.{name}")
    elif "array" in schema.get("type", ""):
        yield from untyped(schema.get("items", {}), f"{path}[]")
    elif not {"$ref", "enum", "type", "const"} & schema.keys():
        yield path
