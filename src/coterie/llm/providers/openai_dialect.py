"""A request as OpenAI-compatible chat completions want it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from coterie.llm.adapter import on_one_line
from coterie.llm.chat import (
    AssistantSaid,
    Attachment,
    Call,
    Inline,
    Request,
    Said,
    SystemSaid,
    Text,
    ToolSaid,
    ToolSpec,
    UserSaid,
)
from coterie.text import clean

Json = dict[str, Any]
_CAPABILITY = {"image": "vision", "audio": "audio", "file": "file"}
_AUDIO_FORMAT = {"mpeg": "mp3", "mp3": "mp3", "wav": "wav", "x-wav": "wav", "wave": "wav", "vnd.wave": "wav"}
_PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one server makes of the common language. It is found out by its refusals, see `after`."""

    usage: bool = True
    """Takes `stream_options`."""
    limit_key: str = "max_tokens"
    system: bool = True
    """Has a system role; otherwise the system's text leads the first message of the user."""
    alternate: bool = False
    """Demands user and assistant in strict turn, tool results answered before the user speaks."""

    def after(self, complaint: str) -> Dialect:
        """The dialect of a server that refused a request with these words; the same if they concern something else."""
        if self.usage and "stream_options" in complaint:
            return replace(self, usage=False)
        if self.limit_key == "max_tokens" and "max_completion_tokens" in complaint:
            return replace(self, limit_key="max_completion_tokens")
        if self.system and re.search(r"system role (is )?not supported", complaint, re.I):
            return replace(self, system=False)
        if not self.alternate and re.search(r"roles must alternate|after role|last role", complaint, re.I):
            return replace(self, alternate=True)
        return self

    def body(self, request: Request, model: str, max_tokens: int | None, *, stream: bool) -> Json:
        body: Json = {"model": model, "messages": self.messages(request)}
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        if max_tokens:
            body[self.limit_key] = max_tokens
        if stream:
            body["stream"] = True
            if self.usage:
                body["stream_options"] = {"include_usage": True}
        return body

    def messages(self, request: Request) -> list[Json]:
        said = request.said if request.tools else tuple(_without_calls(request.said))
        said = said if self.system else _lead_in(said)
        said = tuple(_merged(said))
        if self.alternate:
            said = tuple(_in_turn(said))
        return [_message(one) for one in said]


def carried(request: Request) -> frozenset[str]:
    """The capabilities that a request makes use of."""
    parts = (part for said in request.said if isinstance(said, UserSaid) for part in said.parts)
    kinds = {_CAPABILITY[part.type] for part in parts if isinstance(part, Inline)}
    return frozenset(kinds | {"tool_calling"}) if request.tools else frozenset(kinds)


def call_ids(request: Request) -> set[str]:
    return {call.id for said in request.said if isinstance(said, AssistantSaid) for call in said.calls}


def wire_name(name: str) -> str:
    """The name as the dialect allows it; a model may have made up one that it does not."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unnamed"


def names(tools: Iterable[ToolSpec]) -> Mapping[str, str]:
    """The tools' own names by those on the wire."""
    return {wire_name(tool.name): tool.name for tool in tools}


def _merged(said: Iterable[Said]) -> Iterator[Said]:
    """Nobody speaks twice in a row, and nobody says nothing."""
    before: Said | None = None
    for one in said:
        match before, one:
            case _, AssistantSaid(text, ()) if not text.strip():
                continue
            case UserSaid(parts), UserSaid(more):
                before = UserSaid((*parts, *more))
                continue
            case AssistantSaid(text, ()), AssistantSaid(more_text, calls):
                before = AssistantSaid(_joined((text, more_text)), calls)
                continue
        if before:
            yield before
        before = one
    if before:
        yield before


def _in_turn(said: Iterable[Said]) -> Iterator[Said]:
    before: Said | None = None
    for one in said:
        match before, one:
            case ToolSaid(), UserSaid():
                yield AssistantSaid("(I was interrupted here.)")
            case ((None | SystemSaid()), AssistantSaid()):
                yield UserSaid((Text("(The conversation goes on from here.)"),))
        yield one
        before = one
    if not isinstance(before, UserSaid | ToolSaid):
        yield UserSaid((Text("(Go on.)"),))


def _without_calls(said: Iterable[Said]) -> Iterator[Said]:
    """Where no tools are offered, calls of the past are told as text: a service without tools has no words for them."""
    called: dict[str, str] = {}
    for one in said:
        match one:
            case AssistantSaid(text, calls) if calls:
                called.update((call.id, call.name) for call in calls)
                yield AssistantSaid(_joined((text, *(f"[called {c.name} with {_arguments(c)}]" for c in calls))))
            case ToolSaid(call_id, text):
                # One JSON line: a result must not be able to open the frame of a message.
                told = {"tool": called.get(call_id, "unknown"), "result": text}
                yield UserSaid((Text(on_one_line({"toolResult": told})),))
            case _:
                yield one


def _lead_in(said: Iterable[Said]) -> tuple[Said, ...]:
    return tuple(UserSaid((Text(one.text),)) if isinstance(one, SystemSaid) else one for one in said)


def _message(said: Said) -> Json:
    match said:
        case SystemSaid(text):
            return {"role": "system", "content": clean(text)}
        case UserSaid(parts):
            return {"role": "user", "content": _content(parts)}
        case AssistantSaid(text, ()):
            return {"role": "assistant", "content": clean(text)}
        case AssistantSaid(text, calls):
            return {
                "role": "assistant",
                "content": clean(text) if text.strip() else None,
                "tool_calls": [_call(call) for call in calls],
            }
        case ToolSaid(call_id, text):
            return {"role": "tool", "tool_call_id": call_id, "content": clean(text)}


def _content(parts: Iterable[Text | Attachment | Inline]) -> str | list[Json]:
    """One string where it is all text, since many servers take nothing else."""
    said = [part for part in parts if not (isinstance(part, Text) and not part.text.strip())]
    texts = [part.text for part in said if isinstance(part, Text)]
    if len(texts) == len(said):
        return clean(_joined(texts)) or "(empty)"
    return [_part(part) for part in said]


def _part(part: Text | Attachment | Inline) -> Json:
    match part:
        case Text(text):
            return {"type": "text", "text": clean(text)}
        case Inline(type="image"):
            return {"type": "image_url", "image_url": {"url": _data_url(part)}}
        case Inline(type="audio"):
            kind = part.mime_type.partition("/")[2]
            audio = {"data": b64encode(part.data).decode(), "format": _AUDIO_FORMAT.get(kind, kind)}
            return {"type": "input_audio", "input_audio": audio}
        case Inline():
            return {"type": "file", "file": {"filename": clean(part.filename), "file_data": _data_url(part)}}
        case Attachment():
            raise TypeError(f"{part.filename} is a reference: the router makes bytes or text of it before a request")


def _call(call: Call) -> Json:
    function = {"name": wire_name(call.name), "arguments": _arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: ToolSpec) -> Json:
    function = {
        "name": wire_name(tool.name),
        "description": clean(tool.description),
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def _arguments(call: Call) -> str:
    return msgspec.json.encode(dict(call.arguments)).decode()


def _data_url(part: Inline) -> str:
    return f"data:{part.mime_type};base64,{b64encode(part.data).decode()}"


def _joined(texts: Iterable[str]) -> str:
    return _PARAGRAPH.join(text for text in texts if text)
