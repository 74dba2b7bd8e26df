"""Connections for reading: as many as are wanted at once, and no more than the server gives.

Whoever cannot get one of their own waits for another's. So a server with few connections to give makes reading slow
before it makes it fail.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from coterie.errors import StoreUnavailable
from coterie.stores.postgres.connection import PgConnection, connect

MOST = 4
PATIENCE = 2.0
"""Seconds for which somebody waits until a connection is free."""


class Readers:
    def __init__(self, url: str, each: str) -> None:
        """`each`: what every statement is preceded by."""
        self._url, self._each = url, each
        self._idle: queue.LifoQueue[PgConnection] = queue.LifoQueue()
        self._open: set[PgConnection] = set()
        self._opening = 0
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[PgConnection]:
        """A connection that met trouble is not given to anybody else."""
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
            return self._connected() or self._wait()

    def _connected(self) -> PgConnection | None:
        """A new one; None when there are enough, or no more to be had."""
        with self._lock:
            if len(self._open) + self._opening >= MOST:
                return None
            self._opening += 1
        try:
            db = PgConnection(connect(self._url), self._each)
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

    def _wait(self) -> PgConnection:
        try:
            return self._idle.get(timeout=PATIENCE)
        except queue.Empty:
            raise StoreUnavailable("all connections to the database are in use: try again in a moment") from None

    def _drop(self, db: PgConnection) -> None:
        with self._lock:
            self._open.discard(db)
        db.close()
