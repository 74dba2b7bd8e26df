"""A connection for one errand of the owner: whatever goes wrong with it is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg

from coterie.errors import StoreError, StoreUnusable
from coterie.stores.postgres.connection import PgConnection, connect
from coterie.stores.postgres.trouble import meaning, passes
from coterie.text import one_line


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
