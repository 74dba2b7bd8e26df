"""Run a society and look after its files.

`init`, `serve`, `worker`, `apply`, `open`, `check`, `verify`, `prune`, `backup`, `restore`, `migrate`, `copy`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie import __version__
from coterie.cli.options import DEFAULT_FOLDER, Dir, DirArgument, Json, OptionalDir, Token, Turns
from coterie.cli.output import Progress, count_of, print_error, print_json, print_line, run_quietly

if TYPE_CHECKING:
    from coterie.cli.check import CheckReport

LISTED_NAMES = 10
NOT_IN_BACKUP = "the access token and the keys of model services (data/token, data/secrets.json)"
COPY_HELP = "A society's folder, or the address of a PostgreSQL: postgresql://user@host/name."


def init(given: DirArgument = None, dir: OptionalDir = None, json: Json = False) -> None:  # noqa: A002
    """Create a society's folder, with commented templates."""
    from coterie.config import SocietyFolder
    from coterie.errors import StoreUnusable

    folder = SocietyFolder(given or dir or DEFAULT_FOLDER)
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


def serve(
    given: DirArgument = None,
    dir: OptionalDir = None,  # noqa: A002
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", envvar="COTERIE_HOST", help="Address to listen on, instead of server.host."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", envvar="COTERIE_PORT", min=0, max=65535, help="Instead of server.port; 0: any free port."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", envvar="COTERIE_TOKEN", help="Gives full access; created if not given."),
    ] = None,
    no_agents: Annotated[
        bool, typer.Option("--no-agents", help="Leave all turns to coterie worker. Needs a PostgreSQL as store.url.")
    ] = False,
    turns: Turns = None,
) -> None:
    """Run a society until Ctrl-C or SIGTERM. A missing folder is created, with commented templates."""
    import asyncio

    from coterie.cli import logs, server

    logs.start()
    folder = (given or dir or DEFAULT_FOLDER).resolve()
    options = server.ServeOptions(
        folder=folder, host=host, port=port, token=token or None, run_turns=not no_agents, max_turns=turns
    )
    raise typer.Exit(asyncio.run(server.run_server(options)))


def worker(given: DirArgument = None, dir: OptionalDir = None, turns: Turns = None) -> None:  # noqa: A002
    """Run agents of a shared society in this process, too, until Ctrl-C or SIGTERM.

    The address of its PostgreSQL is store.url, or COTERIE_STORE in the environment: then no folder is needed.
    """
    import asyncio

    from coterie.cli import logs, server

    logs.start()
    with server.worker_folder((given or dir or DEFAULT_FOLDER).resolve()) as folder:
        code = asyncio.run(server.run_worker(folder, turns))
    raise typer.Exit(code)


def apply(
    given: DirArgument = None,
    dir: OptionalDir = None,  # noqa: A002
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; only list what differs.")] = False,
    json: Json = False,
) -> None:
    """Write agents, services and limits of the files to a society in PostgreSQL. Running processes follow.

    Keys do not go to the database. With SQLite the files themselves count, and this command is not needed.
    """
    from coterie.cli import logs

    logs.silence()
    folder = given or dir or DEFAULT_FOLDER
    version, differences = run_quietly(_apply_files(folder, dry_run))
    if json:
        print_json({"version": version, "differences": list(differences), "applied": not dry_run})
        return
    for difference in differences:
        print_line(difference)
    found = count_of(len(differences), "difference") if differences else "no difference"
    if dry_run:
        print_line(f"Found {found} to version {version} of the configuration in the database; nothing was changed.")
    else:
        print_line(f"The files in {folder} are version {version} of the configuration ({found} before).")


async def _apply_files(folder: Path, dry_run: bool) -> tuple[int, Sequence[str]]:
    from coterie.clock import SystemClock
    from coterie.config import read_config
    from coterie.configuration import DatabaseConfiguration
    from coterie.errors import StoreUnusable
    from coterie.stores.open import is_shared, open_store, open_store_read_only, require_society

    society_folder = require_society(folder)
    config = read_config(folder)
    if not is_shared(config):
        raise StoreUnusable(
            f"the society in {folder} is in SQLite, where its files count: a running server reads them again after"
            " POST /api/v1/reload"
        )
    opening = open_store_read_only if dry_run else open_store
    store, _ = await opening(society_folder, config, SystemClock())
    try:
        return await DatabaseConfiguration(society_folder, store).apply_files(dry_run=dry_run)
    finally:
        await store.close()


def open_panel(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    print_only: Annotated[bool, typer.Option("--print", help="Only write the link, open nothing.")] = False,
    token: Token = None,
    json: Json = False,
) -> None:
    """Open the panel of the running society in a browser, or write a link to it where there is none."""
    url = run_quietly(_make_link(dir, token))
    if json:
        print_json({"url": url})
    elif print_only or not _has_display() or not _open_browser(url):
        print_line(url)
    else:
        print_line("Opened the panel in your browser.")


async def _make_link(folder: Path, token: str | None) -> str:
    from coterie.cli.client import find_server
    from coterie.errors import ServerUnusable

    client = find_server(folder, token)
    if client is None:
        raise ServerUnusable(f"no process runs the society in {folder}: start it with coterie serve {folder}")
    async with client:
        return str((await client.post("/links"))["url"])


