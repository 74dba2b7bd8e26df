"""A connection to PostgreSQL that can do what the shared transitions ask of one.

Nothing is kept in the session: no prepared statement, no setting outlives its transaction. So it makes no difference
whether the other end is the database or a pooler that lends out its sessions one transaction at a time.

The shared SQL, which is written as SQLite reads it, in the words of PostgreSQL.

A connection for one errand of the owner: whatever goes wrong with it is one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, lru_cache
from typing import Any

import msgspec
import psycopg
from psycopg.abc import RV, Buffer, PQGen
from psycopg.adapt import Dumper, Loader
from psycopg.pq import TransactionStatus

from coterie.errors import StoreError, StoreUnusable
from coterie.stores.postgres.errors import Doubtful, is_own, meaning, passes
from coterie.stores.sql.connection import Rows
from coterie.text import one_line

CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
"""The server's time in milliseconds."""
_ONLY_HERE = re.compile(r"/\*\+(.*?)\*/", re.DOTALL)
_INTO = re.compile(r"(\w+) \(([^)]*)\)")
_NUMBERED = re.compile(r"\?(\d+)")
# There is no text here that is no text.
_FROM_JSON = "INSERT INTO {} SELECT {} FROM json_populate_recordset(NULL::{}, ?)"
_encode = msgspec.json.Encoder().encode
_SAME = {"CAST(payload AS BLOB)": "payload", "CAST(m.payload AS BLOB)": "m.payload"}


def bound(sql: str, parameters: Any) -> tuple[bytes, Any]:
    """The statement and its values as psycopg wants them."""
    text, numbered = translated(sql)
    if not numbered:
        return text, parameters
    return text, {f"p{n}": value for n, value in enumerate(parameters, 1)}


@lru_cache(maxsize=1024)
def translated(sql: str) -> tuple[bytes, bool]:
    """With psycopg's placeholders; whether they are numbered."""
    text = _ONLY_HERE.sub(r"\1", sql).replace("%", "%%")
    for theirs, ours in _SAME.items():
        text = text.replace(theirs, ours)
    text, numbered = _NUMBERED.subn(r"%(p\1)s", text)
    return (text if numbered else text.replace("?", "%s")).encode(), bool(numbered)


@cache
def as_json(into: str) -> tuple[str, Sequence[str]]:
    """Inserts rows that come as one JSON text into a table with its columns; their names."""
    found = _INTO.fullmatch(into)
    assert found, into  # noqa: S101
    table, columns = found.groups()
    return _FROM_JSON.format(into, columns, table), columns.replace(" ", "").split(",")


def json_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """True and false are numbers here."""
    return _encode(
        [
            {name: int(value) if value.__class__ is bool else value for name, value in zip(columns, row, strict=True)}
            for row in rows
        ]
    ).decode()


CONNECT_SECONDS = 5
STATEMENT_MS = 15_000
LOCK_MS = 5_000
PATIENCE = 20.0
"""Seconds after which no answer means that none will come: whoever is silent need not be gone."""
IDLE_MS = 3_000
"""A process that is stopped in the middle of a transaction keeps the others waiting no longer than this."""
TIMEOUTS = (
    f"SET LOCAL statement_timeout = {STATEMENT_MS}; SET LOCAL lock_timeout = {LOCK_MS};"
    f" SET LOCAL idle_in_transaction_session_timeout = {IDLE_MS};"
    " SET LOCAL synchronous_commit = on;"  # an answer means that it is on the disk, whatever the server is set to
)
_NETWORK = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "coterie",
}


class _BoolAsNumber(Dumper):
    def dump(self, obj: bool) -> Buffer:
        return b"1" if obj else b"0"

    def quote(self, obj: bool) -> Buffer:
        return self.dump(obj)


class _WholeNumber(Loader):
    """Sums of whole numbers are whole, whatever type they come in."""

    def load(self, data: Buffer) -> int:
        return int(bytes(data))


class _Bounded(psycopg.Connection[Any]):
    """Waits for no answer for ever. The network's own timeouts see the next machine only, not what is behind it."""

    patience = PATIENCE

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.patience)
        except psycopg.OperationalError:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                self.pgconn.finish()  # the answer may still come, and would be taken for that of the next question
            raise


def connect(url: str, patience: float = PATIENCE) -> psycopg.Connection[Any]:
    """A connection in which nothing is begun or committed but by our own words."""
    wanted = psycopg.conninfo.conninfo_to_dict(url)
    missing: dict[str, Any] = {name: value for name, value in _NETWORK.items() if name not in wanted}
    raw = _Bounded.connect(url, autocommit=True, prepare_threshold=None, cursor_factory=psycopg.ClientCursor, **missing)
    raw.patience = patience
    raw.adapters.register_dumper(bool, _BoolAsNumber)
    raw.adapters.register_loader("numeric", _WholeNumber)
    return raw


