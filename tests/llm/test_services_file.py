"""Parsing of llmservices.json: problems are reported with their path, and the rest works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.llm.config import MAX_SERVICES_BYTES, ServiceRegistry, parse_services
from coterie.llm.price import Price
from coterie.llm.service import TokenUsage

from .entries import KEY, entry, no_key, problems, read


def test_invalid_capabilities_are_reported_with_their_path_and_the_rest_counts() -> None:
    """003-1.4"""
    services = read(
        entry("a"),
        7,
        entry("b", capabilities={"input": ["text", 7, "vision", ""], "output": "text"}),
        entry("c", capabilities=["vision"]),
    )

    assert problems(services) == [
        "llmservices.json: services[1]: expected an object, got 7",
        "llmservices.json: services[2].capabilities.input[1]: expected a non-empty string, got 7",
        'llmservices.json: services[2].capabilities.input[3]: expected a non-empty string, got ""',
        'llmservices.json: services[2].capabilities.output: expected an array, got "text"',
        "llmservices.json: services[3].capabilities: expected an object, got an array",
    ]
    assert [one.id for one in services] == ["a", "b", "c"]
    assert services.get_capabilities("b").input == {"text", "vision"}
    assert services.get_capabilities("c").inferred
    assert not any(problem.fatal for problem in services.problems)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("visoin", "vision"),
        ("visio", "vision"),
        ("audios", "audio"),
        ("tool-calling", "tool_calling"),
        ("toolcalling", "tool_calling"),
        ("structured_outputs", "structured_output"),
        ("test", "text"),
    ],
)
def test_a_misspelt_standard_name_is_corrected_and_reported(typo: str, meant: str) -> None:
    services = read(entry(capabilities={"input": ["text", typo]}))

    assert services.has_capability("main", typo, "input")
    [problem] = problems(services)
    assert problem.startswith("llmservices.json: services[0].capabilities.input[1]: ")
    assert f'did you mean "{meant}"?' in problem


@pytest.mark.parametrize("name", ["Vision", "VISION", "two words", "a\nb", "x" * 65])
def test_a_name_that_is_not_lower_case_is_left_out(name: str) -> None:
    services = read(entry(capabilities={"input": ["text", name]}))

    assert services.get_capabilities("main").input == {"text"}
    assert len(services.problems) == 1


@pytest.mark.parametrize("key", ["id", "baseURL", "model"])
@pytest.mark.parametrize("value", [None, "", "  ", 7, [], {}])
def test_an_entry_without_a_required_key_is_left_out(key: str, value: Any) -> None:
    services = read(entry("a"), entry("b", **{key: value}), entry("c"))

    assert [one.id for one in services] == ["a", "c"]
    assert [problem.location for problem in services.problems] == [f"llmservices.json: services[1].{key}"]


@pytest.mark.parametrize(
    "value", ["127.0.0.1:1234", "ftp://host/v1", "http://", "http://[::1", "http://host:99999/v1", "http://a\x01b"]
)
def test_an_address_that_cannot_be_one_is_reported(value: str) -> None:
    services = read(entry(baseURL=value))

    assert len(services) == 0
    assert problems(services) == [
        "llmservices.json: services[0].baseURL: expected an address such as http://127.0.0.1:1234/v1"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("timeout", "soon"),
        ("timeout", 0),
        ("timeout", True),
        ("timeout", 1e3),
        ("timeout", 10**40),
        ("firstTokenTimeout", 0),
        ("totalTimeout", "long"),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("topP", -0.1),
        ("reasoningEffort", 3),
        ("reasoningEffort", "High!"),
        ("extraBody", [1]),
        ("extraBody", {"messages": []}),
        ("headers", ["x"]),
        ("maxConcurrentRequests", 0),
        ("maxTokens", -1),
        ("contextTokens", "many"),
        ("capabilityTags", "coding"),
        ("description", 7),
        ("name", []),
        ("provider", {}),
        ("limits", [1]),
        ("fallback", "spare"),
        ("price", 2),
    ],
)
def test_a_wrong_optional_value_is_reported_and_takes_its_default(key: str, value: Any) -> None:
    services = read(entry(**{key: value}))

    assert [problem.location for problem in services.problems] == [f"llmservices.json: services[0].{key}"]
    assert services.get("main") == read(entry()).get("main")


def test_unknown_keys_are_reported_with_the_closest_known_one_and_notes_are_not() -> None:
    services = read(entry(capabilites={"input": ["vision"]}, team="blue", topp=1, _note="x", **{"$schema": "y"}))

    assert problems(services) == [
        'llmservices.json: services[0].capabilites: is not known, did you mean "capabilities"?',
        "llmservices.json: services[0].team: is not known",
        'llmservices.json: services[0].topp: is not known, did you mean "topP"?',
    ]
    assert services.get("main") == read(entry()).get("main")


def test_of_two_equal_ids_the_first_wins_and_the_second_is_reported() -> None:
    services = read(entry("main", model="first"), entry("main", model="second"))

    assert [one.model for one in services] == ["first"]
    assert problems(services) == [
        'llmservices.json: services[1].id: "main" is the id of services[0] already; the first one counts'
    ]


def test_a_fallback_that_does_not_exist_is_reported_and_the_others_stay() -> None:
    services = read(entry("main", fallback=["spre", "main", "spare", 7, "broken"]), entry("spare"), {"id": "broken"})

    assert services.get("main").fallback == ("spare",)
    mine = [line for line in problems(services) if "fallback" in line]
    assert mine == [
        'llmservices.json: services[0].fallback[0]: there is no service "spre", did you mean "spare"?',
        "llmservices.json: services[0].fallback[1]: a service cannot be its own fallback",
        "llmservices.json: services[0].fallback[3]: expected a non-empty string, got 7",
        'llmservices.json: services[0].fallback[4]: there is no service "broken"',
    ]


# The file as a whole


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (b'{"services": [\n  {"id": "a",}\n]}', "llmservices.json: line 2 column 14"),
        (b"", "llmservices.json: line 1 column 1"),
        (b'{\n"services": "\xff"}', "llmservices.json: line 2 column 14"),
        (b"[" * 100_000, "llmservices.json"),
        (b'{"services": [NaN]}', "llmservices.json"),
        (b'{"services": ' + b"9" * 5_000 + b"}", "llmservices.json"),
        (b" " * (MAX_SERVICES_BYTES + 1), "llmservices.json"),
    ],
)
def test_a_file_that_cannot_be_read_at_all_is_fatal_and_says_where(tmp_path: Path, data: bytes, position: str) -> None:
    (tmp_path / "llmservices.json").write_bytes(data)

    with pytest.raises(ConfigError) as caught:
        ServiceRegistry.load(tmp_path, {})
    [problem] = caught.value.problems
    assert problem.fatal
    assert str(problem).startswith(f"{position}: ")
    assert problem.location == "llmservices.json"


def test_a_byte_order_mark_does_no_harm() -> None:
    entries, found = parse_services(b"\xef\xbb\xbf" + json.dumps({"services": [entry()]}).encode(), no_key)

    assert [one.id for one in entries] == ["main"]
    assert not found


@pytest.mark.parametrize("top", [[], 7, "x", None, {"services": {}}, {"service": []}])
def test_a_file_of_another_shape_is_reported_and_has_no_services(top: object) -> None:
    entries, found = parse_services(json.dumps(top).encode(), no_key)

    assert list(entries) == []
    assert len(found) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
KEYS = st.sampled_from(
    ["id", "name", "provider", "baseURL", "model", "apiKey", "capabilities", "limits", "fallback", "timeout"]
)
NEARLY = st.dictionaries(
    KEYS, JSON | st.dictionaries(st.sampled_from(["input", "output"]), st.lists(JSON, max_size=4)), max_size=8
)


@pytest.mark.slow
@given(invalid=st.lists(JSON | NEARLY, max_size=5), position=st.integers(0, 5))
def test_invalid_entries_do_not_affect_a_valid_one(invalid: list[Any], position: int) -> None:
    """003-1.4"""
    good = entry("good", capabilities={"input": ["text", "vision"]}, apiKey="${GOOD}")
    services = read(*invalid[:position], good, *invalid[position:], GOOD=KEY)

    assert services.has_capability("good", "vision", "input")
    assert all(problem.location.startswith("llmservices.json: services[") for problem in services.problems)
    usable = {one.id for one in services}
    assert all(set(one.fallback) <= usable for one in services)
    json.dumps([one.to_dict() for one in services])


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_file_content_makes_the_reader_crash(data: bytes) -> None:
    try:
        parse_services(data, no_key)
    except ConfigError as error:
        assert [problem.fatal for problem in error.problems] == [True]


def test_sampling_values_and_additional_fields_are_read() -> None:
    given: dict[str, Any] = {
        "temperature": 0,
        "topP": 0.9,
        "maxTokens": 99,
        "reasoningEffort": "low",
        "extraBody": {"top_k": 40},
    }
    services = read(entry(**given))

    assert services.problems == ()
    assert {key: services.get("main").to_dict()[key] for key in given} == given


def test_headers_may_hold_secrets_and_are_masked_everywhere() -> None:
    services = read(
        entry(headers={"X-Team": "Bearer ${TEAM_TOKEN}", "X-Plain": "a-plain-value-of-some-length"}),
        entry("other", headers={"X-Team": "${MISSING}", "Host": "h", "a b": "x", "X-Odd": "${no-name}", "X-No": 7}),
        TEAM_TOKEN=KEY,
    )

    main, other = services.get("main"), services.get("other")
    assert [(header.name, header.value.reveal()) for header in main.headers] == [
        ("X-Team", f"Bearer {KEY}"),
        ("X-Plain", "a-plain-value-of-some-length"),
    ]
    assert main.to_dict()["headers"]["X-Team"] == f"…{KEY[-4:]}"
    assert KEY not in f"{main} {main.to_dict()} {main.digest}"
    assert (other.headers, other.missing_key) == ((), "MISSING")
    assert [text.partition("headers.")[2].partition(":")[0] for text in problems(services)] == [
        *("X-Team", "Host", "a b", "X-Odd", "X-No")
    ]


def test_the_digest_of_an_entry_does_not_depend_on_secrets() -> None:
    first, second = (read(entry(headers={"X": "${T}"}), T=token).get("main") for token in (KEY, f"{KEY}-changed"))
    assert first != second and first.digest == second.digest


def test_a_price_is_read_and_has_defaults() -> None:
    services = read(
        entry(price={"input": 0.25, "cachedInput": 0.025, "output": 2, "currency": "EUR"}),
        entry("other", price={"input": 1, "output": 0, "currency": "EUR"}),
        entry("free"),
    )

    assert services.problems == () and services.currency == "EUR"
    assert services.get("main").to_dict()["price"] == {
        "input": 0.25,
        "cachedInput": 0.025,
        "output": 2,
        "currency": "EUR",
    }
    assert services.get("other").price == Price(input=1, cached_input=1, output=0, currency="EUR")
    assert services.get("free").price is None and services.get("free").to_dict()["price"] is None
    (price,) = (one.price for one in read(entry(price={"input": 1, "output": 2})))
    assert price is not None and price.currency == "USD"
    assert read(entry()).currency is None


@pytest.mark.parametrize(
    ("price", "place"),
    [
        ({"input": 1}, "output"),
        ({"output": 1}, "input"),
        ({"input": -0.1, "output": 1}, "input"),
        ({"input": "1", "output": 1}, "input"),
        ({"input": True, "output": 1}, "input"),
        ({"input": 1, "output": 1e400}, "output"),
        ({"input": 1, "output": 10**400}, "output"),
        ({"input": 1, "output": 1, "cachedInput": []}, "cachedInput"),
        ({"input": 1, "output": 1, "currency": "usd"}, "currency"),
        ({"input": 1, "output": 1, "currency": "EURO"}, "currency"),
        ({"input": 1, "output": 1, "currency": 7}, "currency"),
    ],
)
def test_a_wrong_price_is_reported_and_the_cost_is_unknown(price: dict[str, Any], place: str) -> None:
    text = json.dumps({"services": [entry(price=price)]}).replace("Infinity", "1e400")
    services = ServiceRegistry(*parse_services(text.encode(), no_key))

    (problem,) = services.problems
    assert problem.location == f"llmservices.json: services[0].price.{place}"
    assert problem.message.startswith("expected ")
    assert services.get("main") == read(entry()).get("main")


def test_an_unknown_key_of_a_price_is_reported_and_the_rest_counts() -> None:
    services = read(entry(price={"input": 1, "output": 2, "cached_input": 0.5, "_from": "the price list"}))

    assert problems(services) == [
        'llmservices.json: services[0].price.cached_input: is not known, did you mean "cachedInput"?'
    ]
    assert services.get("main").price == Price(input=1, cached_input=1, output=2)


def test_all_prices_must_have_one_currency() -> None:
    services = read(
        entry("free"),
        entry("first", price={"input": 1, "output": 1, "currency": "EUR"}),
        entry("second", price={"input": 1, "output": 1}),
        entry("third", price={"input": 2, "output": 2, "currency": "EUR"}),
    )

    assert problems(services) == [
        'llmservices.json: services[2].price.currency: expected "EUR", the currency of service "first", got "USD":'
        " all prices must have one currency; until then the cost of this service is unknown"
    ]
    assert [one.id for one in services if one.price] == ["first", "third"]


@pytest.mark.parametrize(
    ("tokens", "cost"),
    [
        ({"input_tokens": 1_000_000}, 37_500_000),
        ({"input_tokens": 1}, 38),
        ({"input_tokens": 1_000, "cached_tokens": 400}, 600 * 37.5 + 400 * 10),
        ({"output_tokens": 3}, 450),
        ({}, 0),
        ({"input_tokens": 2**53 - 1, "output_tokens": 2**53 - 1}, 2**53 - 1),
    ],
)
def test_a_cost_is_in_whole_billionths(tokens: dict[str, Any], cost: int) -> None:
    price = Price(input=0.0375, cached_input=0.01, output=0.15)

    found = price.cost(TokenUsage(**tokens))

    assert (found, type(found)) == (cost, int)


def test_the_digest_of_an_entry_does_not_depend_on_its_price() -> None:
    first, second = read(entry()).get("main"), read(entry(price={"input": 1, "output": 1})).get("main")
    assert first != second and first.digest == second.digest
