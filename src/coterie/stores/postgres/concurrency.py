"""Places at model services, shared by the processes of one society: who has how many, and who waits."""

from __future__ import annotations

from datetime import timedelta

from coterie.llm.concurrency import Other, Share, fair
from coterie.stores.postgres.cluster import Herald
from coterie.stores.postgres.connection import CLOCK, TIMEOUTS, PgConnection

PATIENT = timedelta(seconds=5)
"""Who waits says so every second. Who has not for so long may be stuck, and nobody stands back for it."""
_MS = timedelta(milliseconds=1)
# Of no worth after a crash: nobody waits for the disk. One at a time for each service.
_BEGIN = tuple(f"BEGIN; {TIMEOUTS} SET LOCAL synchronous_commit = off".split(";"))
_ALONE = "SELECT pg_advisory_xact_lock(hashtextextended(?, 0))"
_OTHERS = f"""
SELECT r.kept, CASE WHEN r.asked_at > {CLOCK} - ?3 THEN r.waiting ELSE 0 END, r.urgent
  FROM places r JOIN processes p ON p.id = r.process AND p.seen_at > {CLOCK} - ?4
 WHERE r.service = ?1 AND r.process <> ?2
"""
_MINE = "SELECT kept, waiting, urgent FROM places WHERE service = ? AND process = ?"
_WRITE = f"""
INSERT INTO places (service, process, kept, waiting, urgent, asked_at) VALUES (?, ?, ?, ?, ?, {CLOCK})
    ON CONFLICT (service, process) DO UPDATE
   SET kept = excluded.kept, waiting = excluded.waiting, urgent = excluded.urgent, asked_at = excluded.asked_at
"""
_LEAVE = "DELETE FROM places WHERE service = ? AND process = ?"
_TELL = "SELECT pg_notify(?, ?)"


def share(
    db: PgConnection,
    herald: Herald,
    lease: timedelta,
    service: str,
    limit: int,
    keeps: int,
    waiting: int,
    urgent: int,
) -> Share:
    """One transaction, in two round trips."""
    key, gathered, db.gathers = (service, herald.process), db.gathers, True
    try:
        for words in _BEGIN:
            db.execute(words)
        db.execute(_ALONE, (f"{herald.channel} {service}",))
        others = db.execute(_OTHERS, (*key, PATIENT // _MS, lease // _MS))
        kept, waited, hurried = db.execute(_MINE, key).fetchone() or (0, 0, 0)
        rivals = [Other(*row) for row in others]
        found = fair(limit, keeps, waiting, rivals, urgent=urgent, gave_back=keeps < kept)
        left, pressing = waiting - found.granted, max(0, urgent - found.granted)
        if keeps or waiting:
            db.execute(_WRITE, (*key, keeps + found.granted, left, pressing))
        else:
            db.execute(_LEAVE, key)
        if (found.wanted and keeps + found.granted < kept) or (left and not waited) or (pressing and not hurried):
            db.execute(_TELL, herald.room())
        db.say("COMMIT")
    finally:
        db.gathers = gathered
    return found
