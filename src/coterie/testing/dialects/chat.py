"""OpenAI chat completions, and the stricter templates of local models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from coterie.testing.dialects.strictness import (
    NAME,
    Wrong,
    complaint,
    is_base64,
    is_data_url,
    is_object,
    need,
    unstorable,
)

Json = Mapping[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")


def check_openai_chat(messages: object, tools: object = None) -> str | None:
    """`messages` and `tools` of a chat completions request."""
    return complaint(lambda: _openai_chat(messages, tools))


def check_strict_alternation(messages: Sequence[Json]) -> str | None:
    """The templates of many local models: user and assistant in turn, tool results answered before the user speaks."""
    return complaint(lambda: _alternation(messages))


def _openai_chat(messages: object, tools: object) -> None:
    need(isinstance(messages, list) and messages, "Invalid 'messages': expected an array with minimum length 1.")
    assert isinstance(messages, list)  # noqa: S101
    need(not unstorable(messages), "We could not parse the JSON body of your request: invalid Unicode.")
    if tools is not None:
        _openai_tools(tools)
    ids: set[str] = set()
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        need(isinstance(message, dict), f"Invalid type for 'messages[{at}]': expected an object.")
        _openai_message(message, at)
        if message["role"] == "tool":
            _answered(message, open_calls, at)
            continue
        need(not open_calls, _dangling(open_calls))
        open_calls = _called(message, at, ids, tools)
    need(not open_calls, _dangling(open_calls))


def _openai_message(message: Json, at: int) -> None:
    role, content = message.get("role"), message.get("content")
    need(role in _ROLES, f"Invalid value: '{role}'. Supported values are: {', '.join(map(repr, _ROLES))}.")
    known = {"role", "content", "name"} | {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}.get(str(role), set())
    strange = next((key for key in message if key not in known), None)
    need(strange is None, f"Unrecognized request argument supplied: messages[{at}].{strange}")
    need(role not in ("system", "developer") or at == 0, "System message must be at the beginning.")
    if content is None:
        need(
            role == "assistant" and message.get("tool_calls"),
            f"Invalid value for 'content': expected a string, got null. (messages[{at}])",
        )
    elif isinstance(content, str):
        need(content.strip() or role == "tool", f"messages[{at}]: content must be non-empty.")
    else:
        need(isinstance(content, list) and content, f"Invalid type for 'messages[{at}].content'.")
        for place, part in enumerate(content):
            _openai_part(part, str(role), f"messages[{at}].content[{place}]")


def _openai_part(part: Any, role: str, place: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    allowed = ("text", "image_url", "input_audio", "file") if role == "user" else ("text",)
    need(kind in allowed, f"Invalid value: '{kind}'. Supported values are: {', '.join(map(repr, allowed))}. ({place})")
    match part:
        case {"type": "text", "text": str(text)}:
            need(text.strip(), f"{place}: text content must be non-empty.")
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            need(is_data_url(url, "image/"), f"Invalid 'image_url': expected a base64-encoded data URL. ({place})")
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(form)}}:
            need(is_base64(data) and form, f"Invalid 'input_audio'. ({place})")
        case {"type": "file", "file": {"filename": str(name), "file_data": str(url)}}:
            need(name and is_data_url(url), f"Invalid 'file_data': expected a base64-encoded data URL. ({place})")
        case _:
            raise Wrong(f"Missing required parameter: '{place}.{kind}'.")


def _openai_tools(tools: object) -> None:
    need(isinstance(tools, list) and 0 < len(tools) <= 128, "Invalid 'tools': expected an array of 1 to 128 tools.")
    assert isinstance(tools, list)  # noqa: S101
    names: set[str] = set()
    for at, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name), "parameters": {**parameters}}}:
                need(NAME.fullmatch(name), _pattern(f"tools[{at}].function.name"))
                need(
                    parameters.get("type") == "object", f"Invalid schema for function '{name}': type must be 'object'."
                )
                need(name not in names, f"Tool names must be unique: '{name}'.")
                names.add(name)
            case _:
                raise Wrong(f"Missing required parameter: 'tools[{at}].function'.")


def _called(message: Json, at: int, ids: set[str], tools: object) -> list[str]:
    """The ids of the calls a message makes."""
    if "tool_calls" not in message:
        return []
    calls = message["tool_calls"]
    need(isinstance(calls, list) and calls, f"Invalid 'messages[{at}].tool_calls': empty array.")
    need(tools, f"messages[{at}].tool_calls is only allowed when 'tools' are specified.")
    for place, call in enumerate(calls):
        where = f"messages[{at}].tool_calls[{place}]"
        match call:
            case {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": str(arguments)}}:
                need(id, f"Invalid '{where}.id': empty string.")
                need(len(id) <= 64, f"Invalid '{where}.id': string too long.")
                need(id not in ids, f"Duplicate value for '{where}.id': '{id}'.")
                need(NAME.fullmatch(name), _pattern(f"{where}.function.name"))
                need(is_object(arguments), f"Invalid '{where}.function.arguments': expected a JSON object.")
                ids.add(id)
            case _:
                raise Wrong(f"Missing required parameter: '{where}'.")
    return [call["id"] for call in calls]


def _answered(message: Json, open_calls: list[str], at: int) -> None:
    need(
        open_calls,
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
        f" (messages[{at}])",
    )
    expected, got = open_calls.pop(0), message.get("tool_call_id")
    need(got == expected, f"Invalid 'messages[{at}].tool_call_id': expected '{expected}', got '{got}'.")


def _dangling(open_calls: Sequence[str]) -> str:
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'."
        f" The following tool_call_ids did not have response messages: {', '.join(open_calls)}"
    )


def _pattern(place: str) -> str:
    return f"Invalid '{place}': expected a string that matches the pattern '^[a-zA-Z0-9_-]{{1,64}}$'."


def _alternation(messages: Sequence[Json]) -> None:
    roles = [str(message["role"]) for message in messages]
    if roles and roles[0] == "system":
        roles = roles[1:]
    need(roles and roles[0] == "user", "Conversation roles must alternate user/assistant/user/assistant/...")
    for before, role in pairwise(roles):
        need(role != before or role == "tool", "Conversation roles must alternate user/assistant/user/assistant/...")
        need((before, role) != ("tool", "user"), "Unexpected role 'user' after role 'tool'")
    need(roles[-1] in ("user", "tool"), f"Expected last role User or Tool for serving but got {roles[-1]}")
