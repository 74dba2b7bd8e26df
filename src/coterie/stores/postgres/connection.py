"""PostgreSQL connections that run the SQL both engines share, and the classification of database errors.

Shared SQL is written in SQLite's dialect and translated here; see `translate_sql`. Statements can be pipelined: queued
and sent together in one round trip.

A connection keeps no session state: no prepared statements, no settings that outlive a transaction. So it also works
through a pooler in transaction mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache, lru_cache
from typing import Any, Self

import msgspec
import psycopg
import psycopg_pool
from psycopg.abc import RV, Buffer, PQGen
from psycopg.adapt import Dumper, Loader
from psycopg.pq import TransactionStatus

from coterie.errors import StoreBroken, StoreError, StoreUnavailable, StoreUnusable
from coterie.stores.postgres.server import cause_of, require_suitable, unusable
from coterie.stores.sql.rows import Rows
from coterie.text import one_line

CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
"""SQL expression: the server's time in ms."""
CONNECT_TIMEOUT_SECONDS = 5
STATEMENT_TIMEOUT_MS = 15_000
LOCK_TIMEOUT_MS = 5_000
RESPONSE_TIMEOUT_SECONDS = 20.0
"""How long to wait for a response. TCP alone does not detect a peer that stays silent."""
IDLE_TRANSACTION_TIMEOUT_MS = 3_000
"""Bounds how long a process that stops inside a transaction keeps its locks."""
SET_TIMEOUTS = (
    f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS}; SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS};"
    f" SET LOCAL idle_in_transaction_session_timeout = {IDLE_TRANSACTION_TIMEOUT_MS};"
    " SET LOCAL synchronous_commit = on;"  # a commit must be durable, whatever the server's default is
)
_SET_SESSION_TIMEOUTS = (
    f"SET statement_timeout = {STATEMENT_TIMEOUT_MS}; SET lock_timeout = {LOCK_TIMEOUT_MS};"
    f" SET idle_in_transaction_session_timeout = {IDLE_TRANSACTION_TIMEOUT_MS}; SET synchronous_commit = on"
)
_BEGIN_BEHIND_POOLER = (
    f"BEGIN; SELECT set_config('statement_timeout', '{STATEMENT_TIMEOUT_MS}', true),"
    f" set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true),"
    f" set_config('idle_in_transaction_session_timeout', '{IDLE_TRANSACTION_TIMEOUT_MS}', true),"
    " set_config('synchronous_commit', 'on', true)"
)
MAX_READERS = 4
POOL_TIMEOUT_SECONDS = 2.0
"""How long a reader waits for a free connection."""
MAX_SEPARATE_ROWS = 4
"""Rows of one INSERT whose values are separate literals."""
MAX_QUEUED_BYTES = 1 << 20
"""Pipelined statements are sent at the latest when they reach this size."""
_CONNECT_OPTIONS = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "coterie",
}
_FIRST_SAVEPOINT = b"SAVEPOINT job"
_NEXT_SAVEPOINT = b"RELEASE SAVEPOINT job; SAVEPOINT job"


class _BoolDumper(Dumper):
    """Booleans are stored as 0 and 1."""

    def dump(self, obj: bool) -> Buffer:
        return b"1" if obj else b"0"

    def quote(self, obj: bool) -> Buffer:
        return self.dump(obj)


class _IntLoader(Loader):
    """Load NUMERIC as int: a sum of integers has that type."""

    def load(self, data: Buffer) -> int:
        return int(bytes(data))


