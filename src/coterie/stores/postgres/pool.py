"""Pool of connections for reading. When the server grants no more, readers wait for a free connection."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from coterie.errors import StoreUnavailable
from coterie.stores.postgres.connection import PgConnection, connect

MAX_READERS = 4
POOL_TIMEOUT_SECONDS = 2.0
"""How long a reader waits for a free connection."""


class ReaderPool:
    def __init__(self, url: str, prefix: str) -> None:
        """`prefix`: SQL sent before every statement."""
        self._url, self._prefix = url, prefix
        self._idle: queue.LifoQueue[PgConnection] = queue.LifoQueue()
        self._open: set[PgConnection] = set()
        self._opening = 0
        self._lock = threading.Lock()

    @contextmanager
    def connection(self) -> Iterator[PgConnection]:
        """Lend a connection. It is closed after a database error, else returned to the pool."""
        db = self._take()
        try:
            yield db
        except psycopg.Error:
            self._drop(db)
            raise
        except BaseException:
            self._idle.put(db)
            raise
        self._idle.put(db)

    def close(self) -> None:
        for db in self._open:
            db.close()

    def _take(self) -> PgConnection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._open_connection() or self._wait_for_idle()

    def _open_connection(self) -> PgConnection | None:
        """A new connection; None if the pool is full or the server grants no more."""
        with self._lock:
            if len(self._open) + self._opening >= MAX_READERS:
                return None
            self._opening += 1
        try:
            db = PgConnection(connect(self._url), self._prefix)
        except psycopg.Error:
            if not self._open:
                raise
            return None
        finally:
            with self._lock:
                self._opening -= 1
        with self._lock:
            self._open.add(db)
        return db

    def _wait_for_idle(self) -> PgConnection:
        try:
            return self._idle.get(timeout=POOL_TIMEOUT_SECONDS)
        except queue.Empty:
            raise StoreUnavailable("all connections to the database are in use: try again in a moment") from None

    def _drop(self, db: PgConnection) -> None:
        with self._lock:
            self._open.discard(db)
        db.close()
