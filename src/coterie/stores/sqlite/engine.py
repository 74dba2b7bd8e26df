"""`SqliteStore`: the store on one SQLite file, with one writer thread and a few reader threads."""

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

from coterie.clock import UNIX_EPOCH, Clock, from_ms, to_ms
from coterie.errors import StoreBroken, StoreError, StoreUnusable
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.messages import Message
from coterie.store import Limits, Page, StoreInfo, Worker, worker_name
from coterie.stores.sql.claims import EagerClaimer
from coterie.stores.sql.jobs import Result, run_read
from coterie.stores.sql.migrations import migrate_sqlite, sqlite_version
from coterie.stores.sql.retention import COUNTED_TABLES, DatabaseSize
from coterie.stores.sql.rows import (
    Connection,
    get_meta,
    make_secret,
    read_secret,
    set_meta,
)
from coterie.stores.sql.session import SqliteSession
from coterie.stores.sql.store import SqlStore
from coterie.stores.sql.text_index import read_batch, read_position, read_queued
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.stores.sqlite.connection import (
    DATABASE_ERRORS,
    Durability,
    FolderLock,
    LastCommitFile,
    OpenFiles,
    check_filesystem,
    copy_database,
    find_lost_commits,
    open_reader,
    open_writer,
    to_store_error,
    version_warnings,
)
from coterie.stores.sqlite.search import index_batch, merge_segments, remove_batch, search
from coterie.stores.sqlite.writer import Writer, rewrite_file
from coterie.supervision import Shutdown
from coterie.text import one_line
from coterie.turn_store import TurnWorker

log = logging.getLogger(__name__)

T = TypeVar("T")

DATABASE = "coterie.db"
READERS = 2
FREE_PART = 0.1
"""Part of the file that may be free pages."""
RELEASED_PAGES = 32
"""Free pages that one transaction gives back: one or two milliseconds."""
SMALL_FILE_BYTES = 64 << 20
"""A file of an older version up to this size is rewritten at its first start: it takes less than a second."""
_INCREMENTAL = 2
"""Value of `PRAGMA auto_vacuum`."""
_COUNT_CLAIMS = "SELECT count(*) FROM agents WHERE worker = :worker AND state IN ('llm', 'tools')"


