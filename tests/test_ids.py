"""Names that people and programs outside refer to."""

from __future__ import annotations

import re

from coterie.ids import LENGTH, id_for, new_id

RANDOM_BITS = 122
"""The fewest that a public name may have: as many as a UUID of version 4."""


def test_a_name_holds_enough_random_bits_that_nobody_can_guess_one() -> None:
    names = [new_id() for _ in range(4_000)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(rf"[0-9a-f]{{{LENGTH}}}", name) for name in names)
    times_set = [sum(int(name, 16) >> bit & 1 for name in names) for bit in range(128)]  # the time is before these
    # A fair coin thrown 4,000 times stays between these but once in some ten to the 20th times.
    fair = [bit for bit, count in enumerate(times_set) if 1_700 < count < 2_300]
    assert len(fair) >= RANDOM_BITS


def test_a_name_made_for_something_has_the_same_form_and_is_always_the_same() -> None:
    assert id_for("message", "user", "1") == id_for("message", "user", "1")
    assert len({id_for("a", "bc"), id_for("ab", "c"), id_for("abc"), id_for("abc", "")}) == 4
    assert re.fullmatch(rf"[0-9a-f]{{{LENGTH}}}", id_for("\ud800"))
