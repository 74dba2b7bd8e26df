"""A connection to PostgreSQL that can do what the shared transitions ask of one.

Nothing is kept in the session: no prepared statement, no setting outlives its transaction. So it makes no difference
whether the other end is the database or a pooler that lends out its sessions one transaction at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.abc import RV, Buffer, PQGen
from psycopg.adapt import Dumper, Loader
from psycopg.pq import TransactionStatus

from coterie.stores.postgres.dialect import bound

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


class PgConnection:
    Error: type[Exception] = psycopg.Error
    IntegrityError: type[Exception] = psycopg.IntegrityError
    OperationalError: type[Exception] = psycopg.OperationalError

    def __init__(self, raw: psycopg.Connection[Any], before: str = "") -> None:
        """`before`: goes with every statement, in the same round trip."""
        self.raw, self._before = raw, before.encode()
        self._cursor = psycopg.ClientCursor(raw)
        self._later: list[bytes] = []

    def execute(self, sql: str, parameters: Any = (), /) -> psycopg.Cursor[Any]:
        text, values = bound(sql, parameters)
        if not self._later:
            return _last(self.raw.execute(self._before + text, values))
        self._later.append(self._written_out(text, values))
        return self.flush()

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> None:
        for values in parameters:
            self.later(sql, values)

    def later(self, sql: str, parameters: Any = (), /) -> None:
        """A statement whose outcome nobody looks at: it goes with the next one, in the same round trip."""
        self._later.append(self._written_out(*bound(sql, parameters)))

    def say(self, sql: str) -> psycopg.Cursor[Any]:
        """Statements of our own, in one round trip; the rows of the last one."""
        self._later.append(sql.encode())
        return self.flush()

    def begin_job(self) -> None:
        """What the next one does can be undone by itself."""
        self._later.append(_NEXT_JOB)

    def flush(self) -> psycopg.Cursor[Any]:
        """Whatever is still to be said; the rows of the last statement."""
        if not self._later:
            return self._cursor
        said, self._later = b";".join(self._later), []
        return _last(self.raw.execute(said))

    def forget(self) -> None:
        """Not to be said any more: what this job wanted. That it has begun must be said all the same."""
        self._later = [one for one in self._later if one is _NEXT_JOB]

    def _written_out(self, text: bytes, values: Any) -> bytes:
        return self._cursor.mogrify(text, values).encode()

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def close(self) -> None:
        self.raw.close()


def _last(cursor: psycopg.Cursor[Any]) -> psycopg.Cursor[Any]:
    while cursor.nextset():
        pass
    return cursor
