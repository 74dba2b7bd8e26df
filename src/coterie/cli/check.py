"""`coterie check`: everything that is wrong with the society's files, before it runs."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coterie import __version__
from coterie.cli.options import HOME, Dir, Json
from coterie.cli.output import counted, say, say_json

if TYPE_CHECKING:
    from coterie.config import Config
    from coterie.errors import Problem

SHOWN = 10


@dataclass
class Report:
    engine: str
    engine_version: str
    agents: list[str] | None = None
    """None: the file that names them cannot be read."""
    services: list[str] | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    owner: int | None = None
    """Who runs the society now."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "engine": self.engine,
            "engineVersion": self.engine_version,
            "agents": self.agents,
            "services": self.services,
            "problems": [{"place": p.location, "message": p.message, "fatal": p.fatal} for p in self.problems],
            "warnings": self.warnings,
            "runningPid": self.owner,
        }


def check(dir: Dir = HOME, json: Json = False) -> None:  # noqa: A002
    """Look for mistakes in the society's files. Names every one with its file and place."""
    report = _report(dir)
    if json:
        say_json(report.to_wire())
    else:
        _print(report, dir)
    raise typer.Exit(1 if report.problems else 0)


def _report(folder: Path) -> Report:
    from coterie.admin.inspect import owner_pid, storage_problems
    from coterie.stores.open import require_society
    from coterie.stores.sqlite.connection import version_warnings

    place = require_society(folder)
    report = Report(engine="sqlite", engine_version=sqlite3.sqlite_version, owner=owner_pid(place))
    report.warnings += version_warnings()
    config = _read_toml(folder, report)
    _read_services(folder, report, config)
    if report.engine == "sqlite":
        report.problems += storage_problems(place)
    return report


def _read_toml(folder: Path, report: Report) -> Config | None:
    from coterie.config import read_config
    from coterie.errors import ConfigError
    from coterie.stores.open import is_shared, require_driver
    from coterie.web.addresses import addresses

    try:
        config = read_config(folder)
        require_driver(config.store)
        addresses(config.server.host, config.server.port, config.server.public_url)
    except ConfigError as error:
        report.problems += error.problems
        return None
    if is_shared(config):
        # Its version, and whether it is there at all, is known when it is asked; a check asks nobody.
        report.engine, report.engine_version, report.warnings = "postgresql", "", []
    report.problems += config.problems
    report.agents = [agent.id for agent in config.agents]
    return config


def _read_services(folder: Path, report: Report, config: Config | None) -> None:
    from coterie.config import unknown_service
    from coterie.errors import ConfigError
    from coterie.llm.config import ServiceRegistry

    try:
        services = ServiceRegistry.load(folder)
    except ConfigError as error:
        report.problems += error.problems
        return
    report.problems += services.problems
    report.services = names = [service.id for service in services]
    for agent in config.agents if config else ():
        if agent.service is not None and agent.service not in services:
            report.problems.append(unknown_service(agent.id, agent.service, names))


def _print(report: Report, folder: Path) -> None:
    say(f"coterie {__version__} with {f'{report.engine} {report.engine_version}'.strip()}, society in {folder}")
    say(f"agents: {_listed(report.agents)}")
    say(f"services: {_listed(report.services)}")
    if report.owner:
        say(f"running: process {report.owner}")
    for warning in report.warnings:
        say(f"Warning: {warning}")
    for problem in report.problems:
        say(f"Problem: {problem}")
    say(f"{counted(len(report.problems), 'problem')} found." if report.problems else "No problems found.")


def _listed(names: list[str] | None) -> str:
    if names is None:
        return "unknown"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more or "none"
