"""Services created from llmservices.json, and their error messages."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent_runtime import make_service
from coterie.clock import SystemClock
from coterie.llm.config import ServiceRegistry
from coterie.llm.service import Completion, ModelRequest, ServiceError, TextPart, TransientError, UserMessage
from coterie.testing import ModelServer, Says, Status, model_faults
from coterie.testing.model_server import Reply
from coterie.tour.provider import TOUR_ENTRIES
from tests.agent.stage import stage

HELLO = ModelRequest(messages=(UserMessage((TextPart("hello"),)),))
KEY = "sk-right-0123456789abcdef"


async def ask(services: ServiceRegistry, service_id: str) -> Completion:
    service = make_service(services.get(service_id), SystemClock())
    try:
        (answer,) = [piece async for piece in service.generate(HELLO) if isinstance(piece, Completion)]
        return answer
    finally:
        await service.close()


def services(folder: Path, key: str, **entry: object) -> ServiceRegistry:
    whole = {"id": "main", "model": "some-model", "apiKey": "${MAIN_API_KEY}"} | entry
    (folder / "llmservices.json").write_text(json.dumps({"services": [whole]}))
    return ServiceRegistry.load(folder, {"MAIN_API_KEY": key})


async def test_an_entry_becomes_a_service_that_answers(tmp_path: Path) -> None:
    async with ModelServer(api_key=KEY, models={"some-model"}) as server:
        server.script("Good morning")
        assert (await ask(services(tmp_path, KEY, baseURL=server.base_url), "main")).text == "Good morning"


async def test_a_wrong_key_error_names_the_setting_and_not_the_key(tmp_path: Path) -> None:
    async with ModelServer(api_key=KEY) as server:
        with pytest.raises(ServiceError) as failure:
            await ask(services(tmp_path, "sk-wrong-0123456789abcdef", baseURL=server.base_url), "main")
    said = str(failure.value)
    assert '"main"' in said and "MAIN_API_KEY" in said and "llmservices.json" in said
    assert "sk-wrong" not in said and "\n" not in said


async def test_a_wrong_model_error_names_the_model_and_the_setting(tmp_path: Path) -> None:
    async with ModelServer(api_key=KEY, models={"another"}) as server:
        with pytest.raises(ServiceError) as failure:
            await ask(services(tmp_path, KEY, baseURL=server.base_url), "main")
    said = str(failure.value)
    assert '"main"' in said and "some-model" in said and "llmservices.json" in said and "\n" not in said


async def test_an_unreachable_address_error_names_the_address_and_the_setting(tmp_path: Path) -> None:
    async with ModelServer() as server:
        address = server.base_url
    with pytest.raises(ServiceError) as failure:
        await ask(services(tmp_path, KEY, baseURL=address), "main")
    said = str(failure.value)
    assert '"main"' in said and address.removeprefix("http://").split("/")[0] in said and "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize("entry", TOUR_ENTRIES, ids=lambda entry: entry.id)
async def test_the_tour_answers_without_any_service(entry: object) -> None:
    (answer,) = [await ask(ServiceRegistry(TOUR_ENTRIES), one.id) for one in TOUR_ENTRIES if one is entry]
    assert "script" in answer.text.lower() or answer.calls


@pytest.mark.slow
async def test_a_slow_answer_that_keeps_coming_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    async with ModelServer() as server:
        server.script(Says(" ".join(["word"] * 30), token_delay=0.05))
        registry = services(tmp_path, KEY, baseURL=server.base_url, timeout=1_000)
        answer = await ask(registry, "main")
    assert answer.text.split() == ["word"] * 30


@pytest.mark.parametrize(
    ("reply", "timeouts", "setting"),
    [
        (model_faults.stall(), {"timeout": 300, "totalTimeout": 30_000}, "timeout"),
        (model_faults.no_first_byte(), {"timeout": 30_000, "firstTokenTimeout": 300}, "firstTokenTimeout"),
        (model_faults.never_ending(0.01), {"timeout": 30_000, "totalTimeout": 300}, "totalTimeout"),
    ],
)
async def test_each_timeout_names_its_setting(
    tmp_path: Path, reply: Reply, timeouts: dict[str, int], setting: str
) -> None:
    async with ModelServer() as server:
        server.script(reply)
        with pytest.raises(TransientError, match=f"raise {setting} in llmservices.json") as failure:
            await ask(services(tmp_path, KEY, baseURL=server.base_url, **timeouts), "main")
    assert failure.value.reason == "timeout"


def test_a_service_with_a_fallback_may_be_silent_for_half_of_its_timeout_first(tmp_path: Path) -> None:
    spare = {"id": "spare", "baseURL": "http://127.0.0.1:9/v1", "model": "m"}
    main = spare | {"id": "main", "timeout": 60_000, "fallback": ["spare"]}
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": [main, spare]}))
    registry = ServiceRegistry.load(tmp_path, {})
    assert registry.get("main").deadlines.first_byte == timedelta(seconds=30)
    assert registry.get("spare").deadlines.first_byte == timedelta(minutes=5), "nobody else could answer"


EVERYTHING = {
    "temperature": 0.2,
    "topP": 0.9,
    "maxTokens": 99,
    "reasoningEffort": "low",
    "extraBody": {"top_k": 40},
    "headers": {"X-Team": "Bearer ${MAIN_API_KEY}"},
}


async def test_sampling_additional_fields_and_headers_reach_the_service(tmp_path: Path) -> None:
    async with ModelServer() as server:
        registry = services(tmp_path, KEY, baseURL=server.base_url, **EVERYTHING)
        assert registry.problems == ()
        await ask(registry, "main")
    request = server.requests[-1]
    sent = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 99, "reasoning_effort": "low", "top_k": 40}
    assert {key: request.body.get(key) for key in sent} == sent
    assert request.headers["x-team"] == f"Bearer {KEY}"


async def test_an_error_that_quotes_a_secret_of_a_header_is_redacted(tmp_path: Path) -> None:
    async with ModelServer() as server:
        server.script(Status(400, f"bad token {KEY} in X-Team"))
        with pytest.raises(ServiceError) as failure:
            await ask(services(tmp_path, KEY, baseURL=server.base_url, apiKey=None, **EVERYTHING), "main")
    assert KEY not in str(failure.value) and "bad token ***" in str(failure.value)


async def test_the_values_of_an_agent_override_those_of_its_service(tmp_path: Path) -> None:
    agents = """
[agents.ada]
temperature = 1
max_tokens = 7
extra_body = {seed = 3}
[agents.bob]
"""
    async with stage(tmp_path, agents=agents, temperature=0.2, topP=0.9, extraBody={"top_k": 40}) as here:
        for agent in ("ada", "bob"):
            await here.say("Hello", to=agent)
        await here.heard(2)
    bodies = {request.body.get("max_tokens"): request.body for request in here.server.requests}
    keys = ("temperature", "top_p", "top_k", "seed")
    assert [bodies[7].get(key) for key in keys] == [1, 0.9, 40, 3]
    assert [bodies[None].get(key) for key in keys] == [0.2, 0.9, 40, None]
