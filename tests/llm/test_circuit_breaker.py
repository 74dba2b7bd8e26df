"""States of the circuit breaker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coterie.llm.gateway import CircuitBreaker


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(max_failures=3, first_open_seconds=10, max_open_seconds=35)
    for _ in range(3):
        breaker.record_failure(now, probe=breaker.start_request())
    return breaker


def test_it_opens_after_consecutive_failures() -> None:
    breaker = CircuitBreaker(max_failures=3, first_open_seconds=10)
    breaker.record_failure(0, probe=breaker.start_request())
    breaker.record_failure(0, probe=breaker.start_request())
    assert breaker.seconds_until_allowed(0) == 0

    breaker.record_failure(1, probe=breaker.start_request())
    assert breaker.seconds_until_allowed(1) == 10
    assert breaker.seconds_until_allowed(10) == 1


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = CircuitBreaker(max_failures=2)
    for _ in range(10):
        breaker.record_failure(0, probe=breaker.start_request())
        breaker.record_success()
    breaker.record_failure(0, probe=breaker.start_request())

    assert breaker.seconds_until_allowed(0) == 0


def test_after_the_open_time_one_probe_runs_and_the_others_wait() -> None:
    breaker = opened()

    assert breaker.seconds_until_allowed(10) == 0
    assert breaker.start_request()
    assert breaker.seconds_until_allowed(10) > 0
    assert breaker.seconds_until_allowed(1_000) > 0


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = opened()
    breaker.start_request()
    breaker.record_success()

    assert breaker.seconds_until_allowed(10) == 0
    assert not breaker.start_request()
    assert breaker.seconds_until_allowed(10) == 0


def test_a_failed_probe_doubles_the_open_time_up_to_the_maximum() -> None:
    breaker = opened()
    now, rests = 0.0, []
    for _ in range(4):
        rests.append(breaker.seconds_until_allowed(now))
        now += rests[-1]
        breaker.record_failure(now, probe=breaker.start_request())

    assert rests == [10, 20, 35, 35]


def test_after_recovery_the_open_time_is_short_again() -> None:
    breaker = opened()
    breaker.record_failure(10, probe=breaker.start_request())
    breaker.record_success()
    for _ in range(3):
        breaker.record_failure(50, probe=breaker.start_request())

    assert breaker.seconds_until_allowed(50) == 10


def test_an_abandoned_probe_allows_another_probe() -> None:
    breaker = opened()
    breaker.record_abandoned(probe=breaker.start_request())

    assert breaker.seconds_until_allowed(10) == 0
    assert breaker.start_request()


def test_failures_of_requests_from_before_it_opened_do_not_prolong_it() -> None:
    breaker = opened()
    for _ in range(20):
        breaker.record_failure(5, probe=False)

    assert breaker.seconds_until_allowed(5) == 5


@given(st.lists(st.sampled_from(["ask", "good", "bad", "gone", "later"]), max_size=80))
def test_there_is_at_most_one_probe_and_the_circuit_closes_again(steps: list[str]) -> None:
    breaker, now, probes, plain = CircuitBreaker(max_failures=2, first_open_seconds=4, max_open_seconds=16), 0.0, 0, 0
    for step in steps:
        if step == "later":
            now += 3
        elif step == "ask":
            if breaker.seconds_until_allowed(now) == 0:
                probe = breaker.start_request()
                probes, plain = probes + probe, plain + (not probe)
        elif probes or plain:
            probe = probes > 0
            probes, plain = probes - probe, plain - (not probe)
            match step:
                case "good":
                    breaker.record_success()
                    plain, probes = plain + probes, 0
                case "bad":
                    breaker.record_failure(now, probe=probe)
                case "gone":
                    breaker.record_abandoned(probe=probe)
        assert probes <= 1
        assert breaker.seconds_until_allowed(now) <= 16
