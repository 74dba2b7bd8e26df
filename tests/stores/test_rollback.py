"""A rolled back transaction leaves no trace, on every engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coterie import failpoints
from coterie.errors import Refused
from coterie.messages import Envelope, make_envelope
from coterie.store import Store


def to_ada(text: str) -> Envelope:
    return make_envelope(sender="user", to="ada", payload={"text": text})


@pytest.mark.parametrize("at", ["flush.done", "commit.before"])
async def test_a_rolled_back_write_leaves_no_trace(store: Store, at: str) -> None:
    await store.send(to_ada("before"))
    failpoints.arm(f"{at}:1:raise")
    try:
        with pytest.raises(failpoints.FailpointHit):
            await store.send(to_ada("undone"))
    finally:
        failpoints.arm("")
    await store.send(to_ada("after"))
    assert [(one.payload["text"], one.mailbox_position) for one in await store.waiting("ada")] == [
        ("before", 1),
        ("after", 2),
    ]


async def test_a_failed_job_leaves_no_trace_in_other_jobs_of_its_batch(store: Any) -> None:
    def fails(_: Any, uow: Any) -> None:
        uow.accept(to_ada("undone"))
        uow.flush()
        raise Refused("not_yours", "too late")

    await asyncio.gather(store.send(to_ada("before")), store._transact(fails, touches=["ada"]), return_exceptions=True)
    await store.send(to_ada("after"))
    assert [(one.payload["text"], one.mailbox_position) for one in await store.waiting("ada")] == [
        ("before", 1),
        ("after", 2),
    ]
