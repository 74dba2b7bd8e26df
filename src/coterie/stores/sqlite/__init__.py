"""The embedded engine: one file, one writing process, nothing to install."""

from coterie.stores.sqlite.engine import SqliteStore

__all__ = ["SqliteStore"]
