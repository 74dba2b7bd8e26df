"""Societies whose old data is deleted step by step while everything else happens.

The other checks of the end state need all messages, so these runs check the invariants, that no agent is stuck, and
that a deletion never changes what a model is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from coterie.retention_store import Pruned, Retention
from coterie.stores.sql import claims
from coterie.stores.sql.retention import Pruner, Read, Steps, Write
from coterie.turn import AskModel
from coterie.turn_store import Claim, HistoryView, StaleClaim
from tests.engines import Postgres

from .oracle import Oracle, Violation
from .simulation import Job, Simulation, Worker
from .world import World

SEEDS, ON_POSTGRES, FULL = 60, 6, 1_000
KEPT = Retention(messages=timedelta(seconds=60), dead_letters=timedelta(seconds=60), events=timedelta(seconds=60))
ENOUGH = {
    "messages": 400,
    "history": 150,
    "plans": 20,
    "tasks": 200,
    "model_calls": 60,
    "events": 1_000,
    "summaries": 60,
}
"""Least numbers of deleted rows and of summaries in `SEEDS` runs: a run that deletes nothing proves nothing."""


class PruningOracle(Oracle):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.pruned_world = world

    def summarised(self, after: Claim) -> None:
        self._owners[after.agent_id] = after

    def check_final_state(self, witness: Mapping[str, int]) -> None:
        if found := self.pruned_world.violations():
            raise Violation("; ".join(found[:3]))


class PruningSimulation(Simulation):
    def __init__(self, seed: int, world: World | None = None) -> None:
        super().__init__(seed, world=world)
        self.oracle: PruningOracle = PruningOracle(self.world)
        self.deleted = Pruned()
        self._steps: Steps | None = None
        self._result: object = None

    def _act(self, action: Callable[[Simulation], None]) -> None:
        super()._act(action)
        if self._rng.random() < 0.3:
            self._prune(self._rng.choice((1, 3, 40)))

    def _prune(self, steps: int) -> None:
        """Go on with a deletion, or begin one."""
        before = self._views()
        self.world.worker = None
        for _ in range(steps):
            if self._steps is None:
                run = Pruner(KEPT, self.world.now, full=self._rng.random() < 0.5)
                self._steps, self._result = run.steps(), None
            try:
                step = self._steps.send(self._result)
            except StopIteration:
                self._steps = None
                break
            self._result = None
            if isinstance(step, Read):
                self._result = step.run(self.world.db)
            elif isinstance(step, Write):
                self.deleted += self.world.transact(step.run)
        if self._rng.random() < 0.2 and (found := self.world.violations()):
            raise Violation("; ".join(found[:3]))
        if before != self._views():
            raise Violation("a deletion has changed what a model is shown")

    def _drain(self) -> None:
        """Also finish the deletion that has begun, and run another one."""
        super()._drain()
        for _ in range(2):
            self._prune(100_000)

    def _views(self) -> dict[str, HistoryView]:
        """What models are shown. A terminated agent has none."""
        agents = self.world.rows("SELECT id FROM agents WHERE kind = 'agent' AND state <> 'terminated'")
        return {str(agent_id): self.world.view(str(agent_id)) for (agent_id,) in agents}

    def _perform(self, worker: Worker, job: Job) -> None:
        if isinstance(job.claim.action, AskModel) and self._rng.random() < 0.4:
            self._summarise(worker, job)
        if job in worker.jobs:
            super()._perform(worker, job)

    def _summarise(self, worker: Worker, job: Job) -> None:
        """Let a summary stand for all but the last rows that are shown."""
        claim = job.claim
        rows = self.world.view(claim.agent_id).rows
        ends = [row.seq for row, following in pairwise(rows) if following.role != "tool"]
        if not ends:
            return
        upto = self._rng.choice(ends[-3:])
        try:
            after = self.world.transact(lambda db, uow: claims.summarise(db, uow, claim, upto, "in short", None))
        except StaleClaim:
            self.oracle.fenced(claim)
            worker.jobs.remove(job)
            return
        self.seen["summaries"] += 1
        self.oracle.summarised(after)
        job.claim = after


def simulate(first: int, count: int, make: Callable[[], World] = World) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        simulation = PruningSimulation(seed, make())
        seen["summaries"] += simulation.run()["summaries"]
        seen.update({name: getattr(simulation.deleted, name) for name in ENOUGH if name != "summaries"})
    missed = {name: seen[name] for name, least in ENOUGH.items() if seen[name] < least * count / SEEDS / 2}
    assert not missed, f"counts below the minimum: {missed}"


def test_no_guarantee_is_broken_while_old_data_is_deleted() -> None:
    simulate(3_000_000, SEEDS)


def test_no_guarantee_is_broken_while_old_data_is_deleted_from_postgres(shared: Postgres, tmp_path: Path) -> None:
    from .shared_world import SharedWorld

    simulate(3_100_000, ON_POSTGRES, lambda: SharedWorld(shared.url(tmp_path)))


@pytest.mark.full
def test_no_guarantee_is_broken_in_a_thousand_societies_while_old_data_is_deleted() -> None:
    simulate(4_000_000, FULL)
