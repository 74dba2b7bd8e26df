"""Hears from other processes what was written, and what is being said, so that nobody has to wait for the next look.

A hint and no more: whoever hears nothing, for want of this connection or behind a pooler that lends out sessions, looks
every second anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql

from coterie.stores.postgres.connection import connect
from coterie.stores.postgres.trouble import meaning

log = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds until it tries to hear again."""
LOOK_UP = 60.0
"""Seconds of silence after which it asks whether the other end is still there."""


class Listening:
    def __init__(self, url: str, channel: str, on_words: Callable[[list[str]], None]) -> None:
        """`on_words`: called on the event loop with what was heard; an empty word says that something was written."""
        self._url, self._channel, self._on_words = url, channel, on_words
        self._loop = asyncio.get_running_loop()
        self._woken, self._wake = socket.socketpair()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="coterie-listening", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._ending.set()
        self._wake.send(b".")
        await asyncio.to_thread(self._thread.join)
        self._woken.close()
        self._wake.close()

    def _keep(self) -> None:
        while not self._ending.is_set():
            try:
                self._listen()
            except (psycopg.Error, OSError) as error:
                log.info("nothing is heard from other processes for now: %s", meaning(error))
                self._ending.wait(AGAIN)

    def _listen(self) -> None:
        with contextlib.closing(connect(self._url)) as raw:
            raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            self._tell([""])  # whatever was written meanwhile
            while not self._ending.is_set():
                self._hear(raw)

    def _hear(self, raw: psycopg.Connection[Any]) -> None:
        ready, _, _ = select.select([raw.fileno(), self._woken.fileno()], [], [], LOOK_UP)
        if not ready:
            raw.execute("SELECT 1")
        elif raw.fileno() in ready and (heard := [note.payload for note in raw.notifies(timeout=0)]):
            self._tell(heard)

    def _tell(self, words: list[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone already
            self._loop.call_soon_threadsafe(self._on_words, words)
