"""The store port on SQLite.

Who owns the file, and how the last owner left it.

The file of a society and the connections to it: who owns it, one thread that writes, a few that read.

Words looked for in what was said.
"""

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

import msgspec

from coterie.clock import EPOCH, Clock, from_ms, to_ms
from coterie.errors import StoreBroken, StoreError, StoreUnusable
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.messages import Message
from coterie.store import Limits, Page, StoreInfo, Worker, name_of
from coterie.stores.sql.claims import Attendance
from coterie.stores.sql.connection import Connection, get_meta, make_secret, read_secret, set_meta
from coterie.stores.sql.jobs import Result
from coterie.stores.sql.queries import patterns
from coterie.stores.sql.rows import MESSAGE, to_message
from coterie.stores.sql.session import OneWriter
from coterie.stores.sql.store import SqlDatabase, SqlStore
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.stores.sqlite.connection import (
    ADVISED,
    DATABASE_ERRORS,
    LAST_EVENT,
    CommitFile,
    Durability,
    FolderLock,
    OpenFiles,
    check_filesystem,
    copy,
    lost_commits,
    open_reader,
    open_writer,
    translate,
)
from coterie.stores.sqlite.migrate import check_version, migrate
from coterie.stores.sqlite.writer import Writer
from coterie.supervision import Shutdown
from coterie.text import one_line
from coterie.turn_store import Taker

log = logging.getLogger(__name__)


def begin_boot(db: sqlite3.Connection) -> None:
    # Whoever worked on a turn is gone with the last boot: those agents can be claimed at once.
    db.execute("UPDATE agents SET runnable_at = 0 WHERE state IN ('llm', 'tools')")
    # Counted by the database: nothing depends on the number, so nothing may fail over it.
    db.execute(
        "INSERT INTO meta (key, value) VALUES ('boot_epoch', '1')"
        " ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)"
    )
    set_meta(db, "clean", "0")


def end_boot(db: sqlite3.Connection) -> None:
    set_meta(db, "clean", "1")


def was_unclean(db: sqlite3.Connection) -> bool:
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone():
        return False
    return get_meta(db, "clean") == "0"


T = TypeVar("T")

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
        run: Callable[[Connection, UnitOfWork], T],
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
            post = UnitOfWork(db, now=now, limits=self.limits, ledger=ledger)
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
    end_boot(db)
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
        unclean = was_unclean(db)
        if unclean:
            _check_after_crash(db)
        migrate(db)
        hit("open.checked")
        begin_boot(db)
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


_TEXT = "coalesce(json_extract(payload, '$.text'), '')"
_FOLDED = f"folded({_TEXT})"
_LOOKED_AT = f"""
SELECT {MESSAGE} FROM messages WHERE (?1 IS NULL OR seq < ?1) AND (?2 IS NULL OR ?2 IN (sender, recipient))
"""
_NOT_IN = "AND NOT EXISTS (SELECT 1 FROM json_each(?3) WHERE"
_NEWEST = "NOT LIKE value ESCAPE '\\') ORDER BY seq DESC LIMIT ?4"
_SEARCH = f"{_LOOKED_AT} {_NOT_IN} {_TEXT} {_NEWEST}"
_SEARCH_FOLDED = f"{_LOOKED_AT} {_NOT_IN} {_FOLDED} {_NEWEST}"


def search(db: sqlite3.Connection, words: str, page: Page, agent_id: str | None) -> list[Message]:
    wanted = patterns(words)
    if not wanted:
        return []
    sql = _SEARCH
    if not words.isascii() and words.lower() != words.upper():
        # The engine's own LIKE knows the two cases of a to z only, and is faster than asking Python for each row.
        db.create_function("folded", 1, str.casefold, deterministic=True)
        sql = _SEARCH_FOLDED
    rows = db.execute(sql, (page.before, agent_id, msgspec.json.encode(wanted).decode(), page.limit))
    return [to_message(row) for row in rows]


_CLAIMS = "SELECT count(*) FROM agents WHERE worker = ? AND state IN ('llm', 'tools')"


class SqliteStore(Database, SqlStore):
    def attend(self, taker: Taker) -> None:
        super().attend(taker)
        self._attending_since = self._clock.now()

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        return await self._read(lambda db: search(db, words, page, agent_id))

    async def workers(self) -> Sequence[Worker]:
        """Ourselves, if our agents work."""
        if self._taker is None:
            return []
        ((claims,),) = await self._query(_CLAIMS, self._taker.worker)
        return [
            Worker(
                id=self._taker.worker,
                name=name_of(),
                since=self._attending_since,
                seen_at=self._clock.now(),
                claims=claims,
                heartbeats=0,
                fenced=self.tally.fenced,
                takeovers=self.tally.takeovers,
            )
        ]

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(copy, self._path, target)
