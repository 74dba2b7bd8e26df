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
    """Names or patterns of the tools it may use, as far as its maker may. Empty: none."""
    services: tuple[str, ...] = ()
    """Ids or patterns of the services that agents it makes may use, besides its own."""
    parent: str | None = None
    """The agent that may end it."""
    maker: str | None = None
    """The agent whose rights are the most it can have. None: the owner made it, and it has the rights written here."""
    role: str | None = None
    """What it was made after, if it was."""
    made_by: str = ""
    """The call that made it: when that runs again, there is nothing more to make."""
