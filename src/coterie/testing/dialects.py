"""Strict validators of the requests that model APIs accept.

Each check returns the first error in the service's own words, or None. A valid history should be valid for all APIs:
`responses_input` and `anthropic_body` convert a chat completions request.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_INVALID_UNICODE = re.compile("[\x00\ud800-\udfff]")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.A)


class Invalid(Exception):
    """The message is the service's error message."""


def first_error(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Invalid as error:
        return str(error)
    return None


def require(condition: object, message: str) -> None:
    if not condition:
        raise Invalid(message)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def is_data_url(url: str, kind: str = "") -> bool:
    head = _DATA_URL.match(url)
    return head is not None and url.startswith(f"data:{kind}") and is_base64(url[head.end() :])


def is_base64(data: str) -> bool:
    try:
        return bool(base64.b64decode(data, validate=True)) or data == ""
    except binascii.Error:
        return False


def has_invalid_unicode(value: object) -> bool:
    values = [value]
    for item in values:  # grows during the loop
        if isinstance(item, str):
            if _INVALID_UNICODE.search(item):
                return True
        elif isinstance(item, dict):
            values += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            values += item
    return False


def parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content or []


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


def responses_input(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return `input` for the Responses API."""
    return [item for message in messages for item in _items(message)]


def check_openai_responses(items: Sequence[Json], tools: Sequence[Json] = ()) -> str | None:
    """Validate `input` of a Responses API request."""
    return first_error(lambda: _responses(items, tools))


def _items(message: Mapping[str, Any]) -> Iterator[Json]:
    role = message["role"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        return
    kind = "output_text" if role == "assistant" else "input_text"
    content = [_rendered(part, kind) for part in parts(message)]
    if content:
        yield {"type": "message", "role": role, "content": content}
    for call in message.get("tool_calls", ()):
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _rendered(part: Mapping[str, Any], kind: str) -> Json:
    match part:
        case {"type": "image_url", "image_url": {"url": url}}:
            return {"type": "input_image", "image_url": url}
        case {"type": "file", "file": file}:
            return {"type": "input_file", **file}
        case {"type": "input_audio"}:
            return dict(part)
    return {"type": kind, "text": part["text"]}


def _responses(items: Sequence[Json], tools: Sequence[Json]) -> None:
    require(items, "Invalid 'input': expected at least one item.")
    require(not has_invalid_unicode(items), "We could not parse the JSON body of your request: invalid Unicode.")
    names = [tool.get("name") for tool in tools]
    require(len(set(names)) == len(names), "Tool names must be unique.")
    called: list[str] = []
    answered: set[str] = set()
    for at, item in enumerate(items):
        match item:
            case {"type": "message", "role": "system" | "user" | "assistant" as role, "content": [*content]}:
                require(content, f"Invalid 'input[{at}].content': empty array.")
                require(all(_is_part(part, role) for part in content), f"Invalid value: 'input[{at}].content'.")
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                require(id and id not in called, f"Duplicate 'call_id' in input[{at}]: '{id}'.")
                require(NAME.fullmatch(name) and is_object(arguments), f"Invalid function_call: 'input[{at}]'.")
                called.append(id)
            case {"type": "function_call_output", "call_id": str(id), "output": str()}:
                require(id in called, f"No tool call found for function call output with call_id {id}.")
                require(id not in answered, f"Duplicate function_call_output for call_id {id}.")
                answered.add(id)
            case _:
                raise Invalid(f"Invalid value: 'input[{at}]'.")
    open_call = next((call_id for call_id in called if call_id not in answered), None)
    require(open_call is None, f"No tool output found for function call {open_call}.")


def _is_part(part: Json, role: str) -> bool:
    match part:
        case {"type": "output_text", "text": str(text)}:
            return role == "assistant" and bool(text)
        case {"type": "input_text", "text": str(text)}:
            return role != "assistant" and bool(text)
        case {"type": "input_image", "image_url": str(url)}:
            return role == "user" and is_data_url(url, "image/")
        case {"type": "input_file", "filename": str(), "file_data": str(url)}:
            return role == "user" and is_data_url(url)
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str()}}:
            return role == "user" and is_base64(data)
    return False


def anthropic_body(messages: Sequence[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return `system`, `messages` and `tools` for the Messages API."""
    body: dict[str, Any] = {"messages": []}
    for message in messages:
        if message["role"] == "system":
            body["system"] = message["content"]
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = list(_blocks(message))
        if body["messages"] and body["messages"][-1]["role"] == role:
            body["messages"][-1]["content"] += blocks
        else:
            body["messages"].append({"role": role, "content": blocks})
    functions = [tool["function"] for tool in tools]
    if functions:
        body["tools"] = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    return body


def check_anthropic(body: dict[str, Any]) -> str | None:
    """Validate `system`, `messages` and `tools` of a Messages API request."""
    return first_error(lambda: _anthropic(body))


def _blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if message["role"] == "tool":
        call_id = _valid_id(message["tool_call_id"])
        yield {"type": "tool_result", "tool_use_id": call_id, "content": message["content"]}
        return
    for part in parts(message):
        yield _render_anthropic(part)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        yield {"type": "tool_use", "id": _valid_id(call["id"]), "name": function["name"], "input": arguments}


def _render_anthropic(part: Mapping[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "image_url", "image_url": {"url": url}}:
            return {"type": "image", "source": _source(url)}
        case {"type": "file", "file": {"file_data": url}}:
            return {"type": "document", "source": _source(url)}
        case {"type": "input_audio"}:
            return {"type": "text", "text": "[audio, which this service does not take]"}
    return {"type": "text", "text": part["text"]}


def _source(data_url: str) -> dict[str, Any]:
    head, _, data = data_url.partition(",")
    return {"type": "base64", "media_type": head.removeprefix("data:").removesuffix(";base64"), "data": data}


def _valid_id(call_id: str) -> str:
    # Characters that are not allowed become their code, so that different ids stay different.
    return re.sub(r"[^a-zA-Z0-9-]", lambda match: f"_{ord(match[0]):x}_", call_id)[:64]


def _anthropic(body: dict[str, Any]) -> None:
    messages = body.get("messages") or []
    require(messages, "messages: at least one message is required")
    require(not has_invalid_unicode(body), "The request body is not valid JSON: invalid Unicode.")
    require(messages[0]["role"] == "user", 'messages: first message must use the "user" role')
    for before, message in pairwise(messages):
        require(before["role"] != message["role"], 'messages: roles must alternate between "user" and "assistant"')
    ids: set[str] = set()
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        role, blocks = message["role"], message["content"]
        require(role in ("user", "assistant"), f"messages.{at}.role: Input should be 'user' or 'assistant'")
        require(isinstance(blocks, list) and blocks, "messages: all messages must have non-empty content")
        for block in blocks:
            require(_is_block(block, role), f"messages.{at}.content: invalid block of type {block.get('type')!r}")
        _check_results(blocks, open_calls, at)
        open_calls = [_call_id(block, ids) for block in blocks if block["type"] == "tool_use"]
        require(not open_calls or body.get("tools"), "Requests which include `tool_use` blocks must define tools")
    _check_results([], open_calls, len(messages))


def _check_results(blocks: Sequence[dict[str, Any]], open_calls: Sequence[str], at: int) -> None:
    """Require that the first blocks answer exactly the calls of the previous message."""
    results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    missing = [call_id for call_id in open_calls if call_id not in results]
    path = f"messages.{at}"
    require(not missing, f"{path}: `tool_use` ids were found without `tool_result` blocks immediately after: {missing}")
    fits = len(results) == len(open_calls) and set(results) == set(open_calls)
    require(fits, f"{path}: unexpected `tool_use_id` found in `tool_result` blocks: {results}")
    first = all(block["type"] == "tool_result" for block in blocks[: len(results)])
    require(first, f"{path}: `tool_result` blocks must come first in the content array")


def _call_id(block: dict[str, Any], ids: set[str]) -> str:
    call_id = str(block.get("id"))
    require(NAME.fullmatch(call_id), f"tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$': {call_id}")
    require(call_id not in ids, f"`tool_use` ids must be unique: {call_id}")
    ids.add(call_id)
    return call_id


def _is_block(block: dict[str, Any], role: str) -> bool:
    match block:
        case {"type": "text", "text": str(text)}:
            return bool(text.strip())
        case {"type": "tool_use", "name": str(name), "input": dict()}:
            return bool(NAME.fullmatch(name)) and role == "assistant"
        case {"type": "tool_result", "tool_use_id": str(), "content": str()}:
            return role == "user"
        case {"type": "image" | "document", "source": {"type": "base64", "media_type": str(), "data": str(data)}}:
            return role == "user" and is_base64(data)
    return False
