"""The secret of a society: one random row that every process of the society reads and nobody changes.

Message ids and the marks around messages in a model's request are hashed with it. It never leaves the database except
in a backup or a copy of the whole society. No tool, API route or export shows it.
"""

from __future__ import annotations

import os

from coterie.ids import new_secret
from coterie.stores.sql.connection import Connection

_READ = "SELECT value FROM meta WHERE key = 'secret'"
_MAKE = "INSERT INTO meta (key, value) VALUES ('secret', ?) ON CONFLICT (key) DO NOTHING"


def read_secret(db: Connection) -> bytes:
    """The secret; a random one if the database has none, which happens only in databases opened for reading."""
    row = db.execute(_READ).fetchone()
    return row[0].encode() if row else os.urandom(32)


def make_secret(db: Connection) -> bytes:
    """Make the secret unless there is one, and return it. Call it when a store opens, outside any other transaction."""
    db.execute(_MAKE, (new_secret(),))
    return read_secret(db)