class _TimeoutConnection(psycopg.Connection[Any]):
    """Connection with a response timeout. TCP timeouts cover only the next hop, for example a pooler."""

    response_timeout: float | None = RESPONSE_TIMEOUT_SECONDS
    """In seconds; None: wait for as long as a statement takes."""

    @classmethod
    def connect(  # type: ignore[override]
        cls,
        conninfo: str = "",
        *,
        response_timeout: float | None = RESPONSE_TIMEOUT_SECONDS,
        on_error: Callable[[psycopg.Error], None] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Open an autocommit connection. `on_error` is called with the error if that fails."""
        given = psycopg.conninfo.conninfo_to_dict(conninfo)
        defaults: dict[str, Any] = {name: value for name, value in _CONNECT_OPTIONS.items() if name not in given}
        settings: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, **defaults, **kwargs}
        try:
            raw = super().connect(conninfo, cursor_factory=psycopg.ClientCursor, **settings)
        except psycopg.Error as error:
            if on_error:
                on_error(error)
            raise
        raw.response_timeout = response_timeout
        raw.adapters.register_dumper(bool, _BoolDumper)
        raw.adapters.register_loader("numeric", _IntLoader)
        return raw

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.response_timeout)
        except psycopg.OperationalError:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                self.pgconn.finish()  # a late response would be taken for that of the next statement
            raise


def connect(url: str, response_timeout: float = RESPONSE_TIMEOUT_SECONDS) -> psycopg.Connection[Any]:
    """Open an autocommit connection; transactions begin and end with explicit statements."""
    return _TimeoutConnection.connect(url, response_timeout=response_timeout)


def connect_suitable(url: str) -> psycopg.Connection[Any]:
    """Connect to a server that can be used, for statements that may take any time: an upgrade, a copy, a check.

    The first response has the usual timeout.
    """
    raw = _TimeoutConnection.connect(url)
    try:
        require_suitable(raw)
        raw.execute("SELECT 1")  # a pooler lets clients in while the server behind it is silent
    except BaseException:
        raw.close()
        raise
    raw.response_timeout = None
    return raw


@contextmanager
def owner_connection(url: str) -> Iterator[PgConnection]:
    """Connection for one command of the owner. It is closed afterwards; errors become `StoreError`."""
    try:
        with closing(PgConnection(connect_suitable(url))) as db:
            yield db
    except psycopg.Error as error:
        raise _owner_error(error, url) from error


def _owner_error(error: psycopg.Error, url: str) -> StoreError:
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return StoreUnusable("another program is writing to this database: stop it first, then try again")
    # An error without a code is one of the connection.
    return unusable(error, url) if is_transient(error) or not error_code(error) else to_store_error(error)


class LazyResult:
    """Result of a pipelined statement. Its first access sends the queued statements."""

    __slots__ = ("_db", "_is_loaded", "_rowcount", "_rows")

    def __init__(self, db: PgConnection) -> None:
        self._db, self._is_loaded = db, False
        self._rows: list[Any] = []
        self._rowcount = -1

    def set(self, cursor: psycopg.Cursor[Any]) -> None:
        self._is_loaded, self._rowcount = True, cursor.rowcount
        if cursor.description:
            self._rows = cursor.fetchall()

    @property
    def rowcount(self) -> int:
        self._load()
        return self._rowcount

    def fetchone(self) -> Any:
        self._load()
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        self._load()
        rows, self._rows = self._rows, []
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())

    def _load(self) -> None:
        if not self._is_loaded:
            self._db.flush()


class PgConnection:
    """A psycopg connection with the interface of `sqlite3.Connection` and with pipelining."""

    Error: type[Exception] = psycopg.Error
    IntegrityError: type[Exception] = psycopg.IntegrityError
    OperationalError: type[Exception] = psycopg.OperationalError

    def __init__(self, raw: psycopg.Connection[Any], prefix: str = "") -> None:
        """`prefix`: SQL sent before every statement, in the same round trip."""
        self.raw, self._prefix = raw, prefix.encode()
        self.pipelining = False
        """Queue statements until a result is accessed. An error then raises `PipelineFailed`."""
        self.begin_sql = _BEGIN_BEHIND_POOLER
        """Begins a transaction with timeouts."""
        self._cursor = psycopg.ClientCursor(raw)
        self._queued: list[tuple[bytes, LazyResult | None]] = []
        self._queued_bytes = 0
        self._writes: list[bytes] = []
        """The last writes, which are queued as one statement: none depends on another."""

    @classmethod
    def for_writes(cls, url: str) -> PgConnection:
        """Connect for transactions. Without a pooler the timeouts are set once, for the whole session."""
        db = cls(connect(url))
        # A pooler tells its clients other process ids than the server's.
        if db.execute("SELECT pg_backend_pid()").fetchone()[0] == db.raw.info.backend_pid:
            db.raw.execute(_SET_SESSION_TIMEOUTS.encode())
            db.begin_sql = "BEGIN"
        return db

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] = (), /) -> Rows:
        text = translate_sql(sql)
        if not self.pipelining and not self._queued and not self._writes:
            return _last_result(self.raw.execute(self._prefix + text, parameters))
        result = LazyResult(self)
        self._enqueue(self._render(text, parameters), result)
        if not self.pipelining or self._queued_bytes > MAX_QUEUED_BYTES:
            self.flush()
        return result

    def executemany(self, sql: str, parameters: Iterable[Mapping[str, Any]], /) -> None:
        """Queue the statements; the next `execute` or `flush` sends them."""
        text = translate_sql(sql)
        for values in parameters:
            self._enqueue(self._render(text, values))

    def insert_rows(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        """Queue an INSERT. Several in succession, and UPDATEs of `update_row`, become one statement.

        Many rows are one JSON parameter: faster than thousands of separate values.
        """
        if len(rows) <= MAX_SEPARATE_ROWS:
            text = literal_insert(into, len(rows[0]), len(rows))
            self._writes.append(self._render(text, [value for values in rows for value in values]))
        else:
            statement, columns = json_insert(into)
            self._writes.append(self._render(translate_sql(statement), {"rows": encode_rows(columns, rows)}))
        if not self.pipelining:
            self.flush()

    def update_row(self, sql: str, parameters: Mapping[str, Any]) -> None:
        """Queue an UPDATE as `insert_rows` does. No other write of the same succession may change its row."""
        self._writes.append(self._render(translate_sql(sql), parameters))
        if not self.pipelining:
            self.flush()

    def execute_now(self, sql: str) -> psycopg.Cursor[Any]:
        """Send the queued statements and `sql`, untranslated, in one round trip. Return the last result."""
        self._enqueue(sql.encode())
        return self.flush()

    def begin_savepoints(self) -> None:
        """Queue the savepoint `job` of the first job."""
        self._enqueue(_FIRST_SAVEPOINT)

    def next_savepoint(self) -> None:
        """Queue a new savepoint `job` in place of the current one."""
        self._enqueue(_NEXT_SAVEPOINT)

    def flush(self) -> psycopg.Cursor[Any]:
        """Send the queued statements and return the last result."""
        self._join_writes()
        if not self._queued:
            return self._cursor
        sent, self._queued, self._queued_bytes = self._queued, [], 0
        try:
            cursor = self.raw.execute(b";".join(text for text, _ in sent))
        except psycopg.Error as error:
            if self.pipelining and is_job_error(error):
                raise PipelineFailed from error
            raise
        for text, result in sent:
            if result:
                result.set(cursor)
            for _ in range(2 if text is _NEXT_SAVEPOINT else 1):
                cursor.nextset()
        return _last_result(cursor)

    def discard_job(self) -> None:
        """Drop queued statements of the current job, but keep the statement that sets its savepoint."""
        self._writes.clear()
        marks = (_FIRST_SAVEPOINT, _NEXT_SAVEPOINT)
        savepoints = [index for index, (text, _) in enumerate(self._queued, 1) if text in marks]
        del self._queued[savepoints[-1] if savepoints else 0 :]

    def discard_queued(self) -> None:
        self._queued, self._queued_bytes, self._writes = [], 0, []

    def _join_writes(self) -> None:
        writes, self._writes = self._writes, []
        if writes:
            *others, last = writes
            parts = b", ".join(b"write_%d AS (%b)" % (number, text) for number, text in enumerate(others))
            text = b"WITH %b %b" % (parts, last) if others else last
            self._queued.append((text, None))
            self._queued_bytes += len(text)

    def _enqueue(self, text: bytes, result: LazyResult | None = None) -> None:
        self._join_writes()
        self._queued.append((text, result))
        self._queued_bytes += len(text)

    def _render(self, text: bytes, values: Mapping[str, Any] | Sequence[Any]) -> bytes:
        """The statement with its values as SQL literals."""
        return self._cursor.mogrify(text, values).encode()

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def close(self) -> None:
        self.raw.close()


def _last_result(cursor: psycopg.Cursor[Any]) -> psycopg.Cursor[Any]:
    while cursor.nextset():
        pass
    return cursor


_TABLE_AND_COLUMNS = re.compile(r"(\w+) \(([^)]*)\)")
_encode = msgspec.json.Encoder().encode
_POSTGRES_CLAUSE = re.compile(r"/\*\+(.*?)\*/", re.DOTALL)
_SQLITE_SYNTAX = re.compile(
    r"""
    (?P<literal>'(?:[^']|'')*')
    | (?P<cast>::)
    | :(?P<name>[A-Za-z_]\w*)
    | (?P<positional>\?)
    | CAST\((?P<blob>[\w.]+)\ AS\ BLOB\)
    | (?P<percent>%)
    """,
    re.VERBOSE,
)


@lru_cache(maxsize=1024)
def translate_sql(sql: str) -> bytes:
    """Translate shared SQL for psycopg.

    `:name` becomes `%(name)s`, and `?` becomes `%s`; string literals and `::type` stay. `/*+ clause */` becomes
    `clause`. `CAST(column AS BLOB)` becomes `column`: SQLite needs the cast for damaged text, PostgreSQL's text is
    always valid.
    """
    return _SQLITE_SYNTAX.sub(_translate_token, _POSTGRES_CLAUSE.sub(r"\1", sql)).encode()


def _translate_token(token: re.Match[str]) -> str:
    text = token.group(token.lastgroup or 0)
    match token.lastgroup:
        case "name":
            return f"%({text})s"
        case "positional":
            return "%s"
        case "literal" | "percent":
            return text.replace("%", "%%")
        case _:
            return text


@cache
def literal_insert(into: str, width: int, size: int) -> bytes:
    """Statement that inserts `size` rows of `width` values. `into`: `table (column, ...)`."""
    row = f"({', '.join(['%s'] * width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * size)}".encode()


@cache
def json_insert(into: str) -> tuple[str, Sequence[str]]:
    """Statement that inserts a JSON array of rows, and the column names. `into`: `table (column, ...)`."""
    match = _TABLE_AND_COLUMNS.fullmatch(into)
    assert match, into  # noqa: S101
    table, columns = match.groups()
    statement = f"INSERT INTO {into} SELECT {columns} FROM json_populate_recordset(NULL::{table}, :rows)"
    return statement, columns.replace(" ", "").split(",")


def encode_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as a JSON array of objects; booleans become 0 and 1. A missing key is NULL, so None is left out."""
    return _encode(
        [
            {
                name: int(value) if value.__class__ is bool else value
                for name, value in zip(columns, row, strict=True)
                if value is not None
            }
            for row in rows
        ]
    ).decode()


