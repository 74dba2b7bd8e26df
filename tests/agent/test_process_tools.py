"""Tools in processes: results, errors, deadlines, and no process outlives its call."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext, ToolResult
from coterie.agent.user_tools import load_user_tools
from coterie.bus import MessageBus
from coterie.messages import Payload, Receipt
from coterie.store import Store
from tests.agent.tool_calls import LifePipe, call, content_of, error_of
from tests.engines import Engine

PROCESS_TOOLS = '''
import asyncio, os, signal, sys, time
from dataclasses import dataclass
from coterie.agent.tools import ToolContext, ToolResult, tool
from coterie.errors import CoterieError, Refused


@dataclass
class City:
    name: str


@tool(process=True)
def greet(city: City, times: int = 1) -> dict:
    print("output, not a result")
    os.write(1, b"output too\\n")
    caller = (os.environ["COTERIE_AGENT_ID"], os.environ["COTERIE_IDEMPOTENCY_KEY"])
    return {"hello": [city.name] * times, "caller": caller, "is_group_leader": os.getpid() == os.getpgid(0)}


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
            return ToolResult(ok=False, text="refused")


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
def hang(pipe: str) -> None:
    life = os.open(pipe, os.O_WRONLY)
    os.write(life, b"up")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


@tool(process=True)
def daemonize(pipe: str, wait: bool) -> str:
    """Fork twice and leave the session. The daemon inherits all descriptors."""
    life = os.open(pipe, os.O_WRONLY)
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(life, b"up")
            os.write(writable, b"up")
            while True:
                time.sleep(1)
        os._exit(0)
    os.read(readable, 2)
    while wait:
        time.sleep(1)
    return "started"


@tool(process=True)
def read_fields(*, ctx: ToolContext) -> object:
    can = ctx.capabilities
    return [ctx.agent_id, ctx.idempotency_key, sorted(can.input), sorted(can.output), can.inferred]


@tool(process=True)
async def use_context(ref: str, *, ctx: ToolContext) -> object:
    receipt = await ctx.send("bob", {"text": "from the process"}, quick_replies=["Yes"])
    made = await ctx.artifacts.put(b"made here", "made.txt", key="k")
    errors = []
    for failing in (ctx.send("nobody", {"text": "x"}), ctx.artifacts.describe("nothing")):
        try:
            await failing
        except Refused as refusal:
            errors.append(refusal.code)
    try:
        await ctx.router.fit()
    except CoterieError as error:
        errors.append(str(error))
    return {
        "messageId": receipt.message_id,
        "made": [made.filename, made.size],
        "read": len(await ctx.artifacts.read(ref)),
        "part": (b"".join([piece async for piece in ctx.artifacts.open(ref, 2, 5)])).decode(),
        "latest": [artifact.filename for artifact in await ctx.artifacts.latest()],
        "errors": errors,
    }


@tool(process=True)
async def copy(*, ctx: ToolContext) -> str:
    await ctx.report_progress(2, 5, "the second file")
    await ctx.report_progress(3)
    return "copied"


@tool(process=True)
async def break_protocol(*, ctx: ToolContext) -> object:
    import socket

    for fd in range(3, 64):
        try:
            socket.socket(fileno=os.dup(fd)).sendall(b"\\xff" * 64)
        except OSError:
            continue
    return "not reached" if await ctx.send("bob", {"text": "x"}) else ""


@tool(process=True, memory_mb=200)
def blow_up() -> int:
    kept = []
    while True:
        kept.append(bytearray(10_000_000))
'''


@pytest.fixture
def engine() -> Engine:
    """Processes do not depend on the engine: SQLite only."""
    return Engine()


@pytest.fixture
def processes(tmp_path: Path) -> Toolbox:
    (tmp_path / "tools.py").write_text(PROCESS_TOOLS)
    loaded = load_user_tools(tmp_path)
    assert loaded.problems == ()
    return Toolbox(loaded.tools)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[LifePipe]:
    made = LifePipe(tmp_path / "life")
    yield made
    made.close()


async def test_the_output_of_a_process_tool_is_not_part_of_its_result(processes: Toolbox, ctx: ToolContext) -> None:
    result = await call(processes, "greet", ctx, city={"name": "Rome"}, times=2)
    assert content_of(result) == {"hello": ["Rome", "Rome"], "caller": ["ada", "turn-1/0"], "is_group_leader": False}
    assert (await call(processes, "greet_later", ctx)).text == "later"


async def test_invalid_arguments_start_no_process(
    processes: Toolbox, ctx: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
    assert "bad_arguments" in error_of(await call(processes, "greet", ctx, city="Rome"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "tool_failed: end failed: ValueError: no such city"),
        ("base", "BaseException: base"),
        ("system_exit", "SystemExit: 3"),
        ("_exit", "no_result: end: its process ended with status 3 without a result"),
        ("kill", "its process was ended by SIGKILL without a result"),
        ("closed", "its process ended with status 4 without a result"),
    ],
)
async def test_a_process_that_ends_without_a_result_is_an_error_result(
    processes: Toolbox, ctx: ToolContext, how: str, message: str
) -> None:
    """F42"""
    assert message in error_of(await call(processes, "end", ctx, how=how))


async def test_a_process_tool_reads_the_fields_of_its_context(processes: Toolbox, ctx: ToolContext) -> None:
    can = ctx.capabilities
    expected = ["ada", "turn-1/0", sorted(can.input), sorted(can.output), can.inferred]

    assert content_of(await call(processes, "read_fields", ctx)) == expected


async def test_a_process_tool_sends_messages_and_uses_artifacts_through_its_context(
    processes: Toolbox, ctx: ToolContext, bus: MessageBus, store: Store
) -> None:
    async def send(to: str, payload: Payload, **options: Any) -> Receipt:
        return await bus.send(sender="ada", to=to, payload=payload, **options)

    large = await ctx.artifacts.put(b"0123456789" * 300_000, "large.txt")

    result = await call(processes, "use_context", replace(ctx, send=send), ref=large.ref)

    content = content_of(result)
    message = await store.message(content["messageId"])
    assert message is not None
    assert (message.sender, message.to, message.payload) == (
        "ada",
        "bob",
        {"text": "from the process", "quickReplies": ["Yes"]},
    )
    assert content["made"] == ["made.txt", 9]
    assert (content["read"], content["part"]) == (3_000_000, "234")
    assert set(content["latest"]) == {"large.txt", "made.txt"}
    assert content["errors"][:2] == ["unknown_recipient", "unknown_artifact"]
    assert "not available with process=True" in content["errors"][2]


async def test_a_process_tool_reports_its_progress(processes: Toolbox, ctx: ToolContext) -> None:
    reports: list[tuple[float, float | None, str | None]] = []

    async def report(progress: float, total: float | None = None, message: str | None = None) -> None:
        reports.append((progress, total, message))

    assert (await call(processes, "copy", replace(ctx, report_progress=report))).text == "copied"
    assert reports == [(2, 5, "the second file"), (3, None, None)]


async def test_an_error_of_a_call_to_the_runtime_reaches_the_process(processes: Toolbox, ctx: ToolContext) -> None:
    async def send(*_: object, **__: object) -> Receipt:
        raise OSError("the disk is gone")

    assert "the disk is gone" in error_of(await call(processes, "use_context", replace(ctx, send=send), ref="x"))


async def test_a_process_that_breaks_the_protocol_harms_only_its_own_call(processes: Toolbox, ctx: ToolContext) -> None:
    assert not (await call(processes, "break_protocol", ctx)).ok
    assert (await call(processes, "greet_later", ctx)).text == "later"


async def test_a_process_tool_may_return_a_failed_tool_result(processes: Toolbox, ctx: ToolContext) -> None:
    assert await call(processes, "end", ctx, how="failed") == ToolResult(ok=False, text="refused")


@pytest.mark.slow
async def test_the_size_limits_apply_to_results_of_processes(processes: Toolbox, ctx: ToolContext) -> None:
    """F43"""
    raw = await call(processes, "give", ctx, what="bytes")
    assert await ctx.artifacts.read(content_of(raw)["artifactRef"]) == bytes(range(256))
    assert "NaN" in error_of(await call(processes, "give", ctx, what="nan"))
    assert "70,000,000 bytes, the most is" in error_of(await call(processes, "give", ctx, what="70 MB"))
    assert (await call(processes, "give", ctx, what="surrogate")).ok
    long = await call(processes, "give", replace(ctx, idempotency_key="k2"), what="50 MB")
    assert content_of(long)["size"] == 50_000_000 and len(long.text) < 20_000


@pytest.mark.slow
async def test_a_process_that_hangs_is_killed_at_its_deadline(
    processes: Toolbox, ctx: ToolContext, life: LifePipe
) -> None:
    """F41"""
    hanging = asyncio.create_task(call(processes, "hang", ctx, timedelta(seconds=3), pipe=life.path))
    assert await life.read() == b"up"
    assert error_of(await hanging).startswith("tool_timeout: hang did not end within 3 s and was killed. It may")
    assert await life.read() == b"" and processes.abandoned_calls == 0


async def test_cancelling_the_caller_kills_the_process(processes: Toolbox, ctx: ToolContext, life: LifePipe) -> None:
    hanging = asyncio.create_task(call(processes, "hang", ctx, pipe=life.path))
    assert await life.read() == b"up"
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await life.read() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers, which find a daemon in another session")
@pytest.mark.parametrize("wait", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_daemon_forked_by_a_tool_is_killed_with_the_call_and_no_descriptor_stays_open(
    processes: Toolbox, ctx: ToolContext, life: LifePipe, wait: bool
) -> None:
    """F44"""
    await call(processes, "greet_later", ctx)
    before = count_descriptors()
    result = asyncio.create_task(call(processes, "daemonize", ctx, timedelta(seconds=3), pipe=life.path, wait=wait))
    assert await life.read() == b"up"
    assert ("was killed" if wait else "started") in (await result).text
    assert await life.read() == b""
    assert count_descriptors() == before


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_process_above_its_memory_limit_is_an_error_result(processes: Toolbox, ctx: ToolContext) -> None:
    """F09"""
    assert "MemoryError" in error_of(await call(processes, "blow_up", ctx))


RUNTIME = """
import asyncio, sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from coterie.agent.user_tools import load_user_tools
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import CallTimer

ctx = SimpleNamespace(agent_id="ada", idempotency_key="k", artifacts=None, timer=CallTimer())
box = Toolbox(load_user_tools(Path(sys.argv[1])).tools)
arguments = {"pipe": sys.argv[2], "wait": True}
asyncio.run(box.call("daemonize", arguments, ctx, timedelta(seconds=60), patterns=["*"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers, which find a daemon in another session")
async def test_killing_the_runtime_kills_its_tool_processes_and_their_daemons(
    processes: Toolbox, tmp_path: Path, life: LifePipe
) -> None:
    """F07"""
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME, str(tmp_path), life.path])
    assert await life.read() == b"up"
    runtime.kill()
    runtime.wait()
    assert await life.read() == b""
