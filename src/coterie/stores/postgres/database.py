"""The database of a society and the connections to it: one thread that writes, a few that read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Self, TypeVar

import psycopg

from coterie.clock import Clock, from_ms
from coterie.errors import StoreBroken, StoreError, StoreUnusable
from coterie.ids import new_id
from coterie.llm.places import Share
from coterie.store import Limits, StoreInfo
from coterie.stores.postgres.connection import STATEMENT_MS, PgConnection, connect
from coterie.stores.postgres.dialect import CLOCK
from coterie.stores.postgres.leases import Leases
from coterie.stores.postgres.ledger import BatchLedger
from coterie.stores.postgres.listening import Herald, Listening
from coterie.stores.postgres.migrate import check_version, migrate
from coterie.stores.postgres.places import share
from coterie.stores.postgres.readers import MOST, Readers
from coterie.stores.postgres.trouble import meaning, passes
from coterie.stores.postgres.writer import Writer
from coterie.stores.sql.attendance import Attendance
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.database import SqlDatabase
from coterie.stores.sql.jobs import Result
from coterie.stores.sql.post import Post
from coterie.stores.sql.secret import make_secret, read_secret
from coterie.supervision import Shutdown
from coterie.text import one_line
from coterie.turns import Taker

T = TypeVar("T")
log = logging.getLogger(__name__)

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
        run: Callable[[Connection, Post], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
    ) -> asyncio.Future[T]:
        if self._leases is None:
            raise StoreError("this society was opened for reading only")
        attendance = Attendance(self._taker) if self._taker else None

        def work(db: PgConnection, ledger: BatchLedger) -> Result:
            post = Post(db, now=ledger.now, limits=self.limits, ledger=ledger)
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