class ReaderPool:
    """Pool of connections for reading."""

    def __init__(self, url: str, prefix: str, *, response_timeout: float | None = RESPONSE_TIMEOUT_SECONDS) -> None:
        """`prefix`: SQL sent before every statement. `response_timeout`: in seconds, None for none."""
        self._prefix = prefix
        self._connect_error: psycopg.Error | None = None
        # Connections are opened when they are needed. One thread opens them, so that a stopped server is not flooded.
        self._pool = psycopg_pool.ConnectionPool(
            url,
            connection_class=_TimeoutConnection,
            kwargs={"on_error": self._note_error, "response_timeout": response_timeout},
            min_size=0,
            max_size=MAX_READERS,
            num_workers=1,
            timeout=POOL_TIMEOUT_SECONDS,
            # Attempts to connect get rarer and rarer. After this time the pool gives up; the next reader begins anew.
            reconnect_timeout=POOL_TIMEOUT_SECONDS,
            open=True,
        )

    @contextmanager
    def connection(self) -> Iterator[PgConnection]:
        """Lend a connection. It is closed after a database error, else returned to the pool."""
        raw = self._take()
        try:
            yield PgConnection(raw, self._prefix)
        except psycopg.Error:
            raw.close()
            raise
        finally:
            self._pool.putconn(raw)

    def close(self) -> None:
        self._pool.close()

    def _take(self) -> _TimeoutConnection:
        """Wait for a connection. The pool retries meanwhile, so `StoreError` is final for the caller."""
        self._connect_error = None
        try:
            return self._pool.getconn()
        except psycopg_pool.PoolTimeout:
            if self._connect_error:
                raise to_store_error(self._connect_error) from self._connect_error
            raise StoreUnavailable("all connections to the database are in use: try again in a moment") from None

    def _note_error(self, error: psycopg.Error) -> None:
        """The pool retries in the background; its own timeout does not say why connecting failed."""
        self._connect_error = error


