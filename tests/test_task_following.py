"""What a program sees of a task when the store fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from coterie.errors import StoreUnavailable
from coterie.messages import Receipt
from coterie.task_following import TaskFollowing
from coterie.tasks import TaskTree
from coterie.testing import FakeClock
from tests.agent.stage import stage
from tests.agent.tool_calls import HANG_SECONDS


@asynccontextmanager
async def paused_task(folder: Path) -> AsyncIterator[tuple[TaskFollowing, Receipt, FakeClock]]:
    """A task of a paused society. Its followers have their own clock."""
    async with stage(folder) as here, asyncio.timeout(HANG_SECONDS):
        await here.society.pause_all()
        sent = await here.society.send(to="ada", text="hello")
        clock = FakeClock()
        following = TaskFollowing(here.society.store, here.society.bus, here.society.live, clock)
        try:
            yield following, sent, clock
        finally:
            await following.watch.shut_down()


def fail_once(following: TaskFollowing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next read of a task tree fail."""
    read, failed = following.store.task_tree, asyncio.Event()

    async def task_tree(message_id: str) -> TaskTree | None:
        if not failed.is_set():
            failed.set()
            raise StoreUnavailable("the database cannot be reached")
        return await read(message_id)

    monkeypatch.setattr(following.store, "task_tree", task_tree)


async def end(follower: asyncio.Task[None], clock: FakeClock) -> None:
    """Let time pass until the follower ends."""
    while not follower.done():
        advance = asyncio.create_task(clock.advance(seconds=1))
        await asyncio.wait({advance, follower}, return_when=asyncio.FIRST_COMPLETED)
        advance.cancel()
        with suppress(asyncio.CancelledError):
            await advance


async def test_a_follower_of_a_paused_task_says_that_the_store_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paused_task(tmp_path) as (following, sent, clock):
        message = await following.store.message(sent.message_id)
        assert message is not None

        async def follow() -> None:
            async for _ in following.follower(message).follow(None):
                pass

        fail_once(following, monkeypatch)
        follower = asyncio.create_task(follow())
        await end(follower, clock)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await follower


async def test_a_stream_of_a_paused_task_says_that_the_store_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paused_task(tmp_path) as (following, sent, clock):

        async def follow() -> None:
            with following.stream("ada") as stream:
                async for _ in stream.follow(sent):
                    pass

        fail_once(following, monkeypatch)
        follower = asyncio.create_task(follow())
        await end(follower, clock)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await follower
