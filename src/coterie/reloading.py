"""Reading the owner's files again: what counts at once, what at the next start, what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie.config import FILE, Config
from coterie.errors import Problem
from coterie.text import nearest


def running(now: Config, read: Config) -> Config:
    """`read`, but for what is in use since the start: the address, the engine, the tool servers."""
    store = replace(now.store, keep_days=read.store.keep_days)
    return replace(read, server=now.server, store=store, mcp=now.mcp)


def after_restart(now: Config, read: Config) -> list[Problem]:
    """What was changed and does not count yet."""
    kept = running(now, read)
    changed = [name for name in ("server", "store", "mcp") if getattr(kept, name) != getattr(read, name)]
    return [Problem(f"{FILE}: {name}", "the change takes effect at the next start") for name in changed]


def unknown_service(agent: str, service: str, known: Sequence[str]) -> Problem:
    meant = nearest(service, set(known))
    hint = f', did you mean "{meant}"?' if meant else ""
    return Problem(f"{FILE}: agents.{agent}.service", f'there is no service "{service}" in llmservices.json{hint}')
