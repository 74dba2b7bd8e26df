from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import coterie as package
from coterie.config import SocietyFolder

from .commands import coterie, coterie_process
from .conftest import schedule


def test_the_version_is_printed() -> None:
    assert coterie("--version").stdout == f"coterie {package.__version__}\n"


@pytest.mark.parametrize("args", [("sedn",), ("send",), ("delayed", "--limit", "0"), ("check", "--nope")])
def test_wrong_usage_exits_with_2_and_points_to_the_help(args: tuple[str, ...]) -> None:
    done = coterie(*args)

    assert done.code == 2
    assert "--help" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unexpected_error_is_one_line_with_an_incident_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: SocietyFolder) -> list[Path]:
        raise KeyError("secret detail")

    monkeypatch.setattr(SocietyFolder, "create", fail)

    failure = coterie("init", tmp_path / "x").failure

    assert "incident" in failure
    assert "COTERIE_DEBUG=1" in failure
    assert "secret detail" not in failure


@pytest.mark.slow
def test_debug_mode_shows_the_traceback(folder: Path) -> None:
    done = coterie_process(
        "send",
        "assistant",
        "x",
        "--dir",
        folder,
        env={"COTERIE_DEBUG": "1", "COTERIE_FAILPOINTS": "commit.before:1:raise"},
    )

    assert done.code == 1
    assert "FailpointHit" in done.stderr
    assert "Traceback" in done.stderr


def test_without_debug_mode_there_is_no_traceback(folder: Path) -> None:
    done = coterie_process(
        "send", "assistant", "x", "--dir", folder, env={"COTERIE_FAILPOINTS": "commit.before:1:raise"}
    )

    assert "FailpointHit" in done.failure


# The environment of a user: output is buffered.
BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_output_pipe_causes_no_error_message(folder: Path, form: tuple[str, ...]) -> None:
    schedule(folder, 2000)
    command = [sys.executable, "-m", "coterie", "delayed", "--limit", "2000", "--dir", str(folder), *form]
    with subprocess.Popen(
        command, env=BUFFERED, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()

        assert process.stderr.read() == ""
        assert process.wait() == 1


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("environment", [BUFFERED, BUFFERED | {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("args", [("--help",), ("check",)])
def test_output_that_cannot_be_written_is_a_one_line_error(
    folder: Path, args: tuple[str, ...], environment: dict[str, str]
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"COTERIE_DIR": str(folder)},
        )

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr


@pytest.mark.slow
def test_characters_missing_in_the_output_encoding_are_escaped(folder: Path) -> None:
    coterie("send", "assistant", "größer", "--delay", "1h", "--dir", folder)

    done = coterie_process("delayed", "--dir", folder, env={"PYTHONIOENCODING": "ascii"})

    assert done.code == 0
    assert r"gr\xf6\xdfer" in done.stdout


def test_importing_coterie_loads_no_large_packages() -> None:
    assert _loaded_by("import coterie") & {"asyncio", "msgspec", "sqlite3", "typer", "rich", "httpx"} == set()


def test_help_loads_no_packages_that_only_commands_need() -> None:
    heavy = {"asyncio.events", "coterie.society", "httpx", "msgspec", "pydantic", "rich", "sqlite3", "tarfile"}

    assert _loaded_by("import sys; sys.argv[1:] = ['--help']; from coterie.cli import main; main()") & heavy == set()


def test_a_client_of_a_running_server_loads_no_storage_engine() -> None:
    engines = {"sqlite3", "psycopg", "coterie.society", "coterie.stores.sql.store", "starlette.routing"}

    assert _loaded_by("import coterie.cli.client, coterie.cli.conversation") & engines == set()


def _loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())
