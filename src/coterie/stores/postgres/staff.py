"""The processes that share a society."""

from __future__ import annotations

from datetime import timedelta

from coterie.clock import from_ms
from coterie.stores.postgres.connection import PgConnection
from coterie.stores.postgres.dialect import CLOCK
from coterie.workers import Worker

_ALIVE = f"""
SELECT p.worker, p.name, p.began_at, p.seen_at, p.heartbeats, p.fenced, p.takeovers,
       (SELECT count(*) FROM agents a WHERE a.worker = p.worker AND a.state IN ('llm', 'tools'))
  FROM processes p WHERE p.seen_at > {CLOCK} - ? ORDER BY p.name, p.began_at
"""


def workers(db: PgConnection, lease: timedelta) -> list[Worker]:
    """Who was not seen for as long as a lease lasts is gone."""
    return [
        Worker(
            id=id_,
            name=name,
            since=from_ms(since),
            seen_at=from_ms(seen),
            claims=claims,
            heartbeats=heartbeats,
            fenced=fenced,
            takeovers=takeovers,
        )
        for id_, name, since, seen, heartbeats, fenced, takeovers, claims in db.execute(
            _ALIVE, (lease // timedelta(milliseconds=1),)
        )
    ]
