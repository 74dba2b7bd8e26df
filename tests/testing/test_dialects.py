"""API validators find what real services find; a history valid for one API is valid for all."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from coterie.llm.providers.openai import Dialect
from coterie.llm.service import (
    AssistantMessage,
    ChatMessage,
    InlineFile,
    ModelRequest,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from coterie.testing.dialects import (
    anthropic_body,
    check_anthropic,
    check_openai_chat,
    check_openai_responses,
    check_strict_alternation,
    responses_input,
)

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": ""}
URL = "data:image/png;base64,iVBORw0KGgo="


def assistant(*ids: str, **more: Any) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "look_up", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def tool(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "cold"}


def calling(name: str, arguments: str = "{}") -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    return assistant(tool_calls=[call])


def part(**more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [more]}


GOOD: dict[str, list[Any]] = {
    "a question": [USER],
    "a system block first": [{"role": "system", "content": "Be brief."}, USER],
    "a closed group": [USER, assistant("a", "b"), tool("a"), tool("b"), USER],
    "two groups": [
        USER,
        assistant("a"),
        tool("a"),
        assistant("b"),
        tool("b"),
        {"role": "assistant", "content": "Cold."},
    ],
    "an empty result": [USER, assistant("a"), {"role": "tool", "tool_call_id": "a", "content": ""}],
    "a picture": [part(type="image_url", image_url={"url": URL})],
    "a sound": [part(type="input_audio", input_audio={"data": "SUQz", "format": "mp3"})],
    "a file": [part(type="file", file={"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="})],
}
BAD: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "minimum length 1"),
    "no object": (["Hi"], "expected an object"),
    "an unknown role": ([{"role": "function", "content": "x"}], "Invalid value: 'function'"),
    "no role": ([{"content": "x"}], "Invalid value: 'None'"),
    "an unknown key": ([{**USER, "weight": 1}], "Unrecognized request argument"),
    "a system block later": ([USER, {"role": "system", "content": "x"}], "must be at the beginning"),
    "two system blocks": ([{"role": "system", "content": "x"}] * 2, "must be at the beginning"),
    "an empty question": ([{"role": "user", "content": ""}], "non-empty"),
    "a blank question": ([{"role": "user", "content": " \n"}], "non-empty"),
    "no question": ([{"role": "user", "content": None}], "got null"),
    "an answer of nothing": ([USER, {"role": "assistant", "content": None}], "got null"),
    "no parts": ([{"role": "user", "content": []}], "Invalid type"),
    "an unknown part": ([part(type="video")], "Invalid value: 'video'"),
    "an empty part": ([part(type="text", text="")], "non-empty"),
    "a picture by reference": ([part(type="image_url", image_url={"url": "artifact:7"})], "data URL"),
    "a picture that is none": ([part(type="image_url", image_url={"url": "data:text/plain;base64,SUQz"})], "data URL"),
    "a broken picture": ([part(type="image_url", image_url={"url": URL + "!"})], "data URL"),
    "a picture without bytes": ([part(type="image_url")], "Missing required parameter"),
    "a picture from the assistant": (
        [USER, {**part(type="image_url"), "role": "assistant"}],
        "Invalid value: 'image_url'",
    ),
    "a dangling call": ([USER, assistant("a")], "did not have response messages: a"),
    "a call half answered": ([USER, assistant("a", "b"), tool("a"), USER], "did not have response messages: b"),
    "something in a group": ([USER, assistant("a"), USER, tool("a")], "did not have response messages: a"),
    "results in the wrong order": ([USER, assistant("a", "b"), tool("b"), tool("a")], "expected 'a', got 'b'"),
    "a result twice": ([USER, assistant("a"), tool("a"), tool("a")], "must be a response to a preceeding message"),
    "a result without a call": ([USER, tool("a")], "must be a response to a preceeding message"),
    "a result first": ([tool("a")], "must be a response to a preceeding message"),
    "an id twice in a group": ([USER, assistant("a", "a"), tool("a"), tool("a")], "Duplicate value"),
    "an id twice in a history": ([USER, assistant("a"), tool("a"), assistant("a"), tool("a")], "Duplicate value"),
    "an empty id": ([USER, assistant(""), tool("")], "empty string"),
    "no calls": ([USER, assistant(content="x")], "empty array"),
    "a bad name": ([USER, calling("look up!"), tool("a")], "pattern"),
    "arguments that are no object": ([USER, calling("look_up", "[]"), tool("a")], "JSON object"),
    "NUL": ([{"role": "user", "content": "a\x00"}], "invalid Unicode"),
    "a lone surrogate": ([{"role": "user", "content": "a\ud800"}], "invalid Unicode"),
}
BAD_TOOLS: dict[str, tuple[Any, str]] = {
    "none": ([], "1 to 128"),
    "too many": ([TOOL] * 129, "1 to 128"),
    "twice": ([TOOL, TOOL], "unique"),
    "a bad name": ([{"type": "function", "function": {"name": "a b", "parameters": {"type": "object"}}}], "pattern"),
    "no function": ([{"type": "function"}], "Missing required parameter"),
    "a bad schema": ([{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}], "schema"),
}


@pytest.mark.parametrize("messages", GOOD.values(), ids=GOOD)
def test_a_valid_history_is_accepted(messages: list[Any]) -> None:
    assert check_openai_chat(messages, [TOOL]) is None
    assert check_openai_responses(responses_input(messages)) is None
    assert check_anthropic(anthropic_body(messages, [TOOL])) is None


@pytest.mark.parametrize(("messages", "error"), BAD.values(), ids=BAD)
def test_an_invalid_history_is_refused_with_the_reason(messages: list[Any], error: str) -> None:
    assert error in (check_openai_chat(messages, [TOOL]) or "no error")


@pytest.mark.parametrize(("tools", "error"), BAD_TOOLS.values(), ids=BAD_TOOLS)
def test_bad_tools_are_refused(tools: Any, error: str) -> None:
    assert error in (check_openai_chat([USER], tools) or "no error")


def test_calls_are_refused_where_no_tools_are_declared() -> None:
    messages = [USER, assistant("a"), tool("a")]

    assert "only allowed when 'tools'" in (check_openai_chat(messages) or "")
    assert "must define tools" in (check_anthropic(anthropic_body(messages)) or "")


@pytest.mark.parametrize(
    ("roles", "error"),
    [
        ("system user", None),
        ("user assistant user", None),
        ("user calls tool tool assistant user", None),
        ("user calls tool", None),
        ("assistant user", "must alternate"),
        ("user user", "must alternate"),
        ("user assistant calls tool", "must alternate"),
        ("user calls tool user", "after role 'tool'"),
        ("user assistant", "last role"),
    ],
)
def test_strict_turns(roles: str, error: str | None) -> None:
    messages = [{"role": role.replace("calls", "assistant"), "content": "x"} for role in roles.split()]

    found = check_strict_alternation(messages)

    assert found is None if error is None else error in (found or "")


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([], "at least one"),
        ([{"type": "reasoning"}], "Invalid value"),
        ([{"type": "function_call_output", "call_id": "a", "output": "x"}], "No tool call found"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}], "No tool output found"),
        ([{"type": "message", "role": "user", "content": [{"type": "output_text", "text": "x"}]}], "Invalid value"),
    ],
)
def test_bad_responses_input_is_refused(items: list[Any], error: str) -> None:
    assert error in (check_openai_responses(items) or "")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "at least one"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "x"}]}], "first message"),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], "invalid block"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 2, "must alternate"),
        ([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": ""}]}], "unexpected"),
        (
            [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            ],
            "without `tool_result`",
        ),
        (
            [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]},
            ],
            "must come first",
        ),
    ],
)
def test_bad_anthropic_messages_are_refused(messages: list[Any], error: str) -> None:
    assert error in (check_anthropic({"messages": messages, "tools": [{}]}) or "")


@pytest.mark.parametrize("seed", range(20))
def test_every_valid_history_is_valid_for_every_api(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        said = _history(chance)
        for tools in ((_SPEC,), ()):
            _fits(ModelRequest(messages=said, tools=tools), replay=f"seed {seed}: {said}")


_SPEC = ToolSpec(name="look_up", description="", parameters={"type": "object"})


def _fits(request: ModelRequest, replay: str) -> None:
    body = Dialect().body(request, "m", None, stream=True)
    messages, tools = json.loads(json.dumps(body["messages"])), body.get("tools")
    strict = Dialect(strict_alternation=True, system_role=False).messages(request)
    assert check_openai_chat(messages, tools) is None, replay
    assert check_openai_responses(responses_input(messages)) is None, replay
    assert check_openai_chat(strict, tools) is None, replay
    assert check_strict_alternation(strict) is None, replay
    assert check_anthropic(anthropic_body(strict, tools or ())) is None, replay


def _history(chance: random.Random) -> tuple[ChatMessage, ...]:
    """Return a random valid history with content that providers are sensitive to."""
    said: list[ChatMessage] = [SystemMessage("Be brief.")] if chance.random() < 0.7 else []
    for turn in range(chance.randint(1, 6)):
        said += [UserMessage(_parts(chance)) for _ in range(chance.randint(turn == 0, 3))]
        for step in range(chance.randint(0, 2)):
            calls = tuple(
                ToolCall(
                    id=f"c.{turn}:{step}_{n}", name=chance.choice(["look_up", "天气 x", ""]), arguments={"a": "é😀"}
                )
                for n in range(chance.randint(1, 3))
            )
            said.append(AssistantMessage(chance.choice(["", " ", "I look."]), calls))
            said += [ToolMessage(call.id, chance.choice(["", "cold", "😀"])) for call in calls]
        if chance.random() < 0.7:
            said.append(AssistantMessage(chance.choice(["", "Cold.", "\n"])))
    return tuple(said)


def _parts(chance: random.Random) -> tuple[TextPart | InlineFile, ...]:
    picture = InlineFile(type="image", filename="a.png", mime_type="image/png", data=b"\x89PNG")
    sound = InlineFile(type="audio", filename="a.wav", mime_type="audio/x-wav", data=b"RIFF")
    file = InlineFile(type="file", filename="ä.pdf", mime_type="application/pdf", data=b"%PDF")
    some: list[TextPart | InlineFile] = [TextPart("Hi"), TextPart(""), TextPart(" "), picture, sound, file]
    return tuple(chance.choice(some) for _ in range(chance.randint(0, 3)))
