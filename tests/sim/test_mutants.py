"""Every wrong design is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .mutants import MUTANTS, Later, mutated
from .oracle import Violation
from .simulation import Simulation

SEEDS = 600
"""Most are found in the first few; the un-fenced read in about one of a hundred."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_design_breaks_a_promise(mutant: Callable[[Later], Iterator[Any]]) -> None:
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulation = Simulation(seed)
            with mutated(simulation, mutant):
                simulation.run()


def test_there_are_thirteen_of_them() -> None:
    assert len({mutant.__name__ for mutant in MUTANTS}) == 13
