"""The owner's files: each by itself, their mistakes named with file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext
from coterie.agent.user_tools import UserTools, load_user_tools

GOOD = """
from coterie.agent.tools import tool

@tool(effect="pure")
async def {name}() -> str:
    "A good one."
    return "{name} at work"
"""


def write(folder: Path, **files: str) -> None:
    """`tools=` is tools.py, every other name a file in tools/."""
    (folder / "tools").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "tools.py" if name == "tools" else folder / "tools" / f"{name}.py").write_text(text)


def names(loaded: UserTools) -> list[str]:
    return [tool.name for tool in loaded.tools]


def problems(loaded: UserTools) -> list[str]:
    return [str(problem) for problem in loaded.problems]


def test_a_folder_without_tools_has_none(tmp_path: Path) -> None:
    assert load_user_tools(tmp_path) == UserTools((), ())


async def test_tools_come_from_the_file_and_from_the_folder_in_order(tmp_path: Path, ctx: ToolContext) -> None:
    write(tmp_path, tools=GOOD.format(name="top"), b=GOOD.format(name="bee"), a=GOOD.format(name="ay"))
    loaded = load_user_tools(tmp_path)
    assert (names(loaded), problems(loaded)) == (["top", "ay", "bee"], [])
    box = Toolbox(loaded.tools)
    assert (await box.call("bee", {}, ctx, patterns=["*"])).text == "bee at work"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\ndef broken(:\n", "tools/bad.py: line 2: cannot be loaded: SyntaxError: invalid syntax"),
        ("\n\nimport nothing_of_the_kind\n", "tools/bad.py: line 3: cannot be loaded: ModuleNotFoundError: No module"),
        ("def f():\n    return 1 / 0\n\nf()\n", "tools/bad.py: line 2: cannot be loaded: ZeroDivisionError: division"),
        ("import sys\nsys.exit(3)\n", "tools/bad.py: line 2: cannot be loaded: SystemExit: 3"),
        ("raise BaseException\n", "tools/bad.py: line 1: cannot be loaded: BaseException"),
        (
            "from coterie.agent.tools import tool\n\n@tool\ndef f(city): ...\n",
            'tools/bad.py: line 3: cannot be loaded: BadTool: tool f: parameter "city" needs a type',
        ),
        ("x = '\x00'\n", "tools/bad.py: "),
        ("from . import _broken\n", "tools/bad.py: line 1: cannot be loaded: SyntaxError"),
    ],
)
def test_a_file_with_a_mistake_is_named_with_its_line_and_keeps_nobody_else_away(
    tmp_path: Path, text: str, problem: str
) -> None:
    write(tmp_path, tools=GOOD.format(name="top"), bad=text, good=GOOD.format(name="good"), _broken="def (\n")
    loaded = load_user_tools(tmp_path)
    assert names(loaded) == ["top", "good"]
    assert len(loaded.problems) == 1 and problems(loaded)[0].startswith(problem)
    assert not loaded.problems[0].fatal


def test_a_file_that_is_no_text_is_a_problem_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, good=GOOD.format(name="good"))
    (tmp_path / "tools.py").write_bytes(b"x = '\xff\xfe'\n")
    loaded = load_user_tools(tmp_path)
    assert names(loaded) == ["good"] and problems(loaded)[0].startswith("tools.py")


def test_a_mistake_in_tools_py_does_not_keep_the_folder_away(tmp_path: Path) -> None:
    write(tmp_path, tools="1 / 0\n", good=GOOD.format(name="good"))
    loaded = load_user_tools(tmp_path)
    assert names(loaded) == ["good"] and problems(loaded)[0].startswith("tools.py: line 1")


def test_built_in_tools_win_and_of_two_of_the_owners_the_first(tmp_path: Path) -> None:
    write(tmp_path, tools=GOOD.format(name="twin") + GOOD.format(name="send_message"), z=GOOD.format(name="twin"))
    loaded = load_user_tools(tmp_path, reserved_names={"send_message"})
    assert names(loaded) == ["twin"]
    assert problems(loaded) == [
        "tools.py: the tool send_message is left out: a built-in tool has that name",
        "tools/z.py: the tool twin is left out: tools.py has one of that name",
    ]


def test_files_share_helpers_and_a_tool_that_is_imported_elsewhere_is_still_one_tool(tmp_path: Path) -> None:
    write(
        tmp_path,
        _helpers="WORD = 'shared'\n" + GOOD.format(name="helper"),
        weather="from ._helpers import WORD\nassert WORD == 'shared'\n" + GOOD.format(name="weather"),
        tools="from .weather import weather\nfrom ._helpers import helper\n",
    )
    loaded = load_user_tools(tmp_path)
    assert (sorted(names(loaded)), problems(loaded)) == (["helper", "weather"], [])


def test_loading_again_reads_what_is_there_now(tmp_path: Path) -> None:
    write(tmp_path, a=GOOD.format(name="one"))
    assert names(load_user_tools(tmp_path)) == ["one"]
    write(tmp_path, a=GOOD.format(name="two"))
    assert names(load_user_tools(tmp_path)) == ["two"]
    (tmp_path / "tools" / "a.py").unlink()
    assert names(load_user_tools(tmp_path)) == []


def test_two_societies_in_one_process_do_not_mix(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write(tmp_path / place, _helpers=f"PLACE = '{place}'\n", a="from ._helpers import PLACE\n" + GOOD)
        text = (tmp_path / place / "tools" / "a.py").read_text().replace("{name}", place)
        (tmp_path / place / "tools" / "a.py").write_text(text + f"assert PLACE == '{place}'\n")
    assert names(load_user_tools(tmp_path / "here")) == ["here"]
    assert names(load_user_tools(tmp_path / "there")) == ["there"]


def test_loading_leaves_nothing_in_the_folder_and_nothing_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write(tmp_path, tools=GOOD.format(name="top"), a=GOOD.format(name="one"))
    path = list(sys.path)
    load_user_tools(tmp_path)
    assert sys.path == path and "tools" not in sys.modules
    assert [entry for entry in tmp_path.rglob("*") if entry.name == "__pycache__"] == []
