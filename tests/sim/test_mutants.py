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
FIRST_SEEDS = {"cut_out_of_order": 25, "reminder_lost_with_its_answer": 200, "unfenced_read": 115}
"""Seeds below these show nothing of a rare mutant. They save time only."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulator_detects_a_wrong_design(mutant: Callable[[Later], Iterator[Any]]) -> None:
    with pytest.raises(Violation):
        first = FIRST_SEEDS.get(mutant.__name__, 0)
        for seed in range(first, first + SEEDS):
            simulation = Simulation(seed)
            with mutated(simulation, mutant):
                simulation.run()
