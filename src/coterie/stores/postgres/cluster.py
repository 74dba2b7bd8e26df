"""Coordination of the processes that share a society: heartbeats, notifications and the list of workers.

`Heartbeat` renews the leases of claimed agents. It has its own thread and connection, so that neither a blocked event
loop nor a long write queue can cost a lease. The epoch fences writes, never the time; but a process that could not
renew for most of a lease drops its claims before other processes may take them over.

`Listener` receives notifications of other processes. They are only hints: without them, processes poll every second.

`request_slots` divides the concurrency slots of a model service between the processes of one society.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import sql

from coterie.clock import from_ms
from coterie.slot_sharing import OtherProcess, SlotGrant, divide_slots
from coterie.store import Worker, WorkerCounters, worker_name
from coterie.stores.postgres.connection import CLOCK, SET_TIMEOUTS, PgConnection, connect, to_store_error
from coterie.stores.postgres.load_sharing import Load, WorkerLoads
from coterie.turn_store import Interruption, TurnWorker

log = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEATS_PER_LEASE = 3
LEASE_AT_RISK_FRACTION = 0.7
"""After this part of a lease without renewal the process drops its claims."""
RECONNECT_DELAY_SECONDS = 1.0
KEEPALIVE_SECONDS = 60.0
"""After this time without notifications the listener tests its connection."""

_BEGIN = tuple(f"BEGIN; {SET_TIMEOUTS}".removesuffix(";").split(";"))
_UPSERT_PROCESS = f"""
INSERT INTO processes (id, seen_at, lease_ms, began_at, name, worker, heartbeats, fenced, takeovers, turns, max_turns)
VALUES (:id, {CLOCK}, :lease_ms, {CLOCK}, :name, :worker, :heartbeats, :fenced, :takeovers, :turns, :max_turns)
    ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, lease_ms = excluded.lease_ms, worker = excluded.worker,
       heartbeats = excluded.heartbeats, fenced = excluded.fenced, takeovers = excluded.takeovers,
       turns = excluded.turns, max_turns = excluded.max_turns
"""
_SELECT_LOADS = f"""
SELECT id, turns, max_turns FROM processes
 WHERE id <> :id AND worker IS NOT NULL AND seen_at + lease_ms > {CLOCK}
"""
# Claims that were released or have expired are not renewed.
_RENEW_CLAIMS = f"""
WITH claimed AS (
    SELECT id FROM agents WHERE worker = :worker AND state IN ('llm', 'tools') AND runnable_at > {CLOCK}
     ORDER BY id FOR UPDATE)
UPDATE agents SET runnable_at = {CLOCK} + :lease_ms FROM claimed WHERE agents.id = claimed.id
"""
_COUNT_OTHERS = f"SELECT count(*) FROM processes WHERE id <> :id AND seen_at + lease_ms > {CLOCK}"
_DELETE_PROCESS = "DELETE FROM processes WHERE id = :id"
_DELETE_DEAD_PROCESSES = f"DELETE FROM processes WHERE seen_at + 10 * lease_ms < {CLOCK}"
_DELETE_SLOTS = "DELETE FROM places WHERE process = :process OR process NOT IN (SELECT id FROM processes)"
# Also deletes marks older than 30 days.
_DELETE_BATCH_MARKS = f"DELETE FROM batches WHERE process = :process OR at < {CLOCK} - 2592000000"
_LIST_WORKERS = f"""
SELECT worker, name, began_at, seen_at, heartbeats, fenced, takeovers,
       (SELECT count(*) FROM agents WHERE agents.worker = processes.worker AND agents.state IN ('llm', 'tools'))
  FROM processes WHERE seen_at + lease_ms > {CLOCK} ORDER BY name, began_at
