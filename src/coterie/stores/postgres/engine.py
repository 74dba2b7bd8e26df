"""The store port on PostgreSQL.

The database of a society and the connections to it: one thread that writes, a few that read.

Words looked for in what was said.

A copy of all rows, as the file that the SQLite engine keeps: it can be looked at, and run, anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import psycopg

from coterie.clock import Clock, from_ms
from coterie.errors import StoreBroken, StoreError, StoreUnusable
from coterie.ids import new_id
from coterie.llm.concurrency import Share
from coterie.messages import Message
from coterie.store import Limits, Page, StoreInfo, Worker
from coterie.stores.postgres.blobs import DatabaseBytes
from coterie.stores.postgres.cluster import Herald, Leases, Listening, workers
from coterie.stores.postgres.concurrency import share
from coterie.stores.postgres.connection import CLOCK, STATEMENT_MS, PgConnection, connect
from coterie.stores.postgres.errors import meaning, passes
from coterie.stores.postgres.migrate import check_version, migrate
from coterie.stores.postgres.pool import MOST, Readers
from coterie.stores.postgres.session import BatchLedger
from coterie.stores.postgres.transfer import PostgresSource
from coterie.stores.postgres.writer import Writer
from coterie.stores.sql.claims import Attendance
from coterie.stores.sql.connection import Connection, make_secret, read_secret
from coterie.stores.sql.jobs import Result
from coterie.stores.sql.queries import patterns
from coterie.stores.sql.rows import MESSAGE, to_message
from coterie.stores.sql.store import SqlDatabase, SqlStore
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.stores.transfer import SqliteTarget, carry_rows
from coterie.supervision import Shutdown
from coterie.text import one_line
from coterie.turn_store import Taker

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_TRIES = 4
LEASE = timedelta(seconds=30)
_MS = timedelta(milliseconds=1)
_EACH = f"SET LOCAL statement_timeout = {STATEMENT_MS};"
_WHISPER = "SELECT pg_notify(?, word) FROM unnest(?::text[]) AS word"
Time = Callable[[], int]


class Database(SqlDatabase):
    def __init__(
        self,
        url: str,
        info: StoreInfo,
        clock: Clock,
        limits: Limits,
        time: Time | None = None,
        lease: timedelta = LEASE,
        *,
        joins: bool = True,
    ) -> None:
        """`joins`: counts among those who run the society."""
        super().__init__()
        self.info, self._clock, self.limits = info, clock, limits
        self._url, self._time, self._lease = url, time, lease
        self._readers = ThreadPoolExecutor(MOST, thread_name_prefix="coterie-reader")
        # Whoever only looks holds nobody up, and may take as long as it takes.
        self._connections = Readers(url, _EACH if joins else "")
        self.broken: asyncio.Future[StoreBroken] = asyncio.get_running_loop().create_future()
        process = new_id()
        self._herald = Herald(info.log_id, process)
        self._writer = Writer(url, self._begin)
        self._leases = Leases(url, process, self._on_unsure, lease.total_seconds(), self.tally) if joins else None
        self._listening = Listening(url, self._herald, self._on_news, self._on_room, self._on_words) if joins else None

    @classmethod
    async def open(
        cls,
        url: str,
        clock: Clock,
        *,
        limits: Limits | None = None,
        time: Time | None = None,
        lease: timedelta = LEASE,
    ) -> Self:
        """Join the society in the database `url`, made if it is empty. Any number of processes can.

        `time`: in place of the database's clock, for tests.
        """
        return cls(url, await asyncio.to_thread(_open, url), clock, limits or Limits(), time, lease)

    @classmethod
    async def open_read_only(cls, url: str, clock: Clock, *, lease: timedelta = LEASE) -> Self:
        """Look at the society beside those who run it."""
        return cls(url, await asyncio.to_thread(_open, url, looking=True), clock, Limits(), lease=lease, joins=False)

    @property
    def healthy(self) -> bool:
        return self._writer.healthy

    async def is_last(self) -> bool:
        return self._leases is None or await self._leases.is_last()

    def attend(self, taker: Taker) -> None:
        self._taker = taker
        if self._leases:
            self._leases.hold(taker.worker)

    async def share(self, service: str, limit: int, keeps: int, waiting: int, urgent: int = 0) -> Share:
        return await self._read(lambda db: share(db, self._herald, self._lease, service, limit, keeps, waiting, urgent))

    async def whisper(self, words: Sequence[str]) -> None:
        await self._query(_WHISPER, self._herald.whispers, list(words))

    def _on_news(self, work: bool) -> None:
        if work and self._taker:
            self._taker.look()
        self.news()

    def _on_room(self, _: None) -> None:
        self.room()

    def _on_words(self, words: list[str]) -> None:
        for word in words:
            self.heard(word)

    def _on_unsure(self) -> None:
        if self._taker:
            self._taker.drop()

    async def close(self) -> None:
        shutdown = Shutdown()
        await shutdown.step("end the writer", self._writer.close)
        if self._listening:
            await shutdown.step("stop listening", self._listening.close)
        if self._leases:
            await shutdown.step("give up the lease", self._leases.close)
        await shutdown.step("close the readers", self._close_readers)
        shutdown.finish()

    async def _close_readers(self) -> None:
        self._readers.shutdown()
        self._connections.close()

    def _post(
        self,
        run: Callable[[Connection, UnitOfWork], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
    ) -> asyncio.Future[T]:
        if self._leases is None:
            raise StoreError("this society was opened for reading only")
        attendance = Attendance(self._taker) if self._taker else None

        def work(db: PgConnection, ledger: BatchLedger) -> Result:
            post = UnitOfWork(db, now=ledger.now, limits=self.limits, ledger=ledger)
            answer = run(db, post)
            attended = attendance.serve(db, post) if attendance else None
            ledger.leaves_work = ledger.leaves_work or post.leaves_work()
            post.close()
            return Result(answer, attended)

        return self._writer.write(work, attendance.settle if attendance else None, tuple(touches), messages)

    def _begin(self, db: PgConnection, touches: Iterable[str], messages: int) -> BatchLedger:
        ledger = BatchLedger(
            db, touches, self._lease // _MS, self._herald, self._time, messages=messages, secret=self.info.secret
        )
        self.seen_paused = ledger.began_paused
        return ledger

    async def _now(self) -> int:
        if self._time:
            return self._time()
        return int((await self._query(f"SELECT {CLOCK}"))[0][0])

    async def _read(self, run: Callable[[PgConnection], T], *, one_moment: bool = False) -> T:
        def work() -> T:
            for left in reversed(range(READ_TRIES)):
                try:
                    with self._connections.one() as db:
                        return _in_one_moment(db, run) if one_moment else run(db)
                except psycopg.Error as error:
                    if not left or not passes(error):
                        raise meaning(error) from error
                    time.sleep(0.1)
            raise AssertionError("the last try returns or raises")

        return await asyncio.get_running_loop().run_in_executor(self._readers, work)


def _in_one_moment(db: PgConnection, run: Callable[[PgConnection], T]) -> T:
    db.say("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        return run(db)
    finally:
        if not db.closed:
            db.say("ROLLBACK")


def _open(url: str, *, looking: bool = False) -> StoreInfo:
    try:
        with connect(url) as raw:
            if looking:
                check_version(raw)
            else:
                migrate(raw)
            raw.execute("INSERT INTO meta VALUES ('log_id', %s) ON CONFLICT DO NOTHING", (new_id(),))
            row: Any = raw.execute("SELECT value, last_at FROM meta, log WHERE key = 'log_id'").fetchone()
            secret = read_secret(PgConnection(raw)) if looking else make_secret(PgConnection(raw))
            version = raw.info.parameter_status("server_version") or ""
    except psycopg.Error as error:
        raise _unusable(error) from error
    last_seen = from_ms(row[1])
    return StoreInfo(engine="postgresql", version=version, log_id=row[0], last_seen=last_seen, secret=secret)


def _unusable(error: psycopg.Error) -> StoreError:
    return StoreUnusable(
        f"the PostgreSQL of store.url cannot be used ({one_line(str(error))}): check that it runs, and who may connect"
    )


_LOOKED_AT = f"""
SELECT {MESSAGE} FROM messages
 WHERE (?1 IS NULL OR seq < ?1) AND (?2 IS NULL OR ?2 IN (sender, recipient)) AND said(payload) ILIKE ALL (?3)
 ORDER BY seq DESC LIMIT ?4
