"""Validation of sends."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import HTTP_STATUS, Refused
from coterie.messages import MAX_PAYLOAD_BYTES, Envelope, make_envelope, validate_delay, validate_quick_replies

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
good_option = st.text(min_size=1).filter(lambda text: bool(text.strip()))


def draft(**changed: Any) -> Envelope:
    return make_envelope(**{"sender": "ada", "to": "bob", "payload": {"text": "hello"}} | changed)


def payload_of(envelope: Envelope) -> dict[str, Any]:
    return msgspec.json.decode(envelope.payload_json)  # type: ignore[no-any-return]


def code_of(**changed: Any) -> str:
    with pytest.raises(Refused) as refusal:
        draft(**changed)
    assert refusal.value.status == HTTP_STATUS[refusal.value.code]
    return refusal.value.code


# Quick replies: seed 000 requirement 1, seed 001 property 1


def valid_quick_replies(value: object) -> bool:
    if value is None or value == []:
        return True
    return (
        isinstance(value, list) and len(value) <= 10 and all(isinstance(item, str) and item.strip() for item in value)
    )


@given(json_values | st.lists(json_values | good_option, max_size=13) | st.lists(good_option, max_size=13))
def test_quick_replies_are_accepted_exactly_when_they_are_one_to_ten_non_blank_strings_or_none(value: object) -> None:
    try:
        validate_quick_replies(value)
    except Refused as refusal:
        assert not valid_quick_replies(value)
        assert refusal.code.startswith("quickReplies_")
    else:
        assert valid_quick_replies(value)


@given(st.lists(good_option.filter(lambda text: "\x00" not in text), min_size=1, max_size=10))
def test_valid_options_travel_in_the_payload_unchanged_and_in_order(options: list[str]) -> None:
    assert payload_of(draft(quick_replies=options))["quickReplies"] == options


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_options_are_the_same_as_none_given(nothing: object) -> None:
    assert "quickReplies" not in payload_of(draft(quick_replies=nothing))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("yes", "quickReplies_invalid_type"),
        ({"a": 1}, "quickReplies_invalid_type"),
        (7, "quickReplies_invalid_type"),
        (False, "quickReplies_invalid_type"),
        (["a", 1], "quickReplies_invalid_type"),
        (["a", None], "quickReplies_invalid_type"),
        (["a", ""], "quickReplies_empty_string"),
        (["  \n"], "quickReplies_empty_string"),
        (["a"] * 11, "quickReplies_too_many"),
        ([1] * 11, "quickReplies_too_many"),
        (["", 1], "quickReplies_empty_string"),
    ],
)
def test_wrong_quick_replies_are_refused_with_the_first_thing_wrong(value: object, code: str) -> None:
    assert code_of(quick_replies=value) == code
    assert code_of(payload={"text": "x", "quickReplies": value}) == code


def test_options_given_both_ways_are_those_of_the_parameter() -> None:
    sealed = draft(payload={"text": "x", "quickReplies": ["inner"]}, quick_replies=["outer"])
    assert payload_of(sealed)["quickReplies"] == ["outer"]


# Delays: seed 002 requirement 1


@pytest.mark.parametrize(
    ("value", "milliseconds"), [(None, 0), (0, 0), (-5, 0), (-0.5, 0), (1, 1), (0.2, 1), (1500.5, 1501)]
)
def test_a_delay_is_whole_milliseconds_never_less_than_asked_and_never_below_zero(
    value: object, milliseconds: int
) -> None:
    assert validate_delay(value) == timedelta(milliseconds=milliseconds)


@pytest.mark.parametrize("value", [True, "10", math.nan, math.inf, -math.inf, [1], 11 * 365.25 * 86_400_000, 10**400])
def test_a_delay_that_is_no_number_or_beyond_ten_years_is_refused(value: object) -> None:
    assert code_of(delay_ms=value) == "delayMs_invalid"


# Payloads


@pytest.mark.slow
@given(st.dictionaries(st.text().filter(lambda key: key not in ("text", "attachments", "quickReplies")), json_values))
def test_unknown_payload_fields_pass_unchanged(payload: dict[str, Any]) -> None:
    sent = payload_of(draft(payload=payload))
    if "\x00" not in repr(payload) and "\\x00" not in repr(payload):
        assert sent == payload


@pytest.mark.parametrize(
    "payload",
    [
        "a string",
        None,
        7,
        ["text"],
        {"text": 7},
        {1: "x"},
        {"x": math.nan},
        {"x": math.inf},
        {"x": {1, 2}},
        {"x": datetime(2030, 1, 1)},
        {"x": b"bytes"},
        {"x": 2**70},
        {"attachments": "a.png"},
        {"attachments": [{"filename": "a"}]},
    ],
)
def test_a_payload_that_is_no_json_object_is_refused(payload: object) -> None:
    assert code_of(payload=payload) == "payload_invalid"


def test_a_payload_nested_too_deep_is_refused_and_not_a_crash() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"x": deep}
    assert code_of(payload=deep) == "payload_invalid"


def test_a_payload_over_one_mebibyte_is_refused() -> None:
    fits = MAX_PAYLOAD_BYTES - len('{"text":""}')
    draft(payload={"text": "x" * fits})
    assert code_of(payload={"text": "x" * (fits + 1)}) == "payload_too_large"


@given(st.text(st.characters(exclude_categories=())))
def test_nul_and_lone_surrogates_are_replaced_everywhere(text: str) -> None:
    sealed = draft(payload={"text": text, text: [text]}, to=text or "x", in_reply_to=text, client_id=text)
    for value in (sealed.payload_json, sealed.to, sealed.in_reply_to or ""):
        assert "\x00" not in value and "\\u0000" not in value.replace("\\\\", "")
        value.encode()


# Identity


def test_the_same_client_id_of_the_same_sender_is_the_same_message_and_of_another_is_not() -> None:
    first = draft(client_id="c1").id
    assert draft(client_id="c1").id == first
    assert draft(client_id="c1", sender="eve").id != first
    assert draft(client_id="c2").id != first


def test_ids_hold_at_least_122_random_bits_and_never_repeat() -> None:
    ids = {draft().id for _ in range(1000)}
    assert len(ids) == 1000
    assert len({name[12:] for name in ids}) == 1000 and all(len(name) - 12 == 32 for name in ids)


def test_an_option_needs_the_question_it_belongs_to() -> None:
    assert code_of(option=1) == "option_invalid"
    assert code_of(option=-1, in_reply_to="m") == "option_invalid"
    assert code_of(option=True, in_reply_to="m") == "option_invalid"
    assert draft(option=2, in_reply_to="m").option == 2


@pytest.mark.parametrize("to", [None, "", 7, ["ada"]])
def test_an_invalid_recipient_is_refused(to: object) -> None:
    assert code_of(to=to) == "unknown_recipient"
