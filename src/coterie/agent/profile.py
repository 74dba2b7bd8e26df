"""What makes one agent different from another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    id: str
    name: str = ""
    service: str | None = None
    """The model service it thinks with. None: the first there is."""
    prompt: str = ""
    tools: tuple[str, ...] = ("*",)
    """Names or patterns of the tools it may use."""
    parent: str | None = None
    """The agent that made it, and may end it."""
    role: str | None = None
    """What it was made after, if it was."""
    made_by: str = ""
    """The call that made it: when that runs again, there is nothing more to make."""
