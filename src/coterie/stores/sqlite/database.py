"""The file of a society and the connections to it: who owns it, one thread that writes, a few that read."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from coterie.clock import EPOCH, Clock, from_ms, to_ms
from coterie.errors import StoreBroken, StoreError, StoreUnusable
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.store import Limits, StoreInfo
from coterie.stores.sql.attendance import Attendance
from coterie.stores.sql.connection import Connection, get_meta, set_meta
from coterie.stores.sql.database import SqlDatabase
from coterie.stores.sql.jobs import Result
from coterie.stores.sql.ledger import OneWriter
from coterie.stores.sql.post import Post
from coterie.stores.sql.secret import make_secret, read_secret
from coterie.stores.sqlite import boot
from coterie.stores.sqlite.connections import (
    ADVISED,
    DATABASE_ERRORS,
    Durability,
    check_filesystem,
    open_reader,
    open_writer,
    translate,
)
from coterie.stores.sqlite.files import LAST_EVENT, CommitFile, OpenFiles, lost_commits
from coterie.stores.sqlite.lock import FolderLock
from coterie.stores.sqlite.migrate import check_version, migrate
from coterie.stores.sqlite.writer import Writer
from coterie.supervision import Shutdown
from coterie.text import one_line

T = TypeVar("T")
log = logging.getLogger(__name__)

DATABASE = "coterie.db"
READERS = 2


class Database(SqlDatabase):
    def __init__(
        self,
        path: Path,
        db: sqlite3.Connection | None,
        info: StoreInfo,
        clock: Clock,
        limits: Limits,
        lock: FolderLock | None = None,
        durability: Durability = "full",
    ) -> None:
        super().__init__()
        self.info = info
        self._path, self._clock, self.limits = path, clock, limits
        self._db, self._lock = db, lock
        self._ended_in_order = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="coterie-reader")
        self._local = threading.local()
        self._reading: list[sqlite3.Connection] = []
        self._spare: list[sqlite3.Connection] = []
        """Opened, and not yet used by a thread."""
        self.broken: asyncio.Future[StoreBroken] = asyncio.get_running_loop().create_future()
        self._ledger: OneWriter | None = None
        self._writer: Writer | None = None
        self._files: OpenFiles | None = None
        self._commits: CommitFile | None = None
        if db:
            self._ledger = OneWriter(db, to_ms(info.last_seen))
            flushes = durability == "full"
            self._files = OpenFiles(path)
            last = db.execute(LAST_EVENT).fetchone()[0] or 0
            self._commits = CommitFile(path.parent, info.log_id, last, flushed=flushes)
            self._writer = Writer(
                db,
                self._on_broken,
                self._ledger.read_anew,
                folder=path.parent,
                files=self._files,
                commits=self._commits,
                flushes=flushes,
            )

    @classmethod
    async def open(
        cls, folder: Path, clock: Clock, *, limits: Limits | None = None, durability: Durability = "full"
    ) -> Self:
        """Own the society's data in `folder`, made if missing. Only one process can."""
        _make_private(folder)
        check_filesystem(folder)
        lock = FolderLock(folder)
        try:
            db, info = await asyncio.to_thread(_open, folder / DATABASE, durability)
        except BaseException:
            lock.release()
            raise
        opened = cls(folder / DATABASE, db, info, clock, limits or Limits(), lock, durability)
        try:
            await asyncio.to_thread(opened._open_readers)
        except DATABASE_ERRORS as error:
            await opened._let_go()
            raise _unusable(error) from error
        return opened

    @classmethod
    async def open_read_only(cls, folder: Path, clock: Clock) -> Self:
        """Look at the society's data beside whoever owns it; every write is refused."""
        path = folder / DATABASE
        if not path.exists():
            raise StoreUnusable(f"there is no society in {folder.parent}: make one with coterie init or coterie serve")
        try:
            db = open_reader(path)
            check_version(db)
            log_id, secret = get_meta(db, "log_id") or "", read_secret(db)
            db.close()
        except DATABASE_ERRORS as error:
            raise _unusable(error) from error
        info = StoreInfo(engine="sqlite", version=sqlite3.sqlite_version, log_id=log_id, secret=secret)
        return cls(path, None, info, clock, Limits())

    @property
    def healthy(self) -> bool:
        writes = self._writer is not None and self._writer.healthy and not self.broken.done()
        return writes and self.trouble is None

    @property
    def trouble(self) -> str | None:
        return self._files.problem() if self._files else None

    async def close(self) -> None:
        try:
            if self._writer and not self.broken.done():
                await self._write(_end_boot)
                self._ended_in_order = True
        except StoreError as error:
            log.warning("the orderly end could not be noted (%s): the next start checks the database", error)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        shutdown = Shutdown()
        if self._writer:
            await shutdown.step("end the writer", self._writer.close)
        await shutdown.step("close the readers", self._close_readers)
        await shutdown.step("close the database", self._close_file)
        if self._lock:
            self._lock.release()
            self._lock = None
        shutdown.finish()

    async def _close_readers(self) -> None:
        self._readers.shutdown()
        for connection in (*self._reading, *self._spare):
            connection.close()

    async def _close_file(self) -> None:
        if self._db:
            self._db.close()
        if self._commits:
            # Another program that reads the database keeps the log alive, and with it commits that only the log has.
            moved = not self._path.with_name(f"{DATABASE}-wal").exists()
            self._commits.close(remove=self._ended_in_order and moved)

    def _write(
        self,
        run: Callable[[sqlite3.Connection], Result],
        settled: Callable[[Any], None] | None = None,
        *,
        small: bool = False,
    ) -> asyncio.Future[Any]:
        if self._writer is None:
            raise StoreError("this society was opened for reading only")
        return self._writer.write(run, settled, small=small)

    def _post(
        self,
        run: Callable[[Connection, Post], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
    ) -> asyncio.Future[T]:
        attendance, ledger = Attendance(self._taker) if self._taker else None, self._ledger

        def work(db: sqlite3.Connection) -> Result:
            assert ledger is not None  # noqa: S101 - there is a writer
            now = to_ms(self._clock.now())
            ledger.begin(now)
            post = Post(db, now=now, limits=self.limits, ledger=ledger)
            answer = run(db, post)
            attended = attendance.serve(db, post) if attendance else None
            post.close()
            return Result(answer, attended)

        return self._write(work, attendance.settle if attendance else None, small=small)

    async def _now(self) -> int:
        return to_ms(self._clock.now())

    async def _read(self, run: Callable[[sqlite3.Connection], T], *, one_moment: bool = False) -> T:
        def work() -> T:
            try:
                return _in_one_moment(self._reader(), run) if one_moment else run(self._reader())
            except DATABASE_ERRORS as error:
                raise translate(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _reader(self) -> sqlite3.Connection:
        """This thread's own connection."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = self._local.db = self._spare.pop() if self._spare else open_reader(self._path)
            self._reading.append(db)
        return db

    def _open_readers(self) -> None:
        """One for each thread, before anything can happen to the files: what is stored stays readable."""
        for _ in range(READERS):
            self._spare.append(open_reader(self._path))
            self._spare[-1].execute("SELECT count(*) FROM sqlite_schema").fetchone()

    def _on_broken(self, error: StoreBroken) -> None:
        if not self.broken.done():
            self.broken.set_result(error)


def _end_boot(db: sqlite3.Connection) -> Result:
    boot.end_boot(db)
    return Result(None)


def _in_one_moment(db: sqlite3.Connection, run: Callable[[sqlite3.Connection], T]) -> T:
    db.execute("BEGIN")  # all of it is read from the state the first statement sees
    try:
        return run(db)
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _open(path: Path, durability: Durability) -> tuple[sqlite3.Connection, StoreInfo]:
    # Before anything is written: the log that was deleted can still be put back.
    if loss := lost_commits(path):
        raise StoreUnusable(loss)
    try:
        db = open_writer(path, durability)
    except DATABASE_ERRORS as error:
        raise _unusable(error) from error
    try:
        path.chmod(0o600)
        unclean = boot.was_unclean(db)
        if unclean:
            _check_after_crash(db)
        migrate(db)
        hit("open.checked")
        boot.begin_boot(db)
        log_id = get_meta(db, "log_id") or set_meta(db, "log_id", new_id())
        secret = make_secret(db)
        last = db.execute("SELECT at FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    except DATABASE_ERRORS as error:
        db.close()
        raise _unusable(error) from error
    except BaseException:
        db.close()
        raise
    info = StoreInfo(
        engine="sqlite",
        version=sqlite3.sqlite_version,
        log_id=log_id,
        last_seen=from_ms(last[0]) if last else EPOCH,
        unclean=unclean,
        warnings=_warnings(),
        secret=secret,
    )
    return db, info


def _check_after_crash(db: sqlite3.Connection) -> None:
    finding = one_line(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    if finding != "ok":
        raise StoreUnusable(f"data/coterie.db is damaged ({finding}): restore a backup with coterie restore FILE")


def _unusable(error: sqlite3.Error | UnicodeDecodeError) -> StoreError:
    meaning = translate(error)
    if isinstance(meaning, StoreBroken):
        return StoreUnusable(f"data/coterie.db is damaged ({error}): restore a backup with coterie restore FILE")
    if "unable to open" in str(error) or "readonly" in str(error):
        return StoreUnusable(f"data/coterie.db cannot be opened ({error}): make the data folder readable and writable")
    return meaning


def _warnings() -> Sequence[str]:
    if sqlite3.sqlite_version_info >= ADVISED:
        return ()
    advised = ".".join(map(str, ADVISED))
    return (f"SQLite {sqlite3.sqlite_version} is older than {advised}, which is advised",)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise StoreUnusable(
            f"{folder} cannot be used ({error.strerror}): make it writable, or choose another with --dir"
        ) from error
