"""A copy of all rows, as the file that the SQLite engine keeps: it can be looked at, and run, anywhere."""

from __future__ import annotations

from pathlib import Path

from coterie.stores.postgres.carrying import PostgresSource
from coterie.stores.sql.carrying import carry_rows
from coterie.stores.sqlite.carrying import SqliteTarget


def copy(url: str, target: Path) -> None:
    """As they were at one moment; on the disk when this returns."""
    with PostgresSource.open(url, None) as source, SqliteTarget.make(target, target.parent) as file:
        carry_rows(source, file)
