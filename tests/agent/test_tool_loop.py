"""The owner's async tools run on an event loop of their own: one that blocks it stops nobody else."""

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
from coterie.agent.tools import OnLoop, OnToolLoop, Tool, ToolContext, ToolResult, get_tool, tool
from coterie.messages import Receipt
from coterie.testing import Calls, Says

from .stage import each, stage

SOON = timedelta(milliseconds=150)
LONG = timedelta(seconds=60)
QUICK = timedelta(milliseconds=200)


def as_owners(function: Callable[..., Awaitable[object]]) -> Tool:
    made = get_tool(function)
    assert made is not None and isinstance(made.run, OnLoop)
    return replace(made, run=OnToolLoop(made.run.function))


@pytest.fixture
async def make_box() -> AsyncIterator[Callable[..., Toolbox]]:
    boxes: list[Toolbox] = []

    def make(*functions: Callable[..., Awaitable[object]], **options: Any) -> Toolbox:
        boxes.append(Toolbox([as_owners(function) for function in functions], **options))
        return boxes[-1]

    yield make
    for box in boxes:
        await box.close()


async def call(box: Toolbox, name: str, ctx: ToolContext, deadline: timedelta = LONG, **arguments: Any) -> ToolResult:
    return await box.call(name, arguments, ctx, deadline, patterns=["*"])


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


