"""The embedded engine: one file, one writing process, nothing to install."""

from coterie.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
