"""kill -9 at any moment: nothing acknowledged is lost, nothing arrives twice, nothing arrives early."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from .harness import ForkServer


def kill(server: ForkServer, folder: Path, cycles: int, what: str = "cycles", **at_least: int) -> None:
    """Kill until so much was seen; fail on any problem."""
    seed = int(os.environ.get("COTERIE_FAULT_SEED") or random.randrange(1 << 32))
    wanted = with_spaces(at_least)
    report: dict[str, Any] = server.call(what, folder=str(folder), seed=seed, cycles=cycles, at_least=wanted)
    replay = f"COTERIE_FAULT_SEED={seed} python -m pytest {os.environ['PYTEST_CURRENT_TEST'].split()[0]}"
    assert not report["problems"], "\n".join([*report["problems"][:20], f"seen: {report['seen']}", replay])
    report["replay"] = replay
    print(dict(sorted(report["seen"].items())))
    assert_seen(report, **at_least)


def with_spaces(at_least: dict[str, int]) -> dict[str, int]:
    return {words.replace("_", " "): number for words, number in at_least.items()}


def assert_seen(report: dict[str, Any], **at_least: int) -> None:
    """Fail if the test did not see enough of each situation."""
    for what, number in with_spaces(at_least).items():
        assert report["seen"].get(what, 0) >= number, f"too few: {what}: {report['seen']}; {report['replay']}"


def test_a_few_kills_lose_nothing(fork_server: ForkServer, tmp_path: Path) -> None:
    kill(fork_server, tmp_path, 25, acknowledged=100, delayed_and_delivered=20)


@pytest.mark.full
def test_500_kills_during_sends_and_promotions_lose_repeat_and_hurry_nothing(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    kill(
        fork_server,
        tmp_path,
        500,
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


def test_a_few_kills_during_turns_lose_nothing(fork_server: ForkServer, tmp_path: Path) -> None:
    kill(
        fork_server,
        tmp_path,
        40,
        "work_cycles",
        acknowledged=60,
        answers=20,
        closed_plans=5,
        withdrawn_plans=5,
        answers_cut=3,
        killed_while_a_model_was_asked=5,
        requests_compared=50,
        requests_compared_after_a_takeover=5,
    )


@pytest.mark.full
def test_1000_kills_during_turns_lose_nothing_and_repeat_no_unsafe_effect(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    kill(
        fork_server,
        tmp_path,
        1_000,
        "work_cycles",
        acknowledged=2_000,
        recovered=50,
        unacknowledged_and_absent=50,
        asked_again_under_the_same_id=200,
        delayed_and_delivered=500,
        turns=1_000,
        answers=1_000,
        messages_of_agents=100,
        closed_plans=400,
        withdrawn_plans=300,
        answers_cut=50,
        plans_closed_in_the_middle=75,
        unknown_outcomes=60,
        calls_run_again=40,
        requests_made_again=150,
        requests_compared=2_000,
        requests_compared_after_a_takeover=300,
        turns_quarantined=10,
        approvals_granted=30,
        approvals_denied=10,
        approvals_voided=40,
        blocked_agents=20,
        resumed_by_hand=5,
        retries=40,
        summaries=50,
        found_in_wait_approval=20,
        found_in_blocked=10,
        found_in_wait_retry=10,
        killed_while_a_summary_was_made=5,
        killed_while_opening=20,
        killed_at_random=300,
        killed_while_a_model_was_asked=250,
        killed_while_a_tool_ran=40,
        killed_in_a_claim=25,
        killed_before_the_model=25,
        killed_after_the_model=25,
        killed_before_a_tool=25,
        killed_after_a_tool=25,
        killed_in_a_step=25,
        killed_in_a_commit=25,
        killed_with_a_commit_hanging=25,
        killed_in_a_promotion=10,
    )
