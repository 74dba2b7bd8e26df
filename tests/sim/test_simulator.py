"""Simulated societies with random crashes, stale workers and interruptions. No guarantee may be broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import Postgres

from .oracle import Violation
from .simulation import STEPS, Simulation
from .world import World

FAST, SLOW, ON_POSTGRES = 150, 150, 20
"""Seeds of every change."""
SHARDS, SHARD, FULL_ON_POSTGRES = 4, 1_000, 200
"""Seeds before a release."""

# Minimum counts per 1,000 seeds: a run without faults proves nothing.
ENOUGH = {
    "steps": 87_500,
    "crashes": 5_000,
    "fenced": 1_250,
    "takeovers": 2_500,
    "retracted, k = 0": 100,
    "retracted, k >= 1": 300,
    "unknown": 300,
    "cancelled": 500,
    "early": 100,
    "approved": 50,
    "denied": 20,
    "asked back": 20,
    "ambiguous": 100,
    "stops": 100,
    "cut answers": 100,
    "poisoned": 100,
    "restarts": 200,
    "answers": 2_500,
    "dead": 50,
    "terminations": 30,
    "withdrawn messages": 200,
    "recurring messages": 25,
    "claimed with the mail": 2_000,
    "shown from memory": 2_000,
    "budget questions": 400,
    "continued": 300,
    "stopped at the limit": 5,
    "stopped tasks": 300,
    "turns of stopped tasks": 100,
    "messages of stopped tasks": 150,
    "task_stopped": 6,
    "joined tasks": 1_000,
    "tasks of tasks": 150,
    "moved": 250,
    "moot reminders": 30,
    "reminders that fired": 400,
    "reminders withdrawn": 100,
}


def simulate(first: int, count: int, make: Callable[[], World] = World) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        seen += Simulation(seed, world=make()).run()
    # Half of the share, because few seeds vary. What is expected less than four times may not happen by chance.
    expected = {name: least * count / SHARD / 2 for name, least in ENOUGH.items()}
    missed = {name: (seen[name], least) for name, least in expected.items() if seen[name] < least and least >= 2}
    assert not missed, f"counts below the minimum (count, minimum): {missed}"
    return seen


def test_no_guarantee_is_broken_in_150_societies() -> None:
    simulate(1_000_000, FAST)


@pytest.mark.slow
def test_no_guarantee_is_broken_in_150_more_societies() -> None:
    simulate(1_000_000 + FAST, SLOW)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_guarantee_is_broken_in_thousands_of_societies(shard: int) -> None:
    seen = simulate(shard * SHARD, SHARD)
    missed = {name: (seen[name], least) for name, least in ENOUGH.items() if seen[name] < least}
    assert not missed, f"counts below the minimum (count, minimum): {missed}"
    print(dict(sorted(seen.items())))


@pytest.mark.slow
def test_no_guarantee_is_broken_on_postgres(shared: Postgres, tmp_path: Path) -> None:
    from .shared_world import SharedWorld

    simulate(2_000_000, ON_POSTGRES, lambda: SharedWorld(shared.url(tmp_path)))


@pytest.mark.full
def test_no_guarantee_is_broken_in_200_societies_on_postgres(shared: Postgres, tmp_path: Path) -> None:
    from .shared_world import SharedWorld

    simulate(2_000_000 + ON_POSTGRES, FULL_ON_POSTGRES, lambda: SharedWorld(shared.url(tmp_path)))


def test_a_seed_decides_everything_that_happens() -> None:
    def log_of(seed: int) -> list[str]:
        lines: list[str] = []
        Simulation(seed, log=lines.append).run()
        return lines

    assert log_of(7) == log_of(7)
    assert log_of(7) != log_of(8)
    assert len(log_of(7)) > STEPS / 2


def test_a_violation_names_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.stores.sql.turn_transaction.TurnTransaction.check_fence", lambda turn, claim: None)
    with pytest.raises(Violation, match=r"replay: python -m tests\.sim \d+$"):
        for seed in range(100):
            Simulation(seed).run()
