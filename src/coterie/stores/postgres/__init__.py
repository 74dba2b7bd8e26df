"""The engine for several processes: one PostgreSQL is all that coordinates them."""

from coterie.stores.postgres.engine import PostgresStore

__all__ = ["PostgresStore"]