"""


class Heartbeat:
    """Registers this process and renews its leases from a thread."""

    def __init__(
        self,
        url: str,
        channels: NotifyChannels,
        on_lease_at_risk: Callable[[], None],
        lease: float,
        counters: WorkerCounters,
        loads: WorkerLoads,
    ) -> None:
        """`lease` in seconds. `on_lease_at_risk`: called on the event loop when renewal failed for too long."""
        self._url, self._on_lease_at_risk, self.lease, self._counters = url, on_lease_at_risk, lease, counters
        self._channels, self._loads = channels, loads
        self.process, self._name = channels.process, worker_name()
        self._worker: TurnWorker | None = None
        self._has_sent_load = False
        self._db: PgConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._renewed_at = time.monotonic()
        self._is_at_risk = False
        self._timer = self._loop.call_later(lease * LEASE_AT_RISK_FRACTION, self._check_lease)
        self._closing, self._due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="coterie-leases", daemon=True)
        self._thread.start()

    def set_worker(self, worker: TurnWorker) -> None:
        """Renew the worker's claims from now on, and notify other processes that this one runs turns."""
        self._worker = worker
        self._due.set()

    async def is_last_process(self) -> bool:
        """True if no other live process is known; False on error."""
        try:
            return not await asyncio.to_thread(self._count_others)
        except psycopg.Error as error:
            log.warning("other processes could not be counted: %s", to_store_error(error))
            return False

    async def close(self) -> None:
        """End the thread; it deregisters the process."""
        self._closing.set()
        self._due.set()
        self._timer.cancel()
        await asyncio.to_thread(self._thread.join)

    def _run_thread(self) -> None:
        while not self._closing.is_set():
            self._due.clear()
            try:
                self._beat()
            except Exception:  # keep the thread alive: without it the process loses all claims
                log.exception("claims could not be renewed")
                self._disconnect()
            is_regular = not self._is_at_risk and self._db
            self._due.wait(self.lease / HEARTBEATS_PER_LEASE if is_regular else min(1.0, self.lease / 10))
        self._deregister()

    def _beat(self) -> None:
        started_at, counters, worker = time.monotonic(), self._counters, self._worker
        load = Load(worker.running_turns, worker.max_turns) if worker else Load(0, 0)
        lease_ms = int(self.lease * 1000)
        try:
            db = self._connection()
            db.pipelining = True  # one round trip: a lease may be short
            for statement in _BEGIN:
                db.execute(statement)
            db.execute(
                _UPSERT_PROCESS,
                {
                    "id": self.process,
                    "lease_ms": lease_ms,
                    "name": self._name,
                    "worker": worker.worker if worker else None,
                    "heartbeats": counters.heartbeats + 1,
                    "fenced": counters.fenced,
                    "takeovers": counters.takeovers,
                    "turns": load.running,
                    "max_turns": load.limit,
                },
            )
            if worker:
                db.execute(_RENEW_CLAIMS, {"worker": worker.worker, "lease_ms": lease_ms})
                if not self._has_sent_load:
                    self._notify_load(db, load)  # the first change notice of this process may come much later
            others = db.execute(_SELECT_LOADS, {"id": self.process})
            db.execute_now("COMMIT")
        except psycopg.Error as error:
            log.warning("claims could not be renewed: %s", to_store_error(error))
            self._disconnect()
            return
        self._renewed_at, self._is_at_risk = started_at, False
        counters.heartbeats += 1
        self._has_sent_load = worker is not None
        self._loads.replace_all({process: Load(running, limit) for process, running, limit in others})

    def _notify_load(self, db: PgConnection, load: Load) -> None:
        channel, notice = self._channels.load_notice(load)
        db.execute(_NOTIFY, {"channel": channel, "notice": notice})

    def _check_lease(self) -> None:
        """Drop claims if renewal is overdue. Runs on the event loop, because the thread may hang in a statement."""
        remaining = self._renewed_at + self.lease * LEASE_AT_RISK_FRACTION - time.monotonic()
        if remaining <= 0 and not self._is_at_risk:
            self._is_at_risk = True
            log.error("the database was unreachable for most of a lease: claims of this process are dropped")
            try:
                self._on_lease_at_risk()
            except Exception:
                log.exception("claims could not be dropped")
        self._timer = self._loop.call_later(max(remaining, self.lease / 20), self._check_lease)

    def _deregister(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            db = self._connection()
            db.pipelining = False
            self._notify_load(db, Load(0, 0))
            db.execute(_DELETE_PROCESS, {"id": self.process})
            db.execute(_DELETE_DEAD_PROCESSES)
            db.execute(_DELETE_SLOTS, {"process": self.process})
            db.execute(_DELETE_BATCH_MARKS, {"process": self.process})
        self._disconnect()

    def _count_others(self) -> int:
        db = PgConnection(connect(self._url))
        try:
            return int(db.execute(_COUNT_OTHERS, {"id": self.process}).fetchone()[0])
        finally:
            db.close()

    def _connection(self) -> PgConnection:
        if self._db is None or self._db.closed:
            self._db = PgConnection(connect(self._url, response_timeout=self.lease / HEARTBEATS_PER_LEASE))
        return self._db

    def _disconnect(self) -> None:
        if self._db:
            with contextlib.suppress(psycopg.Error):
                self._db.close()
            self._db = None


MAX_INTERRUPTIONS_IN_NOTICE = 50
"""At most 84 bytes each; PostgreSQL limits a notification to 8,000 bytes."""
MAX_CLAIMERS_IN_NOTICE = 32
"""At most 50 bytes each."""
_CHANGED, _WORK_AVAILABLE, _SLOTS_CHANGED, _LOAD_CHANGED = "news", "work", "room", "load"
"""Kinds of notices. The values are sent to processes of other versions."""
_LOAD, _CLAIMER, _ABOUT_SOCIETY = "load=", "claimer=", "society"
"""Words of a notice: the load of its process; a process that should claim the agents that became ready; the write has
one of `SOCIETY_EVENTS`."""
_ENDED = "ended-"
"""Before the epoch of an ended turn in a notice."""


LOG_LOCK_BITS = 40
"""Bits of an advisory lock's key that are the number of an event. The others are a hash of the society."""


@dataclass(frozen=True, slots=True)
class NotifyChannels:
    """Names of the NOTIFY channels and the payloads that this process sends."""

    society: str
    """Part of the names: other societies may share the database in other schemas."""
    process: str

    @property
    def change_channel(self) -> str:
        return f"coterie_{self.society}"

    @property
    def log_lock(self) -> int:
        """Advisory lock of event number 0. The lock of each other number follows it."""
        digest = hashlib.sha256(self.society.encode()).digest()
        return (int.from_bytes(digest[:3]) >> 1 | 1) << LOG_LOCK_BITS

    @property
    def broadcast_channel(self) -> str:
        return f"{self.change_channel}_live"

    def change_notice(
        self,
        has_work: bool,
        interruptions: Sequence[Interruption] = (),
        *,
        load: Load | None = None,
        claimers: Iterable[str] = (),
        about_society: bool = False,
    ) -> tuple[str, str]:
        """Channel and payload that announce a write. `has_work`: an agent can be claimed.

        `load`: of this process. `claimers`: the processes that should claim the ready agents; if there are none, all.
        `about_society`: the write has one of `SOCIETY_EVENTS`. All these words come before the kind, where processes of
        older versions ignore them. Interruptions that do not fit are left out.
        """
        shared = [_ABOUT_SOCIETY] if about_society else []
        shared += [f"{_LOAD}{load.running}/{load.limit}"] if load else []
        shared += (f"{_CLAIMER}{process}" for process in [*claimers][:MAX_CLAIMERS_IN_NOTICE])
        words = [
            f"{agent_id}:{position}" if epoch is None else f"{agent_id}:{_ENDED}{epoch}"
            for agent_id, position, epoch in interruptions
        ]
        kind = _WORK_AVAILABLE if has_work else _CHANGED
        return self.change_channel, " ".join([self.process, *shared, *words[:MAX_INTERRUPTIONS_IN_NOTICE], kind])

    def load_notice(self, load: Load) -> tuple[str, str]:
        """Channel and payload that report the load of this process to the others."""
        return self.change_channel, f"{self.process} {_LOAD}{load.running}/{load.limit} {_LOAD_CHANGED}"

    def read_load(self, notice: str) -> tuple[str, Load] | None:
        """The process that sent a notice, and its load."""
        process, _, words = notice.partition(" ")
        for word in words.split(" "):
            running, _, limit = word.removeprefix(_LOAD).partition("/")
            if word.startswith(_LOAD) and running.isdecimal() and limit.isdecimal():
                return process, Load(int(running), int(limit))
        return None

    def asks_to_claim(self, notice: str) -> bool:
        """True if this process should claim agents that became ready."""
        words = notice.split(" ")
        claimers = [word.removeprefix(_CLAIMER) for word in words if word.startswith(_CLAIMER)]
        return words[-1] == _WORK_AVAILABLE and (not claimers or self.process in claimers)

    def slot_notice(self) -> tuple[str, str]:
        """Channel and payload that announce a wanted or released slot of a model service."""
        return self.change_channel, f"{self.process} {_SLOTS_CHANGED}"

    def is_from_other_process(self, notice: str) -> bool:
        return not notice.startswith(self.process)

    def interruptions(self, notice: str) -> list[Interruption]:
        """The interruptions that a change notice announces."""
        found = []
        for agent_id, _, number in (word.partition(":") for word in notice.split(" ")[1:-1]):
            if number.isdecimal():
                found.append(Interruption(agent_id, int(number)))
            elif number.startswith(_ENDED) and number[len(_ENDED) :].isdecimal():
                found.append(Interruption(agent_id, 0, int(number[len(_ENDED) :])))
        return found


class ChangeNotice(NamedTuple):
    """What a write of another process means for this one."""

    has_work: bool
    """This process should claim agents."""
    about_society: bool
    """The write may have one of `SOCIETY_EVENTS`."""


class Listener:
    """Receives notifications in a thread and passes them to callbacks on the event loop."""

    def __init__(
        self,
        url: str,
        channels: NotifyChannels,
        on_change: Callable[[ChangeNotice], None],
        on_slots_changed: Callable[[None], None],
        on_broadcasts: Callable[[list[str]], None],
        on_interruptions: Callable[[list[Interruption]], None],
        loads: WorkerLoads,
    ) -> None:
        """`on_change`: another process has written."""
        self._on_interruptions, self._loads = on_interruptions, loads
        self._url, self._channels = url, channels
        self._on_change, self._on_slots_changed, self._on_broadcasts = on_change, on_slots_changed, on_broadcasts
        self._loop = asyncio.get_running_loop()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="coterie-listening", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._closing.set()
        self._wake_sender.send(b".")
        await asyncio.to_thread(self._thread.join)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _run_thread(self) -> None:
        while not self._closing.is_set():
            try:
                self._listen()
            except (psycopg.Error, OSError) as error:
                log.info("no notifications from other processes for now: %s", to_store_error(error))
                self._closing.wait(RECONNECT_DELAY_SECONDS)
            except Exception:  # keep the thread alive
                log.exception("listening to other processes failed and is retried")
                self._closing.wait(RECONNECT_DELAY_SECONDS)

    def _listen(self) -> None:
        # Not select(): it refuses file descriptors from 1,024 on, which a server with many connections has.
        with contextlib.closing(connect(self._url)) as raw, selectors.DefaultSelector() as selector:
            selector.register(raw.fileno(), selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            for channel in (self._channels.change_channel, self._channels.broadcast_channel):
                raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            self._call(self._on_change, ChangeNotice(True, True))  # notices may have been missed before LISTEN
            while not self._closing.is_set():
                ready = [key.fd for key, _ in selector.select(KEEPALIVE_SECONDS)]
                if not ready:
                    raw.execute("SELECT 1")
                elif raw.fileno() in ready:
                    self._receive(raw)

    def _receive(self, raw: psycopg.Connection[Any]) -> None:
        notifies = list(raw.notifies(timeout=0))
        notices = [notify.payload for notify in notifies if notify.channel == self._channels.change_channel]
        notices = [notice for notice in notices if self._channels.is_from_other_process(notice)]
        kinds = {notice.rpartition(" ")[2] for notice in notices}
        for notice in notices:
            if reported := self._channels.read_load(notice):
                self._loads.update(*reported)
        if interruptions := [one for notice in notices for one in self._channels.interruptions(notice)]:
            self._call(self._on_interruptions, interruptions)
        if kinds - {_SLOTS_CHANGED, _LOAD_CHANGED}:
            has_work = any(map(self._channels.asks_to_claim, notices))
            about_society = any(_ABOUT_SOCIETY in notice.split(" ")[1:-1] for notice in notices)
            self._call(self._on_change, ChangeNotice(has_work, about_society))
        if _SLOTS_CHANGED in kinds:
            self._call(self._on_slots_changed, None)
        if texts := [notify.payload for notify in notifies if notify.channel == self._channels.broadcast_channel]:
            self._call(self._on_broadcasts, texts)

    def _call(self, callback: Callable[[T], None], argument: T) -> None:
        """Call `callback` on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, argument)


class _WorkerRow(NamedTuple):
    """Columns of `_LIST_WORKERS`."""

    worker: str | None
    name: str
    began_at: int
    seen_at: int
    heartbeats: int
    fenced: int
    takeovers: int
    claims: int


def list_workers(db: PgConnection) -> list[Worker]:
    """Processes seen within their lease."""
    rows = [_WorkerRow._make(row) for row in db.execute(_LIST_WORKERS)]
    return [
        Worker(
            id=row.worker,
            name=row.name,
            since=from_ms(row.began_at),
            seen_at=from_ms(row.seen_at),
            claims=row.claims,
            heartbeats=row.heartbeats,
            fenced=row.fenced,
            takeovers=row.takeovers,
        )
        for row in rows
    ]


WAITING_TTL = timedelta(seconds=5)
"""Waiting processes repeat their request every second. An older request is ignored: its process may hang."""
_MS = timedelta(milliseconds=1)
# Slots have no value after a crash, so the commit need not be durable.
_BEGIN_SLOTS = (*_BEGIN, "SET LOCAL synchronous_commit = off")
_LOCK_SERVICE = "SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"
_SELECT_OTHERS = f"""
SELECT places.kept, CASE WHEN places.asked_at > {CLOCK} - :waiting_ttl_ms THEN places.waiting ELSE 0 END, places.urgent
  FROM places JOIN processes ON processes.id = places.process AND processes.seen_at + processes.lease_ms > {CLOCK}
 WHERE places.service = :service AND places.process <> :process
"""
_SELECT_OWN = "SELECT kept, waiting, urgent FROM places WHERE service = :service AND process = :process"
_UPSERT_OWN = f"""
INSERT INTO places (service, process, kept, waiting, urgent, asked_at)
VALUES (:service, :process, :held, :waiting, :urgent, {CLOCK})
    ON CONFLICT (service, process) DO UPDATE
   SET kept = excluded.kept, waiting = excluded.waiting, urgent = excluded.urgent, asked_at = excluded.asked_at
"""
_DELETE_OWN = "DELETE FROM places WHERE service = :service AND process = :process"
_NOTIFY = "SELECT pg_notify(:channel, :notice)"


def request_slots(
    db: PgConnection,
    channels: NotifyChannels,
    service: str,
    limit: int,
    held: int,
    waiting: int,
    urgent: int,
) -> SlotGrant:
    """Report held slots and waiting requests, and return the grant. One transaction in two round trips."""
    key = {"service": service, "process": channels.process}
    was_pipelining, db.pipelining = db.pipelining, True
    try:
        for statement in _BEGIN_SLOTS:
            db.execute(statement)
        db.execute(_LOCK_SERVICE, {"name": f"{channels.change_channel} {service}"})
        rows = db.execute(_SELECT_OTHERS, {**key, "waiting_ttl_ms": WAITING_TTL // _MS})
        held_before, waited_before, urgent_before = db.execute(_SELECT_OWN, key).fetchone() or (0, 0, 0)
        others = [OtherProcess(*row) for row in rows]
        grant = divide_slots(limit, held, waiting, others, urgent=urgent, releases_slot=held < held_before)
        still_waiting, still_urgent = waiting - grant.granted, max(0, urgent - grant.granted)
        if held or waiting:
            db.execute(
                _UPSERT_OWN,
                {**key, "held": held + grant.granted, "waiting": still_waiting, "urgent": still_urgent},
            )
        else:
            db.execute(_DELETE_OWN, key)
        released = grant.others_wait and held + grant.granted < held_before
        if released or (still_waiting and not waited_before) or (still_urgent and not urgent_before):
            channel, notice = channels.slot_notice()
            db.execute(_NOTIFY, {"channel": channel, "notice": notice})
        db.execute_now("COMMIT")
    finally:
        db.pipelining = was_pipelining
    return grant
