"""The files for running Coterie as a service fit the current program."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from coterie.cli import app
from coterie.config import ShutdownSettings, read_config

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "contrib").glob("*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DRAIN = read_config(ROOT / "contrib" / "society").shutdown.drain_seconds


def assert_is_a_command(words: list[str]) -> None:
    """Check that the command and its options exist."""
    group: Any = typer.main.get_command(app)
    with group.make_context("coterie", words, resilient_parsing=True) as context:
        name, command, rest = group.resolve_command(context, words)
        assert name == words[0]
        command.make_context(name, rest)


def settings(unit: Path) -> dict[str, str]:
    lines = [line for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_compose_runs_a_database_a_server_and_two_workers_with_commands_that_exist() -> None:
    assert set(SERVICES) == {"postgres", "serve", "worker"}
    assert SERVICES["worker"]["deploy"]["replicas"] == 2
    for name in ("serve", "worker"):
        assert SERVICES[name]["command"][0] == name
        assert_is_a_command(SERVICES[name]["command"])
        assert SERVICES[name]["depends_on"] == {"postgres": {"condition": "service_healthy"}}


def test_every_container_has_a_healthcheck_and_none_of_ours_is_root_or_writes_elsewhere() -> None:
    for name, service in SERVICES.items():
        assert service["healthcheck"]["test"], name
    for name in ("serve", "worker"):
        service = SERVICES[name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and not service["user"].startswith(("0", "root"))
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == ["1000:1000"]
    shell = SERVICES["worker"]["healthcheck"]["test"][1]
    assert_is_a_command(shlex.split(shell.split("|")[0])[1:])


def test_secrets_come_from_the_environment_and_without_them_nothing_starts() -> None:
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    assert SERVICES["serve"]["environment"]["COTERIE_TOKEN"].startswith("${COTERIE_TOKEN:?")
    for name in ("serve", "worker"):
        assert SERVICES[name]["environment"]["PGPASSWORD"].startswith("${POSTGRES_PASSWORD:?")


def test_the_society_of_compose_is_valid_and_uses_its_database() -> None:
    config = read_config(ROOT / "contrib" / "society")
    database = SERVICES["postgres"]["environment"]
    assert config.problems == ()
    assert config.store.url == f"postgresql://{database['POSTGRES_USER']}@postgres/{database['POSTGRES_DB']}"


@pytest.mark.parametrize("folder", ["society", "server"])
def test_the_societies_for_servers_are_valid_and_keep_delayed_messages_over_a_restart(folder: str) -> None:
    config = read_config(ROOT / "contrib" / folder)

    assert (config.problems, config.shutdown.delayed) == ((), "keep")


def test_the_image_copies_only_from_stages_that_it_defines() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))

    assert set(re.findall(r"--from=(\w+)", dockerfile)) == stages


def test_stop_timeouts_are_longer_than_the_drain_time() -> None:
    for name in ("serve", "worker"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= DRAIN + 10
    for unit in UNITS:
        assert int(settings(unit)["TimeoutStopSec"]) >= max(DRAIN, ShutdownSettings().drain_seconds) + 10
        assert settings(unit)["KillSignal"] == "SIGTERM" and settings(unit)["KillMode"] == "mixed"


def test_the_image_is_built_from_existing_files_with_existing_extras() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE):
        for name in copied.split():
            assert (ROOT / name).exists() and name in let_in
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"--extra (\w+)", dockerfile)
    assert "postgres" in extras and set(extras) <= set(project["optional-dependencies"])
    assert {project["readme"], *project["license-files"]} <= let_in


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_an_existing_command_and_not_as_root(unit: Path) -> None:
    written = settings(unit)
    program, *words = shlex.split(written["ExecStart"])
    assert Path(program).name == "coterie" and written["User"] == "coterie"
    assert words[-1] == f"/var/lib/{written['StateDirectory']}"
    assert_is_a_command(words)
    for wall in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictSUIDSGID"):
        assert written[wall] == "yes"
    assert written["ProtectSystem"] == "strict"


def test_the_units_differ_in_what_they_run_and_in_nothing_else() -> None:
    one, other = map(settings, UNITS)
    assert {key for key in one if one[key] != other.get(key)} == {"Description", "ExecStart"}
    assert one.keys() == other.keys()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/coterie/bin/coterie", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
