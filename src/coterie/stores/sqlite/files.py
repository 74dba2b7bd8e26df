"""The files of a database while it is open: still in their place, and as new as the last run left them.

`data/last-commit` holds the number of the last committed event. It is written after each commit and never flushed,
so it costs a few microseconds and is never newer than the database. A database that is older than this file has lost
commits: its `-wal` was deleted, cut off or replaced after a kill. The file is removed when the database was closed in
order and everything is in `coterie.db`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

LAST_COMMIT = "last-commit"
_SIZE = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LAST_EVENT = "SELECT max(seq) FROM events"


@dataclass(frozen=True, slots=True)
class Commit:
    """The last commit that a run of the society made."""

    log_id: str
    event: int
    flushed: bool
    """Whether commits waited for the disk."""
    boot: str
    """Names the machine's start; empty where the system does not tell it."""


class CommitFile:
    """Writes `data/last-commit`. Errors are ignored: without the file only the warning about lost commits is lost."""

    def __init__(self, folder: Path, log_id: str, event: int, *, flushed: bool) -> None:
        self._path, self._handle = folder / LAST_COMMIT, -1
        self._last = Commit(log_id=log_id, event=event, flushed=flushed, boot=boot_id())
        with contextlib.suppress(OSError):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._write(self._last)

    def note(self, event: int) -> None:
        """Call it after the commit, never before: a kill in between must not look like a lost commit."""
        if event == self._last.event or self._handle < 0:
            return
        self._last = Commit(self._last.log_id, event, self._last.flushed, self._last.boot)
        with contextlib.suppress(OSError):
            self._write(self._last)

    def close(self, *, remove: bool) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if remove:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _write(self, commit: Commit) -> None:
        os.pwrite(self._handle, _encode(commit), 0)


def _encode(commit: Commit) -> bytes:
    body = json.dumps(asdict(commit)).encode()
    return f"{zlib.crc32(body):08x} ".encode() + body.ljust(_SIZE - 10) + b"\n"


def read_last_commit(folder: Path) -> Commit | None:
    """None: there is no such file, or a power cut left only a part of it."""
    try:
        sum_, _, body = (folder / LAST_COMMIT).read_bytes().partition(b" ")
        if int(sum_, 16) != zlib.crc32(body.rstrip()):
            return None
        return Commit(**json.loads(body))
    except (OSError, ValueError, TypeError):
        return None


def lost_commits(database: Path) -> str | None:
    """What the database lacks of the last run, and what to do, in one sentence. Nothing is changed by looking."""
    from coterie.stores.sqlite.connections import open_reader

    last = read_last_commit(database.parent)
    if last is None or not (last.flushed or last.boot == boot_id()):
        return None  # commits that did not wait for the disk may be lost with the machine; that is documented
    remedy = (
        "put the file back, or restore a backup with coterie restore FILE into another folder;"
        f" to go on without what is lost, delete {LAST_COMMIT} in {database.parent} and start again"
    )
    if not database.exists():
        return f"{database} is missing, but a society was stored there when it was last stopped: {remedy}"
    try:
        with contextlib.closing(open_reader(database)) as db:
            log_id = db.execute("SELECT value FROM meta WHERE key = 'log_id'").fetchone()
            event = db.execute(LAST_EVENT).fetchone()[0] or 0
    except (sqlite3.Error, UnicodeDecodeError):
        # The normal start tells what is wrong with such a file. But a file without tables never got past its log.
        if not _is_empty(database):
            return None
        log_id, event = (last.log_id,), 0
    if log_id is None or log_id[0] != last.log_id or event >= last.event:
        return None
    return (
        f"{database} ends at event {event:,}, but event {last.event:,} was stored before the last stop, so commits are"
        f" lost: {database.name}-wal is missing, cut off or too old: {remedy}"
    )


def _is_empty(database: Path) -> bool:
    from coterie.stores.sqlite.connections import open_reader

    with contextlib.suppress(sqlite3.Error, UnicodeDecodeError), contextlib.closing(open_reader(database)) as db:
        return int(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]) == 0
    return False


def boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class OpenFiles:
    """The files that the writer has open. One that is removed or replaced takes all later commits with it."""

    def __init__(self, database: Path) -> None:
        """Make it after the first commit, which creates the `-wal`."""
        self._known = {path: _identity(path) for path in (database, database.with_name(f"{database.name}-wal"))}
        self._told, self._lock = False, threading.Lock()

    def problem(self) -> str | None:
        """Why nothing can be stored, in one sentence. Two calls of stat, some microseconds."""
        gone = [path for path, known in self._known.items() if _identity(path) != known]
        sentence = None
        if gone:
            sentence = (
                f"{gone[0]} was removed or replaced while the society runs, so nothing is stored any more:"
                " put the same file back, or stop the society and restore a backup with coterie restore FILE"
            )
        with self._lock:
            changed, self._told = bool(gone) != self._told, bool(gone)
        if changed:
            log.critical("%s", sentence) if sentence else log.warning("the files of the database are back")
        return sentence


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