class Block:
    """A tool that blocks its loop until the test lets it go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def tool(self, **options: Any) -> Callable[..., Awaitable[object]]:
        @tool(name="block", **options)
        async def block() -> str:
            self.begun.set()
            self.let_go.wait()
            return "let go"

        return block


@tool(effect="pure")
async def which_loop() -> int:
    return id(asyncio.get_running_loop())


async def test_all_calls_share_one_loop_in_another_thread(ctx: ToolContext, make_box: Callable[..., Toolbox]) -> None:
    clients: list[asyncio.Queue[str]] = []

    @tool
    async def connect() -> str:
        clients.append(asyncio.Queue())
        asyncio.get_running_loop().call_later(0.01, clients[0].put_nowait, "from the first call")
        return threading.current_thread().name

    @tool
    async def use() -> str:
        return await clients[0].get()

    box = make_box(connect, use)
    assert (await call(box, "connect", ctx)).text != threading.current_thread().name
    assert (await call(box, "use", ctx)).text == "from the first call"


async def test_a_tool_that_blocks_fails_at_its_deadline_and_the_society_goes_on(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    """F41"""
    block = Block()
    box = make_box(block.tool(effect="pure"))
    result = await call(box, "block", ctx, SOON)  # this test's own loop keeps the time, so it runs meanwhile
    assert block.begun.is_set() and not block.let_go.is_set()
    assert "tool_timeout" in result.text and "abandoned" in result.text and not result.is_outcome_unknown
    assert box.abandoned_calls == 1
    block.let_go.set()
    await until(lambda: box.abandoned_calls == 0)


async def test_an_unsafe_tool_that_blocks_past_its_deadline_may_have_happened(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    block = Block()
    result = await call(make_box(block.tool()), "block", ctx, SOON)
    assert result.is_outcome_unknown and json.loads(result.text)["status"] == "unknown"
    block.let_go.set()


async def test_a_blocked_loop_is_replaced_and_the_log_names_the_tool_and_its_agent(
    ctx: ToolContext, make_box: Callable[..., Toolbox], caplog: pytest.LogCaptureFixture
) -> None:
    block = Block()
    box = make_box(block.tool(), which_loop, blocked_after=QUICK)
    first = (await call(box, "which_loop", ctx)).text
    with caplog.at_level(logging.WARNING, logger="coterie"):
        blocked = asyncio.create_task(call(box, "block", ctx))
        await until(block.begun.is_set)
        waiting = [asyncio.create_task(call(box, "which_loop", ctx)) for _ in range(3)]
        others = {(await one).text for one in waiting}  # they end while the other one still blocks
    assert not blocked.done() and first not in others and len(others) == 1
    assert box.blocked_loops >= 1
    (words, *_) = [one.getMessage() for one in caplog.records if "blocks its event loop" in one.getMessage()]
    assert "block (called by ada)" in words and "self.let_go.wait()" in words
    block.let_go.set()
    assert (await blocked).text == "let go"


async def test_a_tool_that_has_blocked_once_has_a_loop_to_itself(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    blocks = [Block(), Block()]
    left = iter(blocks)

    @tool
    async def block() -> None:
        this = next(left)
        this.begun.set()
        this.let_go.wait()

    box = make_box(block, which_loop, blocked_after=QUICK)
    first = asyncio.create_task(call(box, "block", ctx))
    await until(lambda: box.blocked_loops == 1)
    shared = (await call(box, "which_loop", ctx)).text
    second = asyncio.create_task(call(box, "block", ctx))
    await until(blocks[1].begun.is_set)
    assert (await call(box, "which_loop", ctx)).text == shared
    for one in blocks:
        one.let_go.set()
    await asyncio.gather(first, second)


async def test_a_call_that_waits_behind_a_blocked_loop_and_is_given_up_never_begins(
    ctx: ToolContext, make_box: Callable[..., Toolbox]
) -> None:
    block, ran = Block(), threading.Event()

    @tool
    async def later() -> None:
        ran.set()

    box = make_box(block.tool(), later, which_loop)
    blocked = asyncio.create_task(call(box, "block", ctx))
    await until(block.begun.is_set)
    assert "tool_timeout" in (await call(box, "later", ctx, SOON)).text
    block.let_go.set()
    await blocked
    await call(box, "which_loop", ctx)
    assert not ran.is_set() and box.abandoned_calls == 0


async def test_cancelling_the_caller_reaches_the_tool(ctx: ToolContext, make_box: Callable[..., Toolbox]) -> None:
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
    await until(begun.is_set)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set() and box.abandoned_calls == 0


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
async def test_whatever_a_tool_raises_is_a_result_and_its_loop_goes_on(
    ctx: ToolContext, make_box: Callable[..., Toolbox], error: BaseException
) -> None:
    @tool
    async def fail() -> None:
        raise error

    box = make_box(fail, which_loop)
    before = (await call(box, "which_loop", ctx)).text
    assert "tool_failed" in (await call(box, "fail", ctx)).text
    assert (await call(box, "which_loop", ctx)).text == before


async def test_what_a_tool_is_given_works_from_its_loop(ctx: ToolContext, make_box: Callable[..., Toolbox]) -> None:
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
    told = {"opened": "one two", "read": "one two", "sent": "m1", "limit": ctx.artifacts.max_file_bytes}
    assert json.loads(result.text) == told
    assert sent == [("bob", {"text": "hi"}, {"delay_ms": 5})]


async def test_a_refusal_reaches_the_tool_as_the_same_error(ctx: ToolContext, make_box: Callable[..., Toolbox]) -> None:
    @tool
    async def look(*, ctx: ToolContext) -> None:
        await ctx.artifacts.describe("nothing")

    assert "unknown_artifact" in (await call(make_box(look), "look", ctx)).text


ASKED_BY: ContextVar[str] = ContextVar("asked_by", default="nobody")


async def test_a_tool_sees_the_context_of_its_call(ctx: ToolContext, make_box: Callable[..., Toolbox]) -> None:
    @tool
    async def note() -> str:
        return await asyncio.create_task(deeper())

    async def deeper() -> str:
        return ASKED_BY.get()

    box = make_box(note)
    for name in ("ada", "bob"):
        ASKED_BY.set(name)
        assert (await call(box, "note", ctx)).text == name


async def test_the_loop_of_the_society_is_watched_too(
    make_box: Callable[..., Toolbox],
) -> None:
    box = make_box(blocked_after=QUICK)
    box.watch_loop()
    said = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "event loop of the society is blocked" in record.getMessage():
                said.set()

    heard = Heard()
    logging.getLogger("coterie.agent.user_tools").addHandler(heard)
    try:
        await asyncio.sleep(0)
        assert said.wait(60)  # blocks this loop until the log says so
    finally:
        logging.getLogger("coterie.agent.user_tools").removeHandler(heard)


BLOCKING = """
import time
from coterie import tool
from tests.agent.test_tool_loop import Gate

@tool
async def block() -> str:
    "Blocks the event loop it runs on, until another agent has answered."
    Gate.begun.set()
    Gate.answered.wait()
    return "went on"
"""


class Gate:
    begun: threading.Event
    answered: threading.Event


async def test_an_agent_answers_while_the_tool_of_another_blocks_its_loop(tmp_path: Path) -> None:
    Gate.begun, Gate.answered = threading.Event(), threading.Event()
    async with stage(tmp_path) as here, asyncio.timeout(60):
        (tmp_path / "tools.py").write_text(BLOCKING)
        await here.society.reload()
        here.server.default = each(ada=[Says(calls=(Calls("block", {}),)), "ada is done"], bob=["bob is here"])
        await here.say("go", to="ada")
        await until(Gate.begun.is_set)
        await here.say("are you there?", to="bob")
        assert await here.texts() == ["bob is here"]
        Gate.answered.set()
        assert (await here.texts(2))[1] == "ada is done"
        assert [text for role, text in await here.history() if role == "tool"] == ["went on"]
