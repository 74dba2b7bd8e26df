"""Token estimates, learned limits of services, and requests that are shortened to fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.agent.context import render_message
from coterie.agent.context_window import (
    ContextWindows,
    estimate_tokens,
    estimate_usage,
    fit_messages,
    message_tokens,
    shorten_text,
    text_tokens,
)
from coterie.clock import UNIX_EPOCH
from coterie.ids import random_mark
from coterie.llm.config import ServiceEntry
from coterie.llm.providers.openai import Dialect
from coterie.llm.service import (
    AssistantMessage,
    Attachment,
    ChatMessage,
    ContextTooLong,
    ModelRequest,
    SystemMessage,
    TextPart,
    TokenUsage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from coterie.messages import Message
from coterie.testing.dialects import check_openai_chat, check_strict_alternation

ENTRY = ServiceEntry(id="main", base_url="http://127.0.0.1:9/v1", model="m", context_tokens=8_000)
UNKNOWN = replace(ENTRY, context_tokens=None)


def request_of(size: int) -> ModelRequest:
    return ModelRequest(messages=(SystemMessage("x" * size),))


# Estimates


def test_an_estimate_grows_with_request_and_answer() -> None:
    short, long = request_of(30), request_of(3_000)
    assert 0 < estimate_tokens(short) < estimate_tokens(long)
    assert estimate_usage(short, "four words of text").output_tokens > estimate_usage(short, "").output_tokens == 0


@pytest.mark.parametrize("text", ["plain English words ", "中文的句子。", '{"a":\n"b\\c"}', "€ und ä, ö, ü "])
def test_an_estimate_is_a_third_of_the_bytes_that_are_sent(text: str) -> None:
    tool = ToolSpec(name="look_up", description=text, parameters={"type": "object", "properties": {}})
    calls = (ToolCall(id="c1", name="look_up", arguments={"text": text * 50}),)
    messages: tuple[ChatMessage, ...] = (
        SystemMessage(text * 50),
        UserMessage((TextPart(text * 50),)),
        AssistantMessage("", calls),
        ToolMessage("c1", text * 50),
    )
    request = ModelRequest(messages=messages, tools=(tool,))
    body = json.dumps(Dialect().body(request, "m", None, stream=False), ensure_ascii=False).encode()
    assert len(body) / 3 * 0.85 < estimate_tokens(request) < len(body) / 3 * 1.25


# Limits


def test_a_request_leaves_space_for_the_answer() -> None:
    windows = ContextWindows()
    budget = windows.budget(ENTRY)
    assert budget is not None and 6_000 < budget < 7_000
    longer = windows.budget(replace(ENTRY, max_tokens=3_000))
    assert longer is not None and longer < 5_000
    assert windows.budget(UNKNOWN) is None


def test_the_reported_tokens_correct_the_estimate() -> None:
    windows, request = ContextWindows(), request_of(9_000)
    before, size = windows.budget(ENTRY), estimate_tokens(request)
    assert before is not None
    windows.record_answer(ENTRY, request, size, TokenUsage(input_tokens=size * 2))
    assert windows.budget(ENTRY) == pytest.approx(before / 2, rel=0.01)
    for _ in range(30):
        windows.record_answer(ENTRY, request, size, TokenUsage(input_tokens=size * 3 // 4))
    assert windows.budget(ENTRY) == pytest.approx(before * 4 / 3, rel=0.05)
    # Neither an estimate nor a changed entry says anything about the service.
    windows.record_answer(ENTRY, request, size, TokenUsage(input_tokens=size * 3, estimated=True))
    assert windows.budget(ENTRY) == pytest.approx(before * 4 / 3, rel=0.05)
    assert windows.budget(replace(ENTRY, context_tokens=8_001)) == pytest.approx(before, rel=0.01)


def test_an_error_that_names_the_window_sets_the_limit() -> None:
    windows = ContextWindows()
    windows.record_too_long(UNKNOWN, 5_000, ContextTooLong("too long", limit=4_096, sent=4_500))
    budget = windows.budget(UNKNOWN)
    assert budget is not None and budget <= 4_096
    windows.record_too_long(ENTRY, 5_000, ContextTooLong("too long", limit=4_096, sent=10_000))
    smaller = windows.budget(ENTRY)
    assert smaller is not None and smaller <= 4_096 / 2


@given(st.lists(st.tuples(st.none() | st.integers(256, 10**7), st.none() | st.integers(256, 10**7)), max_size=12))
def test_after_every_refusal_the_next_request_is_strictly_smaller(
    refusals: Sequence[tuple[int | None, int | None]],
) -> None:
    for entry in (ENTRY, UNKNOWN):
        windows, size = ContextWindows(), 100_000
        for limit, sent in refusals:
            after = windows.record_too_long(entry, size, ContextTooLong("too long", limit=limit, sent=sent))
            assert after <= size * 0.9
            assert after <= (windows.budget(entry) or 0)
            size = after


def test_a_limit_found_by_trial_grows_again_and_can_be_forgotten() -> None:
    windows = ContextWindows()
    first = windows.record_too_long(UNKNOWN, 10_000, ContextTooLong("too long"))
    for _ in range(10):
        windows.record_answer(UNKNOWN, request_of(10), 10, TokenUsage(estimated=True))
    grown = windows.budget(UNKNOWN)
    assert grown is not None and first * 1.2 < grown < first * 1.3
    windows.forget(UNKNOWN)
    assert windows.budget(UNKNOWN) is None


# Shortening


def user(text: str, **more: Any) -> UserMessage:
    message = Message(
        seq=1, id="m", sender="user", to="ada", payload={"text": text, **more}, state="taken", created_at=UNIX_EPOCH
    )
    return UserMessage(render_message(message, random_mark()))


def calls(number: int, count: int = 1, size: int = 100) -> list[ChatMessage]:
    ids = [f"call_{number}_{index}" for index in range(count)]
    made = tuple(ToolCall(id=one, name="look", arguments={"text": "a" * size}) for one in ids)
    return [AssistantMessage("", made), *(ToolMessage(one, "r" * size) for one in ids)]


def conversations() -> st.SearchStrategy[list[ChatMessage]]:
    steps = st.tuples(st.sampled_from(["user", "text", "calls"]), st.integers(0, 5_000), st.integers(1, 8))
    return st.lists(steps, min_size=1, max_size=12).map(_conversation)


def _conversation(steps: Sequence[tuple[str, int, int]]) -> list[ChatMessage]:
    messages: list[ChatMessage] = [user("first")]
    for number, (kind, size, count) in enumerate(steps):
        if kind == "user":
            messages.append(user("u" * size))
        elif kind == "text":
            messages.append(AssistantMessage("a" * size))
        else:
            messages += calls(number, count, size)
    return messages


@given(conversations(), st.integers(150, 8_000))
def test_a_shortened_conversation_fits_and_is_valid_for_strict_servers(
    messages: list[ChatMessage], budget: int
) -> None:
    shown = fit_messages(messages, budget)
    assert shown is not None
    assert sum(map(message_tokens, shown)) <= budget
    tools = (ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}}),)
    request = ModelRequest(messages=(SystemMessage("You are Ada."), *shown), tools=tools)
    usual, strict = (
        json.loads(json.dumps(dialect.body(request, "m", None, stream=False)))
        for dialect in (Dialect(), Dialect(strict_alternation=True))
    )
    assert check_openai_chat(usual["messages"], usual["tools"]) is None
    assert check_openai_chat(strict["messages"], strict["tools"]) is None
    assert check_strict_alternation(strict["messages"]) is None


def test_the_oldest_texts_are_shortened_first() -> None:
    messages: list[ChatMessage] = [user("o" * 9_000), AssistantMessage("a" * 600), user("n" * 600)]
    shown = fit_messages(messages, 2_500)
    assert shown is not None and shown[1:] == messages[1:]
    assert "characters left out" in repr(shown[0])


def test_the_newest_message_is_kept_when_nothing_else_fits() -> None:
    messages: list[ChatMessage] = [
        message for n in range(50) for message in (user(f"{n} " + "o" * 300), AssistantMessage("a" * 300))
    ]
    shown = fit_messages([*messages, user("the newest one")], 150)
    assert shown is not None
    assert "earlier messages are not shown" in repr(shown[0]) and "the newest one" in repr(shown[-1])
    assert fit_messages([user("x" * 1_000)], 20) is None


def test_many_calls_of_one_answer_become_text_if_they_do_not_fit() -> None:
    shown = fit_messages([user("go"), *calls(1, count=100)], 500)
    assert shown is not None and sum(map(message_tokens, shown)) <= 500
    assert isinstance(shown[-1], UserMessage) and "toolResults" in repr(shown[-1])


def test_a_shortened_text_names_the_artifact_that_was_left_out() -> None:
    text = "x" * 2_000 + '{"artifactRef": "ref-17"}' + "y" * 2_000
    assert "characters left out; artifactRef ref-17" in shorten_text(text, 600)
    file = Attachment(artifact_ref="ref-18", type="image", filename="a.png", mime_type="image/png", size=3)
    shown = fit_messages([UserMessage((TextPart("look " * 900), file)), AssistantMessage("yes"), user("and?")], 900)
    assert shown is not None and "ref-18" in repr(shown[0]) and "characters left out" in repr(shown[0])


def test_a_shortened_text_keeps_the_lines_of_its_frame() -> None:
    opening, closing = f"<abcdefgh {'a' * 64} 2030-01-01T12:00Z due:2030-01-01T12:00Z>", "</abcdefgh>"
    short = shorten_text(f"{opening}\n{'x' * 1_000}\n{closing}", 30).splitlines()
    assert (short[0], short[-1]) == (opening, closing) and len(short) == 5


def test_a_text_is_not_made_longer_by_its_note() -> None:
    for size in range(0, 300, 7):
        assert text_tokens(shorten_text("x" * size, 100)) <= text_tokens("x" * size)
