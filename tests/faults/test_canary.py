"""Keys in files, environment, arguments and URLs appear in no output and in no other file."""

from __future__ import annotations

import contextlib
import json
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import TIMEOUT_SECONDS, Result, ServeProcess, coterie, coterie_process
from tests.cli.environment import Environment, Terminal

from .canary import CANARIES, ENVIRON, SECRET_FILES, Visitor, make_society

REPORTED = {
    "mcp.one": f'"http://x?token={CANARIES["address"]}"',
    "mcp.two.env": f'"{CANARIES["mcp"]}"',
    "mcp.three.env": f'{{ KEY = ["{CANARIES["mcp"]}"] }}',
    "mcp.four.url": f'["http://x?token={CANARIES["address"]}"]',
    "mcp.five.url": f'{{ "{CANARIES["address"]}" = "{CANARIES["address"]}" }}',
    "mcp.six.args": f'"--token {CANARIES["argument"]}"',
    "mcp.seven.api_key": f'"{CANARIES["mcp"]}"',
}
"""Problems that do not prevent a start; all are reported."""
REFUSED = [
    f'mcp = "http://x?token={CANARIES["address"]}"',
    f'[mcp.demo]\nenv = {{ KEY = "{CANARIES["mcp"]}" \n',
    f'[store]\nurl = "postgre://me:{CANARIES["password"]}@127.0.0.1:9/y"',
    f'[store]\nurl = "postgre://me:a/b:c@{CANARIES["password"]}@127.0.0.1:9/y"',
    f'[store]\nurl = "postgre://127.0.0.1:9/y?password={CANARIES["password"]}"',
]
ABSENT = f'[store]\nurl = "postgresql://me:{CANARIES["password"]}@127.0.0.1:9/y"'
"""A valid configuration of an unreachable database."""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    with Environment(tmp_path / "home") as made:
        make_society(made)
        yield made


@contextlib.contextmanager
def as_json(folder: Path, output: dict[str, str]) -> Iterator[None]:
    with ServeProcess(folder, timeout=TIMEOUT_SECONDS) as serving:
        yield
        assert serving.stop() == 0
    output["log"] = "".join(serving.banner) + json.dumps(serving.log, ensure_ascii=False)


@contextlib.contextmanager
def as_lines(folder: Path, output: dict[str, str]) -> Iterator[None]:
    """Log lines for a terminal, with tracebacks."""
    with Terminal("serve", folder) as terminal:
        terminal.wait_for("Ready")
        with terminal.read_on():
            yield
            terminal.process.send_signal(signal.SIGTERM)
    output["log"] = terminal.raw


def all_of(outcome: Result) -> str:
    return outcome.stdout + outcome.stderr


def kinds_with(text: str, output: dict[str, str]) -> set[str]:
    return {kind for kind, content in output.items() if text in content}


def leaks(output: dict[str, str]) -> dict[tuple[str, str], str]:
    """Where a key appears, with the text before it."""
    found = {(kind, name): (text, text.find(key)) for kind, text in output.items() for name, key in CANARIES.items()}
    return {where: text[max(0, at - 200) : at] for where, (text, at) in found.items() if at >= 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "debugging", [False, pytest.param(True, marks=pytest.mark.full)], ids=["json", "lines and tracebacks"]
)
def test_no_key_appears_in_output_logs_or_responses(
    stage: Environment, monkeypatch: pytest.MonkeyPatch, debugging: bool
) -> None:
    monkeypatch.setenv("COTERIE_DEBUG", "1" if debugging else "")
    folder, output = stage.folder, dict[str, str]()
    with (as_lines if debugging else as_json)(folder, output):
        url = json.loads((folder / "data" / "server.json").read_text())["url"]
        with Visitor(url) as visitor:
            visitor.send_messages()
            visitor.read_everything()
            visitor.make_mistakes()
        output |= visitor.received
        output["check"] = all_of(coterie("check", "--dir", folder))
        output["export"] = all_of(coterie("export", "status-400", "--dir", folder))
        output["backup"] = all_of(coterie("backup", "--dir", folder, "--to", folder.parent))
    output["models"] = "".join(request.raw.decode() for request in stage.model.requests)

    assert leaks(output) == {}
    assert kinds_with("no luck with ***", output) >= {"log", "events", "history", "export"}
    assert kinds_with("cannot log in with ***", output) >= {"log", "history", "models"}
    for words in ("demo wrote: begun with *** and ***", "demo wrote: died with *** and ***", "has no attribute"):
        assert words in output["log"]
    assert all(output.values())


@pytest.mark.slow
def test_only_the_secret_files_contain_keys(stage: Environment, tmp_path: Path) -> None:
    output, backup = dict[str, str](), tmp_path / "backup.tar.gz"
    with as_json(stage.folder, output):
        url = json.loads((stage.folder / "data" / "server.json").read_text())["url"]
        with Visitor(url) as visitor:
            visitor.send_messages()
            visitor.make_mistakes()
        assert coterie("backup", "--dir", stage.folder, "--to", backup).code == 0
        assert_clean(stage.folder)  # while it runs, the newest rows are in the write-ahead log
    assert_clean(stage.folder)
    with tarfile.open(backup) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    [inside] = (tmp_path / "unpacked").iterdir()
    assert_clean(inside)


def assert_clean(folder: Path) -> None:
    kept = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    keys = [key.encode() for key in CANARIES.values()]
    assert {path for path, held in kept.items() if any(key in held for key in keys)} <= SECRET_FILES
    assert any(b"cannot log in with ***" in held for held in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("debug", ["", pytest.param("1", marks=pytest.mark.full)])
def test_no_key_appears_in_errors_about_an_invalid_configuration(tmp_path: Path, debug: str) -> None:
    def run_with(command: str, text: str) -> str:
        (tmp_path / "coterie.toml").write_text(text)
        folder = ["--dir", tmp_path] if command == "check" else [tmp_path]
        run = coterie_process if command == "serve" and debug else coterie  # a process also logs, with tracebacks
        outcome = run(command, *folder, env={"COTERIE_DEBUG": debug})
        assert outcome.code != 0 and all_of(outcome), text
        assert leaks({command: all_of(outcome)}) == {}, text
        return all_of(outcome)

    reported = run_with("check", "\n".join(f"{location} = {value}" for location, value in REPORTED.items()))
    assert {location for location in REPORTED if f"coterie.toml: {location}: " in reported} == {*REPORTED}
    for text in REFUSED:
        run_with("check", text)
    for text in [*REFUSED, ABSENT]:
        run_with("serve", text)
