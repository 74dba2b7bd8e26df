"""Look after a society's files: `init`, `check`, `verify`, `backup`, `restore`, `migrate`, `copy`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie import __version__
from coterie.cli.options import DEFAULT_FOLDER, Dir, DirArgument, Json, OptionalDir
from coterie.cli.output import Progress, count_of, print_error, print_json, print_line, run_quietly

if TYPE_CHECKING:
    from coterie.config import Config
    from coterie.errors import Problem

LISTED_NAMES = 10
NOT_IN_BACKUP = "the access token and the keys of model services (data/token, data/secrets.json)"
COPY_HELP = "A society's folder, or the address of a PostgreSQL: postgresql://user@host/name."


def init(place: DirArgument = None, dir: OptionalDir = None, json: Json = False) -> None:  # noqa: A002
    """Make a society's folder, with commented templates."""
    from coterie.config import SocietyFolder
    from coterie.errors import StoreUnusable

    folder = SocietyFolder(place or dir or DEFAULT_FOLDER)
    if folder.exists:
        raise StoreUnusable(f"there is a society in {folder.path} already: run it with coterie serve {folder.path}")
    written = folder.create()
    if json:
        print_json({"dir": str(folder.path), "written": [str(file) for file in written]})
        return
    for file in written:
        print_line(f"wrote {file}")
    services = folder.path / "llmservices.json"
    print_line(f"Next: name your model services in {services}, then run: coterie serve {folder.path}")


def check(dir: Dir = DEFAULT_FOLDER, json: Json = False) -> None:  # noqa: A002
    """Look for mistakes in the society's files. Names every one with its file and place."""
    import sqlite3

    from coterie.admin.inspect import owner_pid, storage_problems
    from coterie.stores.open import require_society
    from coterie.stores.sqlite.connection import version_warnings

    folder = require_society(dir)
    report: dict[str, Any] = {
        "version": __version__,
        "engine": "sqlite",
        "engineVersion": sqlite3.sqlite_version,
        "agents": None,
        "services": None,
        "problems": [],
        "warnings": list(version_warnings()),
        "runningPid": owner_pid(folder),
    }
    problems: list[Problem] = []
    config = _check_config(dir, report, problems)
    _check_services(dir, report, problems, config)
    if report["engine"] == "sqlite":
        problems += storage_problems(folder)
    report["problems"] = [{"place": p.location, "message": p.message, "fatal": p.fatal} for p in problems]
    if json:
        print_json(report)
    else:
        _print_report(report, problems, dir)
    raise typer.Exit(1 if problems else 0)


def _check_config(folder: Path, report: dict[str, Any], problems: list[Problem]) -> Config | None:
    from coterie.config import read_config
    from coterie.errors import ConfigError
    from coterie.stores.open import is_shared, require_driver
    from coterie.web.addresses import addresses

    try:
        config = read_config(folder)
        require_driver(config.store)
        addresses(config.server.host, config.server.port, config.server.public_url)
    except ConfigError as error:
        problems += error.problems
        return None
    if is_shared(config):
        # The check does not connect to PostgreSQL, so its version stays unknown.
        report |= {"engine": "postgresql", "engineVersion": "", "warnings": []}
    problems += config.problems
    report["agents"] = [agent.id for agent in config.agents]
    return config


def _check_services(folder: Path, report: dict[str, Any], problems: list[Problem], config: Config | None) -> None:
    from coterie.config import unknown_service
    from coterie.errors import ConfigError
    from coterie.llm.config import ServiceRegistry

    try:
        services = ServiceRegistry.load(folder)
    except ConfigError as error:
        problems += error.problems
        return
    problems += services.problems
    report["services"] = names = [service.id for service in services]
    for agent in config.agents if config else ():
        if agent.service is not None and agent.service not in services:
            problems.append(unknown_service(agent.id, agent.service, names))


def _print_report(report: dict[str, Any], problems: list[Problem], folder: Path) -> None:
    engine = f"{report['engine']} {report['engineVersion']}".strip()
    print_line(f"coterie {__version__} with {engine}, society in {folder}")
    print_line(f"agents: {_list_names(report['agents'])}")
    print_line(f"services: {_list_names(report['services'])}")
    if report["runningPid"]:
        print_line(f"running: process {report['runningPid']}")
    for warning in report["warnings"]:
        print_line(f"Warning: {warning}")
    for problem in problems:
        print_line(f"Problem: {problem}")
    print_line(f"{count_of(len(problems), 'problem')} found." if problems else "No problems found.")


def _list_names(names: list[str] | None) -> str:
    if names is None:
        return "unknown"
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return ", ".join(names[:LISTED_NAMES]) + more or "none"


def verify(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    deep: Annotated[bool, typer.Option("--deep", help="Read all artifacts again and compare their hashes.")] = False,
    json: Json = False,
) -> None:
    """Check that the stored society keeps every promise. Works beside a running one."""
    with Progress.show("Checking") as progress:
        violations = run_quietly(_find_violations(dir, deep, progress))
    if json:
        print_json({"ok": not violations, "violations": violations})
    else:
        for violation in violations:
            print_line(f"Violation: {violation}")
        found = count_of(len(violations), "violation")
        if violations:
            print_line(f"{found} found in {dir}: keep it as it is, and restore a backup into a new folder.")
        else:
            print_line(f"{dir} is sound: every invariant holds, every artifact has its {'very ' if deep else ''}bytes.")
    raise typer.Exit(1 if violations else 0)


async def _find_violations(folder: Path, deep: bool, progress: Progress) -> list[str]:
    from coterie.admin.inspect import Inspection

    async with Inspection.open(folder) as stored:
        return [violation async for violation in stored.find_problems(deep=deep, on_progress=progress.update)]


