"""Care for a stored society: `verify`, `backup`, `restore`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import HOME, Dir, Json
from coterie.cli.output import Progress, counted, say, say_aside, say_json

NOT_INSIDE = "the access token and the keys of model services (data/token, data/secrets.json)"


def verify(
    dir: Dir = HOME,  # noqa: A002
    deep: Annotated[bool, typer.Option("--deep", help="Read all artifacts again and compare their hashes.")] = False,
    json: Json = False,
) -> None:
    """Check that the stored society keeps every promise. Works beside a running one."""
    import asyncio

    from coterie.cli import logs

    logs.stay_quiet()
    with Progress.shown("Checking") as progress:
        found = asyncio.run(_findings(dir, deep, progress))
    if json:
        say_json({"ok": not found, "violations": found})
    else:
        for finding in found:
            say(f"Violation: {finding}")
        say(_broken(dir, len(found)) if found else _sound(dir, deep))
    raise typer.Exit(1 if found else 0)


def backup(
    dir: Dir = HOME,  # noqa: A002
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
    from coterie.cli import logs

    logs.stay_quiet()
    with Progress.shown("Backing up") as progress, tidy_when_terminated():
        made = back_up(dir, _target(dir, to), progress.tell)
    if made.lost:
        say_aside(f"Warning: the bytes of {len(made.lost):,} artifacts are gone: see which with coterie verify")
    if made.outside_files:
        say_aside(f"Warning: not in the backup, because outside the folder: {', '.join(made.outside_files)}")
    if json:
        say_json({"file": str(made.path), "size": made.size, "artifacts": made.artifacts, "lost": list(made.lost)})
        return
    say(f"Wrote {made.path}: {made.size:,} bytes, with {counted(made.artifacts, 'artifact')}.")
    say(f"Not in it: {NOT_INSIDE}{', and the password in store.url' if made.had_password else ''}.")
    say(f"Restore it with: coterie restore {made.path} --dir NEW-FOLDER")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What coterie backup wrote.", show_default=False)],
    dir: Dir = HOME,  # noqa: A002
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
    from coterie.admin.restore import restore as put_back
    from coterie.cli import logs

    logs.stay_quiet()
    with Progress.shown("Restoring") as progress, tidy_when_terminated():
        done = put_back(file, dir, progress.tell, _checked_store(store))
    if done.lost:
        say_aside(f"Warning: {len(done.lost):,} artifacts had lost their bytes when the backup was made")
    if json:
        say_json({"dir": str(dir), "createdAt": done.created_at, "artifacts": done.artifacts, "lost": list(done.lost)})
        return
    artifacts = counted(done.artifacts, "artifact")
    say(f"Restored the society of {done.created_at} into {dir}, with {artifacts}; everything was checked.")
    say(f"Not in a backup: {NOT_INSIDE}; put them back if you have them.")
    say(f"Next: coterie serve {dir}")


def _checked_store(url: str | None) -> str | None:
    from coterie.config import SQLITE, is_postgres_url

    if url is not None and url != SQLITE and not is_postgres_url(url):
        raise typer.BadParameter("expected sqlite or postgresql://user@host/name", param_hint="--store")
    return url


async def _findings(folder: Path, deep: bool, progress: Progress) -> list[str]:
    from coterie.admin.inspect import Inspection

    async with Inspection.open(folder) as society:
        return [finding async for finding in society.find_problems(deep=deep, on_progress=progress.tell)]


def _broken(folder: Path, count: int) -> str:
    return f"{counted(count, 'violation')} found in {folder}: keep it as it is, and restore a backup into a new folder."


def _sound(folder: Path, deep: bool) -> str:
    return f"{folder} is sound: every invariant holds, every artifact has its {'very ' if deep else ''}bytes."


def _target(folder: Path, to: Path | None) -> Path:
    if to is not None and not to.is_dir():
        return to
    from coterie.clock import SystemClock

    name = f"{folder.resolve().name}-{SystemClock().now():%Y-%m-%d-%H%M%S}.tar"
    return (to or Path()) / name


@contextmanager
def tidy_when_terminated() -> Iterator[None]:
    """SIGTERM ends the command like Ctrl-C does, so that nothing half-written stays behind."""
    import signal

    def end(*_: object) -> None:
        raise typer.Exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
