"""kill -9 at any moment: nothing acknowledged is lost, nothing arrives twice, nothing arrives early."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from .harness import ForkServer


def kill(server: ForkServer, folder: Path, cycles: int) -> dict[str, Any]:
    seed = int(os.environ.get("COTERIE_FAULT_SEED") or random.randrange(1 << 32))
    report: dict[str, Any] = server.call("cycles", folder=str(folder), seed=seed, cycles=cycles)
    replay = f"COTERIE_FAULT_SEED={seed} python -m pytest tests/faults/test_kill_cycles.py"
    assert not report["problems"], "\n".join([*report["problems"][:20], f"seen: {report['seen']}", replay])
    report["replay"] = replay
    return report


def assert_seen(report: dict[str, Any], **at_least: int) -> None:
    """A run that did not meet enough of what it is about proves nothing."""
    for words, number in at_least.items():
        what = words.replace("_", " ")
        assert report["seen"].get(what, 0) >= number, f"too few: {what}: {report['seen']}; {report['replay']}"


def test_a_few_kills_lose_nothing(fork_server: ForkServer, tmp_path: Path) -> None:
    report = kill(fork_server, tmp_path, 25)

    assert_seen(report, acknowledged=100, delayed_and_delivered=20)


@pytest.mark.slow
def test_500_kills_during_sends_and_promotions_lose_nothing_double_nothing_and_hurry_nothing(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    report = kill(fork_server, tmp_path, 500)

    assert_seen(
        report,
        acknowledged=2_000,
        recovered=50,
        unacknowledged_and_absent=50,
        delayed_and_delivered=500,
        delivered_early_by_a_graceful_stop=1,
        deliveries_watched=100,
        withdrawn=50,
        asked_again_under_the_same_id=300,
        killed_while_opening=20,
        killed_at_random=120,
        killed_in_a_commit=45,
        killed_in_a_promotion=40,
        killed_with_a_commit_hanging=50,
        killed_with_a_send_in_flight=100,
    )
