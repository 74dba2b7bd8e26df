"""A simulated disk: SQLite connections that hold, fail or report their commits, flushes and checkpoints."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest

from coterie.stores.sqlite import writer

Change = Literal["commit", "flush", "checkpoint"]
_CHANGES: dict[str, Change] = {"COMMIT": "commit", "PRAGMA wal_checkpoint(PASSIVE)": "checkpoint"}


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._connections: list[sqlite3.Connection] = []
        self._errors: list[sqlite3.Error] = []
        self._fails_flush = False
        self._reached, self._released = threading.Event(), threading.Event()
        self._released.set()
        self.on_change: Callable[[Change, sqlite3.Connection], None] = lambda *_: None
        """Called after each commit, flush and checkpoint, one at a time, in the thread that made it."""
        self.flushes = 0
        self._lock = threading.RLock()
        self._fdatasync = writer.fdatasync
        monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=self._connect))
        monkeypatch.setattr(writer, "fdatasync", self._flush)

    def fill(self) -> None:
        """Let the database grow by no page."""
        self._writer.execute("PRAGMA max_page_count = 1")

    def free(self) -> None:
        self._writer.execute("PRAGMA max_page_count = 1000000000")

    def fail_next_commit(self, code: int) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        self._errors.append(error)

    def fail_next_flush(self) -> None:
        """The commit is in the file nevertheless."""
        self._fails_flush = True

    def hold_commits(self) -> None:
        self._reached.clear()
        self._released.clear()

    def wait_for_commit(self) -> None:
        """Wait until a commit is held."""
        assert self._reached.wait(120)

    def release_commits(self) -> None:
        self._released.set()

    def checkpoint_every(self, pages: int) -> None:
        """Checkpoint the write-ahead log after every `pages` pages."""
        self._writer.execute(f"PRAGMA wal_autocheckpoint = {pages}")

    @property
    def _writer(self) -> sqlite3.Connection:
        return self._connections[0]

    def _connect(self, *args: Any, **options: Any) -> sqlite3.Connection:
        connection = _Connection(*args, **options)
        connection.run_change = self._change
        self._connections.append(connection)
        return connection

    def _change(self, change: Change, run: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        if change == "commit":
            self._reached.set()
            assert self._released.wait(120)
            if self._errors:
                raise self._errors.pop(0)
        with self._lock:
            done = run()
            self.on_change(change, self._writer)
        return done

    def _flush(self, handle: int) -> None:
        if self._fails_flush:
            self._fails_flush = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        with self._lock:
            self._fdatasync(handle)
            self.flushes += 1
            self.on_change("flush", self._writer)


class _Connection(sqlite3.Connection):
    run_change: Callable[[Change, Callable[[], sqlite3.Cursor]], sqlite3.Cursor]

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if change := _CHANGES.get(sql):
            return self.run_change(change, partial(super().execute, sql))
        return super().execute(sql, parameters)
