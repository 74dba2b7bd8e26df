"""A connection to PostgreSQL that can do what the shared transitions ask of one.

Nothing is kept in the session: no prepared statement, no setting outlives its transaction. So it makes no difference
whether the other end is the database or a pooler that lends out its sessions one transaction at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper, Loader

from coterie.stores.postgres.dialect import bound

CONNECT_SECONDS = 5
STATEMENT_MS = 15_000
LOCK_MS = 5_000
IDLE_MS = 10_000
"""A process that is stopped in the middle of a transaction keeps the others waiting no longer than this."""
TIMEOUTS = (
    f"SET LOCAL statement_timeout = {STATEMENT_MS}; SET LOCAL lock_timeout = {LOCK_MS};"
    f" SET LOCAL idle_in_transaction_session_timeout = {IDLE_MS};"
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


def connect(url: str) -> psycopg.Connection[Any]:
    """A connection in which nothing is begun or committed but by our own words."""
    wanted = psycopg.conninfo.conninfo_to_dict(url)
    missing: dict[str, Any] = {name: value for name, value in _NETWORK.items() if name not in wanted}
    raw = psycopg.connect(url, autocommit=True, prepare_threshold=None, cursor_factory=psycopg.ClientCursor, **missing)
    raw.adapters.register_dumper(bool, _BoolAsNumber)
    raw.adapters.register_loader("numeric", _WholeNumber)
    return raw


class PgConnection:
    Error: type[Exception] = psycopg.Error
    IntegrityError: type[Exception] = psycopg.IntegrityError
    OperationalError: type[Exception] = psycopg.OperationalError

    def __init__(self, raw: psycopg.Connection[Any], before: str = "") -> None:
        """`before`: goes with every statement, in the same round trip."""
        self.raw, self._before = raw, before.encode()

    def execute(self, sql: str, parameters: Any = (), /) -> psycopg.Cursor[Any]:
        text, values = bound(sql, parameters)
        return _last(self.raw.execute(self._before + text, values))

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> psycopg.Cursor[Any]:
        cursor = self.raw.cursor()
        for values in parameters:
            cursor.execute(*bound(sql, values))
        return cursor

    def say(self, sql: str) -> psycopg.Cursor[Any]:
        """Statements of our own, in one round trip; the rows of the last one."""
        return _last(self.raw.execute(sql.encode()))

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def close(self) -> None:
        self.raw.close()


def _last(cursor: psycopg.Cursor[Any]) -> psycopg.Cursor[Any]:
    while cursor.nextset():
        pass
    return cursor
