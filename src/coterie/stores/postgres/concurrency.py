"""Concurrency slots of model services, divided between the processes of one society."""

from __future__ import annotations

from datetime import timedelta

from coterie.llm.concurrency import OtherProcess, SlotGrant, divide_slots
from coterie.stores.postgres.cluster import NotifyChannels
from coterie.stores.postgres.connection import CLOCK, SET_TIMEOUTS, PgConnection

WAITING_TTL = timedelta(seconds=5)
"""Waiting processes repeat their request every second. An older request is ignored: its process may hang."""
_MS = timedelta(milliseconds=1)
# Slots have no value after a crash, so the commit need not be durable.
_BEGIN = tuple(f"BEGIN; {SET_TIMEOUTS} SET LOCAL synchronous_commit = off".split(";"))
_LOCK_SERVICE = "SELECT pg_advisory_xact_lock(hashtextextended(?, 0))"
_SELECT_OTHERS = f"""
SELECT r.kept, CASE WHEN r.asked_at > {CLOCK} - ?3 THEN r.waiting ELSE 0 END, r.urgent
  FROM places r JOIN processes p ON p.id = r.process AND p.seen_at > {CLOCK} - ?4
 WHERE r.service = ?1 AND r.process <> ?2
"""
_SELECT_OWN = "SELECT kept, waiting, urgent FROM places WHERE service = ? AND process = ?"
_UPSERT_OWN = f"""
INSERT INTO places (service, process, kept, waiting, urgent, asked_at) VALUES (?, ?, ?, ?, ?, {CLOCK})
    ON CONFLICT (service, process) DO UPDATE
   SET kept = excluded.kept, waiting = excluded.waiting, urgent = excluded.urgent, asked_at = excluded.asked_at
"""
_DELETE_OWN = "DELETE FROM places WHERE service = ? AND process = ?"
_NOTIFY = "SELECT pg_notify(?, ?)"


def request_slots(
    db: PgConnection,
    channels: NotifyChannels,
    lease: timedelta,
    service: str,
    limit: int,
    held: int,
    waiting: int,
    urgent: int,
) -> SlotGrant:
    """Report held slots and waiting requests, and return the grant. One transaction in two round trips."""
    key, was_pipelining, db.pipelining = (service, channels.process), db.pipelining, True
    try:
        for statement in _BEGIN:
            db.execute(statement)
        db.execute(_LOCK_SERVICE, (f"{channels.change_channel} {service}",))
        rows = db.execute(_SELECT_OTHERS, (*key, WAITING_TTL // _MS, lease // _MS))
        held_before, waited_before, urgent_before = db.execute(_SELECT_OWN, key).fetchone() or (0, 0, 0)
        others = [OtherProcess(*row) for row in rows]
        grant = divide_slots(limit, held, waiting, others, urgent=urgent, releases_slot=held < held_before)
        still_waiting, still_urgent = waiting - grant.granted, max(0, urgent - grant.granted)
        if held or waiting:
            db.execute(_UPSERT_OWN, (*key, held + grant.granted, still_waiting, still_urgent))
        else:
            db.execute(_DELETE_OWN, key)
        released = grant.others_wait and held + grant.granted < held_before
        if released or (still_waiting and not waited_before) or (still_urgent and not urgent_before):
            db.execute(_NOTIFY, channels.slot_notice())
        db.execute_now("COMMIT")
    finally:
        db.pipelining = was_pipelining
    return grant