_NEXT_JOB = b"RELEASE SAVEPOINT job; SAVEPOINT job"
_MUCH = 1 << 20
"""Bytes of statements that wait at most."""


class Outcome:
    """What a statement gave, which has to be said only when somebody looks at it."""

    __slots__ = ("_db", "_rowcount", "_rows", "_said")

    def __init__(self, db: PgConnection) -> None:
        self._db, self._said = db, False
        self._rows: list[Any] = []
        self._rowcount = -1

    def set(self, cursor: psycopg.Cursor[Any]) -> None:
        self._said, self._rowcount = True, cursor.rowcount
        if cursor.description:
            self._rows = cursor.fetchall()

    @property
    def rowcount(self) -> int:
        self._look()
        return self._rowcount

    def fetchone(self) -> Any:
        self._look()
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        self._look()
        rows, self._rows = self._rows, []
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())

    def _look(self) -> None:
        if not self._said:
            self._db.flush()


class PgConnection:
    Error: type[Exception] = psycopg.Error
    IntegrityError: type[Exception] = psycopg.IntegrityError
    OperationalError: type[Exception] = psycopg.OperationalError

    def __init__(self, raw: psycopg.Connection[Any], before: str = "") -> None:
        """`before`: goes with every statement, in the same round trip."""
        self.raw, self._before = raw, before.encode()
        self.gathers = False
        """Statements wait until somebody looks at what one of them gave. When one of several goes wrong, all of that
        is in doubt."""
        self._cursor = psycopg.ClientCursor(raw)
        self._later: list[tuple[bytes, Outcome | None]] = []
        self._size = 0

    def execute(self, sql: str, parameters: Any = (), /) -> Rows:
        text, values = bound(sql, parameters)
        if not self.gathers and not self._later:
            return _last(self.raw.execute(self._before + text, values))
        outcome = Outcome(self)
        self._add(self._written_out(text, values), outcome)
        if not self.gathers or self._size > _MUCH:
            self.flush()
        return outcome

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> None:
        for values in parameters:
            self._add(self._written_out(*bound(sql, values)))

    def insert_rows(self, into: str, rows: Iterable[Sequence[Any]]) -> None:
        """As one value: to write out thousands of them, and to read them there, would cost more than all the rest."""
        statement, columns = as_json(into)
        self.execute(statement, (json_rows(columns, rows),))

    def say(self, sql: str) -> psycopg.Cursor[Any]:
        """Statements of our own, in one round trip; how the last one ended."""
        self._add(sql.encode())
        return self.flush()

    def begin_job(self) -> None:
        """What the next one does can be undone by itself."""
        self._add(_NEXT_JOB)

    def flush(self) -> psycopg.Cursor[Any]:
        """Whatever is still to be said; how the last statement ended."""
        if not self._later:
            return self._cursor
        said, self._later, self._size = self._later, [], 0
        try:
            cursor = self.raw.execute(b";".join(text for text, _ in said))
        except psycopg.Error as error:
            if self.gathers and is_own(error):
                raise Doubtful from error
            raise
        return _tell(cursor, said)

    def forget_job(self) -> None:
        """Not to be said any more: what this job wanted. That it has begun must be said all the same."""
        began = [place for place, (text, _) in enumerate(self._later, 1) if text is _NEXT_JOB]
        del self._later[began[-1] if began else 0 :]

    def forget(self) -> None:
        self._later, self._size = [], 0

    def _add(self, text: bytes, outcome: Outcome | None = None) -> None:
        self._later.append((text, outcome))
        self._size += len(text)

    def _written_out(self, text: bytes, values: Any) -> bytes:
        return self._cursor.mogrify(text, values).encode()

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def close(self) -> None:
        self.raw.close()


def _tell(cursor: psycopg.Cursor[Any], said: list[tuple[bytes, Outcome | None]]) -> psycopg.Cursor[Any]:
    """Each outcome what its statement gave."""
    for text, outcome in said:
        if outcome:
            outcome.set(cursor)
        for _ in range(2 if text is _NEXT_JOB else 1):
            cursor.nextset()
    return _last(cursor)


def _last(cursor: psycopg.Cursor[Any]) -> psycopg.Cursor[Any]:
    while cursor.nextset():
        pass
    return cursor


@contextmanager
def errand(url: str) -> Iterator[PgConnection]:
    """Closed afterwards; what was not committed by then is undone."""
    try:
        with closing(PgConnection(connect(url))) as db:
            yield db
    except psycopg.Error as error:
        raise _told(error) from error


def _told(error: psycopg.Error) -> StoreError:
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return StoreUnusable("somebody else is writing to this database: stop them first, then try again")
    if passes(error):
        words = one_line(str(error)) or type(error).__name__
        return StoreUnusable(f"the PostgreSQL cannot be used ({words}): check that it runs, and who may connect")
    return meaning(error)
