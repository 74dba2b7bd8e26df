"""Stores on one database, as several processes have them; and what they write to each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from coterie.messages import Envelope, make_envelope
from coterie.store import Store
from coterie.stores.postgres import PostgresStore

Opener = Callable[[], Awaitable[PostgresStore]]


def letter(sender: str, to: str, text: str = "hello", **more: Any) -> Envelope:
    return make_envelope(sender=sender, to=to, payload={"text": text}, **more)


async def texts(store: Store, who: str) -> list[str]:
    return [message.payload["text"] for message in await store.waiting(who, 10_000)]
