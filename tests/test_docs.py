"""Check the documents: settings load, commands and named tests exist, relative links resolve."""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from coterie.agent.user_tools import load_user_tools
from coterie.cli import app
from coterie.config import read_config
from coterie.llm.config import parse_services

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PROOF = re.compile(r"`?(tests/[\w/]+\.py)::(test_\w+)")
CALL = re.compile(r"(?:\bcoterie|\./dev run) ([a-z]+)\b(?![./:])((?: +(?!#)\S+)*)")
DEV_COMMAND = re.compile(r"(?:\./dev|\bmake) ([a-z-]+)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def code_of(page: Path) -> Iterator[str]:
    """Yield the lines of shell blocks and the inline code of a page."""
    for block in blocks(page, "sh"):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text()))


@cache
def commands() -> dict[str, set[str]]:
    """Return the commands of the CLI with their options."""
    group = get_command(app)
    assert hasattr(group, "commands")
    return {command: options(found) for command, found in group.commands.items()}


def options(command: Any) -> set[str]:
    """Return the options of a command, and of its subcommands."""
    own = {option for parameter in command.params for option in parameter.opts}
    return own.union(*(options(each) for each in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_resolve(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    links = [link.partition("#")[0] for link in LINK.findall(text) if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    for line in code_of(page):
        for command, rest in CALL.findall(line):
            assert command in commands(), f"there is no command {command!r}: {line}"
            wrong = set(re.findall(r"--[a-z-]+", rest)) - commands()[command] - {"--help"}
            assert wrong == set(), line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_dev_command_exists(page: Path) -> None:
    dev_commands = set(runpy.run_path(str(ROOT / "dev"))["COMMANDS"])
    targets = set(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.M))
    known = dev_commands | {target for line in targets for target in line.split()}
    named = {command for line in code_of(page) for command in DEV_COMMAND.findall(line)}
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_named_test_exists(page: Path) -> None:
    found = PROOF.findall(page.read_text())
    assert [f"{path}::{test}" for path, test in found if test not in functions_in(ROOT / path)] == []


@cache
def functions_in(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name)
def test_settings_shown_load_without_problems(page: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/ada.md").touch()
    for block in blocks(page, "toml"):
        (tmp_path / "coterie.toml").write_text(block)
        assert read_config(tmp_path).problems == (), block


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "json")], ids=name)
def test_services_shown_load_without_problems(page: Path) -> None:
    for block in blocks(page, "json"):
        shown = json.loads(block)
        if "services" in shown:
            entries, problems = parse_services(block.encode(), lambda _: "a-key")
            assert list(problems) == [] and len(entries) == len(shown["services"])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_tools_shown_can_be_loaded(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, name(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if "@tool" in block:
            (tmp_path / "tools.py").write_text(block)
            loaded = load_user_tools(tmp_path)
            assert loaded.problems == () and len(loaded.tools) == block.count("@tool")


def test_both_readmes_give_the_same_commands_and_proofs() -> None:
    english, chinese = (readme.read_text() for readme in READMES)

    def typed(text: str) -> list[list[str]]:
        """Return the commands of the shell blocks without comments and quoted text."""
        lines = [line for kind, block in BLOCK.findall(text) if kind == "sh" for line in block.splitlines()]
        return [re.sub(r'"[^"]*"', "…", line.partition(" #")[0]).split() for line in lines]

    assert typed(english) == typed(chinese)
    assert PROOF.findall(english) == PROOF.findall(chinese)
