"""Tasks that are stopped at random moments, with kill -9 in between: nothing of them is left, no other is harmed."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from .harness import ForkServer


def run(server: ForkServer, folder: Path, **load: int) -> dict[str, int]:
    seed = int(os.environ.get("COTERIE_FAULT_SEED") or random.randrange(1 << 32))
    report: dict[str, Any] = server.call("task_cycles", folder=str(folder), seed=seed, **load)
    replay = f"COTERIE_FAULT_SEED={seed} python -m pytest {os.environ['PYTEST_CURRENT_TEST'].split()[0]}"
    assert not report["problems"], "\n".join([*report["problems"][:20], f"seen: {report['seen']}", replay])
    print(dict(sorted(report["seen"].items())))
    seen: dict[str, int] = report["seen"]
    return seen


def test_a_few_stops_with_kills_in_between_leave_nothing_and_harm_no_other_task(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    seen = run(fork_server, tmp_path, tasks=40, stops=8, kills=3)
    assert seen["stopped"] == 8
    assert seen["done"] >= 32 - seen.get("quarantined", 0) > 24


@pytest.mark.full
def test_of_200_tasks_20_stopped_ones_leave_nothing_and_180_others_end(fork_server: ForkServer, tmp_path: Path) -> None:
    seen = run(fork_server, tmp_path, tasks=200, stops=20, kills=12)
    assert seen["stopped"] == 20
    assert seen["done"] >= 180 - seen.get("quarantined", 0) > 160
    assert seen["turns ended by stops"] and seen["messages withdrawn by stops"]