class SqliteStore(SqlStore):
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
        """`db`: the writing connection; None opens the store for reading only."""
        super().__init__()
        self.info = info
        self._path, self._clock, self.limits = path, clock, limits
        self._db, self._lock = db, lock
        self._is_marked_stopped = False
        self._has_segments_to_merge = True
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="coterie-reader")
        self._local = threading.local()
        self._used_connections: list[sqlite3.Connection] = []
        self._spare_connections: list[sqlite3.Connection] = []
        """Reader connections that no thread uses yet."""
        self.broken: asyncio.Future[StoreBroken] = asyncio.get_running_loop().create_future()
        self._session: SqliteSession | None = None
        self._writer: Writer | None = None
        self._files: OpenFiles | None = None
        self._last_commit: LastCommitFile | None = None
        if db:
            session = self._session = SqliteSession(db, to_ms(info.last_seen))
            self._files = OpenFiles(path)
            self._last_commit = LastCommitFile(
                path.parent, info.log_id, session.write_events(), is_durable=durability == "full"
            )
            self._writer = Writer(
                db,
                self._on_broken,
                session.roll_back,
                session.write_events,
                path=path,
                files=self._files,
                last_commit=self._last_commit,
                durability=durability,
            )

    @classmethod
    async def open(
        cls, folder: Path, clock: Clock, *, limits: Limits | None = None, durability: Durability = "full"
    ) -> Self:
        """Lock and open the data folder, created if missing. Raises `StoreOwned` if another process has it."""
        _make_private(folder)
        check_filesystem(folder)
        lock = FolderLock(folder)
        try:
            db, info = await asyncio.to_thread(_open, folder / DATABASE, durability)
        except BaseException:
            lock.release()
            raise
        store = cls(folder / DATABASE, db, info, clock, limits or Limits(), lock, durability)
        try:
            await asyncio.to_thread(store._open_readers)
        except DATABASE_ERRORS as error:
            await store._close_all()
            raise _unusable(error) from error
        return store

    @classmethod
    async def open_read_only(cls, folder: Path, clock: Clock) -> Self:
        """Open without locking; another process may own the folder. Every write raises `StoreError`."""
        path = folder / DATABASE
        if not path.exists():
            raise StoreUnusable(f"there is no society in {folder.parent}: make one with coterie init or coterie serve")
        try:
            db = open_reader(path)
            sqlite_version(db)
            log_id, secret = get_meta(db, "log_id") or "", read_secret(db)
            db.close()
        except DATABASE_ERRORS as error:
            raise _unusable(error) from error
        info = StoreInfo(engine="sqlite", version=sqlite3.sqlite_version, log_id=log_id, secret=secret)
        return cls(path, None, info, clock, Limits())

    @property
    def is_healthy(self) -> bool:
        can_write = self._writer is not None and self._writer.is_healthy and not self.broken.done()
        return can_write and self.write_error is None

    @property
    def write_error(self) -> str | None:
        return self._files.problem() if self._files else None

    def register_worker(self, worker: TurnWorker) -> None:
        super().register_worker(worker)
        self._worker_since = self._clock.now()

    async def workers(self) -> Sequence[Worker]:
        """This process, if its agents work."""
        if self._worker is None:
            return []
        ((claims,),) = await self._query(_COUNT_CLAIMS, worker=self._worker.worker)
        return [
            Worker(
                id=self._worker.worker,
                name=worker_name(),
                since=self._worker_since,
                seen_at=self._clock.now(),
                claims=claims,
                heartbeats=0,
                fenced=self.counters.fenced,
                takeovers=self.counters.takeovers,
            )
        ]

    async def _read_size(self) -> DatabaseSize:
        return await self._read(read_size)

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        return await self._read(lambda db: search(db, words, page, agent_id), in_snapshot=True)

    async def clear_thread(self, agent_id: str) -> int:
        deleted = await super().clear_thread(agent_id)
        # If the process stops meanwhile, `index_messages` removes the rest.
        while await self._remove_queued():
            pass
        return deleted

    async def _remove_queued(self) -> bool:
        """Remove some entries of deleted messages from the text index. False: there are no more."""
        if not (removals := await self._read(read_queued)):
            return False
        await self._write(lambda db: remove_batch(db, removals), alone=True, durable=False)
        self._has_segments_to_merge = True
        return True

    async def index_messages(self) -> bool:
        if self._has_segments_to_merge:
            self._has_segments_to_merge = await self._write(merge_segments, alone=True, durable=False)
            return True
        if await self._remove_queued():
            return True
        batch = await self._read(lambda db: read_batch(db, read_position(db)), in_snapshot=True)
        if batch is None:
            return False
        await self._write(lambda db: index_batch(db, batch), alone=True, durable=False)
        self._has_segments_to_merge = True
        return True

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(copy_database, self._path, target)

    async def release_space(self) -> bool:
        return bool(await self._write(_release_pages, alone=True, durable=False))

    async def rewrite(self) -> None:
        await self._write(rewrite_file, alone=True)

    async def close(self) -> None:
        try:
            if self._writer and not self.broken.done():
                await self._write(_mark_stopped)
                self._is_marked_stopped = True
        except StoreError as error:
            log.warning("the clean stop could not be recorded (%s): the next start checks the database", error)
        finally:
            await self._close_all()

    async def _close_all(self) -> None:
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
        for connection in (*self._used_connections, *self._spare_connections):
            connection.close()

    async def _close_file(self) -> None:
        if self._db:
            self._db.close()
        if self._last_commit:
            # A program that still reads the database keeps the WAL, and some commits are only there.
            is_wal_merged = not self._path.with_name(f"{DATABASE}-wal").exists()
            self._last_commit.close(remove=self._is_marked_stopped and is_wal_merged)

    def _write(
        self,
        run: Callable[[sqlite3.Connection], Result],
        on_settled: Callable[[Any], None] | None = None,
        *,
        small: bool = False,
        durable: bool = True,
        alone: bool = False,
    ) -> asyncio.Future[Any]:
        if self._writer is None:
            raise StoreError("this society was opened for reading only")
        self._write_count += not alone
        return self._writer.write(run, on_settled, small=small, durable=durable, alone=alone)

    def _transact(
        self,
        run: Callable[[Connection, UnitOfWork], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
        durable: bool = True,
        alone: bool = False,
    ) -> asyncio.Future[T]:
        claimer, session = EagerClaimer(self._worker) if self._worker else None, self._session

        def work(db: sqlite3.Connection) -> Result:
            assert session is not None  # noqa: S101 - there is a writer
            now = to_ms(self._clock.now())
            session.begin(now)
            unit_of_work = UnitOfWork(db, now=now, limits=self.limits, session=session)
            value = run(db, unit_of_work)
            claims = claimer.claim_woken(db, unit_of_work) if claimer else None
            unit_of_work.flush()
            return Result(value, claims, needs_flush=durable or unit_of_work.needs_flush)

        settle = claimer.settle if claimer else None
        return self._write(work, settle, small=small, durable=durable, alone=alone)

    async def _now_ms(self) -> int:
        return to_ms(self._clock.now())

    async def _read(self, run: Callable[[sqlite3.Connection], T], *, in_snapshot: bool = False) -> T:
        def work() -> T:
            try:
                return _run_in_snapshot(self._reader(), run) if in_snapshot else run(self._reader())
            except DATABASE_ERRORS as error:
                raise to_store_error(error) from error

        result = await run_read(self._readers, work)
        if self._writer and (flushed := self._writer.flush(all_commits=False)):
            await flushed  # a commit that must be durable before its rows are shown
        return result

    async def _flush_commits(self) -> None:
        if self._writer and (flushed := self._writer.flush(all_commits=True)):
            await flushed

    def _reader(self) -> sqlite3.Connection:
        """The connection of the current reader thread."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = self._local.db = self._spare_connections.pop() if self._spare_connections else open_reader(self._path)
            self._used_connections.append(db)
        return db

    def _open_readers(self) -> None:
        """Open one connection per reader thread now: it stays readable if the files are removed later."""
        for _ in range(READERS):
            self._spare_connections.append(open_reader(self._path))
            self._spare_connections[-1].execute("SELECT count(*) FROM sqlite_schema").fetchone()

    def _on_broken(self, error: StoreBroken) -> None:
        if not self.broken.done():
            self.broken.set_result(error)


def mark_started(db: sqlite3.Connection) -> None:
    """Record a start, and make turns of the previous process claimable."""
    db.execute("UPDATE agents SET runnable_at = 0 WHERE state IN ('llm', 'tools')")
    # Incremented in SQL: nothing depends on the number, so a damaged value must not prevent the start.
    db.execute(
        "INSERT INTO meta (key, value) VALUES ('boot_epoch', '1')"
        " ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)"
    )
    set_meta(db, "clean", "0")


def mark_stopped(db: sqlite3.Connection) -> None:
    """Record a clean stop."""
    set_meta(db, "clean", "1")


def _mark_stopped(db: sqlite3.Connection) -> Result:
    mark_stopped(db)
    return Result(None)


def _release_pages(db: sqlite3.Connection) -> Result:
    """Cut free pages off the end of the file. A part stays, so that the file need not grow again at once."""
    if is_rewrite_needed(db):
        return Result(False, needs_flush=False)
    pages, free = (int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count"))
    if free <= pages * FREE_PART:
        return Result(False, needs_flush=False)
    db.execute(f"PRAGMA incremental_vacuum({RELEASED_PAGES})").fetchall()
    return Result(True, needs_flush=False, moved_pages=RELEASED_PAGES)


def is_rewrite_needed(db: sqlite3.Connection) -> bool:
    """True for a file of an older version, which cannot give free pages back."""
    return int(db.execute("PRAGMA auto_vacuum").fetchone()[0]) != _INCREMENTAL


def read_size(db: sqlite3.Connection) -> DatabaseSize:
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
    )
    rows = {table: int(db.execute("SELECT count(*) FROM " + table).fetchone()[0]) for table in COUNTED_TABLES}
    return DatabaseSize(pages * size, (pages - free) * size, rows, can_shrink=not is_rewrite_needed(db))


def _was_unclean(db: sqlite3.Connection) -> bool:
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone():
        return False
    return get_meta(db, "clean") == "0"


def _run_in_snapshot(db: sqlite3.Connection, run: Callable[[sqlite3.Connection], T]) -> T:
    db.execute("BEGIN")
    try:
        return run(db)
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _open(path: Path, durability: Durability) -> tuple[sqlite3.Connection, StoreInfo]:
    # Check before the first write: a deleted WAL can still be put back.
    if loss := find_lost_commits(path):
        raise StoreUnusable(loss)
    try:
        db = open_writer(path, durability)
    except DATABASE_ERRORS as error:
        raise _unusable(error) from error
    try:
        path.chmod(0o600)
        unclean = _was_unclean(db)
        if unclean:
            _check_after_crash(db)
        migrate_sqlite(db)
        if is_rewrite_needed(db) and path.stat().st_size <= SMALL_FILE_BYTES:
            rewrite_file(db)
        hit("open.checked")
        mark_started(db)
        log_id = get_meta(db, "log_id") or set_meta(db, "log_id", new_id())
        secret = make_secret(db)
        last_event = db.execute("SELECT at FROM events ORDER BY seq DESC LIMIT 1").fetchone()
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
        last_seen=from_ms(last_event[0]) if last_event else UNIX_EPOCH,
        unclean=unclean,
        warnings=version_warnings(),
        secret=secret,
    )
    return db, info


def _check_after_crash(db: sqlite3.Connection) -> None:
    finding = one_line(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    if finding != "ok":
        raise StoreUnusable(f"data/coterie.db is damaged ({finding}): restore a backup with coterie restore FILE")


def _unusable(error: sqlite3.Error | UnicodeDecodeError) -> StoreError:
    """Translate an error that prevents opening the store."""
    store_error = to_store_error(error)
    if isinstance(store_error, StoreBroken):
        return StoreUnusable(f"data/coterie.db is damaged ({error}): restore a backup with coterie restore FILE")
    if "unable to open" in str(error) or "readonly" in str(error):
        return StoreUnusable(f"data/coterie.db cannot be opened ({error}): make the data folder readable and writable")
    return store_error


def _make_private(folder: Path) -> None:
    """Create the folder if missing, accessible to its owner only."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise StoreUnusable(
            f"{folder} cannot be used ({error.strerror}): make it writable, or choose another with --dir"
        ) from error
