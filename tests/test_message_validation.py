"""Validation of sends."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coterie.errors import HTTP_STATUS, Refused
from coterie.messages import MAX_PAYLOAD_BYTES, Envelope, make_envelope, validate_delay
from coterie.text import BLANK_CHARACTERS, is_blank

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
good_option = st.text(min_size=1).filter(lambda text: not is_blank(text))


def draft(**changed: Any) -> Envelope:
    return make_envelope(**{"sender": "ada", "to": "bob", "payload": {"text": "hello"}} | changed)


def payload_of(envelope: Envelope) -> dict[str, Any]:
    return msgspec.json.decode(envelope.payload_json)  # type: ignore[no-any-return]


def code_of(**changed: Any) -> str:
    with pytest.raises(Refused) as refusal:
        draft(**changed)
    assert refusal.value.status == HTTP_STATUS[refusal.value.code]
    return refusal.value.code


# Quick replies: requirements 000-1 and 001-P1


def valid_quick_replies(value: object) -> bool:
    if value is None or value == []:
        return True
    return (
        isinstance(value, list)
        and len(value) <= 10
        and all(isinstance(item, str) and not is_blank(item) for item in value)
    )


@given(
    json_values
    | st.lists(json_values | good_option, max_size=13)
    | st.lists(good_option, max_size=13)
    | st.lists(good_option, min_size=9, max_size=12)
)
@example([])
@example(["x"] * 10)
@example(["x"] * 11)
def test_quick_replies_are_accepted_exactly_when_they_are_one_to_ten_non_blank_strings_or_none(value: object) -> None:
    """001-P1, for options given as the parameter and inside the payload."""
    given_both_ways = {"quick_replies": value}, {"payload": {"text": "hello", "quickReplies": value}}
    for given_as in given_both_ways:
        try:
            sent = payload_of(draft(**given_as))
        except Refused as refusal:
            assert not valid_quick_replies(value)
            assert refusal.code.startswith("quickReplies_")
        else:
            assert valid_quick_replies(value)
            assert bool(sent.get("quickReplies")) == bool(value)


def test_server_and_page_agree_which_options_are_blank() -> None:
    """The page shows no buttons for a blank option, so the server must refuse the same ones."""
    page = (files("coterie.web") / "static" / "state.js").read_text()
    assert f"/^[{BLANK_CHARACTERS}]*$/" in page
    assert all(is_blank(text) for text in ("", "\ufeff", "\x1c\x1f", "\x85", "\u3000 \t"))
    assert all(is_blank(char) for char in map(chr, range(0x110000)) if char.isspace())
    assert not is_blank("\ufeffx") and not is_blank("0")


@given(st.lists(good_option.filter(lambda text: "\x00" not in text), min_size=1, max_size=10))
def test_valid_options_are_in_the_payload_unchanged_and_in_order(options: list[str]) -> None:
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
        (["\ufeff"], "quickReplies_empty_string"),
        (["\u200b \x85"], "quickReplies_empty_string"),
        (["a"] * 11, "quickReplies_too_many"),
        ([1] * 11, "quickReplies_too_many"),
        (["", 1], "quickReplies_empty_string"),
    ],
)
def test_wrong_quick_replies_are_refused_with_the_first_thing_wrong(value: object, code: str) -> None:
    assert code_of(quick_replies=value) == code
    assert code_of(payload={"text": "x", "quickReplies": value}) == code


def test_the_options_parameter_overrides_options_in_the_payload() -> None:
    sealed = draft(payload={"text": "x", "quickReplies": ["inner"]}, quick_replies=["outer"])
    assert payload_of(sealed)["quickReplies"] == ["outer"]


# Delays: requirement 002-1


@pytest.mark.parametrize(
    ("value", "milliseconds"), [(None, 0), (0, 0), (-5, 0), (-0.5, 0), (1, 1), (0.2, 1), (1500.5, 1501)]
)
def test_a_delay_is_whole_milliseconds_never_less_than_asked_and_never_below_zero(
    value: object, milliseconds: int
) -> None:
    assert validate_delay(value) == timedelta(milliseconds=milliseconds)


@pytest.mark.parametrize("value", [True, "10", math.nan, math.inf, -math.inf, [1], 11 * 365.25 * 86_400_000, 10**400])
def test_a_delay_that_is_not_a_number_or_over_ten_years_is_refused(value: object) -> None:
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
def test_a_payload_that_is_not_a_json_object_is_refused(payload: object) -> None:
    assert code_of(payload=payload) == "payload_invalid"


def test_a_payload_nested_too_deep_is_refused() -> None:
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
