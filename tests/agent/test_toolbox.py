"""Calls always come to a result: whatever a tool does, however long it takes, whatever it returns."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import Tool, ToolContext, ToolResult, get_tool, tool
from coterie.agent.user_tools import load_user_tools
from coterie.errors import Refused
from tests.faults.harness import patience

SOON = timedelta(milliseconds=150)
LONG = timedelta(seconds=30)
ALL = ("*",)


def box_of(*functions: object, **options: Any) -> Toolbox:
    return Toolbox([made for function in functions if (made := get_tool(function))], **options)


async def call(box: Toolbox, name: str, ctx: ToolContext, deadline: timedelta = LONG, **arguments: Any) -> ToolResult:
    return await box.call(name, arguments, ctx, deadline, patterns=ALL)


def told(result: ToolResult) -> Any:
    return json.loads(result.text)


def error_of(result: ToolResult) -> str:
    assert not result.ok
    return f"{told(result)['error']}: {told(result)['message']}"


# Who reaches what


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
    ("patterns", "reached"),
    [
        (("*",), {"read_file", "write_file", "pay"}),
        (("*_file",), {"read_file", "write_file"}),
        (("read_*", "pay"), {"read_file", "pay"}),
        (("Pay", "[!p]ay", "pa"), set()),
        ((), set()),
    ],
)
async def test_an_agent_reaches_only_the_tools_its_list_names(
    ctx: ToolContext, patterns: tuple[str, ...], reached: set[str]
) -> None:
    """S22"""
    box = box_of(read_file, write_file, pay)
    assert {spec.name for spec in box.specs(patterns)} == reached
    arguments = {"read_file": {"path": "a"}, "write_file": {"path": "a"}, "pay": {}}
    for name, given in arguments.items():
        result = await box.call(name, given, ctx, LONG, patterns=patterns)
        assert result.ok == (name in reached)
        assert (box.find(name, patterns) is not None) == (name in reached)


async def test_a_tool_that_does_not_exist_is_an_error_with_the_one_that_was_probably_meant(ctx: ToolContext) -> None:
    result = await call(box_of(read_file), "read_fil", ctx)
    assert error_of(result) == 'unknown_tool: you have no tool "read_fil", did you mean read_file?'


def renamed(function: object, name: str) -> Tool:
    found = get_tool(function)
    assert found
    return replace(found, name=name, spec=structs.replace(found.spec, name=name))


async def test_of_two_tools_with_one_name_the_earlier_stays_and_the_other_is_reported(ctx: ToolContext) -> None:
    box = box_of(read_file)
    problems = box.replace_tools("mcp.files", [renamed(pay, "read_file"), renamed(pay, "files__pay")])
    assert [str(problem) for problem in problems] == [
        "mcp.files: the tool read_file is left out: there is one of that name"
    ]
    assert (await call(box, "read_file", ctx, path="a")).text == "content of a"
    assert (await call(box, "files__pay", ctx)).text == "paid"


def test_nobody_can_put_himself_in_the_place_of_send_message() -> None:
    box = box_of()
    assert box.replace_tools("tools.py", [renamed(pay, "send_message")])
    assert box.specs(ALL) == ()


def test_what_a_source_offers_anew_replaces_what_it_offered() -> None:
    box = box_of(read_file)
    box.replace_tools("mcp.files", [renamed(pay, "one"), renamed(pay, "two")])
    box.replace_tools("mcp.files", [renamed(pay, "two"), renamed(pay, "three")])
    assert [spec.name for spec in box.specs(ALL)] == ["read_file", "two", "three"]


# Arguments and results


async def test_a_bad_call_is_an_error_result_and_the_tool_does_not_run(ctx: ToolContext) -> None:
    ran = []

    @tool
    async def count(number: int) -> None:
        ran.append(number)

    result = await call(box_of(count), "count", ctx, number="many")
    assert error_of(result) == "bad_arguments: count was not called: number: expected int, got str"
    assert ran == []


async def test_async_tools_run_on_the_loop_and_sync_ones_off_it_both_with_the_context(ctx: ToolContext) -> None:
    @tool
    async def here(*, ctx: ToolContext) -> list[object]:
        return [ctx.idempotency_key, threading.current_thread() is threading.main_thread()]

    @tool
    def elsewhere(*, ctx: ToolContext) -> list[object]:
        return [ctx.idempotency_key, threading.current_thread() is threading.main_thread()]

    box = box_of(here, elsewhere)
    assert told(await call(box, "here", ctx)) == ["turn-1/0", True]
    assert told(await call(box, "elsewhere", ctx)) == ["turn-1/0", False]


@dataclass
class Weather:
    at: datetime
    degrees: float


def returning(value: object) -> Toolbox:
    @tool(name="give")
    async def give() -> object:
        return value

    return box_of(give)


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
async def test_a_returned_value_is_text_for_the_model(ctx: ToolContext, value: object, text: str) -> None:
    assert await call(returning(value), "give", ctx) == ToolResult(ok=True, text=text)


def cyclic() -> object:
    knot: list[object] = []
    knot.append(knot)
    return {"knot": knot}


class Unwilling:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "no_result: give: it returned NaN or an infinity, which JSON cannot represent"),
        ({"a": [math.inf]}, "NaN or an infinity"),
        (cyclic(), "contains itself, or is nested too deeply"),
        (object(), "it returned a object"),
        (Unwilling(), "it returned a Unwilling"),
        ({(1, 2): 3}, "which JSON cannot represent"),
        (open, "which JSON cannot represent"),
    ],
)
async def test_what_json_cannot_carry_is_an_error_result(ctx: ToolContext, value: object, words: str) -> None:
    """F43"""
    assert words in error_of(await call(returning(value), "give", ctx))


async def test_fifty_megabytes_are_kept_as_an_artifact_and_the_model_sees_both_ends(ctx: ToolContext) -> None:
    """F43"""
    text = "begin" + "x" * 50_000_000 + "end"
    result = await call(returning(text), "give", ctx)
    shown = told(result)
    assert result.ok and len(result.text) < 20_000
    assert shown["head"].startswith("begin") and shown["tail"].endswith("end") and shown["tooLong"] is True
    assert shown["artifactRef"] == result.artifact_ref and shown["size"] == len(text)
    assert (await ctx.artifacts.read(shown["artifactRef"])).decode() == text


async def test_a_long_result_that_comes_again_after_a_crash_is_the_same_artifact(ctx: ToolContext) -> None:
    box = returning(["y" * 40_000])
    first, again = await call(box, "give", ctx), await call(box, "give", ctx)
    other = await call(box, "give", replace(ctx, idempotency_key="turn-1/1"))
    assert first == again and first.artifact_ref != other.artifact_ref


@pytest.mark.parametrize(("size", "kept"), [(32 << 10, False), ((32 << 10) + 1, True)])
async def test_results_of_more_than_32_kib_are_kept_counted_in_bytes(ctx: ToolContext, size: int, kept: bool) -> None:
    result = await call(returning("é" * 1_000 + "x" * (size - 2_000)), "give", ctx)
    assert (result.artifact_ref is not None) == kept


async def test_bytes_are_an_artifact_described_by_their_content(ctx: ToolContext) -> None:
    """F43"""
    png = b"\x89PNG\r\n\x1a\n" + bytes(100)
    result = await call(returning(bytearray(png)), "give", ctx)
    assert result.ok and told(result)["mimeType"] == "image/png"
    assert await ctx.artifacts.read(told(result)["artifactRef"]) == png


async def test_what_is_too_large_even_for_an_artifact_still_comes_to_a_result(ctx: ToolContext) -> None:
    result = await call(returning("x" * 60_000_001), "give", ctx)
    assert result.ok and "larger than" in told(result)["notKept"] and told(result)["head"]
    assert "could not be stored" in error_of(await call(returning(bytes(60_000_001)), "give", ctx))


async def test_a_tool_may_return_its_own_result_and_the_cap_holds_for_it_too(ctx: ToolContext) -> None:
    assert (await call(returning(ToolResult(ok=False, text="no")), "give", ctx)) == ToolResult(ok=False, text="no")
    long = await call(returning(ToolResult(ok=False, text="x" * 40_000)), "give", ctx)
    assert not long.ok and long.artifact_ref


# What a tool raises


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even words")


RAISED = [
    (ValueError("no such city"), "tool_failed: fail failed: ValueError: no such city"),
    (BaseException("base"), "BaseException: base"),
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit(), "GeneratorExit"),
    (StopIteration(1), "StopIteration"),
    (TimeoutError("its own"), "tool_failed: fail failed: TimeoutError: its own"),
    (asyncio.CancelledError(), "cancelled"),
    (Mute(), "tool_failed: fail failed: Mute"),
    (ValueError("x" * 50_000_000), "tool_failed"),
    (ValueError("a\x00\ud800"), "ValueError: a\ufffd\ufffd"),
    (Refused("unknown_artifact", "there is none"), "unknown_artifact: there is none"),
]


@pytest.mark.parametrize(("error", "words"), RAISED, ids=lambda value: type(value).__name__)
async def test_whatever_an_async_tool_raises_is_an_error_result(
    ctx: ToolContext, error: BaseException, words: str
) -> None:
    """F42"""

    @tool
    async def fail() -> None:
        raise error

    result = await call(box_of(fail), "fail", ctx)
    assert words in error_of(result) and len(result.text) < 5_000


@pytest.mark.parametrize(("error", "words"), RAISED, ids=lambda value: type(value).__name__)
async def test_whatever_a_sync_tool_raises_is_an_error_result(
    ctx: ToolContext, error: BaseException, words: str
) -> None:
    """F42"""

    @tool
    def fail() -> None:
        raise error

    result = await call(box_of(fail), "fail", ctx)
    assert (words in error_of(result) or "CancelledError" in error_of(result)) and len(result.text) < 5_000


# Deadlines


async def test_an_async_tool_is_cancelled_at_its_deadline(ctx: ToolContext) -> None:
    """F41"""
    saw = []

    @tool
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            saw.append("cancelled")
            raise

    box = box_of(hang)
    result = await call(box, "hang", ctx, SOON)
    assert error_of(result).startswith("tool_timeout: hang did not end within 0.15 s and was stopped")
    assert saw == ["cancelled"] and box.abandoned_calls == 0


async def test_an_async_tool_that_ignores_its_cancellation_is_left_behind_and_counted(ctx: ToolContext) -> None:
    """F41"""
    let_go = asyncio.Event()

    @tool
    async def hang() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    box = box_of(hang, pay)
    assert "abandoned" in error_of(await call(box, "hang", ctx, SOON))
    assert box.abandoned_calls == 1
    assert (await call(box, "pay", ctx)).ok
    let_go.set()
    await until(lambda: box.abandoned_calls == 0)


async def test_closing_asks_what_was_left_behind_once_more(ctx: ToolContext) -> None:
    asked: list[str] = []

    @tool
    async def hang() -> None:
        while len(asked) < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                asked.append("to stop")

    box = box_of(hang)
    await call(box, "hang", ctx, SOON)
    assert box.abandoned_calls == 1
    await box.close()
    assert box.abandoned_calls == 0 and len(asked) == 2


async def test_a_thread_that_hangs_is_left_behind_and_counted_and_the_loop_never_stood_still(
    ctx: ToolContext,
) -> None:
    """F08, F41"""
    let_go = threading.Event()

    @tool
    def hang() -> None:
        while not let_go.wait(0.01):
            pass

    box = box_of(hang, pay)
    hanging = asyncio.create_task(call(box, "hang", ctx, SOON))
    assert (await call(box, "pay", ctx)).ok and not hanging.done()
    assert "abandoned" in error_of(await hanging)
    assert box.abandoned_calls == 1
    let_go.set()
    await until(lambda: box.abandoned_calls == 0)


async def test_when_too_many_calls_never_came_back_no_more_are_started_that_could_hang(ctx: ToolContext) -> None:
    """F41"""
    let_go = threading.Event()

    @tool
    def hang() -> None:
        let_go.wait()

    box = box_of(hang, pay, max_abandoned=2)
    await asyncio.gather(*(call(box, "hang", ctx, SOON) for _ in range(2)))
    assert error_of(await call(box, "hang", ctx, SOON)).startswith("tools_stuck: 2 earlier calls")
    assert box.abandoned_calls == 2
    let_go.set()
    await until(lambda: box.abandoned_calls == 0)
    assert (await call(box, "hang", ctx)).ok


async def test_a_tools_own_deadline_replaces_the_societys(ctx: ToolContext) -> None:
    @tool(seconds=0.1)
    async def hang() -> None:
        await asyncio.Event().wait()

    assert "within 0.1 s" in error_of(await call(box_of(hang), "hang", ctx, LONG))


async def test_cancelling_the_caller_ends_the_tool_and_passes_through(ctx: ToolContext) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(call(box_of(hang), "hang", ctx))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_thread_whose_caller_was_cancelled_is_counted_until_it_ends(ctx: ToolContext) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @tool
    def hang() -> None:
        begun.set()
        let_go.wait()

    box = box_of(hang)
    task = asyncio.create_task(call(box, "hang", ctx))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert box.abandoned_calls == 1
    let_go.set()
    await until(lambda: box.abandoned_calls == 0)


# Processes

PROCESS_TOOLS = '''
import asyncio, os, signal, sys, time
from dataclasses import dataclass
from coterie.agent.tools import ToolResult, tool


@dataclass
class Place:
    city: str


@tool(process=True)
def greet(place: Place, times: int = 1) -> dict:
    print("this is no result")
    os.write(1, b"neither is this\\n")
    me = (os.environ["COTERIE_AGENT_ID"], os.environ["COTERIE_IDEMPOTENCY_KEY"])
    return {"hello": [place.city] * times, "me": me, "apart": os.getpid() != os.getpgid(0)}


@tool(process=True)
async def greet_later() -> str:
    await asyncio.sleep(0)
    return "later"


@tool(process=True)
def end(how: str) -> object:
    match how:
        case "raise":
            raise ValueError("no such city")
        case "base":
            raise BaseException("base")
        case "system_exit":
            sys.exit(3)
        case "_exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "closed":
            os.closerange(0, 256)
            os._exit(4)
        case "failed":
            return ToolResult(ok=False, text="not today")


@tool(process=True)
def give(what: str) -> object:
    match what:
        case "bytes":
            return bytes(range(256))
        case "nan":
            return [float("nan")]
        case "50 MB":
            return "x" * 50_000_000
        case "70 MB":
            return "x" * 70_000_000
        case "surrogate":
            return "a\\ud800"


@tool(process=True)
def hang(witness: str) -> None:
    witness = os.open(witness, os.O_WRONLY)
    os.write(witness, b"up")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


@tool(process=True)
def daemonize(witness: str, wait: bool) -> str:
    """A daemon by the book: it leaves the process group, and holds on to every handle it was born with."""
    witness = os.open(witness, os.O_WRONLY)
    heard, said = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(witness, b"up")
            os.write(said, b"up")
            while True:
                time.sleep(1)
        os._exit(0)
    os.read(heard, 2)
    while wait:
        time.sleep(1)
    return "started"


@tool(process=True, memory_mb=200)
def blow_up() -> int:
    kept = []
    while True:
        kept.append(bytearray(10_000_000))
'''


@pytest.fixture
def processes(tmp_path: Path) -> Toolbox:
    (tmp_path / "tools.py").write_text(PROCESS_TOOLS)
    loaded = load_user_tools(tmp_path)
    assert loaded.problems == ()
    return Toolbox(loaded.tools)


class Witness:
    """A pipe with a name, held by whoever opened it for writing: it ends when all of them are gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    async def says(self) -> bytes:
        """What is written next; nothing, once nobody holds it any more."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._reader, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), 20)
            return os.read(self._reader, 100)
        finally:
            loop.remove_reader(self._reader)

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture
async def witness(tmp_path: Path) -> AsyncIterator[Witness]:
    made = Witness(tmp_path / "witness")
    yield made
    made.close()


async def test_a_process_tool_returns_what_it_returned_and_what_it_prints_is_no_part_of_it(
    processes: Toolbox, ctx: ToolContext
) -> None:
    result = await call(processes, "greet", ctx, place={"city": "Rome"}, times=2)
    assert told(result) == {"hello": ["Rome", "Rome"], "me": ["ada", "turn-1/0"], "apart": True}
    assert (await call(processes, "greet_later", ctx)).text == "later"


async def test_a_bad_call_starts_no_process(
    processes: Toolbox, ctx: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
    assert "bad_arguments" in error_of(await call(processes, "greet", ctx, place="Rome"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "tool_failed: end failed: ValueError: no such city"),
        ("base", "BaseException: base"),
        ("system_exit", "SystemExit: 3"),
        ("_exit", "no_result: end: its process ended with status 3 without a result"),
        ("kill", "its process was ended by SIGKILL without a result"),
        ("closed", "its process ended with status 4 without a result"),
    ],
)
async def test_however_a_process_ends_it_is_an_error_result(
    processes: Toolbox, ctx: ToolContext, how: str, words: str
) -> None:
    """F42"""
    assert words in error_of(await call(processes, "end", ctx, how=how))


async def test_a_process_tool_may_return_its_own_failure(processes: Toolbox, ctx: ToolContext) -> None:
    assert await call(processes, "end", ctx, how="failed") == ToolResult(ok=False, text="not today")


@pytest.mark.slow
async def test_what_a_process_returns_is_capped_and_kept_like_any_other_result(
    processes: Toolbox, ctx: ToolContext
) -> None:
    """F43"""
    raw = await call(processes, "give", ctx, what="bytes")
    assert await ctx.artifacts.read(told(raw)["artifactRef"]) == bytes(range(256))
    assert "NaN" in error_of(await call(processes, "give", ctx, what="nan"))
    assert "70,000,000 bytes, the most is" in error_of(await call(processes, "give", ctx, what="70 MB"))
    assert (await call(processes, "give", ctx, what="surrogate")).ok
    long = await call(processes, "give", replace(ctx, idempotency_key="k2"), what="50 MB")
    assert told(long)["size"] == 50_000_000 and len(long.text) < 20_000


@pytest.mark.slow
async def test_a_process_that_hangs_is_killed_at_its_deadline(
    processes: Toolbox, ctx: ToolContext, witness: Witness
) -> None:
    """F41"""
    hanging = asyncio.create_task(call(processes, "hang", ctx, timedelta(seconds=3), witness=witness.path))
    assert await witness.says() == b"up"
    assert error_of(await hanging).startswith("tool_timeout: hang did not end within 3 s and was killed. It may")
    assert await witness.says() == b"" and processes.abandoned_calls == 0


async def test_cancelling_the_caller_kills_the_process(processes: Toolbox, ctx: ToolContext, witness: Witness) -> None:
    hanging = asyncio.create_task(call(processes, "hang", ctx, witness=witness.path))
    assert await witness.says() == b"up"
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await witness.says() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a daemon that left its group cannot be found")
@pytest.mark.parametrize("wait", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_daemon_that_a_tool_forked_ends_with_the_call_and_no_handle_stays_open(
    processes: Toolbox, ctx: ToolContext, witness: Witness, wait: bool
) -> None:
    """F44"""
    await call(processes, "greet_later", ctx)
    before = open_handles()
    result = asyncio.create_task(
        call(processes, "daemonize", ctx, timedelta(seconds=3), witness=witness.path, wait=wait)
    )
    assert await witness.says() == b"up"
    assert ("was killed" if wait else "started") in (await result).text
    assert await witness.says() == b""
    assert open_handles() == before


def open_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_process_that_eats_all_memory_is_an_error_result(processes: Toolbox, ctx: ToolContext) -> None:
    """F09"""
    assert "MemoryError" in error_of(await call(processes, "blow_up", ctx))


RUNTIME = """
import asyncio, sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from coterie.agent.user_tools import load_user_tools
from coterie.agent.toolbox import Toolbox

ctx = SimpleNamespace(agent_id="ada", idempotency_key="k", artifacts=None)
box = Toolbox(load_user_tools(Path(sys.argv[1])).tools)
arguments = {"witness": sys.argv[2], "wait": True}
asyncio.run(box.call("daemonize", arguments, ctx, timedelta(seconds=60), patterns=["*"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a daemon that left its group cannot be found")
async def test_when_the_runtime_is_killed_its_tool_processes_and_their_daemons_die_too(
    processes: Toolbox, tmp_path: Path, witness: Witness
) -> None:
    """F07"""
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME, str(tmp_path), witness.path])
    assert await witness.says() == b"up"
    runtime.kill()
    runtime.wait()
    assert await witness.says() == b""


async def until(true: Callable[[], bool]) -> None:
    """What a thread has ended shows on the loop a moment later."""
    async with asyncio.timeout(patience(10)):
        while not true():
            await asyncio.sleep(0)
