"""Validator of the Anthropic Messages API, and conversion of chat completions requests to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from coterie.testing.dialects.validation import NAME, first_error, has_invalid_unicode, is_base64, parts, require

Json = dict[str, Any]


def anthropic_body(messages: Sequence[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]] = ()) -> Json:
    """Return `system`, `messages` and `tools` for the Messages API."""
    body: Json = {"messages": []}
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


def check_anthropic(body: Json) -> str | None:
    """Validate `system`, `messages` and `tools` of a Messages API request."""
    return first_error(lambda: _anthropic(body))


def _blocks(message: Mapping[str, Any]) -> Iterator[Json]:
    if message["role"] == "tool":
        call_id = _valid_id(message["tool_call_id"])
        yield {"type": "tool_result", "tool_use_id": call_id, "content": message["content"]}
        return
    for part in parts(message):
        yield _rendered(part)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        yield {"type": "tool_use", "id": _valid_id(call["id"]), "name": function["name"], "input": arguments}


def _rendered(part: Mapping[str, Any]) -> Json:
    match part:
        case {"type": "image_url", "image_url": {"url": url}}:
            return {"type": "image", "source": _source(url)}
        case {"type": "file", "file": {"file_data": url}}:
            return {"type": "document", "source": _source(url)}
        case {"type": "input_audio"}:
            return {"type": "text", "text": "[audio, which this service does not take]"}
    return {"type": "text", "text": part["text"]}


def _source(data_url: str) -> Json:
    head, _, data = data_url.partition(",")
    return {"type": "base64", "media_type": head.removeprefix("data:").removesuffix(";base64"), "data": data}


def _valid_id(call_id: str) -> str:
    # Characters that are not allowed become their code, so that different ids stay different.
    return re.sub(r"[^a-zA-Z0-9-]", lambda match: f"_{ord(match[0]):x}_", call_id)[:64]


def _anthropic(body: Json) -> None:
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


def _check_results(blocks: Sequence[Json], open_calls: Sequence[str], at: int) -> None:
    """Require that the first blocks answer exactly the calls of the previous message."""
    results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    missing = [call_id for call_id in open_calls if call_id not in results]
    path = f"messages.{at}"
    require(not missing, f"{path}: `tool_use` ids were found without `tool_result` blocks immediately after: {missing}")
    fits = len(results) == len(open_calls) and set(results) == set(open_calls)
    require(fits, f"{path}: unexpected `tool_use_id` found in `tool_result` blocks: {results}")
    first = all(block["type"] == "tool_result" for block in blocks[: len(results)])
    require(first, f"{path}: `tool_result` blocks must come first in the content array")


def _call_id(block: Json, ids: set[str]) -> str:
    call_id = str(block.get("id"))
    require(NAME.fullmatch(call_id), f"tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$': {call_id}")
    require(call_id not in ids, f"`tool_use` ids must be unique: {call_id}")
    ids.add(call_id)
    return call_id


def _is_block(block: Json, role: str) -> bool:
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
