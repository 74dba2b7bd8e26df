"""Claims ready agents for this process and starts their turns, within concurrency limits.

`Slots` limits turns that start or run tools. A turn that asks its model holds no slot; the limit of the service
applies to it. So a slow service does not delay other agents. `ServiceAdmission` leaves agents unclaimed while the queue
of their service is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from coterie.agent.runner import LlmHandler
from coterie.agent.service import AgentDirectory
from coterie.clock import Clock
from coterie.errors import Refused, StoreError
from coterie.files import DiskMonitor
from coterie.llm.gateway import ModelGateway
from coterie.supervision import Shutdown, supervise
from coterie.telemetry import log_context
from coterie.turn import Rules
from coterie.turn_store import AdmitFunction, Claim, ClaimKey, Interruption, TurnStore

log = logging.getLogger(__name__)

MAX_TURN_SLOTS = 256
"""Turns that start or run tools at the same time."""
PERSON_SHARE = 8
"""Per this many turns, one additional turn may start for the person's messages."""
EXTRA_PERSON_SLOTS = MAX_TURN_SLOTS // PERSON_SHARE
"""Additional slots for people's messages, so that agents in long tool calls do not delay people."""


class Slots:
    """Counts slots. Thread-safe: the store's writer thread acquires slots too."""

    def __init__(self, count: int = MAX_TURN_SLOTS, extra_for_person: int = EXTRA_PERSON_SLOTS) -> None:
        self._free = {False: count, True: count + extra_for_person}
        """Free slots by `for_person`. Every slot in use counts in both."""
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {False: deque(), True: deque()}
        self._loop: asyncio.AbstractEventLoop | None = None

    def available(self, *, for_person: bool) -> int:
        """Return how many new turns could start now; 0 while running turns wait for a slot."""
        if self._closed or self._waiting[for_person]:
            return 0
        return max(0, self._free[for_person])

    def try_acquire(self, limit: int, *, for_person: bool) -> int:
        """Acquire up to `limit` slots without waiting; return how many."""
        with self._lock:
            count = min(limit, self.available(for_person=for_person))
            self._use(count)
            return count

    def release(self, count: int) -> None:
        with self._lock:
            self._use(-count)
            if self._loop and (self._waiting[True] or self._waiting[False]):
                self._loop.call_soon_threadsafe(self._serve)

    def close(self) -> None:
        """Start no more turns. Running turns still get slots."""
        with self._lock:
            self._closed = True

    def _use(self, count: int) -> None:
        self._free[False] -= count
        self._free[True] -= count

    async def acquire(self, *, for_person: bool) -> None:
        """Wait for one slot, first come, first served. A cancelled caller holds none."""
        with self._lock:
            if self._free[for_person] > 0 and not self._waiting[True] and not self._waiting[for_person]:
                self._use(1)
                return
            self._loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting[for_person].append(waiter)
        self._serve()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(1)
            else:
                with self._lock, suppress(ValueError):  # `_serve` has removed it
                    self._waiting[for_person].remove(waiter)
            raise

    def _serve(self) -> None:
        with self._lock:
            for for_person in (True, False):
                while self._waiting[for_person] and self._free[for_person] > 0:
                    waiter = self._waiting[for_person].popleft()
                    if not waiter.done():
                        self._use(1)
                        waiter.set_result(None)


class TurnSlot:
    """The slot of one turn. It starts acquired, and can be released and acquired again."""

    def __init__(self, slots: Slots, on_release: Callable[[], None]) -> None:
        self._slots, self._on_release = slots, on_release
        self._held = True

    async def acquire(self, *, for_person: bool) -> None:
        if not self._held:
            await self._slots.acquire(for_person=for_person)
            self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._slots.release(1)
            self._on_release()


