"""Validator of the OpenAI Responses API, and conversion of chat completions messages to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coterie.testing.dialects.validation import (
    NAME,
    Invalid,
    first_error,
    has_invalid_unicode,
    is_base64,
    is_data_url,
    is_object,
    parts,
    require,
)

Json = Mapping[str, Any]


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
