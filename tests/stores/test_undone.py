"""What was undone leaves no trace in what follows, on every engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coterie import failpoints
from coterie.errors import Refused
from coterie.messages import Envelope, seal
from coterie.store import Store


def to_ada(text: str) -> Envelope:
    return seal(sender="user", to="ada", payload={"text": text})


@pytest.mark.parametrize("at", ["post.after_write", "commit.before"])
async def test_what_was_undone_after_it_was_written_leaves_no_trace_in_what_follows(store: Store, at: str) -> None:
    await store.send(to_ada("before"))
    failpoints.arm(f"{at}:1:raise")
    try:
        with pytest.raises(failpoints.FailpointHit):
            await store.send(to_ada("undone"))
    finally:
        failpoints.arm("")
    await store.send(to_ada("after"))
    assert [(one.payload["text"], one.in_seq) for one in await store.waiting("ada")] == [("before", 1), ("after", 2)]


async def test_one_transition_that_fails_after_it_has_written_leaves_no_trace_in_those_beside_it(store: Any) -> None:
    def fails(_: Any, post: Any) -> None:
        post.accept(to_ada("undone"))
        post.close()
        raise Refused("not_yours", "too late")

    await asyncio.gather(store.send(to_ada("before")), store._post(fails, touches=["ada"]), return_exceptions=True)
    await store.send(to_ada("after"))
    assert [(one.payload["text"], one.in_seq) for one in await store.waiting("ada")] == [("before", 1), ("after", 2)]