class ServiceAdmission:
    """Admits agents while the queue of their service has capacity.

    Other agents stay unclaimed: they cost no memory, and another process may claim them. People's messages have their
    own queue limit.
    """

    def __init__(self, models: ModelGateway, directory: AgentDirectory, *, leaves_keyless: bool = False) -> None:
        """`leaves_keyless`: leave agents whose service has no key in this process to processes that have it."""
        self._models, self._directory, self._leaves_keyless = models, directory, leaves_keyless
        self._waiting: set[tuple[str, bool]] = set()
        """`(service, for_person)` for which an agent waits unclaimed. Later agents must not overtake it."""

    def admits(self, agent_id: str, for_person: bool) -> bool:
        """True if an agent that just got mail may start a turn. Called from any thread."""
        if self._is_left_to_others(agent_id):
            return False
        key = self._key(agent_id, for_person)
        if key is None or (key not in self._waiting and self._models.has_capacity(*key)):
            return True
        self._waiting.add(key)
        return False

    def begin_round(self) -> AdmitFunction | None:
        self._waiting.clear()
        leaves_agents = self._leaves_keyless and self._directory.lacks_keys
        return self._admits_in_round if leaves_agents or self._models.is_any_full() else None

    def has_waiting_agent(self, service: str, for_person: bool) -> bool:
        """True if an agent waits unclaimed for this service."""
        return (service, for_person) in self._waiting

    def _admits_in_round(self, agent_id: str, for_person: bool) -> bool:
        if self._is_left_to_others(agent_id):
            return False
        key = self._key(agent_id, for_person)
        if key is None or self._models.has_capacity(*key):
            return True
        self._waiting.add(key)
        return False

    def _is_left_to_others(self, agent_id: str) -> bool:
        if not self._leaves_keyless or not self._directory.lacks_keys:
            return False
        with contextlib.suppress(Refused):  # it has no service
            return self._directory.service_of(agent_id).missing_key is not None
        return False

    def _key(self, agent_id: str, for_person: bool) -> tuple[str, bool] | None:
        """None: the agent has no service. It is admitted, and its turn reports the error."""
        try:
            return self._directory.service_of(agent_id).id, for_person
        except Refused:
            return None


CLAIM_INTERVAL = timedelta(seconds=1)
"""Longest delay until a due retry or a lost wake-up is found."""
SWEEP_INTERVAL = timedelta(seconds=5)
"""Longest time that an agent with an inconsistent stored state stays idle while mail waits for it."""
MAX_RELEASE_ATTEMPTS = 3
"""After the last attempt, turns stay claimed until the next start or the end of the lease, and count as crashed."""
MAX_TURNS = 10_000
"""Turns that run here at the same time, those that wait for their model included."""


