"""any-llm provider against the model server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import pytest

from coterie.llm.providers.any_llm import AnyLLMService
from coterie.llm.providers.errors import RequestContext
from coterie.llm.service import (
    AssistantMessage,
    ContextTooLong,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    Sampling,
    ServiceError,
    ToolMessage,
    TransientError,
    UnsupportedCapability,
)
from coterie.testing import model_faults
from coterie.testing.model_server import Calls, ModelServer, Reply, Says, Status
from tests.faults.harness import scaled_timeout

from .helpers import HELLO, KEY, LONG, LOOK_UP, SHORT, ask, call, say, user

installed = pytest.mark.skipif(find_spec("any_llm") is None, reason="the extra coterie[providers] is not installed")


def service(base_url: str, **more: Any) -> AnyLLMService:
    given: dict[str, Any] = {
        "id": "main",
        "provider": "openai",
        "model": "m",
        "api_key": KEY,
        "key_name": "MAIN_API_KEY",
    }
    return AnyLLMService(base_url=base_url, **(given | {"deadlines": LONG} | more))


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer(api_key=KEY) as opened:
        yield opened


@pytest.fixture
async def main(server: ModelServer, request: pytest.FixtureRequest) -> AsyncIterator[AnyLLMService]:
    opened = service(server.base_url, deadlines=SHORT if "F33" in request.node.name else LONG, max_bytes=1_000_000)
    yield opened
    await opened.close()


async def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "any_llm", None)
    main = service("http://127.0.0.1:1/v1", provider="anthropic")

    error = (await ask(main)).error

    assert isinstance(error, PermanentError) and error.category == "request"
    assert str(error) == (
        'service "main" needs a package for provider "anthropic" that is not installed: '
        'run pip install "coterie[providers]", or change provider in llmservices.json'
    )
    await main.close()


async def test_a_conversation_that_is_too_long_is_no_file_that_is_too_large() -> None:
    class ContextLengthExceededError(Exception):
        """The error of any-llm, which has no status."""

    context = RequestContext(service="main", address="", model="m", file_types={"image/png": "vision"})
    found = service("http://127.0.0.1:1/v1").to_service_error(context, ContextLengthExceededError("It is too much"))

    assert isinstance(found, ContextTooLong)


@installed
@pytest.mark.slow
async def test_text_calls_and_usage_come_through(server: ModelServer, main: AnyLLMService) -> None:
    server.script(Says("Let me see.", (Calls("look_up", {"city": "Oslo"}, "a"),), cached_tokens=7))

    outcome = await ask(main)

    assert outcome.answer, outcome.error
    assert "".join(outcome.deltas) == outcome.answer.text == "Let me see."
    assert outcome.answer.calls == (call("a", city="Oslo"),)
    assert outcome.answer.usage.input_tokens > 7 and outcome.answer.usage.cached_tokens == 7


@pytest.mark.slow
@installed
async def test_a_history_with_calls_is_taken_by_a_strict_service(server: ModelServer, main: AnyLLMService) -> None:
    plan = AssistantMessage("", (call("a"), call("b")))
    said = (user("One"), user("Two"), plan, ToolMessage("a", "1"), ToolMessage("b", "2"), user("Three"))

    assert (await say(main, ModelRequest(messages=said, tools=(LOOK_UP,)))).text == "ok"
    assert server.refused == []


@installed
@pytest.mark.parametrize(
    ("name", "reply", "outcome"),
    [
        ("F30", Status(429, "slow", {"retry-after": "7"}), TransientError),
        ("F31 503", Status(503, "busy"), TransientError),
        (
            "F31 in the stream",
            model_faults.error_in_stream({"message": "Overloaded", "type": "overloaded_error"}),
            TransientError,
        ),
        ("F32 reset", model_faults.reset(), TransientError),
        ("F32 reset in the middle", model_faults.reset(after=2), TransientError),
        ("F33 no first byte", model_faults.no_first_byte(), TransientError),
        ("F33 stall", model_faults.stall(), TransientError),
        ("F33 never ending", model_faults.never_ending(), TransientError),
        ("F34", model_faults.cut_in_arguments(), TransientError),
        ("F35 garbage in the stream", model_faults.events("{oops}"), MalformedResponse),
        ("F36 no name", Says(calls=(Calls(""),)), MalformedResponse),
        ("F38", Status(400, "maximum context length is 10", code="context_length_exceeded"), ContextTooLong),
        ("F39 401", Status(401, f"bad key {KEY}"), PermanentError),
        ("F39 404", Status(404, "The model `m` does not exist", code="model_not_found"), PermanentError),
        ("F39 400", Status(400, "no"), PermanentError),
        ("no tools", Status(400, "m does not support tools"), UnsupportedCapability),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_fault_gives_the_same_error_as_with_other_providers(
    name: str, reply: Reply, outcome: type[ServiceError], server: ModelServer, main: AnyLLMService
) -> None:
    server.script(reply)
    server.default = Status(418, "asked again")

    got = await ask(main)

    assert type(got.error) is outcome, got.error
    assert KEY not in str(got.error) and got.error.__cause__ is None
    assert got.seconds < main.deadlines.total.total_seconds() + scaled_timeout(10)
    assert len(server.requests) == 1


@installed
async def test_a_provider_that_any_llm_does_not_know_is_named(server: ModelServer) -> None:
    main = service(server.base_url, provider="unknown")

    error = (await ask(main)).error

    assert isinstance(error, PermanentError) and "unknown" in str(error)
    assert HELLO.tools


@installed
async def test_sampling_additional_fields_and_headers_reach_the_vendor(server: ModelServer) -> None:
    sampling = Sampling(temperature=0.2, top_p=0.9, max_tokens=99, reasoning_effort="low", extra_body='{"top_k": 40}')
    main = service(server.base_url, sampling=sampling, headers={"X-Team": "blue"})

    await say(main)

    # any-llm uses the newer name of the limit for this vendor.
    sent = {"temperature": 0.2, "top_p": 0.9, "max_completion_tokens": 99, "reasoning_effort": "low", "top_k": 40}
    assert {key: server.requests[-1].body.get(key) for key in sent} == sent
    assert server.requests[-1].headers["x-team"] == "blue"
    await main.close()
