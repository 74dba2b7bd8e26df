"""Services created from llmservices.json, and their error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.clock import SystemClock
from coterie.llm.config import ServiceRegistry
from coterie.llm.providers.factory import TOUR_ENTRIES, make_service
from coterie.llm.service import ServiceError
from coterie.llm.types import Completion, ModelRequest, TextPart, UserMessage
from coterie.testing import ModelServer

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


async def test_a_wrong_key_is_one_sentence_that_names_what_to_set_and_never_the_key(tmp_path: Path) -> None:
    async with ModelServer(api_key=KEY) as server:
        with pytest.raises(ServiceError) as failure:
            await ask(services(tmp_path, "sk-wrong-0123456789abcdef", baseURL=server.base_url), "main")
    said = str(failure.value)
    assert '"main"' in said and "MAIN_API_KEY" in said and "llmservices.json" in said
    assert "sk-wrong" not in said and "\n" not in said


async def test_a_wrong_model_is_one_sentence_that_names_it_and_where_to_mend_it(tmp_path: Path) -> None:
    async with ModelServer(api_key=KEY, models={"another"}) as server:
        with pytest.raises(ServiceError) as failure:
            await ask(services(tmp_path, KEY, baseURL=server.base_url), "main")
    said = str(failure.value)
    assert '"main"' in said and "some-model" in said and "llmservices.json" in said and "\n" not in said


async def test_a_dead_address_is_one_sentence_that_names_it_and_where_to_mend_it(tmp_path: Path) -> None:
    async with ModelServer() as server:
        address = server.base_url
    with pytest.raises(ServiceError) as failure:
        await ask(services(tmp_path, KEY, baseURL=address), "main")
    said = str(failure.value)
    assert '"main"' in said and address.removeprefix("http://").split("/")[0] in said and "\n" not in said


@pytest.mark.parametrize("entry", TOUR_ENTRIES, ids=lambda entry: entry.id)
async def test_the_tour_answers_without_any_service_and_says_what_it_is(entry: object) -> None:
    (answer,) = [await ask(ServiceRegistry(TOUR_ENTRIES), one.id) for one in TOUR_ENTRIES if one is entry]
    assert "script" in answer.text.lower() or answer.calls
