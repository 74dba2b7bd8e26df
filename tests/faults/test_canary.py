"""Keys that stand in files, in the environment, in arguments and in addresses: nothing said or kept holds one."""

from __future__ import annotations

import contextlib
import json
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import TIMEOUT_SECONDS, Result, ServeProcess, coterie_process
from tests.cli.environment import Environment, Terminal

from .canary import CANARIES, ENVIRON, MEANT_TO_HOLD_THEM, Visitor, furnish

REPORTED = {
    "mcp.one": f'"http://x?token={CANARIES["address"]}"',
    "mcp.two.env": f'"{CANARIES["mcp"]}"',
    "mcp.three.env": f'{{ KEY = ["{CANARIES["mcp"]}"] }}',
    "mcp.four.url": f'["http://x?token={CANARIES["address"]}"]',
    "mcp.five.url": f'{{ "{CANARIES["address"]}" = "{CANARIES["address"]}" }}',
    "mcp.six.args": f'"--token {CANARIES["argument"]}"',
    "mcp.seven.api_key": f'"{CANARIES["mcp"]}"',
}
"""What is wrong and stops no start: all of it is told at once."""
REFUSED = [
    f'mcp = "http://x?token={CANARIES["address"]}"',
    f'[mcp.demo]\nenv = {{ KEY = "{CANARIES["mcp"]}" \n',
    f'[store]\nurl = "postgre://me:{CANARIES["password"]}@127.0.0.1:9/y"',
    f'[store]\nurl = "postgre://me:a/b:c@{CANARIES["password"]}@127.0.0.1:9/y"',
    f'[store]\nurl = "postgre://127.0.0.1:9/y?password={CANARIES["password"]}"',
]
ABSENT = f'[store]\nurl = "postgresql://me:{CANARIES["password"]}@127.0.0.1:9/y"'
"""Nothing is wrong with it, but nobody is there."""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    with Environment(tmp_path / "home") as made:
        furnish(made)
        yield made


@contextlib.contextmanager
def as_json(folder: Path, heard: dict[str, str]) -> Iterator[None]:
    with ServeProcess(folder, timeout=5 * TIMEOUT_SECONDS) as serving:
        yield
        assert serving.stop() == 0
    heard["log"] = "".join(serving.banner) + json.dumps(serving.log, ensure_ascii=False)


@contextlib.contextmanager
def as_lines(folder: Path, heard: dict[str, str]) -> Iterator[None]:
    """On a terminal, with tracebacks."""
    with Terminal("serve", folder) as terminal:
        terminal.sees("Ready")
        with terminal.read_on():
            yield
            terminal.process.send_signal(signal.SIGTERM)
    heard["log"] = terminal.raw


def all_of(outcome: Result) -> str:
    return outcome.stdout + outcome.stderr


def holding(words: str, heard: dict[str, str]) -> set[str]:
    return {kind for kind, said in heard.items() if words in said}


def leaks(heard: dict[str, str]) -> dict[tuple[str, str], str]:
    """Where a key came out, and what stood before it."""
    found = {(kind, name): (said, said.find(key)) for kind, said in heard.items() for name, key in CANARIES.items()}
    return {place: said[max(0, at - 200) : at] for place, (said, at) in found.items() if at >= 0}


@pytest.mark.slow
@pytest.mark.parametrize("debugging", [False, True], ids=["json", "lines and tracebacks"])
def test_no_key_comes_out_anywhere(stage: Environment, monkeypatch: pytest.MonkeyPatch, debugging: bool) -> None:
    monkeypatch.setenv("COTERIE_DEBUG", "1" if debugging else "")
    folder, heard = stage.folder, dict[str, str]()
    with (as_lines if debugging else as_json)(folder, heard):
        url = json.loads((folder / "data" / "server.json").read_text())["url"]
        with Visitor(url) as visitor:
            visitor.talk()
            visitor.look()
            visitor.err()
        heard |= visitor.heard
        heard["check"] = all_of(coterie_process("check", "--dir", folder))
        heard["export"] = all_of(coterie_process("export", "status-400", "--dir", folder))
        heard["backup"] = all_of(coterie_process("backup", "--dir", folder, "--to", folder.parent))
    heard["models"] = "".join(request.raw.decode() for request in stage.model.requests)

    assert leaks(heard) == {}
    assert holding("no luck with ***", heard) >= {"log", "events", "history", "export"}
    assert holding("cannot log in with ***", heard) >= {"log", "history", "models"}
    for words in ("demo wrote: begun with *** and ***", "demo wrote: died with *** and ***", "has no attribute"):
        assert words in heard["log"]
    assert all(heard.values())


@pytest.mark.slow
def test_no_file_holds_a_key_but_those_that_are_there_for_it(stage: Environment, tmp_path: Path) -> None:
    heard, backup = dict[str, str](), tmp_path / "backup.tar.gz"
    with as_json(stage.folder, heard):
        url = json.loads((stage.folder / "data" / "server.json").read_text())["url"]
        with Visitor(url) as visitor:
            visitor.talk()
            visitor.err()
        assert coterie_process("backup", "--dir", stage.folder, "--to", backup).code == 0
        assert_clean(stage.folder)  # while it runs, the newest is in files of its own
    assert_clean(stage.folder)
    with tarfile.open(backup) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    [inside] = (tmp_path / "unpacked").iterdir()
    assert_clean(inside)


def assert_clean(folder: Path) -> None:
    kept = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    keys = [key.encode() for key in CANARIES.values()]
    assert {path for path, held in kept.items() if any(key in held for key in keys)} <= MEANT_TO_HOLD_THEM
    assert any(b"cannot log in with ***" in held for held in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("debug", ["", "1"])
def test_no_key_comes_out_of_a_configuration_that_is_wrong(tmp_path: Path, debug: str) -> None:
    def said(command: str, text: str) -> str:
        (tmp_path / "coterie.toml").write_text(text)
        folder = ["--dir", tmp_path] if command == "check" else [tmp_path]
        outcome = coterie_process(command, *folder, env={"COTERIE_DEBUG": debug})
        assert outcome.code != 0 and all_of(outcome), text
        assert leaks({command: all_of(outcome)}) == {}, text
        return all_of(outcome)

    told = said("check", "\n".join(f"{place} = {value}" for place, value in REPORTED.items()))
    assert {place for place in REPORTED if f"coterie.toml: {place}: " in told} == {*REPORTED}
    for text in REFUSED:
        said("check", text)
    for text in [*REFUSED, ABSENT]:
        said("serve", text)
