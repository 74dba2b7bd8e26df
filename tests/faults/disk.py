"""A simulated disk: SQLite connections that hold or fail their commits."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._connections: list[sqlite3.Connection] = []
        self._errors: list[tuple[sqlite3.Error, bool]] = []
        self._reached, self._released = threading.Event(), threading.Event()
        self._released.set()
        self.on_commit: Callable[[sqlite3.Connection], None] = lambda _: None
        """Called after each commit, in the writer thread."""
        monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=self._connect))

    def fill(self) -> None:
        """Let the database grow by no page."""
        self._writer.execute("PRAGMA max_page_count = 1")

    def free(self) -> None:
        self._writer.execute("PRAGMA max_page_count = 1000000000")

    def fail_next_commit(self, code: int, *, written: bool = False) -> None:
        """`written`: the commit is in the file nevertheless, as after a failed flush."""
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        self._errors.append((error, written))

    def hold_commits(self) -> None:
        self._reached.clear()
        self._released.clear()

    def wait_for_commit(self) -> None:
        """Wait until a commit is held."""
        assert self._reached.wait(10)

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
        connection.before_commit = self._commit
        self._connections.append(connection)
        return connection

    def _commit(self, commit: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        self._reached.set()
        assert self._released.wait(10)
        if not self._errors:
            done = commit()
            self.on_commit(self._writer)
            return done
        error, written = self._errors.pop(0)
        if written:
            commit()
        raise error


class _Connection(sqlite3.Connection):
    before_commit: Callable[[Callable[[], sqlite3.Cursor]], sqlite3.Cursor]

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "COMMIT":
            return self.before_commit(partial(super().execute, sql))
        return super().execute(sql, parameters)
