"""Changing services while the society runs: atomic writes, separate keys, health checks."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coterie import Refused, Society
from coterie.errors import ConfigError, StoreUnavailable
from coterie.testing import Calls, ModelServer, Says, Status
from coterie.testing.model_faults import html, reset
from coterie.testing.model_server import ALL_CAPABILITIES, ReceivedRequest, Reply

KEY, OTHER = "sk-first-0123456789abcdef", "sk-other-fedcba9876543210"


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer(models={"m"}) as server:
        yield server


@pytest.fixture
async def society(tmp_path: Path) -> AsyncIterator[Society]:
    (tmp_path / "coterie.toml").write_text("[agents.ada]\n[agents.bob]\nservice = 'main'\n")
    async with Society.open(tmp_path) as society:
        yield society


def entry(server: ModelServer, **more: Any) -> dict[str, Any]:
    return {"baseURL": server.base_url, "model": "m", **more}


def written(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "llmservices.json").read_text())
    return document


def secrets(folder: Path) -> dict[str, str]:
    kept: dict[str, str] = json.loads((folder / "data/secrets.json").read_text())
    return kept


def ids(society: Society) -> list[str]:
    return [view.entry.id for view in society.setup.list()]


async def code(call: Any) -> str:
    with pytest.raises(Refused) as refusal:
        await call
    return refusal.value.code


async def answer_of(society: Society, to: str) -> str:
    await society.send(to=to, text="hello")
    async for message in society.inbox():
        if message.sender == to:
            return str(message.payload["text"])
    raise AssertionError


async def test_the_tour_answers_while_no_real_service_is_configured(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    assert ids(society) == ["tour", "tour-sees"] and society.setup.view("tour").to_dict()["tour"]
    view = await society.setup.put("first", entry(server))
    assert ids(society) == ["first"] and not view.to_dict()["tour"]
    assert (view.used_by, view.health, view.problems) == (["ada"], None, [])
    assert await answer_of(society, "ada") == "ok"
    await society.setup.delete("first")
    assert ids(society) == ["tour", "tour-sees"]
    assert written(tmp_path) == {"services": []}


async def test_a_key_is_stored_as_a_secret_and_the_file_gets_its_name(
    society: Society, server: ModelServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    view = await society.setup.put("my model", entry(server), KEY)
    assert written(tmp_path)["services"][0]["apiKey"] == "${MY_MODEL_API_KEY}"
    assert secrets(tmp_path) == {"MY_MODEL_API_KEY": KEY}
    assert (tmp_path / "data/secrets.json").stat().st_mode & 0o777 == 0o600
    assert await answer_of(society, "ada") == "ok"
    assert server.requests[-1].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in f"{view} {view.to_dict()} {society.setup.list()} {caplog.text}"


async def test_a_key_in_the_api_key_field_is_stored_as_a_secret(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    await society.setup.put("main", entry(server, apiKey=KEY))
    assert KEY not in (tmp_path / "llmservices.json").read_text() and secrets(tmp_path) == {"MAIN_API_KEY": KEY}


async def test_a_new_key_gets_a_new_secret_name_and_the_old_key_is_deleted(
    society: Society, server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await society.setup.put("main", entry(server), KEY)
    await society.setup.put("main", {}, OTHER)
    assert written(tmp_path)["services"][0]["apiKey"] == "${MAIN_API_KEY_2}"
    assert secrets(tmp_path) == {"MAIN_API_KEY_2": OTHER}
    monkeypatch.setenv("MAIN_API_KEY", "what another program uses")
    await society.setup.put("main", {}, KEY)
    assert secrets(tmp_path) == {"MAIN_API_KEY_3": KEY}
    await society.setup.put("main", {"apiKey": None})
    assert secrets(tmp_path) == {} and "apiKey" not in written(tmp_path)["services"][0]


async def test_two_services_with_similar_ids_do_not_share_a_key(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    await society.setup.put("a-b", entry(server), KEY)
    await society.setup.put("a_b", entry(server), OTHER)
    assert secrets(tmp_path) == {"A_B_API_KEY": KEY, "A_B_API_KEY_2": OTHER}


async def test_a_change_keeps_other_entries_unknown_keys_and_their_order(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    mine = {
        "note": "按我的写法",
        "services": [
            {"zeta": 1, "id": "old", "baseURL": server.base_url, "model": "m", "x": {"deep": [1, 2.5, None]}},
            {"id": "broken", "model": 7},
        ],
        "examples": [{"id": "nothing"}],
    }
    (tmp_path / "llmservices.json").write_text(json.dumps(mine))
    (tmp_path / "llmservices.json").chmod(0o640)
    await society.setup.put("old", {"model": "m", "name": "Renamed", "zeta": None})
    await society.setup.put("new", entry(server))
    now = written(tmp_path)
    assert list(now) == ["note", "services", "examples"] and now["examples"] == mine["examples"]
    assert [list(one) for one in now["services"]] == [
        ["id", "baseURL", "model", "x", "name"],
        ["id", "model"],
        ["id", "baseURL", "model"],
    ]
    assert "按我的写法" in (tmp_path / "llmservices.json").read_text()
    assert (tmp_path / "llmservices.json").stat().st_mode & 0o777 == 0o640


async def test_a_symbolic_link_stays_a_link(society: Society, server: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text('{"services": []}')
    (tmp_path / "llmservices.json").symlink_to("elsewhere.json")
    await society.setup.put("main", entry(server))
    assert (tmp_path / "llmservices.json").is_symlink() and "main" in (tmp_path / "elsewhere.json").read_text()


async def test_saving_an_entry_as_it_was_listed_changes_nothing(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    await society.setup.put("main", entry(server), KEY)
    shown = society.setup.view("main").to_dict()
    await society.setup.put("main", shown | {"description": "for every day"})
    again = society.setup.view("main")
    assert again.entry.api_key is not None and again.entry.api_key.reveal() == KEY
    assert again.entry.capabilities.inferred and again.entry.description == "for every day"
    assert not {"problems", "check", "usedBy", "tour", "source"} & set(written(tmp_path)["services"][0])


async def test_a_change_keeps_the_price_as_the_owner_wrote_it(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    price = {"input": 0.25, "output": 2, "_from": "the price list of May"}
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": [{"id": "main", "price": price}]}))
    await society.setup.put("main", entry(server))
    assert written(tmp_path)["services"][0]["price"] == price
    shown = society.setup.view("main").to_dict()
    await society.setup.put("main", shown | {"description": "for every day"})
    assert society.setup.view("main").to_dict()["price"] == shown["price"]
    assert shown["price"] == {"input": 0.25, "cachedInput": 0.25, "output": 2, "currency": "USD"}
    euros = {"input": 1, "output": 1, "currency": "EUR"}
    with pytest.raises(Refused, match='expected "USD", the currency of service "main"'):
        await society.setup.put("other", entry(server, price=euros))
    await society.setup.put("main", {"price": None})
    assert society.setup.view("main").entry.price is None and "price" not in written(tmp_path)["services"][0]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"model": "m"}, "baseURL: expected"),
        ({"baseURL": "ftp://x", "model": "m"}, "baseURL: expected"),
        ({"baseURL": "http://127.0.0.1:9", "model": 7}, "model: expected"),
        ({"baseURL": "http://127.0.0.1:9", "model": "m", "timeout": "long"}, "timeout: expected"),
        ({"baseURL": "http://127.0.0.1:9", "model": "m", "capabilities": {"input": [7]}}, "capabilities.input[0]"),
        ({"baseURL": "http://127.0.0.1:9", "model": "m", "price": {"input": 1}}, "price.output: expected"),
    ],
)
async def test_an_invalid_entry_is_refused_with_its_location_and_nothing_is_written(
    society: Society, tmp_path: Path, fields: dict[str, Any], place: str
) -> None:
    with pytest.raises(Refused, match="expected") as refusal:
        await society.setup.put("main", fields, KEY)
    assert refusal.value.code == "service_invalid" and place in refusal.value.message
    assert not (tmp_path / "llmservices.json").exists() and not (tmp_path / "data/secrets.json").exists()


async def test_an_empty_id_and_an_invalid_key_are_refused(society: Society, server: ModelServer) -> None:
    assert await code(society.setup.put("  ", entry(server))) == "service_invalid"
    with pytest.raises(Refused, match="copy it again") as refusal:
        await society.setup.put("main", entry(server), "schlüssel\n2")
    assert refusal.value.code == "service_invalid" and "schlüssel" not in str(refusal.value)


async def test_an_agent_elsewhere_is_no_service_that_can_be_tested_or_changed(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    (tmp_path / "coterie.toml").write_text('[agents.ada]\n[remote.anna]\ncard = "http://127.0.0.1:9/ada"\n')
    await society.reload()
    setup = society.setup
    for call in (setup.test("remote.anna"), setup.models("remote.anna", {}), setup.delete("remote.anna")):
        assert await code(call) == "unknown_service"
    for change in (setup.put, setup.test_entry, setup.models):
        with pytest.raises(Refused, match="describes an agent elsewhere with this id") as refusal:
            await change("remote.anna ", entry(server))
        assert refusal.value.code == "id_taken"
    assert server.requests == []


async def test_a_reference_to_a_missing_key_is_saved_and_reported(society: Society, server: ModelServer) -> None:
    view = await society.setup.put("main", entry(server, apiKey="${NOBODYS_KEY}"))
    assert [problem.message for problem in view.problems] == [
        "NOBODYS_KEY is set neither in the environment nor in data/secrets.json"
    ]
    assert (await society.setup.test("main")).code == "auth"


async def test_a_file_that_is_not_json_is_not_overwritten(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    (tmp_path / "llmservices.json").write_text("{ oops")
    with pytest.raises(ConfigError, match=r"line 1 column 3"):
        await society.setup.put("main", entry(server), KEY)
    assert (tmp_path / "llmservices.json").read_text() == "{ oops"
    assert not (tmp_path / "data/secrets.json").exists()
    assert ids(society) == ["tour", "tour-sees"]


async def test_when_the_file_cannot_be_written_the_key_is_not_stored(
    society: Society, server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await society.setup.put("main", entry(server), KEY)
    before = (tmp_path / "llmservices.json").read_bytes()

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("coterie.configuration.replace_file", full)
    with pytest.raises(StoreUnavailable, match="nothing was changed") as error:
        await society.setup.put("main", {}, OTHER)
    assert error.value.full
    assert (tmp_path / "llmservices.json").read_bytes() == before and secrets(tmp_path) == {"MAIN_API_KEY": KEY}


async def test_an_error_in_coterie_toml_does_not_prevent_service_changes(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    (tmp_path / "coterie.toml").write_text("= oops")
    await society.setup.put("main", entry(server))
    assert ids(society) == ["main"]


async def test_a_service_used_by_agents_cannot_be_deleted(society: Society, server: ModelServer) -> None:
    await society.setup.put("main", entry(server))
    with pytest.raises(Refused, match="bob") as refusal:
        await society.setup.delete("main")
    assert refusal.value.code == "service_in_use" and ids(society) == ["main"]
    assert await code(society.setup.delete("nowhere")) == "unknown_service"
    assert await code(society.setup.test("nowhere")) == "unknown_service"


async def test_an_agent_blocked_without_its_service_continues_once_it_is_added(
    society: Society, server: ModelServer
) -> None:
    assert "Fix it" in await answer_or_notice(society, "bob")
    blocked = await society.store.agent("bob")
    assert blocked is not None and blocked.state == "blocked"
    await society.setup.put("main", entry(server))
    async for message in society.inbox():
        if message.sender == "bob":
            assert message.payload["text"] == "ok"
            break


async def answer_or_notice(society: Society, to: str) -> str:
    await society.send(to=to, text="hello")
    async for message in society.inbox():
        return str(message.payload["text"])
    raise AssertionError


# Health checks


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("ok", "ok"),
        (Status(401, "no"), "auth"),
        (Status(404, "no such model"), "no_model"),
        (Status(429, "insufficient_quota: check billing"), "quota"),
        (Status(400, "we do not like it"), "refused"),
        (Status(503, "overloaded"), "refused"),
        (html(), "malformed"),
        (reset(), "unreachable"),
    ],
)
async def test_a_health_check_gives_a_code_and_a_message(
    society: Society, server: ModelServer, reply: Reply, expected: str
) -> None:
    server.default = reply
    check = await society.setup.test_entry("main", entry(server), KEY)
    assert (check.code, check.ok) == (expected, expected == "ok")
    assert check.message.endswith(".") and KEY not in str(check.to_dict()) and bool(check.detail) != check.ok
    assert len(server.requests) == (3 if check.ok else 1) and ids(society) == ["tour", "tour-sees"]


def able(request: ReceivedRequest) -> Reply:
    """The replies of a model that calls tools and sees."""
    if "tools" in request.body:
        return Says(calls=(Calls("confirm", {"word": "ready"}),))
    return "Yellow." if isinstance(request.messages[-1]["content"], list) else "ok"


def blind(request: ReceivedRequest) -> Reply:
    """The replies of a model whose server ignores tools and pictures."""
    return "Which tool? Which picture?"


@pytest.mark.parametrize(
    ("model", "supported", "found", "input_", "output"),
    [
        (able, ALL_CAPABILITIES, [True, True], ["text", "vision"], ["text", "tool_calling"]),
        (able, {"tool_calling"}, [True, False], ["text"], ["text", "tool_calling"]),
        (able, {"vision"}, [False, True], ["text", "vision"], ["text"]),
        (blind, ALL_CAPABILITIES, [False, False], ["text"], ["text"]),
    ],
)
async def test_a_health_check_finds_the_capabilities_that_are_saved(
    society: Society, tmp_path: Path, model: Any, supported: Any, found: list[bool], input_: Any, output: Any
) -> None:
    async with ModelServer(capabilities=supported) as server:
        server.default = model
        check = await society.setup.test_entry("main", entry(server))
        assert check.ok and check.capabilities == dict(zip(["tool_calling", "vision"], found, strict=True))
        assert all(request.body["max_tokens"] <= 256 for request in server.requests)
        view = await society.setup.put("main", entry(server))
        assert view.health == check, "the result belongs to the entry that was written"
    assert written(tmp_path)["services"][0]["capabilities"] == {"input": input_, "output": output}


async def test_capabilities_that_the_owner_declares_are_saved_whatever_a_health_check_finds(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    declared = {"input": ["text"], "output": ["text", "tool_calling"]}
    check = await society.setup.test_entry("main", entry(server, capabilities=declared))
    assert check.capabilities == {"tool_calling": False, "vision": False}
    await society.setup.put("main", entry(server, capabilities=declared))
    assert written(tmp_path)["services"][0]["capabilities"] == declared


async def test_a_model_that_thinks_too_long_for_a_check_keeps_its_tools(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    server.script("ok", Says("Let me think", finish="length"), "It is yellow")
    check = await society.setup.test_entry("main", entry(server))
    assert check.capabilities == {"vision": True}
    await society.setup.put("main", entry(server))
    assert "tool_calling" in written(tmp_path)["services"][0]["capabilities"]["output"]


async def test_a_service_that_was_not_tested_is_saved_without_capabilities_and_gets_tools(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    await society.setup.put("main", entry(server))
    assert "capabilities" not in written(tmp_path)["services"][0]
    await answer_of(society, "bob")
    assert server.requests[-1].body["tools"]


@pytest.mark.parametrize(("configured", "sent"), [({}, 256), ({"maxTokens": 4096}, 256), ({"maxTokens": 16}, 16)])
async def test_a_health_check_limits_its_tokens(
    society: Society, server: ModelServer, configured: dict[str, int], sent: int
) -> None:
    assert (await society.setup.test_entry("main", entry(server, **configured), KEY)).ok
    assert server.requests[0].body["max_tokens"] == sent


@pytest.mark.slow
async def test_a_silent_service_fails_its_health_check_in_time(
    society: Society, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    from coterie.testing.model_faults import no_first_byte

    monkeypatch.setattr(
        "coterie.llm.discovery.HEALTH_CHECK_TIMEOUT", timedelta(seconds=1)
    )  # connecting takes a part of the timeout
    server.default = no_first_byte()
    assert (await society.setup.test_entry("main", entry(server))).code == "timeout"


async def test_a_health_check_belongs_to_one_entry_and_key_across_restarts(tmp_path: Path, server: ModelServer) -> None:
    async with Society.open(tmp_path) as society:
        await society.setup.test_entry("main", entry(server), OTHER)
        assert (await society.setup.put("main", entry(server), KEY)).health is None, "another key was tried"
        await society.setup.test_entry("main", {}, OTHER)
        tried = (await society.setup.put("main", {}, OTHER)).health
        assert tried is not None and tried.ok
    async with Society.open(tmp_path) as society:
        assert society.setup.view("main").health == tried
        assert (await society.setup.put("main", {"model": "another"})).health is None
        assert (await society.setup.test("main")).code == "no_model"
        seen = society.setup.view("main").health
        assert seen is not None and not seen.ok
        assert (await society.setup.put("main", {}, KEY)).health is None


# Discovery


async def test_discovery_lists_keys_in_the_environment_by_name_only(
    society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert await society.setup.discover() == []
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("GEMINI_API_KEY", "  ")
    (offer,) = await society.setup.discover()
    assert offer.to_dict() == {
        "id": "anthropic",
        "name": "Anthropic",
        "provider": "openai",
        "baseURL": "https://api.anthropic.com/v1",
        "apiKey": "${ANTHROPIC_API_KEY}",
        "models": [],
        "capabilities": {"input": ["text", "vision"], "output": ["text", "tool_calling"]},
    }
    assert ids(society) == ["tour", "tour-sees"]


# A key belongs to an address


@pytest.mark.parametrize("change", ["address", "address sent back as listed", "provider", "own reference"])
async def test_a_changed_address_requires_the_key_again_and_does_not_get_the_old_one(
    society: Society, server: ModelServer, tmp_path: Path, change: str
) -> None:
    async with ModelServer(models={"m"}) as elsewhere:
        await society.setup.put("main", entry(server), KEY)
        before = (tmp_path / "llmservices.json").read_bytes()
        fields: dict[str, Any] = {"baseURL": elsewhere.base_url}
        if change == "address sent back as listed":
            fields = society.setup.view("main").to_dict() | fields
        elif change == "provider":
            fields = {"provider": "tour"}
        elif change == "own reference":
            fields["apiKey"] = "${MAIN_API_KEY}"
        for call in (society.setup.test_entry, society.setup.put):
            with pytest.raises(Refused, match="enter the key again") as refusal:
                await call("main", fields)
            assert refusal.value.code == "service_invalid"
        assert elsewhere.requests == [] and (tmp_path / "llmservices.json").read_bytes() == before
        assert secrets(tmp_path) == {"MAIN_API_KEY": KEY}


async def test_a_changed_address_gets_the_key_that_is_entered_with_it_or_none(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    async with ModelServer(models={"m"}) as elsewhere:
        await society.setup.put("main", entry(server), KEY)
        assert (await society.setup.test_entry("main", {"baseURL": elsewhere.base_url}, OTHER)).ok
        assert elsewhere.requests[-1].headers["authorization"] == f"Bearer {OTHER}"
        await society.setup.put("main", {"baseURL": elsewhere.base_url}, "")
        assert "apiKey" not in written(tmp_path)["services"][0] and secrets(tmp_path) == {}
        assert (await society.setup.test("main")).ok
        assert "authorization" not in elsewhere.requests[-1].headers


async def test_a_stored_key_is_not_sent_to_the_address_of_another_service(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    async with ModelServer(models={"m"}) as elsewhere:
        await society.setup.put("main", entry(server), KEY)
        fields = entry(elsewhere, apiKey="${MAIN_API_KEY}")
        assert await code(society.setup.test_entry("copy", fields)) == "service_invalid"
        assert await code(society.setup.put("copy", fields)) == "service_invalid"
        assert elsewhere.requests == []
        # At the same address both may use it.
        assert (await society.setup.test_entry("copy", entry(server, apiKey="${MAIN_API_KEY}"))).ok


@pytest.mark.parametrize("same", ["{}/", " {} ", "{}"])
async def test_an_address_that_is_only_written_differently_keeps_its_key(
    society: Society, server: ModelServer, tmp_path: Path, same: str
) -> None:
    await society.setup.put("main", entry(server), KEY)
    view = await society.setup.put("main", {"baseURL": same.format(server.base_url.upper().replace("/V1", "/v1"))})
    assert view.entry.api_key is not None and view.entry.api_key.reveal() == KEY


async def test_a_secret_in_a_header_is_not_sent_to_another_address(
    society: Society, server: ModelServer, tmp_path: Path
) -> None:
    await society.setup.put("main", entry(server), KEY)
    headers = {"X-Team": "${MAIN_API_KEY}"}
    view = await society.setup.put("main", {"headers": headers})
    assert KEY not in str(view.to_dict()) and written(tmp_path)["services"][0]["headers"] == headers
    await society.setup.put("main", {"headers": view.to_dict()["headers"], "name": "Main"})
    assert written(tmp_path)["services"][0]["headers"] == headers, "masked values are not written"
    elsewhere = {"baseURL": "http://127.0.0.1:9/v1"}
    assert await code(society.setup.put("main", elsewhere, "")) == "service_invalid"
    assert await code(society.setup.put("thief", {**elsewhere, "model": "m", "headers": headers})) == "service_invalid"
    await society.setup.put("main", {**elsewhere, "headers": None}, "")
