"""`PostgresStore`: the store on PostgreSQL, shared by any number of processes. One writer thread, a few readers.

`PostgresBlobStore` keeps artifact bytes in the same database.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec
import psycopg

from coterie.artifacts import HEAD_BYTES, StoredBlob
from coterie.clock import Clock, from_ms
from coterie.errors import Refused, StoreBroken, StoreError
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.messages import Message
from coterie.slot_sharing import SlotGrant
from coterie.store import Limits, Page, StoreInfo, Worker
from coterie.stores.blobs import CHUNK_BYTES, DELETE_GRACE
from coterie.stores.postgres.cluster import (
    ChangeNotice,
    Heartbeat,
    Listener,
    NotifyChannels,
    list_workers,
    request_slots,
)
from coterie.stores.postgres.connection import (
    CLOCK,
    MAX_READERS,
    STATEMENT_TIMEOUT_MS,
    PgConnection,
    ReaderPool,
    SchemaUpgraded,
    connect_suitable,
    is_transient,
    to_store_error,
)
from coterie.stores.postgres.load_sharing import CLAIM_DELAY, CLAIMS_PER_SHARED_ROUND, Load, WorkerLoads
from coterie.stores.postgres.search import index_next, search
from coterie.stores.postgres.server import unusable
from coterie.stores.postgres.session import PostgresSession, read_event_horizon
from coterie.stores.postgres.transfer import PostgresSource
from coterie.stores.postgres.writer import Writer
from coterie.stores.sql.claims import EagerClaimer
from coterie.stores.sql.jobs import Result, run_read
from coterie.stores.sql.migrations import migrate_postgres, require_newest_postgres, schema_scripts
from coterie.stores.sql.retention import COUNTED_TABLES, PRUNE_CLAIM, DatabaseSize
from coterie.stores.sql.rows import Connection, get_meta, make_secret, read_secret
from coterie.stores.sql.store import SqlStore
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.stores.transfer import SqliteTarget, transfer_rows
from coterie.supervision import Shutdown
from coterie.turn import Rest
from coterie.turn_store import Claim, Interruption, TurnWorker

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_ATTEMPTS = MAX_READERS + 1
"""After a restart of the server every connection of the pool is broken, and each costs one attempt."""
LEASE = timedelta(seconds=30)
SNAPSHOT_IDLE_TIMEOUT_MS = 15_000
_MS = timedelta(milliseconds=1)
_SET_READ_TIMEOUT = f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS};"
# It locks no rows, but the server keeps all rows that are deleted meanwhile.
_BEGIN_SNAPSHOT = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;"
    f" SET LOCAL idle_in_transaction_session_timeout = {SNAPSHOT_IDLE_TIMEOUT_MS}"
)
_BROADCAST = "SELECT pg_notify(:channel, payload) FROM unnest(:texts::text[]) AS payload"
TimeMs = Callable[[], int]
ReadLimits = Callable[[str], Limits]


class PostgresStore(SqlStore):
    def __init__(
        self,
        url: str,
        info: StoreInfo,
        clock: Clock,
        limits: Limits,
        time: TimeMs | None = None,
        lease: timedelta = LEASE,
        *,
        read_only: bool = False,
        read_limits: ReadLimits | None = None,
    ) -> None:
        """`time`: replaces the database's clock, for tests. `read_only`: the process does not run the society.

        `read_limits`: the limits in the document of the stored configuration; they replace `limits`.
        """
        super().__init__()
        self.info, self._clock, self.limits = info, clock, limits
        self._url, self._time, self._lease, self._read_limits = url, time, lease, read_limits
        self._readers = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="coterie-reader")
        # Read-only commands delay no other process, so their statements have no timeout.
        self._pool = ReaderPool(url, "", response_timeout=None) if read_only else ReaderPool(url, _SET_READ_TIMEOUT)
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[StoreBroken] = self._loop.create_future()
        process = new_id()
        self._channels = NotifyChannels(info.log_id, process)
        self._writer = Writer(url, self._begin_session)
        self._heartbeat: Heartbeat | None = None
        self._listener: Listener | None = None
        self._loads = WorkerLoads()
        self._is_asked_to_claim = True
        """Another process left ready agents to this one, or may have done so."""
        if not read_only:
            self._heartbeat = Heartbeat(
                url, self._channels, self._abandon_turns, lease.total_seconds(), self.counters, self._loads
            )
            self._listener = Listener(
                url,
                self._channels,
                self._publish_change,
                self._publish_slots_changed,
                self._publish_broadcasts,
                self._publish_interruptions,
                self._loads,
            )

    @classmethod
    async def open(
        cls,
        url: str,
        clock: Clock,
        *,
        limits: Limits | None = None,
        time: TimeMs | None = None,
        lease: timedelta = LEASE,
        read_limits: ReadLimits | None = None,
    ) -> Self:
        """Open the database and join the society, created if the database is empty. Arguments as of the class."""
        info = await asyncio.to_thread(_open, url)
        return cls(url, info, clock, limits or Limits(), time, lease, read_limits=read_limits)

    @classmethod
    async def open_read_only(cls, url: str, clock: Clock) -> Self:
        """Open for reading; other processes may run the society. Every write raises `StoreError`."""
        info = await asyncio.to_thread(_open, url, read_only=True)
        return cls(url, info, clock, Limits(), read_only=True)

    @property
    def is_healthy(self) -> bool:
        return self._writer.is_healthy

    async def is_only_process(self) -> bool:
        return self._heartbeat is None or await self._heartbeat.is_last_process()

    def register_worker(self, worker: TurnWorker) -> None:
        self._worker = worker
        if self._heartbeat:
            self._heartbeat.set_worker(worker)

    async def request_slots(self, service: str, limit: int, held: int, waiting: int, urgent: int = 0) -> SlotGrant:
        return await self._read(lambda db: request_slots(db, self._channels, service, limit, held, waiting, urgent))

    async def broadcast(self, texts: Sequence[str]) -> None:
        await self._query(_BROADCAST, channel=self._channels.broadcast_channel, texts=list(texts))

    def _publish_change(self, change: ChangeNotice) -> None:
        if change.has_work and self._worker:
            self._is_asked_to_claim = True
            self._worker.wake()
        for callback in self._on_change:
            callback(change.about_society)

    def _publish_slots_changed(self, _: None) -> None:
        for callback in self._on_slots_changed:
            callback()

    def _publish_broadcasts(self, texts: list[str]) -> None:
        for text in texts:
            for callback in self._on_broadcast:
                callback(text)

    def _publish_interruptions(self, interruptions: list[Interruption]) -> None:
        if self._worker:
            for interruption in interruptions:
                self._worker.interrupt(interruption)

    def _abandon_turns(self) -> None:
        if self._worker:
            self._worker.abandon_turns()

    async def close(self) -> None:
        shutdown = Shutdown()
        await shutdown.step("end the writer", self._writer.close)
        if self._listener:
            await shutdown.step("stop listening", self._listener.close)
        if self._heartbeat:
            await shutdown.step("give up the lease", self._heartbeat.close)
        await shutdown.step("close the readers", self._close_readers)
        shutdown.finish()

    async def _close_readers(self) -> None:
        self._readers.shutdown()
        self._pool.close()

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
        if self._heartbeat is None:
            raise StoreError("this society was opened for reading only")
        self._write_count += not alone
        claimer = EagerClaimer(self._worker, self._should_claim) if self._worker else None

        def work(db: PgConnection, session: PostgresSession) -> Result:
            unit_of_work = UnitOfWork(db, now=session.now, limits=self.limits, session=session)
            value = run(db, unit_of_work)
            claims = claimer.claim_woken(db, unit_of_work) if claimer else None
            session.count_work(
                unclaimed=len(unit_of_work.newly_runnable()),
                frees_others=unit_of_work.frees_other_agents,
                ended=isinstance(value, Claim) and isinstance(value.action, Rest),
            )
            session.interruptions += unit_of_work.interruption_list()
            unit_of_work.flush()
            return Result(value, claims, needs_flush=durable or unit_of_work.needs_flush)

        return self._writer.write(work, claimer.settle if claimer else None, tuple(touches), messages, alone)

    def _load(self) -> Load:
        """Turns that this process runs, or is about to start, and the most that it can run. From any thread."""
        return Load(self._worker.running_turns, self._worker.max_turns) if self._worker else Load(0, 0)

    def _should_claim(self) -> bool:
        return self._loads.should_claim(self._load())

    @property
    def claims_per_round(self) -> int:
        return CLAIMS_PER_SHARED_ROUND if len(self._loads) else super().claims_per_round

    def _claim_delay_ms(self) -> int:
        is_asked, self._is_asked_to_claim = self._is_asked_to_claim, False
        return 0 if is_asked or self._should_claim() else CLAIM_DELAY // _MS

    def _begin_session(
        self, db: PgConnection, touches: Iterable[str], messages: int, tasks: Iterable[str]
    ) -> PostgresSession:
        session = PostgresSession(
            db,
            touches,
            self._lease // _MS,
            self._channels,
            self._time,
            messages=messages,
            tasks=tasks,
            secret=self.info.secret,
            loads=self._loads,
            own_load=self._load,
        )
        if session.compatible_from > schema_scripts("postgres").newest:
            message = (
                "a newer Coterie upgraded the database, and this version must not write to it: this process ends, and"
                " others take over its turns; install the newer version here, too"
            )
            self._loop.call_soon_threadsafe(self._set_broken, StoreBroken(message))
            raise SchemaUpgraded(message)
        self.seen_paused = session.was_paused_at_start
        if session.configuration_version != self.seen_configuration:
            # Read in this transaction: its jobs are bound by the limits that were committed before it.
            if self._read_limits:
                self.limits = self._read_limits(get_meta(db, "configuration") or "{}")
            self.seen_configuration = session.configuration_version
        return session

    def _set_broken(self, error: StoreBroken) -> None:
        if not self.broken.done():
            self.broken.set_result(error)

    async def _now_ms(self) -> int:
        if self._time:
            return self._time()
        return int((await self._query(f"SELECT {CLOCK}"))[0][0])

    async def _read(self, run: Callable[[PgConnection], T], *, in_snapshot: bool = False) -> T:
        def work() -> T:
            for attempts_left in reversed(range(READ_ATTEMPTS)):
                try:
                    with self._pool.connection() as db:
                        return _run_in_snapshot(db, run) if in_snapshot else run(db)
                except psycopg.Error as error:
                    if not attempts_left or not is_transient(error):
                        raise to_store_error(error) from error
                    time.sleep(0.1)
            raise AssertionError("the last attempt returns or raises")

        return await run_read(self._readers, work)

    async def _event_horizon(self) -> int:
        return await self._read(lambda db: read_event_horizon(db, self._channels))

    async def _flush_commits(self) -> None:
        await self._read(flush_commits)

    def blobs(self) -> PostgresBlobStore:
        """The blob store in the same database."""
        return PostgresBlobStore(self._read)

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        return await self._read(lambda db: search(db, words, page, agent_id), in_snapshot=True)

    async def index_messages(self) -> bool:
        now = await self._now_ms()
        # Not on the connection of the writer: sends do not wait for it.
        return await self._read(lambda db: index_next(db, now))

    async def workers(self) -> Sequence[Worker]:
        return await self._read(lambda db: list_workers(db))

    async def _read_size(self) -> DatabaseSize:
        return await self._read(read_size)

    async def claim_prune(self, process: str, *, takes_over: bool = False) -> bool:
        return await self._transact(
            lambda db, uow: _claim_prune(db, uow.now, process, takes_over=takes_over), durable=False, alone=True
        )

    async def release_space(self) -> bool:
        """PostgreSQL reuses the space of deleted rows itself."""
        return False

    async def rewrite(self) -> None:
        """Nothing to do: see `release_space`."""

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(copy_to_sqlite, self._url, target)


_HAS_UNFLUSHED = "SELECT pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()"
# Only a transaction that has written to the log is flushed at its commit.
_FLUSH = "BEGIN; SET LOCAL synchronous_commit = on; SELECT pg_logical_emit_message(true, 'coterie', ''); COMMIT"


def flush_commits(db: PgConnection) -> None:
    """Make all transactions durable that are committed now."""
    if db.execute(_HAS_UNFLUSHED).fetchone()[0]:
        db.execute_now(_FLUSH)


def _run_in_snapshot(db: PgConnection, run: Callable[[PgConnection], T]) -> T:
    db.execute_now(_BEGIN_SNAPSHOT)
    try:
        return run(db)
    finally:
        if not db.closed:
            db.execute_now("ROLLBACK")


def _open(url: str, *, read_only: bool = False) -> StoreInfo:
    try:
        with connect_suitable(url) as raw:
            if read_only:
                require_newest_postgres(raw)
            else:
                migrate_postgres(raw)
            db = PgConnection(raw)
            db.execute("INSERT INTO meta VALUES ('log_id', :log_id) ON CONFLICT DO NOTHING", {"log_id": new_id()})
            (log_id,) = db.execute("SELECT value FROM meta WHERE key = 'log_id'").fetchone()
            (last_at,) = db.execute(
                "SELECT coalesce(max(at), 0) FROM (SELECT at FROM events ORDER BY seq DESC LIMIT 1) AS newest"
            ).fetchone()
            secret = read_secret(db) if read_only else make_secret(db)
            version = raw.info.parameter_status("server_version") or ""
    except psycopg.Error as error:
        raise unusable(error, url) from error
    return StoreInfo(engine="postgresql", version=version, log_id=log_id, last_seen=from_ms(last_at), secret=secret)


# Deleted rows leave free space in the files. PostgreSQL does not report its size, so the part in use is estimated: the
# number of live rows times their average width, relative to the main file of the table. Indexes are taken to be filled
# like it. Long values are in chunks in another table (TOAST); `avg_width` counts only the pointer to them.
_SELECT_SIZES = """
SELECT tables.relname, tables.n_live_tup, pg_total_relation_size(tables.relid), pg_relation_size(tables.relid),
       (SELECT sum(avg_width * (1 - null_frac)) FROM pg_stats
         WHERE pg_stats.schemaname = tables.schemaname AND tablename = tables.relname),
       coalesce(chunks.n_live_tup, 0), coalesce(pg_total_relation_size(chunks.relid), 0),
       coalesce(pg_relation_size(chunks.relid), 0)
  FROM pg_stat_user_tables AS tables JOIN pg_class ON pg_class.oid = tables.relid
  LEFT JOIN pg_stat_all_tables AS chunks ON chunks.relid = pg_class.reltoastrelid
 WHERE tables.schemaname = current_schema() AND tables.relname NOT IN ('blobs', 'pieces')
