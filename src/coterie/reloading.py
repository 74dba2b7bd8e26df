"""Which parts of coterie.toml count at once when it is read again, and which at the next start."""

from __future__ import annotations

from dataclasses import replace

from coterie.config import FILE, Config
from coterie.errors import Problem


def running(now: Config, read: Config) -> Config:
    """`read`, but for what is in use since the start: the address, the engine, the tool servers."""
    store = replace(read.store, url=now.store.url, durability=now.store.durability)
    return replace(read, server=now.server, store=store, mcp=now.mcp)


def after_restart(now: Config, read: Config) -> list[Problem]:
    """What was changed and does not count yet."""
    kept = running(now, read)
    changed = [name for name in ("server", "store", "mcp") if getattr(kept, name) != getattr(read, name)]
    return [Problem(f"{FILE}: {name}", "the change takes effect at the next start") for name in changed]
