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

FAST, SLOW, SHARDS, SHARD, ON_POSTGRES = 150, 450, 4, 1_000, 60

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
    "ambiguous": 100,
    "stops": 100,
    "poisoned": 100,
    "restarts": 200,
    "answers": 2_500,
    "dead": 50,
    "terminations": 30,
    "withdrawn messages": 200,
    "claimed with the mail": 2_000,
    "shown from memory": 2_000,
}


def simulate(first: int, count: int, make: Callable[[], World] = World) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        seen += Simulation(seed, world=make()).run()
    missed = {name: (seen[name], least) for name, least in ENOUGH.items() if seen[name] < least * count / SHARD / 2}
    assert not missed, f"counts below the minimum (count, minimum): {missed}"
    return seen


def test_no_guarantee_is_broken_in_150_societies() -> None:
    simulate(1_000_000, FAST)


@pytest.mark.slow
def test_no_guarantee_is_broken_in_hundreds_of_societies() -> None:
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
