"""/openapi.json is true: whatever is asked, the answer is one that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.web.served import Served, served

# The stream never ends by itself, and what changes services could make agents call servers that are not ours.
LEFT_OUT = re.compile(r"/events$|/services/")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("openapi") / "home"
    with served(folder, work=True) as running:
        yield running


@pytest.mark.slow
def test_no_answer_is_outside_the_description(server: Served) -> None:
    schema = schemathesis.openapi.from_dict(server.app.openapi())
    failures = []
    for result in schema.get_all_operations():
        operation = cast(Any, result).ok()
        if not operation.path.startswith("/api/v1") or LEFT_OUT.search(operation.path):
            continue

        @given(case=operation.as_strategy())
        @settings(
            max_examples=12,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            case.call_and_validate(base_url=server.url, headers=server.headers, checks=CHECKS)

        try:
            ask()
        except BaseException as error:
            failures.append(f"{operation.label}: {error!r} {error}"[:1500])
    assert not failures, "\n\n".join(failures)


def test_every_route_says_what_it_is_for_and_how_it_may_refuse(server: Served) -> None:
    for path, methods in server.app.openapi()["paths"].items():
        for method, described in methods.items():
            if path.startswith("/api/v1") and "/artifacts" not in path and "/links" not in path:
                assert described.get("summary"), f"{method} {path}"
                assert {"401", "421", "429", "503"} <= set(described["responses"]), f"{method} {path}"
