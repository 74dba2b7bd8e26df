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
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from coterie.stores.postgres.connection import connect
from coterie.stores.postgres.trouble import meaning

T = TypeVar("T")
log = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds until it tries to hear again."""
LOOK_UP = 60.0
"""Seconds of silence after which it asks whether the other end is still there."""


@dataclass(frozen=True, slots=True)
class Herald:
    """Who tells, and where. Another society may live in the same database, in a schema of its own."""

    society: str
    process: str

    @property
    def channel(self) -> str:
        return f"coterie_{self.society}"

    @property
    def whispers(self) -> str:
        return f"{self.channel}_live"

    def news(self, leaves_work: bool) -> tuple[str, str]:
        """The channel and the word that says: something was written. `leaves_work`: somebody can be claimed."""
        return self.channel, f"{self.process} {_WORK if leaves_work else _NEWS}"

    def room(self) -> tuple[str, str]:
        """The channel and the word that says: somebody wants a place at a model service, or has given one back."""
        return self.channel, f"{self.process} {_ROOM}"

    def is_foreign(self, word: str) -> bool:
        """What we wrote ourselves we know already."""
        return not word.startswith(self.process)


_NEWS, _WORK, _ROOM = "news", "work", "room"


class Listening:
    def __init__(
        self,
        url: str,
        herald: Herald,
        on_news: Callable[[bool], None],
        on_room: Callable[[None], None],
        on_words: Callable[[list[str]], None],
    ) -> None:
        """All are called on the event loop. `on_news`: others have written something; whether somebody can be claimed.

        `on_room`: somebody wants a place at a model service, or has given one back. `on_words`: what was whispered.
        """
        self._url, self._herald = url, herald
        self._on_news, self._on_room, self._on_words = on_news, on_room, on_words
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
            except Exception:  # without this thread nothing is heard until the next start
                log.exception("listening to other processes failed and is tried again")
                self._ending.wait(AGAIN)

    def _listen(self) -> None:
        with contextlib.closing(connect(self._url)) as raw:
            for channel in (self._herald.channel, self._herald.whispers):
                raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            self._tell(self._on_news, True)  # whatever was written meanwhile
            while not self._ending.is_set():
                self._hear(raw)

    def _hear(self, raw: psycopg.Connection[Any]) -> None:
        ready, _, _ = select.select([raw.fileno(), self._woken.fileno()], [], [], LOOK_UP)
        if not ready:
            raw.execute("SELECT 1")
        elif raw.fileno() in ready:
            notes = list(raw.notifies(timeout=0))
            news = [note.payload for note in notes if note.channel == self._herald.channel]
            kinds = {word.rpartition(" ")[2] for word in news if self._herald.is_foreign(word)}
            if kinds - {_ROOM}:
                self._tell(self._on_news, _WORK in kinds)
            if _ROOM in kinds:
                self._tell(self._on_room, None)
            if words := [note.payload for note in notes if note.channel == self._herald.whispers]:
                self._tell(self._on_words, words)

    def _tell(self, on_heard: Callable[[T], None], heard: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone already
            self._loop.call_soon_threadsafe(on_heard, heard)
