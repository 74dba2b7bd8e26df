"""Ids: random and derived ones."""

from __future__ import annotations

import re

from coterie.ids import ID_LENGTH, id_for, new_id

RANDOM_BITS = 122
"""Minimum for a public id: as many as in a UUID version 4."""


def test_an_id_has_enough_random_bits() -> None:
    names = [new_id() for _ in range(4_000)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(rf"[0-9a-f]{{{ID_LENGTH}}}", name) for name in names)
    times_set = [
        sum(int(name, 16) >> bit & 1 for name in names) for bit in range(128)
    ]  # the timestamp comes before these
    # For 4,000 random bits the probability of being outside is about 1e-20.
    fair = [bit for bit, count in enumerate(times_set) if 1_700 < count < 2_300]
    assert len(fair) >= RANDOM_BITS


def test_a_derived_id_has_the_same_form_and_is_stable() -> None:
    assert id_for("message", "user", "1") == id_for("message", "user", "1")
    assert len({id_for("a", "bc"), id_for("ab", "c"), id_for("abc"), id_for("abc", "")}) == 4
    assert re.fullmatch(rf"[0-9a-f]{{{ID_LENGTH}}}", id_for("\ud800"))
