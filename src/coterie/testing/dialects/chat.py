"""Validators of OpenAI chat completions, and of the stricter templates of local models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from coterie.testing.dialects.validation import (
    NAME,
    Invalid,
    first_error,
    has_invalid_unicode,
    is_base64,
    is_data_url,
    is_object,
    require,
)

Json = Mapping[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")


def check_openai_chat(messages: object, tools: object = None) -> str | None:
    """Validate `messages` and `tools` of a chat completions request."""
    return first_error(lambda: _openai_chat(messages, tools))


def check_strict_alternation(messages: Sequence[Json]) -> str | None:
    """Validate as many local models do: alternating roles, and tool results answered before the next user message."""
    return first_error(lambda: _alternation(messages))


def _openai_chat(messages: object, tools: object) -> None:
    require(isinstance(messages, list) and messages, "Invalid 'messages': expected an array with minimum length 1.")
    assert isinstance(messages, list)  # noqa: S101
    require(not has_invalid_unicode(messages), "We could not parse the JSON body of your request: invalid Unicode.")
    if tools is not None:
        _openai_tools(tools)
    ids: set[str] = set()
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        require(isinstance(message, dict), f"Invalid type for 'messages[{at}]': expected an object.")
        _openai_message(message, at)
        if message["role"] == "tool":
            _answered(message, open_calls, at)
            continue
        require(not open_calls, _dangling(open_calls))
        open_calls = _called(message, at, ids, tools)
    require(not open_calls, _dangling(open_calls))


def _openai_message(message: Json, at: int) -> None:
    role, content = message.get("role"), message.get("content")
    require(role in _ROLES, f"Invalid value: '{role}'. Supported values are: {', '.join(map(repr, _ROLES))}.")
    known = {"role", "content", "name"} | {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}.get(str(role), set())
    unknown = next((key for key in message if key not in known), None)
    require(unknown is None, f"Unrecognized request argument supplied: messages[{at}].{unknown}")
    require(role not in ("system", "developer") or at == 0, "System message must be at the beginning.")
    if content is None:
        require(
            role == "assistant" and message.get("tool_calls"),
            f"Invalid value for 'content': expected a string, got null. (messages[{at}])",
        )
    elif isinstance(content, str):
        require(content.strip() or role == "tool", f"messages[{at}]: content must be non-empty.")
    else:
        require(isinstance(content, list) and content, f"Invalid type for 'messages[{at}].content'.")
        for index, part in enumerate(content):
            _openai_part(part, str(role), f"messages[{at}].content[{index}]")


def _openai_part(part: Any, role: str, path: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    allowed = ("text", "image_url", "input_audio", "file") if role == "user" else ("text",)
    require(
        kind in allowed, f"Invalid value: '{kind}'. Supported values are: {', '.join(map(repr, allowed))}. ({path})"
    )
    match part:
        case {"type": "text", "text": str(text)}:
            require(text.strip(), f"{path}: text content must be non-empty.")
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            require(is_data_url(url, "image/"), f"Invalid 'image_url': expected a base64-encoded data URL. ({path})")
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(form)}}:
            require(is_base64(data) and form, f"Invalid 'input_audio'. ({path})")
        case {"type": "file", "file": {"filename": str(name), "file_data": str(url)}}:
            require(name and is_data_url(url), f"Invalid 'file_data': expected a base64-encoded data URL. ({path})")
        case _:
            raise Invalid(f"Missing required parameter: '{path}.{kind}'.")


def _openai_tools(tools: object) -> None:
    require(isinstance(tools, list) and 0 < len(tools) <= 128, "Invalid 'tools': expected an array of 1 to 128 tools.")
    assert isinstance(tools, list)  # noqa: S101
    names: set[str] = set()
    for at, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name), "parameters": {**parameters}}}:
                require(NAME.fullmatch(name), _pattern(f"tools[{at}].function.name"))
                require(
                    parameters.get("type") == "object", f"Invalid schema for function '{name}': type must be 'object'."
                )
                require(name not in names, f"Tool names must be unique: '{name}'.")
                names.add(name)
            case _:
                raise Invalid(f"Missing required parameter: 'tools[{at}].function'.")


def _called(message: Json, at: int, ids: set[str], tools: object) -> list[str]:
    """Return the ids of the calls in a message."""
    if "tool_calls" not in message:
        return []
    calls = message["tool_calls"]
    require(isinstance(calls, list) and calls, f"Invalid 'messages[{at}].tool_calls': empty array.")
    require(tools, f"messages[{at}].tool_calls is only allowed when 'tools' are specified.")
    for index, call in enumerate(calls):
        path = f"messages[{at}].tool_calls[{index}]"
        match call:
            case {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": str(arguments)}}:
                require(id, f"Invalid '{path}.id': empty string.")
                require(len(id) <= 64, f"Invalid '{path}.id': string too long.")
                require(id not in ids, f"Duplicate value for '{path}.id': '{id}'.")
                require(NAME.fullmatch(name), _pattern(f"{path}.function.name"))
                require(is_object(arguments), f"Invalid '{path}.function.arguments': expected a JSON object.")
                ids.add(id)
            case _:
                raise Invalid(f"Missing required parameter: '{path}'.")
    return [call["id"] for call in calls]


def _answered(message: Json, open_calls: list[str], at: int) -> None:
    require(
        open_calls,
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
        f" (messages[{at}])",
    )
    expected, got = open_calls.pop(0), message.get("tool_call_id")
    require(got == expected, f"Invalid 'messages[{at}].tool_call_id': expected '{expected}', got '{got}'.")


def _dangling(open_calls: Sequence[str]) -> str:
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'."
        f" The following tool_call_ids did not have response messages: {', '.join(open_calls)}"
    )


def _pattern(path: str) -> str:
    return f"Invalid '{path}': expected a string that matches the pattern '^[a-zA-Z0-9_-]{{1,64}}$'."


def _alternation(messages: Sequence[Json]) -> None:
    roles = [str(message["role"]) for message in messages]
    if roles and roles[0] == "system":
        roles = roles[1:]
    require(roles and roles[0] == "user", "Conversation roles must alternate user/assistant/user/assistant/...")
    for before, role in pairwise(roles):
        require(role != before or role == "tool", "Conversation roles must alternate user/assistant/user/assistant/...")
        require((before, role) != ("tool", "user"), "Unexpected role 'user' after role 'tool'")
    require(roles[-1] in ("user", "tool"), f"Expected last role User or Tool for serving but got {roles[-1]}")
