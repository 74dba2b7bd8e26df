"""When a service that fails is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coterie.llm.gateway import Breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, rest=10, longest=35)
    for _ in range(3):
        breaker.failed(now, probe=breaker.enter())
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker(failures=3, rest=10)
    breaker.failed(0, probe=breaker.enter())
    breaker.failed(0, probe=breaker.enter())
    assert breaker.wait(0) == 0

    breaker.failed(1, probe=breaker.enter())
    assert breaker.wait(1) == 10
    assert breaker.wait(10) == 1


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker(failures=2)
    for _ in range(10):
        breaker.failed(0, probe=breaker.enter())
        breaker.succeeded()
    breaker.failed(0, probe=breaker.enter())

    assert breaker.wait(0) == 0


def test_after_the_rest_one_request_tries_and_the_others_wait() -> None:
    breaker = opened()

    assert breaker.wait(10) == 0
    assert breaker.enter()
    assert breaker.wait(10) > 0
    assert breaker.wait(1_000) > 0


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = opened()
    breaker.enter()
    breaker.succeeded()

    assert breaker.wait(10) == 0
    assert not breaker.enter()
    assert breaker.wait(10) == 0


def test_a_probe_that_fails_makes_the_rest_longer_up_to_the_longest() -> None:
    breaker = opened()
    now, rests = 0.0, []
    for _ in range(4):
        rests.append(breaker.wait(now))
        now += rests[-1]
        breaker.failed(now, probe=breaker.enter())

    assert rests == [10, 20, 35, 35]


def test_after_it_has_recovered_the_rest_is_short_again() -> None:
    breaker = opened()
    breaker.failed(10, probe=breaker.enter())
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(50, probe=breaker.enter())

    assert breaker.wait(50) == 10


def test_a_probe_whose_caller_went_away_lets_the_next_one_try() -> None:
    breaker = opened()
    breaker.left(probe=breaker.enter())

    assert breaker.wait(10) == 0
    assert breaker.enter()


def test_failures_of_requests_that_went_before_it_opened_do_not_prolong_it() -> None:
    breaker = opened()
    for _ in range(20):
        breaker.failed(5, probe=False)

    assert breaker.wait(5) == 5


@given(st.lists(st.sampled_from(["ask", "good", "bad", "gone", "later"]), max_size=80))
def test_there_is_never_a_second_probe_and_never_a_rest_without_end(steps: list[str]) -> None:
    breaker, now, probes, plain = Breaker(failures=2, rest=4, longest=16), 0.0, 0, 0
    for step in steps:
        if step == "later":
            now += 3
        elif step == "ask":
            if breaker.wait(now) == 0:
                probe = breaker.enter()
                probes, plain = probes + probe, plain + (not probe)
        elif probes or plain:
            probe = probes > 0
            probes, plain = probes - probe, plain - (not probe)
            match step:
                case "good":
                    breaker.succeeded()
                    plain, probes = plain + probes, 0
                case "bad":
                    breaker.failed(now, probe=probe)
                case "gone":
                    breaker.left(probe=probe)
        assert probes <= 1
        assert breaker.wait(now) <= 16