class Scheduler:
    """The `TurnWorker` of this process.

    The store pushes agents that get mail; the scheduler polls for agents that are ready for other reasons.
    """

    def __init__(
        self,
        store: TurnStore,
        handler: LlmHandler,
        clock: Clock,
        rules: Rules,
        worker: str,
        disk: DiskMonitor,
        admission: ServiceAdmission,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """`max_turns`: turns that run here at the same time, those that wait for their model included."""
        self._admission, self._max_turns = admission, max_turns
        self._reserved = Counter[str]()
        """Slots by agent, reserved for claims that are not committed, or committed and not started yet."""
        self._reserved_count = 0
        self._reserved_lock = threading.Lock()
        self._store, self._handler, self._clock, self._disk = store, handler, clock, disk
        self.rules, self.worker = rules, worker
        self._wake = asyncio.Event()
        self._turns: dict[asyncio.Task[bool], ClaimKey] = {}
        self._slots = Slots()
        self._has_waiting = {False: False, True: False}
        """By `for_person`: agents wait for a slot, and later agents must not overtake them."""
        self._has_unknown_claims = False
        """Claims of this worker may be stored that never reached it."""
        self._failed: set[ClaimKey] = set()
        """Claims of turns that ended with an error."""
        self._abandoned: dict[asyncio.Task[bool], ClaimKey] = {}
        """Cancelled and lost turns whose claims must be released, unless another worker has them now."""
        self._is_stopping, self._stopping = False, asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._last_error: str | None = None
        self._swept_at: float | None = None
        """Time of the last sweep by the monotonic clock."""

    def update_rules(self, rules: Rules) -> None:
        self.rules = rules

    def start(self) -> None:
        self._store.register_worker(self)
        claiming = supervise("claiming agents", self._poll, self._clock, stopping=self._stopping)
        self._loop = asyncio.create_task(claiming, name="coterie-scheduler")

    async def stop_claiming(self) -> None:
        """Start no more turns."""
        self._is_stopping = True
        self._stopping.set()
        self._slots.close()
        self._wake.set()
        if self._loop:
            await self._loop

    async def finish(self, drain: timedelta) -> None:
        """Let turns run for `drain`, then cancel and release them: the next start resumes them."""
        shutdown = Shutdown()
        # First, so that a turn that is released below is not claimed here again.
        await shutdown.step("claim no more turns", self.stop_claiming)
        if self._turns:
            await shutdown.step("drain", partial(asyncio.wait, {*self._turns}, timeout=drain.total_seconds()))
        for turn in self._turns:
            turn.cancel()
        if self._turns:
            await shutdown.step("end turns", partial(asyncio.wait, {*self._turns}))
        await shutdown.step("release turns", self._release_all)
        shutdown.finish()

    async def _release_all(self) -> None:
        for left in reversed(range(MAX_RELEASE_ATTEMPTS)):
            try:
                await self._store.release_claims(self.worker, failed=False)
                return
            except StoreError as error:
                if not left:
                    log.warning("cannot release turns; they count as crashed at the next start: %s", error)

    # Called by the store

    @property
    def running_turns(self) -> int:
        return len(self._turns) + self._reserved_count

    @property
    def max_turns(self) -> int:
        return 0 if self._is_stopping or self._disk.is_full() else self._max_turns

    def reserve_slot(self, agent_id: str, for_person: bool) -> bool:
        if self._has_waiting[for_person] or not self._admission.admits(agent_id, for_person):
            return False
        if not self._free_turns(for_person=for_person) or not self._slots.try_acquire(1, for_person=for_person):
            return False
        with self._reserved_lock:
            self._reserved[agent_id] += 1
            self._reserved_count += 1
        return True

    def release_slots(self, agent_ids: Collection[str]) -> None:
        self._end_reservations(agent_ids)
        self._slots.release(len(agent_ids))

    def start_turns(self, claims: Sequence[Claim]) -> None:
        self._end_reservations([claim.agent_id for claim in claims])
        self._start_turns(claims)

    def _start_turns(self, claims: Sequence[Claim]) -> None:
        if self._is_stopping:
            return  # `finish` releases them
        for claim in claims:
            self._start_turn(claim)

    def _end_reservations(self, agent_ids: Collection[str]) -> None:
        with self._reserved_lock:
            for agent_id in agent_ids:
                self._reserved[agent_id] -= 1
                if not self._reserved[agent_id]:
                    del self._reserved[agent_id]
            self._reserved_count -= len(agent_ids)

    def _free_turns(self, *, for_person: bool) -> int:
        """How many turns may start here. A few more may start for the person."""
        extra = max(1, self._max_turns // PERSON_SHARE) if for_person else 0
        return max(0, self._max_turns + extra - self.running_turns)

    def abandon_turns(self) -> None:
        self._abandoned |= self._turns
        for turn in self._turns:
            turn.cancel()
        self._wake.set()

    def interrupt(self, interruption: Interruption) -> None:
        if interruption.ended_epoch is not None:
            self._handler.drop_turn(interruption.agent_id, interruption.ended_epoch)
        else:
            self._handler.interrupt_turn(interruption.agent_id, interruption.position)

    def wake(self) -> None:
        self._wake.set()

    def reconcile_claims(self) -> None:
        self._has_unknown_claims = True
        self._wake.set()

    def on_service_capacity(self, service: str, for_person: bool) -> None:
        """The queue of this service has capacity again. Called on the event loop."""
        if self._admission.has_waiting_agent(service, for_person):
            self._wake.set()

    # Polling

    async def _poll(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            await self._sweep()
            if not await self._claim_round():
                await self._clock.wait(self._wake, CLAIM_INTERVAL)

    async def _sweep(self) -> None:
        """Wake agents that are idle although mail waits for them, at most once per `SWEEP_INTERVAL`."""
        now = self._clock.monotonic()
        if self._swept_at is not None and now - self._swept_at < SWEEP_INTERVAL.total_seconds():
            return
        self._swept_at = now
        try:
            await self._store.wake_forgotten()
        except StoreError as error:  # the next claim reports it too
            log.debug("cannot look for forgotten agents now: %s", error)

    async def _claim_round(self) -> bool:
        """Claim one round of ready agents. True: more may be ready."""
        # While the disk is full, no turn starts, as if no slot were free.
        full = self._disk.is_full()
        available = 0 if full else self._slots.available(for_person=False)
        limit = 0 if full else min(self._store.claims_per_round, self._free_turns(for_person=True))
        reserved = self._slots.try_acquire(limit, for_person=True)
        others = min(reserved, available, self._free_turns(for_person=False))
        claims: Sequence[Claim] = ()
        try:
            if self._has_unknown_claims or self._failed or self._abandoned:
                await self._release_orphaned()
            if reserved:
                claims = await self._store.claim_ready(
                    self.worker, self.rules, reserved, others=others, admission=self._admission
                )
        except StoreError as error:
            if self._last_error != str(error):  # log each error once, not every second
                log.error("cannot claim agents now: %s", error)
            self._last_error = str(error)
            return False
        except Exception:  # without further rounds no agent would ever work
            log.exception("claiming agents failed; trying again")
            self._has_unknown_claims = True  # the claims may be stored all the same
            return False
        finally:
            self._slots.release(reserved - len(claims))
        self._last_error = None
        self._start_turns(claims)
        agents = sum(not claim.for_person for claim in claims)
        self._has_waiting = {False: agents >= others, True: len(claims) == reserved}
        return (0 < others <= agents) or 0 < reserved == len(claims)

    async def _release_orphaned(self) -> None:
        """Release stored claims for which no turn runs. Turns that fail meanwhile are left for the next round."""
        has_unknown, failed, abandoned = self._has_unknown_claims, self._failed, self._abandoned
        self._has_unknown_claims, self._failed, self._abandoned = False, set(), {}
        try:
            if abandoned:
                await asyncio.wait(abandoned)
                await self._store.release_claims(self.worker, only={*abandoned.values()}, failed=False)
            unknown = await self._find_unknown_claims() if has_unknown else set()
            if failed or unknown:
                await self._store.release_claims(self.worker, only=failed | unknown, failed=True)
        except BaseException:
            self._has_unknown_claims |= has_unknown
            self._failed |= failed
            self._abandoned |= abandoned
            raise

    async def _find_unknown_claims(self) -> set[ClaimKey]:
        """Return the stored claims for which no turn runs and none is about to start."""
        stored = {*await self._store.claims_of(self.worker)} - {*self._turns.values()}
        with self._reserved_lock:
            starting = {key for key in stored if key[0] in self._reserved}
        # The next round looks again: the transaction that reserved such a slot may still end with an error.
        self._has_unknown_claims |= bool(starting)
        return stored - starting

    def _start_turn(self, claim: Claim) -> None:
        slot = TurnSlot(self._slots, self._on_release)
        turn = self._handler.start_turn(claim, slot)
        self._turns[turn] = claim.agent_id, claim.epoch
        turn.add_done_callback(lambda ended: self._on_turn_end(ended, slot))

    def _on_release(self) -> None:
        if any(self._has_waiting.values()):
            self._wake.set()

    def _on_turn_end(self, turn: asyncio.Task[bool], slot: TurnSlot) -> None:
        key = self._turns.pop(turn)
        slot.release()
        self._on_release()  # the turn may have ended without a slot
        if turn.cancelled() and turn.cancelling():
            return
        # Some libraries raise `CancelledError` although no caller has cancelled the turn.
        error = asyncio.CancelledError() if turn.cancelled() else turn.exception()
        if error:
            # The claim is still stored. Releasing it counts as a crash of the turn.
            self._failed.add(key)
            self._wake.set()
            with log_context(agent=key[0]):
                log.error("a turn ended with an unexpected error", exc_info=error)
        elif not turn.result():
            # After a crash of the database the claim may still be stored, with an earlier step.
            self._abandoned[turn] = key
            self._wake.set()