def backup(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file to write, or a folder for it.", show_default="a name with the date"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write the society into one file. Works beside a running one."""
    from coterie.admin.backup import back_up

    with _long_operation("Backing up") as progress:
        made = back_up(dir, _backup_file(dir, to), progress.update)
    if made.lost:
        print_error(f"Warning: the bytes of {len(made.lost):,} artifacts are gone: see which with coterie verify")
    if made.outside_files:
        print_error(f"Warning: not in the backup, because outside the folder: {', '.join(made.outside_files)}")
    if json:
        print_json({"file": str(made.path), "size": made.size, "artifacts": made.artifacts, "lost": list(made.lost)})
        return
    print_line(f"Wrote {made.path}: {made.size:,} bytes, with {count_of(made.artifacts, 'artifact')}.")
    print_line(f"Not in it: {NOT_IN_BACKUP}{', and the password in store.url' if made.had_password else ''}.")
    print_line(f"Restore it with: coterie restore {made.path} --dir NEW-FOLDER")


def _backup_file(folder: Path, to: Path | None) -> Path:
    if to is not None and not to.is_dir():
        return to
    from coterie.clock import SystemClock

    return (to or Path()) / f"{folder.resolve().name}-{SystemClock().now():%Y-%m-%d-%H%M%S}.tar"


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What coterie backup wrote.", show_default=False)],
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where it shall be kept: sqlite, or postgresql://user@host/name. It becomes store.url.",
            show_default="as it was, if that is SQLite",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Put the society of a backup into a folder that holds none, and if wanted into an empty PostgreSQL."""
    from coterie.admin.restore import restore as restore_backup
    from coterie.config import SQLITE, is_postgres_url

    if store is not None and store != SQLITE and not is_postgres_url(store):
        raise typer.BadParameter("expected sqlite or postgresql://user@host/name", param_hint="--store")
    with _long_operation("Restoring") as progress:
        done = restore_backup(file, dir, progress.update, store)
    if done.lost:
        print_error(f"Warning: {len(done.lost):,} artifacts had lost their bytes when the backup was made")
    if json:
        lost = list(done.lost)
        print_json({"dir": str(dir), "createdAt": done.created_at, "artifacts": done.artifacts, "lost": lost})
        return
    artifacts = count_of(done.artifacts, "artifact")
    print_line(f"Restored the society of {done.created_at} into {dir}, with {artifacts}; everything was checked.")
    print_line(f"Not in a backup: {NOT_IN_BACKUP}; put them back if you have them.")
    print_line(f"Next: coterie serve {dir}")


def migrate(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 when there is something to do.")
    ] = False,
    json: Json = False,
) -> None:
    """Bring the society's database to the schema of this version. A start does so, too."""
    from coterie.admin.migrate import migrate_society, read_schema
    from coterie.cli import logs
    from coterie.stores.open import require_society

    logs.silence()
    folder = require_society(dir)
    with Progress.show("Looking at the database"):
        schema = read_schema(folder) if check else migrate_society(folder)
    if json:
        migrated = not check and not schema.is_current
        print_json({"engine": schema.engine, "from": schema.version, "to": schema.newest, "migrated": migrated})
    elif schema.is_current:
        print_line(f"{schema.location} has schema {schema.newest}, the newest: there is nothing to do.")
    elif check:
        versions = f"schema {schema.version}, the newest is {schema.newest}"
        print_line(f"{schema.location} has {versions}: run coterie migrate --dir {dir}")
    else:
        print_line(f"Brought {schema.location} from schema {schema.version} to {schema.newest}.")
    raise typer.Exit(1 if check and not schema.is_current else 0)


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help=COPY_HELP, show_default=False)],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="The same; nothing may be in it yet.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Copy a society from one database to another, from SQLite to PostgreSQL or back. Stop the society first.

    For a folder, its coterie.toml says which database. The owner's files, the token and the keys stay where they are.
    """
    from coterie.admin.copy import StoreLocation, copy_society

    origin, goal = StoreLocation.parse(source), StoreLocation.parse(target)
    with _long_operation("Copying") as progress:
        copied = copy_society(origin, goal, progress.update)
    if copied.lost:
        print_error(
            f"Warning: {count_of(len(copied.lost), 'artifact')} had lost their bytes before: see coterie verify"
        )
    if json:
        rows, lost = dict(copied.rows), list(copied.lost)
        print_json({"from": str(origin), "to": str(goal), "rows": rows, "artifacts": copied.artifacts, "lost": lost})
        return
    messages, artifacts = count_of(copied.rows["messages"], "message"), count_of(copied.artifacts, "artifact")
    print_line(f"Copied {origin} to {goal}: {messages}, {artifacts}; everything was counted and checked.")
    if goal.folder:
        print_line(f"It goes on there with: coterie serve {goal.folder.path}, once your own files are there, too.")
    else:
        print_line("It goes on there once store.url in coterie.toml names it.")
    print_line("Do not run both: from here on they would differ.")


@contextmanager
def _long_operation(title: str) -> Iterator[Progress]:
    """Show progress, write no log, and let SIGTERM end the command like Ctrl-C, so that it removes partial files."""
    import signal

    from coterie.cli import logs

    def end(*_: object) -> None:
        raise typer.Exit(128 + signal.SIGTERM)

    logs.silence()
    before = signal.signal(signal.SIGTERM, end)
    try:
        with Progress.show(title) as progress:
            yield progress
    finally:
        signal.signal(signal.SIGTERM, before)
