"""The simulator detects every wrong design."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .mutants import MUTANTS, Later, mutated
from .oracle import Violation
from .simulation import Simulation

SEEDS = 600
"""Most mutants fail within a few seeds; `unfenced_read` in about one of a hundred."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulator_detects_a_wrong_design(mutant: Callable[[Later], Iterator[Any]]) -> None:
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulation = Simulation(seed)
            with mutated(simulation, mutant):
                simulation.run()


def test_there_are_thirteen_of_them() -> None:
    assert len({mutant.__name__ for mutant in MUTANTS}) == 13
