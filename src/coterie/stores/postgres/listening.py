"""Hears from other processes that something was written, so that nobody has to wait for the next look.

A hint and no more: whoever hears nothing, for want of this connection or behind a pooler that lends out sessions, looks
every second anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

import psycopg

from coterie.stores.postgres.connection import connect
from coterie.stores.postgres.ledger import CHANNEL
from coterie.stores.postgres.trouble import meaning

log = logging.getLogger(__name__)

LOOK_UP = 0.2
"""Seconds after which it looks whether it shall end."""
AGAIN = 5.0


class Listening:
    def __init__(self, url: str, on_news: Callable[[], None]) -> None:
        """`on_news`: called on the event loop."""
        self._url, self._on_news = url, on_news
        self._loop = asyncio.get_running_loop()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="coterie-listening", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._ending.set()
        await asyncio.to_thread(self._thread.join)

    def _keep(self) -> None:
        while not self._ending.is_set():
            try:
                self._listen()
            except psycopg.Error as error:
                log.info("nothing is heard from other processes for now: %s", meaning(error))
                self._ending.wait(AGAIN)

    def _listen(self) -> None:
        with connect(self._url) as raw:
            raw.execute(f"LISTEN {CHANNEL}".encode())
            while not self._ending.is_set():
                if list(raw.notifies(timeout=LOOK_UP, stop_after=1)):
                    with contextlib.suppress(RuntimeError):  # the loop is gone already
                        self._loop.call_soon_threadsafe(self._on_news)
