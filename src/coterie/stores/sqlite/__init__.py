"""SQLite engine: one database file, owned by one process."""

from coterie.stores.sqlite.engine import SqliteStore

__all__ = ["SqliteStore"]