"""
_ROW_HEADER_BYTES = 28
_CHUNK_BYTES = 2_000
"""Of a long value; four chunks fill a page."""


class _TableSize(NamedTuple):
    name: str
    rows: int
    total: int
    """With indexes and chunks."""
    main: int
    width: float | None
    """Average width of a row. None: the table was not analysed yet."""
    chunks: int
    chunks_total: int
    """With their index."""
    chunks_main: int

    @property
    def used(self) -> float:
        filled = self.rows * (float(self.width) + _ROW_HEADER_BYTES) / self.main if self.width and self.main else 1.0
        # The number of chunks is lost with the server's statistics, until the next vacuum.
        chunks_filled = self.chunks * _CHUNK_BYTES / self.chunks_main if self.chunks else filled
        return (self.total - self.chunks_total) * min(1.0, filled) + self.chunks_total * min(1.0, chunks_filled)


def read_size(db: PgConnection) -> DatabaseSize:
    tables = [_TableSize(*row) for row in db.execute(_SELECT_SIZES).fetchall()]
    rows = {table.name: table.rows for table in tables if table.name in COUNTED_TABLES}
    used = sum(table.used for table in tables)
    return DatabaseSize(sum(table.total for table in tables), int(used), rows, can_shrink=True)


PRUNE_CLAIM_EXPIRY = timedelta(minutes=5)
"""After this time without a renewal, another process may begin a run."""


class _PruneClaim(msgspec.Struct):
    """The value of `PRUNE_CLAIM` in `meta`."""

    process: str
    at: int


def _claim_prune(db: Connection, now: int, process: str, *, takes_over: bool) -> bool:
    """See `RetentionStore.claim_prune`. The write compares the value again: other processes may claim meanwhile."""
    before, claim = get_meta(db, PRUNE_CLAIM), msgspec.json.encode(_PruneClaim(process, now)).decode()
    if before is None:
        sql = "INSERT INTO meta (key, value) VALUES (:key, :claim) ON CONFLICT (key) DO NOTHING"
        return db.execute(sql, {"key": PRUNE_CLAIM, "claim": claim}).rowcount == 1
    held = msgspec.json.decode(before, type=_PruneClaim)
    if held.process != process and now - held.at < PRUNE_CLAIM_EXPIRY // _MS and not takes_over:
        return False
    sql = "UPDATE meta SET value = :claim WHERE key = :key AND value = :before"
    return db.execute(sql, {"key": PRUNE_CLAIM, "claim": claim, "before": before}).rowcount == 1


def copy_to_sqlite(url: str, target: Path) -> None:
    """Write all rows as one snapshot to a new SQLite file and fsync it."""
    with PostgresSource.open(url, None) as source, SqliteTarget.create(target, target.parent) as sqlite:
        transfer_rows(source, sqlite)


# Artifact bytes: one row per chunk, keyed by the SHA-256 of the content.

# Every statement is idempotent: it is repeated when a response is lost.
_BEGIN_UPLOAD = f"INSERT INTO blobs (sha256, size, at) VALUES (:sha256, 0, {CLOCK}) ON CONFLICT DO NOTHING"
_WRITE_CHUNK = "INSERT INTO pieces (sha256, start, bytes) VALUES (:sha256, :start, :bytes) ON CONFLICT DO NOTHING"
# One statement moves all chunks to the final key: the blob exists whole or not at all.
_FINISH_UPLOAD = f"""
WITH blob AS (
    INSERT INTO blobs (sha256, size, at) VALUES (:sha256, :size, {CLOCK})
    ON CONFLICT (sha256) DO UPDATE SET at = excluded.at RETURNING xmax = 0 AS is_new)