"""
_ANY = "%"
READ_AT_ONCE = 500


def search(db: Connection, words: str, page: Page, agent_id: str | None) -> list[Message]:
    wanted = patterns(words)
    if not wanted:
        return []
    if words.isascii() or words.lower() == words.upper():
        rows = db.execute(_LOOKED_AT, (page.before, agent_id, wanted, page.limit))
        return [to_message(row) for row in rows]
    return _folded(db, words.casefold().split()[: len(wanted)], page, agent_id)


def _folded(db: Connection, words: list[str], page: Page, agent_id: str | None) -> list[Message]:
    """Which letters are the same in another case depends on how the database was made; Python knows them all."""
    found: list[Message] = []
    before = page.before
    while len(found) < page.limit:
        read = [to_message(row) for row in db.execute(_LOOKED_AT, (before, agent_id, [_ANY], READ_AT_ONCE))]
        found += [one for one in read if all(word in str(one.payload.get("text", "")).casefold() for word in words)]
        if len(read) < READ_AT_ONCE:
            break
        before = read[-1].seq
    return found[: page.limit]


def copy(url: str, target: Path) -> None:
    """As they were at one moment; on the disk when this returns."""
    with PostgresSource.open(url, None) as source, SqliteTarget.make(target, target.parent) as file:
        carry_rows(source, file)


class PostgresStore(Database, SqlStore):
    def kept(self) -> DatabaseBytes:
        """The bytes of artifacts, beside everything else."""
        return DatabaseBytes(self._read)

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        return await self._read(lambda db: search(db, words, page, agent_id))

    async def workers(self) -> Sequence[Worker]:
        return await self._read(lambda db: workers(db, self._lease))

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(copy, self._url, target)
