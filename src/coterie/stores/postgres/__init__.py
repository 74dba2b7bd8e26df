"""PostgreSQL engine: several processes run one society and coordinate through its database only."""

from coterie.stores.postgres.engine import PostgresStore

__all__ = ["PostgresStore"]