UPDATE pieces SET sha256 = :sha256 WHERE sha256 = :upload AND (SELECT is_new FROM blob)
"""
_READ_CHUNK = "SELECT start, bytes FROM pieces WHERE sha256 = :sha256 AND start > :after ORDER BY start LIMIT 1"
# All whose hash begins with :sha256: no digit of a hash comes after 'f'. Also deletes chunks of aborted uploads.
_DELETE_BLOB = f"""
DELETE FROM blobs
 WHERE ((sha256 >= :sha256 AND sha256 < CAST(:sha256 AS text) || 'g') OR sha256 LIKE 'incoming %')
   AND at <= {CLOCK} - :grace_ms
   AND NOT EXISTS (SELECT 1 FROM artifacts WHERE artifacts.sha256 = blobs.sha256)
"""


class RunWithConnection(Protocol):
    async def __call__(self, run: Callable[[PgConnection], T], /) -> T: ...


class PostgresBlobStore:
    """Blob store in the society's database."""

    def __init__(self, run: RunWithConnection, grace: timedelta = DELETE_GRACE) -> None:
        """`run`: calls a function with a connection."""
        self._run, self._grace_ms = run, grace // timedelta(milliseconds=1)

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBlob:
        upload, digest, size, head, rest = f"incoming {new_id()}", hashlib.sha256(), 0, b"", b""
        await self._execute(_BEGIN_UPLOAD, sha256=upload)
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise Refused("artifact_too_large", f"the file is larger than {limit:,} bytes, the most allowed")
                head += chunk[: max(0, HEAD_BYTES - len(head))]
                digest.update(chunk)
                rest += chunk
                while len(rest) >= CHUNK_BYTES:
                    await self._execute(_WRITE_CHUNK, sha256=upload, start=size - len(rest), bytes=rest[:CHUNK_BYTES])
                    rest = rest[CHUNK_BYTES:]
            if rest:
                await self._execute(_WRITE_CHUNK, sha256=upload, start=size - len(rest), bytes=rest)
            hit("artifact.before_rename")
            await self._execute(_FINISH_UPLOAD, sha256=digest.hexdigest(), size=size, upload=upload)
        finally:
            with contextlib.suppress(StoreError):  # do not hide an error of the upload; a later delete retries
                await self._execute("DELETE FROM blobs WHERE sha256 = :upload", upload=upload)
        return StoredBlob(sha256=digest.hexdigest(), size=size, head=head)

    async def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        # All chunks but the last have CHUNK_BYTES.
        offset = start - start % CHUNK_BYTES - 1
        while row := await self._fetchone(_READ_CHUNK, sha256=sha256, after=offset):
            offset, chunk = row
            if end is not None and offset >= end:
                return
            if part := chunk[max(0, start - offset) : None if end is None else end - offset]:
                yield part

    async def size(self, sha256: str) -> int | None:
        row = await self._fetchone("SELECT size FROM blobs WHERE sha256 = :sha256", sha256=sha256)
        return int(row[0]) if row else None

    async def delete(self, sha256: str) -> None:
        await self._execute(_DELETE_BLOB, sha256=sha256, grace_ms=self._grace_ms)

    async def _fetchone(self, sql: str, **values: Any) -> Any:
        return await self._run(lambda db: db.execute(sql, values).fetchone())

    async def _execute(self, sql: str, **values: Any) -> None:
        await self._run(lambda db: db.execute(sql, values))
