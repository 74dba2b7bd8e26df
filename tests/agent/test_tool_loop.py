"""Async tools of `tools.py` run on their own event loop, so that a blocking tool does not block the society."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import OnLoop, OnToolLoop, Tool, ToolContext, get_tool, tool
from coterie.messages import Receipt
from coterie.testing import Calls, Says
from tests.engines import Engine

from .stage import each, stage
from .tool_calls import HANG_SECONDS, SOON, call, wait_until

BLOCKED_AFTER = timedelta(milliseconds=200)


@pytest.fixture
def engine() -> Engine:
    """Tool loops do not depend on the engine: SQLite only."""
    return Engine()


def on_tool_loop(function: Callable[..., Awaitable[object]]) -> Tool:
    made = get_tool(function)
    assert made is not None and isinstance(made.run, OnLoop)
    return replace(made, run=OnToolLoop(made.run.function))


@pytest.fixture
async def make_box() -> AsyncIterator[Callable[..., Toolbox]]:
    boxes: list[Toolbox] = []

    def make(*functions: Callable[..., Awaitable[object]], **options: Any) -> Toolbox:
        boxes.append(Toolbox([on_tool_loop(function) for function in functions], **options))
        return boxes[-1]

    yield make
    for box in boxes:
        await box.close()


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, HANG_SECONDS)


class Block:
    """A tool that blocks its loop until the test sets `may_end`."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def tool(self, **options: Any) -> Callable[..., Awaitable[object]]:
        @tool(name="block", **options)
        async def block() -> str:
            self.begun.set()
            self.may_end.wait()
            return "ended"

        return block


@tool(effect="pure")
async def which_loop() -> int:
    return id(asyncio.get_running_loop())


async def test_all_calls_share_one_loop_in_another_thread(ctx: ToolContext, make_box: Callable[..., Toolbox]) -> None:
    clients: list[asyncio.Queue[str]] = []

    @tool
    async def connect() -> str:
        clients.append(asyncio.Queue())
        asyncio.get_running_loop().call_soon(clients[0].put_nowait, "from the first call")
        return threading.current_thread().name

    @tool
    async def use() -> str:
        return await clients[0].get()

    box = make_box(connect, use)
    assert (await call(box, "connect", ctx)).text != threading.current_thread().name
    assert (await call(box, "use", ctx)).text == "from the first call"


