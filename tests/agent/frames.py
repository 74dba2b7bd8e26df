"""Parses the message frames of a request as the system prompt describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from coterie.testing.model_server import ReceivedRequest

OPENING = re.compile(r"<([a-z2-7]{8}) (\S+) (\S+Z)((?: \S+)*)>")


@dataclass(frozen=True, slots=True)
class Frame:
    mark: str
    sender: str
    more: str
    """What the opening line says besides sender and time."""
    lines: list[str] = field(default_factory=list)
    """The lines before the closing line."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def frames_of(request: ReceivedRequest) -> tuple[list[Frame], list[str]]:
    """Return the frames in the user messages of a request, and the lines outside of all frames."""
    texts = [_text(message["content"]) for message in request.body["messages"] if message["role"] == "user"]
    found: list[Frame] = []
    outside: list[str] = []
    frame: Frame | None = None
    for line in "\n".join(texts).split("\n"):
        if frame is not None:
            if line == f"</{frame.mark}>":
                frame = None
            else:
                frame.lines.append(line)
        elif opening := OPENING.fullmatch(line):
            frame = Frame(opening[1], opening[2], opening[4])
            found.append(frame)
        elif line:
            outside.append(line)
    assert frame is None, "a frame is left open"
    return found, outside


def senders(request: ReceivedRequest) -> list[str]:
    frames, _ = frames_of(request)
    return [frame.sender for frame in frames]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"({part['type']})" for part in content)
