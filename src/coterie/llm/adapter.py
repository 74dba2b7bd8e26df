"""ContentAdapter: what a model cannot read becomes text that tells it what there is and who can read it.

Every description is one JSON object on one line: it can be parsed, and nothing inside can pass for anything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from coterie.artifacts import ArtifactType, tidy_filename
from coterie.llm.chat import AssistantSaid, Attachment, Call, Said, Text, ToolSaid, UserSaid
from coterie.llm.service import NEEDS

Why = Literal["ability", "size", "missing"]
"""Why the bytes do not go to the model: it cannot read such content, there is too much of it, or it is kept no more."""

MAX_NAMED = 20
"""Capable agents named in a description; one is enough to forward to, and a society may have thousands."""

# Beyond JSON's own rules: what ends a line, hides or reorders text, or opens a tag. A name stays a name in any frame.
_UNRULY = re.compile("[<>\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class Readers(Protocol):
    async def readers_of(self, kind: ArtifactType, size: int) -> Sequence[str]:
        """The agents, none of them terminated, whose models take such a file as it is."""
        ...


class ContentAdapter:
    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def describe(self, attachment: Attachment, why: Why, *, reader: str, limit: int = 0) -> Text:
        """`attachment` in words for the agent `reader`; `limit`: the bytes its model would have taken."""
        capable = [] if why == "missing" else await self._others(attachment, reader)
        told: dict[str, Any] = {
            "artifactRef": attachment.artifact_ref,
            "contentType": attachment.type,
            "filename": tidy_filename(attachment.filename),
            "mimeType": attachment.mime_type,
            "size": attachment.size,
            "unsupported": NEEDS[attachment.type] if why == "ability" else why,
            "capableAgents": capable,
            "suggestion": _suggestion(attachment, why, bool(capable), limit),
        }
        return Text(on_one_line({"attachment": told}))

    async def _others(self, attachment: Attachment, reader: str) -> list[str]:
        readers = await self._readers.readers_of(attachment.type, attachment.size)
        return [agent for agent in readers if agent != reader][:MAX_NAMED]


def _suggestion(attachment: Attachment, why: Why, capable: bool, limit: int) -> str:
    kind = attachment.type
    if why == "missing":
        return f"This {kind} is no longer kept. Ask whoever sent it, or the person (user), to send it again."
    said = f"Your model does not take this {kind} as it is."
    if why == "size":
        said = f"This {kind} has {attachment.size:,} bytes; your model takes up to {limit:,}."
    if kind == "file":
        said += " If it is text, read it with read_artifact."
    if capable:
        return (
            f"{said} To have it read, forward it with send_message to one of capableAgents: "
            "put its artifactRef into payload.attachments and say in payload.text what you want to know."
        )
    return f"{said} No other agent can read it: ask the person (user) what it shows, or for another form of it."


def tool_runs_as_text(said: Sequence[Said]) -> Iterator[Said]:
    """The same conversation for a model that may not be shown tool calls: what each call gave is told to it."""
    calls: dict[str, Call] = {}
    for one in said:
        match one:
            case AssistantSaid(text, asked) if asked:
                calls |= {call.id: call for call in asked}
                if text:
                    yield AssistantSaid(text)
            case ToolSaid(call_id, text):
                call = calls.get(call_id)
                told = {"tool": call.name, "arguments": dict(call.arguments)} if call else {}
                yield UserSaid((Text(on_one_line({"toolResult": told | {"result": text}})),))
            case _:
                yield one


def on_one_line(value: object) -> str:
    return _UNRULY.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