async def test_a_tool_that_blocks_its_loop_fails_at_its_deadline(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    """F41"""
    block = Block()
    box = make_box(block.tool(effect="pure"))
    result = await call(box, "block", ctx, SOON)  # the deadline runs on this loop, which is not blocked
    assert block.begun.is_set() and not block.may_end.is_set()
    assert "tool_timeout" in result.text and "abandoned" in result.text and not result.is_outcome_unknown
    assert box.abandoned_calls == 1
    block.may_end.set()
    await wait_until(lambda: box.abandoned_calls == 0)


async def test_an_unsafe_tool_that_blocks_past_its_deadline_has_an_unknown_outcome(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    block = Block()
    result = await call(make_box(block.tool()), "block", ctx, SOON)
    assert result.is_outcome_unknown and json.loads(result.text)["status"] == "unknown"
    block.may_end.set()


async def test_a_blocked_loop_is_replaced_and_the_log_names_the_tool_and_its_agent(
    ctx: ToolContext, make_box: Callable[..., Toolbox], caplog: pytest.LogCaptureFixture
) -> None:
    block = Block()
    box = make_box(block.tool(), which_loop, blocked_after=BLOCKED_AFTER)
    first = (await call(box, "which_loop", ctx)).text
    with caplog.at_level(logging.WARNING, logger="coterie"):
        blocked = asyncio.create_task(call(box, "block", ctx))
        await wait_for(block.begun)
        waiting = [asyncio.create_task(call(box, "which_loop", ctx)) for _ in range(3)]
        others = {(await one).text for one in waiting}  # they end while the first call still blocks
    assert not blocked.done() and first not in others and len(others) == 1
    assert box.blocked_loops >= 1
    (warning, *_) = [one.getMessage() for one in caplog.records if "blocks its event loop" in one.getMessage()]
    assert "block (called by ada)" in warning and "self.may_end.wait()" in warning
    block.may_end.set()
    assert (await blocked).text == "ended"


async def test_a_tool_that_has_blocked_a_loop_gets_its_own_loop(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    blocks = [Block(), Block()]
    left = iter(blocks)

    @tool
    async def block() -> None:
        this = next(left)
        this.begun.set()
        this.may_end.wait()

    box = make_box(block, which_loop, blocked_after=BLOCKED_AFTER)
    first = asyncio.create_task(call(box, "block", ctx))
    await wait_until(lambda: box.blocked_loops == 1)
    shared = (await call(box, "which_loop", ctx)).text
    second = asyncio.create_task(call(box, "block", ctx))
    await wait_for(blocks[1].begun)
    assert (await call(box, "which_loop", ctx)).text == shared
    for one in blocks:
        one.may_end.set()
    await asyncio.gather(first, second)


async def test_a_call_that_times_out_behind_a_blocked_loop_never_starts(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    block, ran = Block(), threading.Event()

    @tool
    async def later() -> None:
        ran.set()

    box = make_box(block.tool(), later, which_loop)
    blocked = asyncio.create_task(call(box, "block", ctx))
    await wait_for(block.begun)
    assert "tool_timeout" in (await call(box, "later", ctx, SOON)).text
    block.may_end.set()
    await blocked
    await call(box, "which_loop", ctx)
    assert not ran.is_set() and box.abandoned_calls == 0


async def test_cancelling_the_caller_cancels_the_tool_on_its_loop(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    begun, ended = threading.Event(), threading.Event()

    @tool
    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    box = make_box(hang)
    calling = asyncio.create_task(call(box, "hang", ctx))
    await wait_for(begun)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set() and box.abandoned_calls == 0


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
async def test_an_exception_of_a_tool_is_a_result_and_does_not_end_its_loop(
    ctx: ToolContext, make_box: Callable[..., Toolbox], error: BaseException
) -> None:
    @tool
    async def fail() -> None:
        raise error

    box = make_box(fail, which_loop)
    before = (await call(box, "which_loop", ctx)).text
    assert "tool_failed" in (await call(box, "fail", ctx)).text
    assert (await call(box, "which_loop", ctx)).text == before


async def test_the_tool_context_works_on_the_tool_loop(ctx: ToolContext, make_box: Callable[..., Toolbox]) -> None:
    home, sent = asyncio.get_running_loop(), []

    async def send(to: str, payload: Any, **more: Any) -> Receipt:
        assert asyncio.get_running_loop() is home
        sent.append((to, payload, more))
        return Receipt(message_id="m1", state="pending")

    @tool
    async def use(*, ctx: ToolContext) -> dict[str, Any]:
        here = asyncio.get_running_loop()
        assert here is not home

        async def pieces() -> AsyncIterator[bytes]:
            for piece in (b"one ", b"two"):
                assert asyncio.get_running_loop() is here
                await asyncio.sleep(0)
                yield piece

        kept = await ctx.artifacts.put(pieces(), "a.txt")
        opened = b"".join([piece async for piece in ctx.artifacts.open(kept.ref)])
        read = await ctx.artifacts.read(kept.ref)
        receipt = await ctx.send("bob", {"text": "hi"}, delay_ms=5)
        return {
            "opened": opened.decode(),
            "read": read.decode(),
            "sent": receipt.message_id,
            "limit": ctx.artifacts.max_file_bytes,
        }

    result = await call(make_box(use), "use", replace(ctx, send=send))
    expected = {"opened": "one two", "read": "one two", "sent": "m1", "limit": ctx.artifacts.max_file_bytes}
    assert json.loads(result.text) == expected
    assert sent == [("bob", {"text": "hi"}, {"delay_ms": 5})]


async def test_a_refusal_is_raised_on_the_tool_loop_with_the_same_code(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    @tool
    async def look(*, ctx: ToolContext) -> None:
        await ctx.artifacts.describe("nothing")

    assert "unknown_artifact" in (await call(make_box(look), "look", ctx)).text


ASKED_BY: ContextVar[str] = ContextVar("asked_by", default="unset")


async def test_context_variables_of_the_caller_are_visible_to_the_tool(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    @tool
    async def note() -> str:
        return await asyncio.create_task(deeper())

    async def deeper() -> str:
        return ASKED_BY.get()

    box = make_box(note)
    for name in ("ada", "bob"):
        ASKED_BY.set(name)
        assert (await call(box, "note", ctx)).text == name


async def test_a_blocked_loop_of_the_society_is_logged(make_box: Callable[..., Toolbox]) -> None:
    box = make_box(blocked_after=BLOCKED_AFTER)
    box.watch_loop()
    logged = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "event loop of the society is blocked" in record.getMessage():
                logged.set()

    handler = Handler()
    logging.getLogger("coterie.agent.user_tools").addHandler(handler)
    try:
        await asyncio.sleep(0)
        assert logged.wait(HANG_SECONDS)  # blocks this loop until the watcher logs it
    finally:
        logging.getLogger("coterie.agent.user_tools").removeHandler(handler)


BLOCKING = """
import time
from coterie import tool
from tests.agent.test_tool_loop import Gate

@tool
async def block() -> str:
    "Block the event loop until another agent has answered."
    Gate.begun.set()
    Gate.answered.wait()
    return "unblocked"
"""


class Gate:
    begun: threading.Event
    answered: threading.Event


async def test_an_agent_answers_while_the_tool_of_another_agent_blocks(tmp_path: Path) -> None:
    Gate.begun, Gate.answered = threading.Event(), threading.Event()
    async with stage(tmp_path) as here, asyncio.timeout(HANG_SECONDS):
        (tmp_path / "tools.py").write_text(BLOCKING)
        await here.society.reload()
        here.server.default = each(ada=[Says(calls=(Calls("block", {}),)), "ada is done"], bob=["bob is here"])
        await here.say("go", to="ada")
        await wait_for(Gate.begun)
        await here.say("are you there?", to="bob")
        assert await here.texts() == ["bob is here"]
        Gate.answered.set()
        assert (await here.texts(2))[1] == "ada is done"
        assert [text for role, text in await here.history() if role == "tool"] == ["unblocked"]
