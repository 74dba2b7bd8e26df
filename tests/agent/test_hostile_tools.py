"""Tools that raise SystemExit, KeyboardInterrupt or CancelledError in unusual places do not stop the society."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext, get_tool, tool
from coterie.agent.user_tools import load_user_tools
from coterie.errors import Refused
from coterie.testing import ModelServer
from coterie.testing.model_server import Calls, Says
from tests.agent.tool_calls import HANG_SECONDS
from tests.engines import Engine

EXCEPTIONS = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]


async def error_from(function: Any, ctx: ToolContext, **arguments: Any) -> dict[str, str]:
    made = get_tool(function)
    assert made
    result = await Toolbox([made]).call(made.name, arguments, ctx, patterns=["*"])
    assert not result.ok
    error: dict[str, str] = json.loads(result.text)
    return error


@pytest.fixture
def engine() -> Engine:
    """Tool calls do not depend on the engine: SQLite only."""
    return Engine()


@pytest.mark.parametrize("kind", EXCEPTIONS)
@pytest.mark.parametrize("in_thread", [True, False])
async def test_an_exception_whose_text_raises_is_reported_by_its_type(
    kind: type[BaseException], in_thread: bool, ctx: ToolContext
) -> None:
    class WithoutText(Exception):
        def __str__(self) -> str:
            raise kind

        __repr__ = __str__

    @tool
    def blocking() -> None:
        raise WithoutText

    @tool
    async def waiting() -> None:
        raise WithoutText

    error = await error_from(blocking if in_thread else waiting, ctx)
    assert error["error"] == "tool_failed" and error["message"].endswith("failed: WithoutText")


@pytest.mark.parametrize("kind", EXCEPTIONS)
async def test_an_argument_class_that_raises_is_an_error_result(kind: type[BaseException], ctx: ToolContext) -> None:
    @dataclass
    class Argument:
        name: str

        def __post_init__(self) -> None:
            raise kind("no")

    async def use(argument: Any) -> None: ...

    use.__annotations__["argument"] = Argument
    error = await error_from(tool(use), ctx, argument={"name": "x"})
    assert error["error"] == "tool_failed"


@pytest.mark.parametrize("kind", EXCEPTIONS)
async def test_a_result_that_raises_when_serialized_does_not_raise_from_the_call(
    kind: type[BaseException], ctx: ToolContext
) -> None:
    class WithoutText(ValueError):
        def __str__(self) -> str:
            raise kind

    class RaisingDict(dict[str, Any]):
        def items(self) -> Any:
            raise kind("no")

        def __iter__(self) -> Any:
            raise kind("no")

    class WithoutClass:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise WithoutText

    values: list[Any] = [RaisingDict(a=1), [RaisingDict(a=1)], WithoutClass(), {"a": WithoutClass()}]

    @tool
    async def give() -> Any:
        return values.pop()

    made = get_tool(give)
    assert made
    while values:
        await Toolbox([made]).call("give", {}, ctx, patterns=["*"])  # raises nothing


async def test_a_refused_exception_without_its_attributes_is_an_error_result(ctx: ToolContext) -> None:
    class Incomplete(Refused):
        def __init__(self) -> None: ...

    @tool
    async def fail() -> None:
        raise Incomplete

    assert (await error_from(fail, ctx))["error"] == "tool_failed"


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt\n",
        "raise SystemExit(3)\n",
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit\nraise E\n",
        "class E(Exception):\n    def __str__(self):\n        raise KeyboardInterrupt\nraise E\n",
        "class E(SyntaxError):\n    msg = 3\nraise E\n",
        "class C:\n    @property\n    def __class__(self):\n        raise SystemExit\nx = C()\n",
    ],
)
def test_a_tools_file_that_exits_on_import_is_a_problem_and_the_others_are_loaded(text: str, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools.py").write_text(text)
    good = "from coterie import tool\n\n@tool\nasync def good() -> str:\n    return 'good'\n"
    (tmp_path / "tools/good.py").write_text(good)

    loaded = load_user_tools(tmp_path)

    assert [tool.name for tool in loaded.tools] == ["good"]
    assert [problem.location.partition(":")[0] for problem in loaded.problems] == ["tools.py"]


async def test_a_society_survives_a_tools_file_and_a_tool_that_raise_exits(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "tools/bad.py").write_text(
        "from coterie import tool\n\n"
        "class WithoutText(Exception):\n    def __str__(self):\n        raise SystemExit\n\n"
        "@tool\nasync def fail() -> str:\n    raise WithoutText\n"
    )
    (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
    async with ModelServer() as server:
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
        server.script(Says(calls=(Calls("fail", {}),)), Says("still running"))
        async with Society.open(tmp_path) as society, asyncio.timeout(HANG_SECONDS):
            await society.send(to="ada", text="go")
            assert (await anext(society.inbox())).payload["text"] == "still running"
            await society.reload()
        assert "fail failed: WithoutText" in json.dumps(server.requests[1].body)


SUBTASKS = """
import asyncio
from coterie import tool

async def leave(kind):
    raise kind("no")

@tool
async def leave_in_a_task() -> str:
    "Wait for a task that exits."
    try:
        await asyncio.gather(leave(SystemExit), leave(KeyboardInterrupt))
    except BaseException as error:
        return type(error).__name__

@tool
async def greet() -> str:
    "Say hello."
    return "hello"
"""


async def test_async_tools_still_run_after_a_task_of_one_of_them_has_raised_an_exit(
    tmp_path: Path, ctx: ToolContext
) -> None:
    (tmp_path / "tools.py").write_text(SUBTASKS)
    toolbox = Toolbox(load_user_tools(tmp_path).tools)
    async with asyncio.timeout(HANG_SECONDS):
        left = await toolbox.call("leave_in_a_task", {}, ctx, timedelta(seconds=5), patterns=["*"])
        greeted = await toolbox.call("greet", {}, ctx, patterns=["*"])
    await toolbox.close()

    assert (left.text, greeted.text) == ("SystemExit", "hello")
