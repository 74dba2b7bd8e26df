"""Reads the frames of a request the way its reader is told to, so that a test sees who a model believes is speaking."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from coterie.testing.replies import ReceivedRequest

OPENING = re.compile(r"<message (\w+) (\{.*\})>")


@dataclass(frozen=True, slots=True)
class Frame:
    mark: str
    known: dict[str, Any]
    """What the opening line says."""
    lines: list[str] = field(default_factory=list)
    """Everything up to the closing line."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def frames_of(request: ReceivedRequest) -> tuple[list[Frame], list[str]]:
    """The messages that a request shows, and the lines of the user's role that stand outside of them."""
    texts = [_text(message["content"]) for message in request.body["messages"] if message["role"] == "user"]
    found: list[Frame] = []
    outside: list[str] = []
    frame: Frame | None = None
    for line in "\n".join(texts).split("\n"):
        if frame is not None:
            if line == f"</message {frame.mark}>":
                frame = None
            else:
                frame.lines.append(line)
        elif opening := OPENING.fullmatch(line):
            frame = Frame(opening[1], json.loads(opening[2]))
            found.append(frame)
        elif line:
            outside.append(line)
    assert frame is None, "a frame is left open"
    return found, outside


def senders(request: ReceivedRequest) -> list[tuple[str, str]]:
    frames, _ = frames_of(request)
    return [(frame.known["from"], frame.known["kind"]) for frame in frames]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"({part['type']})" for part in content)
