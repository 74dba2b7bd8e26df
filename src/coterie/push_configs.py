"""Push notifications: addresses that get a POST when a task changes, and what a store promises about them.

No notification is stored, only the change that was sent last. A process that starts again compares it with the task
and sends what is missing. So each change is sent at least once; changes in quick succession are sent as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from coterie.tasks import TaskState

MAX_CONFIGS = 10
"""Per task."""
_PORTS = {"http": 80, "https": 443}


class PushConfig(Struct, frozen=True, kw_only=True):
    task: str
    id: str
    config: str
    """As JSON, in the form of the protocol that it came through. May hold credentials: never logged."""


class OpenPushConfig(Struct, frozen=True, kw_only=True):
    """A config whose task may change, or has changed since the last notification."""

    config: PushConfig
    notified: str
    """The `change` that was sent last; empty: none."""
    attempts: int
    next_at: datetime
    state: TaskState
    last_at: datetime

    @property
    def change(self) -> str:
        """The newest change that is worth a notification. A working task has only one."""
        return self.state if self.state == "working" else f"{self.state} {self.last_at.timestamp():.3f}"

    @property
    def is_last(self) -> bool:
        """True if the task has ended, so that nothing follows."""
        return self.state in ("done", "failed", "stopped")


class PushConfigStore(Protocol):
    async def put_push_config(self, config: PushConfig) -> None:
        """Add or replace it. `Refused`: `unknown_task`, `too_many_configs`."""
        ...

    async def push_configs(self, task: str) -> Sequence[PushConfig]:
        """By id."""
        ...

    async def delete_push_config(self, task: str, config_id: str) -> bool: ...

    async def open_push_configs(self) -> Sequence[OpenPushConfig]: ...

    async def claim_push_config(self, seen: OpenPushConfig, until: datetime) -> bool:
        """Let no other process send the change before `until`. False: another one does, or the config was deleted."""
        ...

    async def record_push(self, seen: OpenPushConfig, *, next_at: datetime | None) -> None:
        """Record that the change was sent or given up. `next_at`: it was not sent, and is tried again then."""
        ...


def is_allowed(url: str, allowed: Sequence[str]) -> bool:
    """True if the address is one that the owner allows, or below one. No part of it may be written in another way."""
    try:
        wanted = urlsplit(url)
        return _is_plain(wanted, url) and any(_is_below(wanted, urlsplit(one)) for one in allowed)
    except ValueError:
        return False


def _is_plain(url: SplitResult, text: str) -> bool:
    """False for addresses that a client may read in another way than this check."""
    is_odd = any(mark in text for mark in ("\\", "@", "#", "%2e", "%2E")) or not (text.isascii() and text.isprintable())
    return url.scheme in _PORTS and bool(url.hostname) and not is_odd and " " not in text and ".." not in url.path


def _is_below(url: SplitResult, allowed: SplitResult) -> bool:
    if (url.scheme, url.hostname, url.port or _PORTS[url.scheme]) != (
        allowed.scheme,
        allowed.hostname,
        allowed.port or _PORTS.get(allowed.scheme),
    ):
        return False
    path = allowed.path.rstrip("/")
    return not path or url.path == path or url.path.startswith(f"{path}/")