def _has_display() -> bool:
    if sys.platform == "darwin" or os.environ.get("WSL_DISTRO_NAME"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open_browser(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False


def check(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also start MCP servers, send services a small request, and read cards of remote agents."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Look for mistakes in the society's files. Each is reported with its file and location."""
    from coterie.cli import logs
    from coterie.cli.check import SocietyCheck
    from coterie.clock import SystemClock
    from coterie.stores.open import require_society

    checking = SocietyCheck(require_society(dir))
    checking.check_files()
    if deep:
        logs.silence()
        with Progress.show("Trying MCP servers and services"):
            run_quietly(checking.try_connections(SystemClock()))
    if json:
        print_json(checking.report.to_dict())
    else:
        _print_report(checking.report, dir)
    raise typer.Exit(1 if checking.report.problems else 0)


def _print_report(report: CheckReport, folder: Path) -> None:
    engine = f"{report.engine} {report.engine_version}".strip()
    print_line(f"coterie {__version__} with {engine}, society in {folder}")
    print_line(f"agents: {_list_names(report.agents)}")
    print_line(f"services: {_list_names(report.services)}")
    print_line(f"tools: {_list_names(report.tools)}")
    if costs := report.fixed_tokens:
        listed = [f"{agent_id} {tokens:,}" for agent_id, tokens in list(costs.items())[:LISTED_NAMES]]
        more = f" and {len(costs) - LISTED_NAMES:,} more" if len(costs) > LISTED_NAMES else ""
        print_line(f"fixed tokens per request (prompt and tools, estimated): {', '.join(listed)}{more}")
    if report.running_pid:
        print_line(f"running: process {report.running_pid}")
    for result in report.connections or ():
        kind = {"mcp": "MCP server", "service": "service", "remote": "remote agent"}[result.kind]
        tools = f": {', '.join(result.tools)}" if result.tools else ""
        print_line(f"{kind} {result.id}: {'ok' if result.ok else 'failed'}, {result.message}{tools}")
    for warning in report.warnings:
        print_line(f"Warning: {warning}")
    problems = report.problems
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
    """Check the stored data: every invariant, and the bytes of every artifact. Works beside a running society."""
    from coterie.stores.sql.invariants import MAIL_COUNTERS

    with Progress.show("Checking") as progress:
        violations = run_quietly(_find_violations(dir, deep, progress))
    if json:
        print_json({"ok": not violations, "violations": violations})
    else:
        for violation in violations:
            print_line(f"Violation: {violation}")
        found = count_of(len(violations), "violation")
        if violations and all(violation.startswith(f"{MAIL_COUNTERS}: ") for violation in violations):
            print_line(
                f"{found} found in {dir}. Only counts are wrong: make a backup and restore it into a new folder. That"
                " counts anew."
            )
        elif violations:
            print_line(f"{found} found in {dir}: keep it as it is, and restore a backup into a new folder.")
        else:
            hashes = " with the right hash" if deep else ""
            print_line(f"{dir} is valid: every invariant holds, and the bytes of every artifact are there{hashes}.")
    raise typer.Exit(1 if violations else 0)


async def _find_violations(folder: Path, deep: bool, progress: Progress) -> list[str]:
    from coterie.admin.inspect import Inspection

    async with Inspection.open(folder) as stored:
        return [violation async for violation in stored.find_problems(deep=deep, on_progress=progress.update)]


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be deleted.")] = False,
    vacuum: Annotated[
        bool,
        typer.Option(
            "--vacuum", help="Afterwards write the SQLite file anew, so that it shrinks; nothing is stored meanwhile."
        ),
    ] = False,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """Delete old data now, by keep_days and keep_gb. A running society does so every hour."""
    from coterie.errors import ServerUnusable

    if dry_run and vacuum:
        raise typer.BadParameter("--dry-run changes nothing: leave out --vacuum")
    with Progress.show("Counting" if dry_run else "Deleting") as progress:
        run, before, after = run_quietly(_prune(dir, token, dry_run, vacuum, progress))
    if run["error"]:
        raise ServerUnusable(f"old data could not be deleted completely: {run['error']}")
    if json:
        print_json({"dryRun": dry_run, "deleted": run["deleted"], "keptDays": run["keptDays"], "bytesBefore": before,
                    "bytesAfter": after})  # fmt: skip
        return
    deleted = run["deleted"]
    counted = [f"{deleted[key]:,} {name}" for key, name in _PRUNED_NAMES.items() if deleted[key]]
    print_line(f"{'Would delete' if dry_run else 'Deleted'} {', '.join(counted) or 'nothing'}.")
    if run["keptDays"] is None:
        print_line("All messages are kept: set store.keep_days or store.keep_gb in coterie.toml to change that.")
    if not dry_run:
        print_line(f"The database has {after:,} bytes; it had {before:,}.")


_PRUNED_NAMES = {
    "messages": "messages", "history": "history rows", "plans": "plans", "calls": "tool calls",
    "modelCalls": "model calls", "tasks": "tasks", "schedules": "ended schedules", "events": "events",
    "artifacts": "unused files",
}  # fmt: skip
_POLL_SECONDS = 0.2


async def _prune(
    folder: Path, token: str | None, dry_run: bool, vacuum: bool, progress: Progress
) -> tuple[Mapping[str, Any], int, int]:
    """Start the deletion in the server and wait. Return the run, and the size of the database before and after."""
    import asyncio

    from coterie.cli.client import connect

    async with connect(folder, token) as client:
        before = (await client.get("/storage"))["fileBytes"]
        run = await client.post("/storage/prune", {"dryRun": dry_run, "rewrite": vacuum})
        while run["running"]:
            await asyncio.sleep(_POLL_SECONDS)
            run = await client.get("/storage/prune")
            progress.update(f"{run['deleted']['messages']:,} messages")
        return run, before, (await client.get("/storage"))["fileBytes"]


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
    """Write the society into one file. Works beside a running society."""
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that coterie backup wrote.", show_default=False)],
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where to store it: sqlite, or postgresql://user@host/name. It becomes store.url.",
            show_default="as it was, if that is SQLite",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Restore a backup into a folder without a society, and with --store into an empty PostgreSQL database."""
    from coterie.admin.backup import restore as restore_backup
    from coterie.store_url import SQLITE, is_postgres_url

    if store is not None and store != SQLITE and not is_postgres_url(store):
        raise typer.BadParameter("expected sqlite or postgresql://user@host/name", param_hint="--store")
    with _long_operation("Restoring") as progress:
        done = restore_backup(file, dir, progress.update, store)
    if done.lost:
        print_error(f"Warning: {len(done.lost):,} artifacts had lost their bytes when the backup was made")
    if json:
        lost = list(done.lost)
        print_json({"dir": str(dir), "createdAt": done.created_at, "artifacts": done.artifacts, "lost": lost,
                    "files": list(done.files), "keys": list(done.keys)})  # fmt: skip
        return
    artifacts = count_of(done.artifacts, "artifact")
    print_line(f"Restored the society of {done.created_at} into {dir}, with {artifacts}; everything was checked.")
    print_line(f"Not in a backup: {NOT_IN_BACKUP}; put them back if you have them.")
    _print_configuration(done.files, done.keys)
    print_line(f"Next: coterie serve {dir}")


def _print_configuration(files: Sequence[str], keys: Sequence[str]) -> None:
    """Say what became of a configuration that was in PostgreSQL and is in files now."""
    if files:
        print_line(f"Agents, services and limits were in the database: they are now in {' and '.join(files)}.")
    if keys:
        print_line(f"They need these keys, in the environment or in data/secrets.json: {', '.join(keys)}.")


def migrate(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if a migration is needed.")
    ] = False,
    json: Json = False,
) -> None:
    """Migrate the society's database to the schema of this version. A start does so, too."""
    from coterie.admin.migrate import migrate_society, read_schema
    from coterie.cli import logs
    from coterie.stores.open import require_society

    logs.silence()
    folder = require_society(dir)
    with Progress.show("Migrating the database" if not check else "Reading the schema version"):
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
        print_line(f"Migrated {schema.location} from schema {schema.version} to {schema.newest}.")
    raise typer.Exit(1 if check and not schema.is_current else 0)


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help=COPY_HELP, show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TO", help="Like FROM; it must be empty.", show_default=False)],
    json: Json = False,
) -> None:
    """Copy a society from one database to another, from SQLite to PostgreSQL or back. Stop the society first.

    For a folder, its coterie.toml says which database. The owner's files, the token and the keys stay where they are,
    but from PostgreSQL to SQLite agents, services and limits are written to the files of TO.
    """
    from coterie.admin.copy import StoreLocation, copy_society

    origin, goal = StoreLocation.parse(source), StoreLocation.parse(target)
    with _long_operation("Copying") as progress:
        done = copy_society(origin, goal, progress.update)
    copied = done.transfer
    if copied.lost:
        print_error(
            f"Warning: {count_of(len(copied.lost), 'artifact')} had lost their bytes before: see coterie verify"
        )
    if json:
        rows, lost = dict(copied.rows), list(copied.lost)
        print_json({"from": str(origin), "to": str(goal), "rows": rows, "artifacts": copied.artifacts, "lost": lost,
                    "files": list(done.files), "keys": list(done.keys)})  # fmt: skip
        return
    messages, artifacts = count_of(copied.rows["messages"], "message"), count_of(copied.artifacts, "artifact")
    print_line(f"Copied {origin} to {goal}: {messages}, {artifacts}; everything was counted and checked.")
    _print_configuration(done.files, done.keys)
    if goal.folder and done.files:
        print_line("Files of these names that were there before now end in .old.")
        print_line(f"To continue there: copy your tools there, then run coterie serve {goal.folder.path}.")
    elif goal.folder:
        print_line(f"To continue there: copy your own files there, then run coterie serve {goal.folder.path}.")
    else:
        print_line("To continue there: set store.url in coterie.toml to this address.")
    print_line("Do not run both copies: they would diverge.")


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
