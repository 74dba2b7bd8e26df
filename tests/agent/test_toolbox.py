"""Toolbox: every call gives a result, also if the tool hangs, raises or returns an unusual value."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
from msgspec import structs

from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import Tool, ToolContext, ToolResult, get_tool, tool
from coterie.errors import Refused
from tests.agent.tool_calls import LONG, SOON, call, content_of, error_of, toolbox_of, wait_until
from tests.engines import Engine


@pytest.fixture
def engine() -> Engine:
    """Tool calls do not depend on the engine: SQLite only."""
    return Engine()


# Access


@tool(effect="pure")
async def read_file(path: str) -> str:
    return f"content of {path}"


@tool
def write_file(path: str) -> str:
    return f"wrote {path}"


@tool(approval=True)
async def pay() -> str:
    return "paid"


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [
        (("*",), {"read_file", "write_file", "pay"}),
        (("*_file",), {"read_file", "write_file"}),
        (("read_*", "pay"), {"read_file", "pay"}),
        (("Pay", "[!p]ay", "pa"), set()),
        ((), set()),
    ],
)
async def test_an_agent_can_call_only_the_tools_in_its_list(
    ctx: ToolContext, patterns: tuple[str, ...], allowed: set[str]
) -> None:
    """S22"""
    box = toolbox_of(read_file, write_file, pay)
    assert {spec.name for spec in box.specs(patterns)} == allowed
    arguments = {"read_file": {"path": "a"}, "write_file": {"path": "a"}, "pay": {}}
    for name, given in arguments.items():
        result = await box.call(name, given, ctx, LONG, patterns=patterns)
        assert result.ok == (name in allowed)
        assert (box.find(name, patterns) is not None) == (name in allowed)


async def test_an_unknown_tool_is_an_error_that_suggests_a_similar_name(ctx: ToolContext) -> None:
    result = await call(toolbox_of(read_file), "read_fil", ctx)
    assert error_of(result) == 'unknown_tool: you have no tool "read_fil", did you mean read_file?'


def renamed(function: object, name: str) -> Tool:
    found = get_tool(function)
    assert found
    return replace(found, name=name, spec=structs.replace(found.spec, name=name))


async def test_a_tool_with_a_name_in_use_is_left_out_and_reported(ctx: ToolContext) -> None:
    box = toolbox_of(read_file)
    problems = box.replace_tools("mcp.files", [renamed(pay, "read_file"), renamed(pay, "files__pay")])
    assert [str(problem) for problem in problems] == [
        "mcp.files: the tool read_file is left out: there is one of that name"
    ]
    assert (await call(box, "read_file", ctx, path="a")).text == "content of a"
    assert (await call(box, "files__pay", ctx)).text == "paid"


def test_send_message_cannot_be_replaced() -> None:
    box = toolbox_of()
    assert box.replace_tools("tools.py", [renamed(pay, "send_message")])
    assert box.specs(["*"]) == ()


def test_new_tools_of_a_source_replace_its_old_tools() -> None:
    box = toolbox_of(read_file)
    box.replace_tools("mcp.files", [renamed(pay, "one"), renamed(pay, "two")])
    box.replace_tools("mcp.files", [renamed(pay, "two"), renamed(pay, "three")])
    assert [spec.name for spec in box.specs(["*"])] == ["read_file", "two", "three"]


# Arguments and results


async def test_invalid_arguments_are_an_error_result_and_the_tool_does_not_run(ctx: ToolContext) -> None:
    ran = []

    @tool
    async def count(number: int) -> None:
        ran.append(number)

    result = await call(toolbox_of(count), "count", ctx, number="many")
    assert error_of(result) == "bad_arguments: count was not called: number: expected int, got str"
    assert ran == []


async def test_async_tools_run_on_the_loop_and_sync_tools_in_a_thread(ctx: ToolContext) -> None:
    @tool
    async def on_loop(*, ctx: ToolContext) -> list[object]:
        return [ctx.idempotency_key, threading.current_thread() is threading.main_thread()]

    @tool
    def in_thread(*, ctx: ToolContext) -> list[object]:
        return [ctx.idempotency_key, threading.current_thread() is threading.main_thread()]

    box = toolbox_of(on_loop, in_thread)
    assert content_of(await call(box, "on_loop", ctx)) == ["turn-1/0", True]
    assert content_of(await call(box, "in_thread", ctx)) == ["turn-1/0", False]


@dataclass
class Weather:
    at: datetime
    degrees: float


def returning(value: object) -> Toolbox:
    @tool(name="give")
    async def give() -> object:
        return value

    return toolbox_of(give)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain words", "plain words"),
        ({"a": [1, None, "é"]}, '{"a": [1, null, "é"]}'),
        (Weather(datetime(2030, 1, 1, tzinfo=UTC), 1.5), '{"at": "2030-01-01T00:00:00Z", "degrees": 1.5}'),
        (None, "null"),
        ("", '""'),
        (2**70, str(2**70)),
        ("a\x00b\ud800c", "a\ufffdb\ufffdc"),
        ({"k\x00": "\udfff"}, '{"k\\u0000": "\ufffd"}'),
    ],
)
async def test_a_returned_value_is_rendered_as_text(ctx: ToolContext, value: object, text: str) -> None:
    assert await call(returning(value), "give", ctx) == ToolResult(ok=True, text=text)


def cyclic() -> object:
    cycle: list[object] = []
    cycle.append(cycle)
    return {"cycle": cycle}


class WithoutRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "no_result: give: it returned NaN or an infinity, which JSON cannot represent"),
        ({"a": [math.inf]}, "NaN or an infinity"),
        (cyclic(), "contains itself, or is nested too deeply"),
        (object(), "it returned a object"),
        (WithoutRepr(), "it returned a WithoutRepr"),
        ({(1, 2): 3}, "which JSON cannot represent"),
        (open, "which JSON cannot represent"),
    ],
)
async def test_a_value_that_json_cannot_represent_is_an_error_result(
    ctx: ToolContext, value: object, message: str
) -> None:
    """F43"""
    assert message in error_of(await call(returning(value), "give", ctx))


async def test_a_result_of_50_mb_is_stored_as_an_artifact_and_shown_with_its_head_and_tail(ctx: ToolContext) -> None:
    """F43"""
    text = "begin" + "x" * 50_000_000 + "end"
    result = await call(returning(text), "give", ctx)
    shown = content_of(result)
    assert result.ok and len(result.text) < 20_000
    assert shown["head"].startswith("begin") and shown["tail"].endswith("end") and shown["tooLong"] is True
    assert shown["artifactRef"] == result.artifact_ref and shown["size"] == len(text)
    assert (await ctx.artifacts.read(shown["artifactRef"])).decode() == text


async def test_a_long_result_of_a_repeated_call_is_the_same_artifact(ctx: ToolContext) -> None:
    box = returning(["y" * 40_000])
    first, again = await call(box, "give", ctx), await call(box, "give", ctx)
    other = await call(box, "give", replace(ctx, idempotency_key="turn-1/1"))
    assert first == again and first.artifact_ref != other.artifact_ref


@pytest.mark.parametrize(("size", "kept"), [(32 << 10, False), ((32 << 10) + 1, True)])
async def test_results_above_32_kib_in_utf_8_are_stored_as_artifacts(ctx: ToolContext, size: int, kept: bool) -> None:
    result = await call(returning("é" * 1_000 + "x" * (size - 2_000)), "give", ctx)
    assert (result.artifact_ref is not None) == kept


async def test_returned_bytes_are_stored_as_an_artifact_with_the_detected_type(ctx: ToolContext) -> None:
    """F43"""
    png = b"\x89PNG\r\n\x1a\n" + bytes(100)
    result = await call(returning(bytearray(png)), "give", ctx)
    assert result.ok and content_of(result)["mimeType"] == "image/png"
    assert await ctx.artifacts.read(content_of(result)["artifactRef"]) == png


async def test_a_result_larger_than_an_artifact_may_be_is_still_a_result(ctx: ToolContext) -> None:
    result = await call(returning("x" * 60_000_001), "give", ctx)
    assert result.ok and "larger than" in content_of(result)["notKept"] and content_of(result)["head"]
    assert "could not be stored" in error_of(await call(returning(bytes(60_000_001)), "give", ctx))


async def test_a_tool_may_return_a_tool_result_and_the_size_limit_applies_to_it(ctx: ToolContext) -> None:
    assert (await call(returning(ToolResult(ok=False, text="no")), "give", ctx)) == ToolResult(ok=False, text="no")
    long = await call(returning(ToolResult(ok=False, text="x" * 40_000)), "give", ctx)
    assert not long.ok and long.artifact_ref


# Exceptions


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


RAISED = [
    (ValueError("no such city"), "tool_failed: fail failed: ValueError: no such city"),
    (BaseException("base"), "BaseException: base"),
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit(), "GeneratorExit"),
    (StopIteration(1), "StopIteration"),
    (TimeoutError("its own"), "tool_failed: fail failed: TimeoutError: its own"),
    (asyncio.CancelledError(), "cancelled"),
    (WithoutText(), "tool_failed: fail failed: WithoutText"),
    (ValueError("x" * 50_000_000), "tool_failed"),
    (ValueError("a\x00\ud800"), "ValueError: a\ufffd\ufffd"),
    (Refused("unknown_artifact", "there is none"), "unknown_artifact: there is none"),
]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(("error", "message"), RAISED, ids=lambda value: type(value).__name__)
async def test_any_exception_of_a_tool_is_an_error_result(
    ctx: ToolContext, error: BaseException, message: str, is_async: bool
) -> None:
    """F42"""

    @tool(name="fail")
    async def fail_on_loop() -> None:
        raise error

    @tool(name="fail")
    def fail_in_thread() -> None:
        raise error

    result = await call(toolbox_of(fail_on_loop if is_async else fail_in_thread), "fail", ctx)
    if isinstance(error, asyncio.CancelledError) and not is_async:
        message = "CancelledError"
    assert message in error_of(result) and len(result.text) < 5_000


# Deadlines


async def test_an_async_tool_is_cancelled_at_its_deadline(ctx: ToolContext) -> None:
    """F41"""
    caught = []

    @tool
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            caught.append("cancelled")
            raise

    box = toolbox_of(hang)
    result = await call(box, "hang", ctx, SOON)
    assert error_of(result).startswith("tool_timeout: hang did not end within 0.15 s and was stopped")
    assert caught == ["cancelled"] and box.abandoned_calls == 0


async def test_an_async_tool_that_ignores_its_cancellation_is_abandoned_and_counted(ctx: ToolContext) -> None:
    """F41"""
    may_end = asyncio.Event()

    @tool
    async def hang() -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    box = toolbox_of(hang, pay)
    assert "abandoned" in error_of(await call(box, "hang", ctx, SOON))
    assert box.abandoned_calls == 1
    assert (await call(box, "pay", ctx)).ok
    may_end.set()
    await wait_until(lambda: box.abandoned_calls == 0)


async def test_closing_cancels_abandoned_calls_again(ctx: ToolContext) -> None:
    cancellations = 0

    @tool
    async def hang() -> None:
        nonlocal cancellations
        while cancellations < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancellations += 1

    box = toolbox_of(hang)
    await call(box, "hang", ctx, SOON)
    assert box.abandoned_calls == 1
    await box.close()
    assert box.abandoned_calls == 0 and cancellations == 2


async def test_a_thread_that_hangs_is_abandoned_and_counted_and_does_not_block_the_loop(
    ctx: ToolContext,
) -> None:
    """F08, F41"""
    may_end = threading.Event()

    @tool
    def hang() -> None:
        while not may_end.wait(0.01):
            pass

    box = toolbox_of(hang, pay)
    hanging = asyncio.create_task(call(box, "hang", ctx, SOON))
    assert (await call(box, "pay", ctx)).ok and not hanging.done()
    assert "abandoned" in error_of(await hanging)
    assert box.abandoned_calls == 1
    may_end.set()
    await wait_until(lambda: box.abandoned_calls == 0)


async def test_no_thread_starts_while_too_many_calls_are_abandoned(ctx: ToolContext) -> None:
    """F41"""
    may_end = threading.Event()

    @tool
    def hang() -> None:
        may_end.wait()

    box = toolbox_of(hang, pay, max_abandoned=2)
    await asyncio.gather(*(call(box, "hang", ctx, SOON) for _ in range(2)))
    assert error_of(await call(box, "hang", ctx, SOON)).startswith("tools_stuck: 2 earlier calls")
    assert box.abandoned_calls == 2
    may_end.set()
    await wait_until(lambda: box.abandoned_calls == 0)
    assert (await call(box, "hang", ctx)).ok


async def test_the_deadline_of_a_tool_replaces_the_default(ctx: ToolContext) -> None:
    @tool(seconds=0.1)
    async def hang() -> None:
        await asyncio.Event().wait()

    assert "within 0.1 s" in error_of(await call(toolbox_of(hang), "hang", ctx, LONG))


async def test_cancelling_the_caller_cancels_the_tool(ctx: ToolContext) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(call(toolbox_of(hang), "hang", ctx))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_thread_whose_caller_was_cancelled_is_counted_until_it_ends(ctx: ToolContext) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @tool
    def hang() -> None:
        begun.set()
        may_end.wait()

    box = toolbox_of(hang)
    task = asyncio.create_task(call(box, "hang", ctx))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert box.abandoned_calls == 1
    may_end.set()
    await wait_until(lambda: box.abandoned_calls == 0)
