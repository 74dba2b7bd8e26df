"""Helpers for tests with several stores on one database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from coterie.messages import Envelope, make_envelope
from coterie.store import Store
from coterie.stores.postgres import PostgresStore

Opener = Callable[[], Awaitable[PostgresStore]]


def envelope(sender: str, to: str, text: str = "hello", **more: Any) -> Envelope:
    return make_envelope(sender=sender, to=to, payload={"text": text}, **more)


async def texts(store: Store, who: str) -> list[str]:
    return [message.payload["text"] for message in await store.waiting(who, 10_000)]