# Errors

# Serialization failure, deadlock, lock not available, statement canceled, server shutdown or start, too many
# connections, read-only after a failover, failed transaction, idle-in-transaction timeout. Class 08: connection errors.
_TRANSIENT_CODES = {"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "53300", "25006", "25P02", "25P03"}
CONFLICT_CODES = {"40001", "40P01"}
"""Serialization failure and deadlock: the transaction lost against another one."""
_DISK_FULL_CODES = {"53100"}
_DISK_FULL_PHRASES = ("No space left on device", "Disk quota exceeded")
"""Some server errors carry no code for a full disk, only the operating system's message."""
_JOB_ERRORS = (psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError)


class RowsLocked(psycopg.OperationalError):
    """Another transaction holds rows that the batch needs. Retry the batch and lock these rows first, in order."""

    def __init__(self, *, agents: Sequence[str] = (), tasks: Sequence[str] = ()) -> None:
        super().__init__(f"another transaction is changing {', '.join([*agents, *tasks])}")
        self.agents, self.tasks = agents, tasks


class StateChanged(psycopg.OperationalError):
    """The society was paused or resumed, or a task stopped, after the batch had read that state. Retry the batch."""


class SchemaUpgraded(psycopg.DatabaseError):
    """Another process upgraded the schema beyond what this program may write to. It must end."""


class RestartBatch(psycopg.OperationalError):
    """The only job of a batch asks to be run again."""


class PipelineFailed(psycopg.OperationalError):
    """One of several pipelined statements failed, and it is unknown which. Retry the batch without pipelining."""


def is_job_error(error: Exception) -> bool:
    """True if the job's own statement is wrong, as opposed to a failure of the database or the connection."""
    return isinstance(error, _JOB_ERRORS) and not is_transient(error)


def error_code(error: Exception) -> str:
    """SQLSTATE of the error; empty if it has none."""
    return getattr(error, "sqlstate", None) or ""


def is_transient(error: Exception) -> bool:
    """True if a retry may succeed."""
    if not isinstance(error, psycopg.Error):
        return False
    code = error_code(error)
    return (
        code in _TRANSIENT_CODES or code.startswith("08") or (not code and isinstance(error, psycopg.OperationalError))
    )


def to_store_error(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    if isinstance(error, SchemaUpgraded):
        return StoreBroken(str(error))
    message = cause_of(error) if isinstance(error, psycopg.Error) else one_line(str(error)) or type(error).__name__
    code = error_code(error)
    has_phrase = any(phrase in message for phrase in _DISK_FULL_PHRASES)
    if code in _DISK_FULL_CODES or (isinstance(error, psycopg.Error) and has_phrase):
        return StoreUnavailable("the database's disk is full: free some space; nothing was lost", full=True)
    if code.startswith("53") and code not in _TRANSIENT_CODES:
        return StoreUnavailable(f"the database is short of resources ({message}): nothing was written; try again")
    if is_transient(error):
        return StoreUnavailable(f"the database is not reachable now ({message}): it is retried")
    return StoreError(f"the database reported an error ({message}): run coterie verify")
