"""What tells the others that this process lives, and renews what it has claimed.

It has a thread and a connection of its own: neither a tool that blocks the event loop nor a queue of writes may cost a
lease. The fence is the epoch, never the time; but a process that could not renew for most of a lease stops working by
itself, before others can begin.

Hears from other processes what was written, and what is being said, so that nobody has to wait for the next look.

A hint and no more: whoever hears nothing, for want of this connection or behind a pooler that lends out sessions, looks
every second anyway.

The processes that share a society.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from coterie.clock import from_ms
from coterie.store import Tally, Worker, name_of
from coterie.stores.postgres.connection import CLOCK, TIMEOUTS, PgConnection, connect
from coterie.stores.postgres.errors import meaning

log = logging.getLogger(__name__)

BEATS = 3
"""So often it is renewed in that time."""
UNSURE = 0.7
"""After this part of a lease without renewal, whatever was claimed may soon be somebody else's."""
_SEEN = f"""
INSERT INTO processes (id, seen_at, began_at, name, worker, heartbeats, fenced, takeovers)
VALUES (?, {CLOCK}, {CLOCK}, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, worker = excluded.worker,
       heartbeats = excluded.heartbeats, fenced = excluded.fenced, takeovers = excluded.takeovers
"""
# Those that were let go, or have run out, are everybody's: they are not taken back.
_RENEW = f"""
WITH mine AS (
    SELECT id FROM agents WHERE worker = ANY (?1) AND state IN ('llm', 'tools') AND runnable_at > {CLOCK}
     ORDER BY id FOR UPDATE)
UPDATE agents SET runnable_at = {CLOCK} + ?2 FROM mine WHERE agents.id = mine.id
"""
_OTHERS = f"SELECT count(*) FROM processes WHERE id <> ? AND seen_at > {CLOCK} - ?"
_GONE = "DELETE FROM processes WHERE id = ?1"
_NO_PLACES = "DELETE FROM places WHERE process = ? OR process NOT IN (SELECT id FROM processes)"
_NO_BATCH = f"DELETE FROM batches WHERE process = ? OR at < {CLOCK} - 2592000000"
_LONG_GONE = f"DELETE FROM processes WHERE seen_at < {CLOCK} - ?"


class Leases:
    def __init__(self, url: str, process: str, on_unsure: Callable[[], None], lease: float, tally: Tally) -> None:
        """`lease` in seconds. `on_unsure`: called on the event loop when claims could not be renewed in time."""
        self._url, self._on_unsure, self.lease, self._tally = url, on_unsure, lease, tally
        self.process, self._name = process, name_of()
        self._workers: list[str] = []
        self._db: PgConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._renewed = time.monotonic()
        self._unsure = False
        self._watch = self._loop.call_later(lease * UNSURE, self._look_at_the_time)
        self._ending, self._due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="coterie-leases", daemon=True)
        self._thread.start()

    def hold(self, worker: str) -> None:
        """From now on its claims are renewed, and others know about it."""
        self._workers = [*self._workers, worker]
        self._due.set()

    async def is_last(self) -> bool:
        """Whether no other process lives. Who cannot tell is not."""
        try:
            return not await asyncio.to_thread(self._count_others)
        except psycopg.Error as error:
            log.warning("whether others run cannot be told: %s", meaning(error))
            return False

    async def close(self) -> None:
        self._ending.set()
        self._due.set()
        self._watch.cancel()
        await asyncio.to_thread(self._thread.join)

    def _keep(self) -> None:
        while not self._ending.is_set():
            self._due.clear()
            try:
                self._beat()
            except Exception:  # without this thread the process loses all its claims
                log.exception("claims could not be renewed")
                self._hang_up()
            self._due.wait(self.lease / BEATS if not self._unsure and self._db else min(1.0, self.lease / 10))
        self._leave()

    def _beat(self) -> None:
        began = time.monotonic()
        try:
            db = self._connected()
            db.say(f"BEGIN; {TIMEOUTS}")
            db.execute(_SEEN, self._sign_of_life())
            if self._workers:
                db.execute(_RENEW, (self._workers, int(self.lease * 1000)))
            db.say("COMMIT")
        except psycopg.Error as error:
            log.warning("claims could not be renewed: %s", meaning(error))
            self._hang_up()
            return
        self._renewed, self._unsure = began, False
        self._tally.heartbeats += 1

    def _sign_of_life(self) -> tuple[str | int | None, ...]:
        tally, worker = self._tally, self._workers[0] if self._workers else None
        return self.process, self._name, worker, tally.heartbeats + 1, tally.fenced, tally.takeovers

    def _look_at_the_time(self) -> None:
        """On the event loop: the thread may be waiting for an answer that does not come."""
        left = self._renewed + self.lease * UNSURE - time.monotonic()
        if left <= 0 and not self._unsure:
            self._unsure = True
            log.error("the database was out of reach for most of a lease: what was claimed here is dropped")
            try:
                self._on_unsure()
            except Exception:
                log.exception("claims could not be dropped")
        self._watch = self._loop.call_later(max(left, self.lease / 20), self._look_at_the_time)

    def _leave(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            db = self._connected()
            db.execute(_GONE, (self.process,))
            db.execute(_LONG_GONE, (int(self.lease * 1000 * 10),))
            db.execute(_NO_PLACES, (self.process,))
            db.execute(_NO_BATCH, (self.process,))  # those of a month ago nobody asks for any more
        self._hang_up()

    def _count_others(self) -> int:
        db = PgConnection(connect(self._url))
        try:
            return int(db.execute(_OTHERS, (self.process, int(self.lease * 1000))).fetchone()[0])
        finally:
            db.close()

    def _connected(self) -> PgConnection:
        if self._db is None or self._db.closed:
            self._db = PgConnection(connect(self._url, patience=self.lease / BEATS))
        return self._db

    def _hang_up(self) -> None:
        if self._db:
            with contextlib.suppress(psycopg.Error):
                self._db.close()
            self._db = None


T = TypeVar("T")

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


_ALIVE = f"""
SELECT p.worker, p.name, p.began_at, p.seen_at, p.heartbeats, p.fenced, p.takeovers,
       (SELECT count(*) FROM agents a WHERE a.worker = p.worker AND a.state IN ('llm', 'tools'))
  FROM processes p WHERE p.seen_at > {CLOCK} - ? ORDER BY p.name, p.began_at
"""


def workers(db: PgConnection, lease: timedelta) -> list[Worker]:
    """Who was not seen for as long as a lease lasts is gone."""
    return [
        Worker(
            id=id_,
            name=name,
            since=from_ms(since),
            seen_at=from_ms(seen),
            claims=claims,
            heartbeats=heartbeats,
            fenced=fenced,
            takeovers=takeovers,
        )
        for id_, name, since, seen, heartbeats, fenced, takeovers, claims in db.execute(
            _ALIVE, (lease // timedelta(milliseconds=1),)
        )
    ]
