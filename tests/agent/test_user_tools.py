"""Loading tools.py and tools/: errors are reported with file and line and affect no other file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext
from coterie.agent.user_tools import UserTools, load_user_tools
from tests.engines import Engine

GOOD = """
from coterie.agent.tools import tool

@tool(effect="pure")
async def {name}() -> str:
    "Return its name."
    return "{name} ran"
"""


@pytest.fixture
def engine() -> Engine:
    """Loading does not depend on the engine: SQLite only."""
    return Engine()


def write(folder: Path, **files: str) -> None:
    """Write tools.py (`tools=`) and files in tools/ (all other names)."""
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
    assert (await box.call("bee", {}, ctx, patterns=["*"])).text == "bee ran"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\ndef broken(:\n", "tools/bad.py: line 2: cannot be loaded: SyntaxError: invalid syntax"),
        ("\n\nimport no_such_module\n", "tools/bad.py: line 3: cannot be loaded: ModuleNotFoundError: No module"),
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
def test_an_error_in_a_file_is_reported_with_its_line_and_other_files_load(
    tmp_path: Path, text: str, problem: str
) -> None:
    write(tmp_path, tools=GOOD.format(name="top"), bad=text, good=GOOD.format(name="good"), _broken="def (\n")
    loaded = load_user_tools(tmp_path)
    assert names(loaded) == ["top", "good"]
    assert len(loaded.problems) == 1 and problems(loaded)[0].startswith(problem)
    assert not loaded.problems[0].fatal


def test_a_file_that_is_not_utf_8_is_reported_and_other_files_load(tmp_path: Path) -> None:
    write(tmp_path, good=GOOD.format(name="good"))
    (tmp_path / "tools.py").write_bytes(b"x = '\xff\xfe'\n")
    loaded = load_user_tools(tmp_path)
    assert names(loaded) == ["good"] and problems(loaded)[0].startswith("tools.py")


def test_an_error_in_tools_py_does_not_affect_the_folder(tmp_path: Path) -> None:
    write(tmp_path, tools="1 / 0\n", good=GOOD.format(name="good"))
    loaded = load_user_tools(tmp_path)
    assert names(loaded) == ["good"] and problems(loaded)[0].startswith("tools.py: line 1")


def test_a_tool_with_a_name_in_use_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, tools=GOOD.format(name="twin") + GOOD.format(name="send_message"), z=GOOD.format(name="twin"))
    loaded = load_user_tools(tmp_path, reserved_names={"send_message"})
    assert names(loaded) == ["twin"]
    assert problems(loaded) == [
        "tools.py: the tool send_message is left out: a built-in tool has that name",
        "tools/z.py: the tool twin is left out: tools.py has one of that name",
    ]


def test_files_can_import_each_other_and_an_imported_tool_counts_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        _helpers="WORD = 'shared'\n" + GOOD.format(name="helper"),
        weather="from ._helpers import WORD\nassert WORD == 'shared'\n" + GOOD.format(name="weather"),
        tools="from .weather import weather\nfrom ._helpers import helper\n",
    )
    loaded = load_user_tools(tmp_path)
    assert (sorted(names(loaded)), problems(loaded)) == (["helper", "weather"], [])


def test_loading_again_reads_the_changed_files(tmp_path: Path) -> None:
    write(tmp_path, a=GOOD.format(name="one"))
    assert names(load_user_tools(tmp_path)) == ["one"]
    write(tmp_path, a=GOOD.format(name="two"))
    assert names(load_user_tools(tmp_path)) == ["two"]
    (tmp_path / "tools" / "a.py").unlink()
    assert names(load_user_tools(tmp_path)) == []


def test_two_societies_in_one_process_have_separate_tools(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, _helpers=f"NAME = '{name}'\n", a="from ._helpers import NAME\n" + GOOD)
        text = (tmp_path / name / "tools" / "a.py").read_text().replace("{name}", name)
        (tmp_path / name / "tools" / "a.py").write_text(text + f"assert NAME == '{name}'\n")
    assert names(load_user_tools(tmp_path / "one")) == ["one"]
    assert names(load_user_tools(tmp_path / "two")) == ["two"]


def test_loading_writes_no_bytecode_and_does_not_change_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write(tmp_path, tools=GOOD.format(name="top"), a=GOOD.format(name="one"))
    path = list(sys.path)
    load_user_tools(tmp_path)
    assert sys.path == path and "tools" not in sys.modules
    assert [entry for entry in tmp_path.rglob("*") if entry.name == "__pycache__"] == []
