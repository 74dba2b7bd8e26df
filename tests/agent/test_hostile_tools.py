"""An owner's code that raises SystemExit or KeyboardInterrupt where nobody expects it: the society goes on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext, get_tool, tool
from coterie.agent.user_tools import load_user_tools
from coterie.errors import Refused
from coterie.testing import ModelServer
from coterie.testing.replies import Calls, Says
from tests.faults.harness import patience

EXITS = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]


async def error_from(function: Any, ctx: ToolContext, **arguments: Any) -> dict[str, str]:
    made = get_tool(function)
    assert made
    result = await Toolbox([made]).call(made.name, arguments, ctx, patterns=["*"])
    assert not result.ok
    told: dict[str, str] = json.loads(result.text)
    return told


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("in_thread", [True, False])
async def test_an_exception_whose_words_raise_is_told_by_its_type(
    kind: type[BaseException], in_thread: bool, ctx: ToolContext
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise kind

        __repr__ = __str__

    @tool
    def blocking() -> None:
        raise Mute

    @tool
    async def waiting() -> None:
        raise Mute

    told = await error_from(blocking if in_thread else waiting, ctx)
    assert told["error"] == "tool_failed" and told["message"].endswith("failed: Mute")


@pytest.mark.parametrize("kind", EXITS)
async def test_arguments_whose_construction_raises_are_an_error_result(
    kind: type[BaseException], ctx: ToolContext
) -> None:
    @dataclass
    class Place:
        name: str

        def __post_init__(self) -> None:
            raise kind("no")

    async def go(place: Any) -> None: ...

    go.__annotations__["place"] = Place
    told = await error_from(tool(go), ctx, place={"name": "x"})
    assert told["error"] == "tool_failed"


@pytest.mark.parametrize("kind", EXITS)
async def test_a_result_that_raises_while_it_is_read_is_an_error_result(
    kind: type[BaseException], ctx: ToolContext
) -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise kind

    class Trap(dict[str, Any]):
        def items(self) -> Any:
            raise kind("no")

        def __iter__(self) -> Any:
            raise kind("no")

    class Odd:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise Mute

    values: list[Any] = [Trap(a=1), [Trap(a=1)], Odd(), {"a": Odd()}]

    @tool
    async def give() -> Any:
        return values.pop()

    made = get_tool(give)
    assert made
    while values:
        await Toolbox([made]).call("give", {}, ctx, patterns=["*"])  # raises nothing


async def test_a_refusal_without_its_parts_is_an_error_result(ctx: ToolContext) -> None:
    class Half(Refused):
        def __init__(self) -> None: ...

    @tool
    async def fail() -> None:
        raise Half

    assert (await error_from(fail, ctx))["error"] == "tool_failed"


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt\n",
        "raise SystemExit(3)\n",
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit\nraise E\n",
        "class E(Exception):\n    def __str__(self):\n        raise KeyboardInterrupt\nraise E\n",
        "class E(SyntaxError):\n    msg = 3\nraise E\n",
        "class Odd:\n    @property\n    def __class__(self):\n        raise SystemExit\nodd = Odd()\n",
    ],
)
def test_a_file_that_ends_the_program_when_it_is_imported_is_a_problem_and_the_others_are_loaded(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools.py").write_text(text)
    good = "from coterie import tool\n\n@tool\nasync def good() -> str:\n    return 'good'\n"
    (tmp_path / "tools/good.py").write_text(good)

    loaded = load_user_tools(tmp_path)

    assert [tool.name for tool in loaded.tools] == ["good"]
    assert [problem.location.partition(":")[0] for problem in loaded.problems] == ["tools.py"]


async def test_a_society_goes_on_with_both_kinds_of_tools(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "tools/bad.py").write_text(
        "from coterie import tool\n\nclass Mute(Exception):\n    def __str__(self):\n        raise SystemExit\n\n"
        "@tool\nasync def hurt() -> str:\n    raise Mute\n"
    )
    (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
    async with ModelServer() as server:
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
        server.script(Says(calls=(Calls("hurt", {}),)), Says("I am still here"))
        async with Society.open(tmp_path) as society, asyncio.timeout(patience(20)):
            await society.send(to="ada", text="go")
            assert (await anext(society.inbox())).payload["text"] == "I am still here"
            await society.reload()
        assert "hurt failed: Mute" in json.dumps(server.requests[1].body)
