"""How a Coterie database is opened: one connection that writes, any number that only read.

One process owns the data folder, by an operating-system lock it holds for life.

The files of a database while it is open: still in their place, and as new as the last run left them.

`data/last-commit` holds the number of the last committed event. It is written after each commit and never flushed,
so it costs a few microseconds and is never newer than the database. A database that is older than this file has lost
commits: its `-wal` was deleted, cut off or replaced after a kill. The file is removed when the database was closed in
order and everything is in `coterie.db`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import sqlite3
import tempfile
import threading
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from coterie.errors import StoreBroken, StoreError, StoreOwned, StoreUnavailable, StoreUnusable
from coterie.stores.sqlite.migrate import check_version

log = logging.getLogger(__name__)

Durability = Literal["full", "relaxed"]

ADVISED = (3, 51, 3)
"""Older libraries can damage a log that several connections checkpoint. Only our writer does, so this is advice."""

BUSY_SECONDS = 5.0
"""How long a connection waits for another program's lock before it says so."""

PAGE = 2048
"""Bytes. A step changes a few rows on a dozen pages, and every page it touches goes into the log whole."""
CHECKPOINT_PAGES = 250
"""Half a megabyte. The commit that fills the log moves it into the database, and whoever is due then waits for that."""

# They mean what they did before. But sqlite3 asks None and bools how they want to be stored, by an exception each.
sqlite3.register_adapter(type(None), {None: None}.get)
sqlite3.register_adapter(bool, int)

_FULL = {sqlite3.SQLITE_FULL}
_WRITES = {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMOPEN}
"""Errors of writes and not of flushes. SQLite reports a reached quota like this, and undoes the transaction."""
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_BROKEN = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def open_writer(path: Path, durability: Durability) -> sqlite3.Connection:
    """For the one who writes. A database that is not ours is refused before anything in it changes."""
    db = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=256, timeout=BUSY_SECONDS
    )
    try:
        check_version(db)
        db.execute(f"PRAGMA page_size = {PAGE}")
        db.execute("PRAGMA journal_mode = WAL")
        # Where commits do not flush, the writer chooses its own time for what does.
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES if durability == 'full' else 0}")
        db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
        _common(db)
    except BaseException:
        db.close()
        raise
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    """For reading only; it can neither write nor checkpoint."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    _common(db)
    db.execute("PRAGMA query_only = ON")
    return db


def _common(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA mmap_size = 0")
    db.execute("PRAGMA trusted_schema = OFF")


DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The second where damage has reached the words of the first."""


def translate(error: sqlite3.Error | UnicodeDecodeError, folder: Path | None = None) -> StoreError:
    """What a database error means for the caller. `folder`: of the database, to tell a quota from a broken disk."""
    if isinstance(error, UnicodeDecodeError):
        return StoreBroken("the database is damaged: restore a backup with coterie restore FILE")
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _FULL or (getattr(error, "sqlite_errorcode", 0) in _WRITES and folder and not has_room(folder)):
        return StoreUnavailable(
            "the disk is full: free some space; nothing was lost and no restart is needed", full=True
        )
    if code in _BUSY:
        return StoreUnavailable("the database is locked by another program: close it, then try again")
    if code in _BROKEN:
        return StoreBroken(f"the database could not be written safely ({error}): check the disk, then start again")
    if code == sqlite3.SQLITE_READONLY:
        return StoreUnavailable("the database is read-only: make the data folder writable, then try again")
    if "decode to UTF-8" in str(error):  # one value is damaged; whoever does not need it goes on
        return StoreError("the database is damaged: restore a backup with coterie restore FILE")
    return StoreError(f"the database refused ({error})")


def has_room(folder: Path) -> bool:
    """False if the disk or the quota has no room for another file of 64 KB in `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(64 << 10))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return True


def check_filesystem(folder: Path) -> None:
    """SQLite's locks cannot be trusted over a network: better no start than a damaged society."""
    if os.environ.get("COTERIE_ALLOW_NETWORK_FS") == "1":
        return
    kind = _filesystem_of(folder)
    if kind in {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "ceph", "glusterfs", "afs"}:
        raise StoreUnusable(
            f"{folder} lies on a network filesystem ({kind}), where SQLite can be damaged: choose a local folder,"
            " use a PostgreSQL store, or set COTERIE_ALLOW_NETWORK_FS=1 if you know that its locks work"
        )


def _filesystem_of(folder: Path) -> str:
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""  # no Linux: nothing to ask
    place, best, kind = folder.resolve(), Path("/"), ""
    for mount in mounts:
        _, point, filesystem, *_ = mount.split()
        where = Path(point.replace("\\040", " "))
        if place.is_relative_to(where) and len(where.parts) >= len(best.parts):
            best, kind = where, filesystem
    return kind


def copy(path: Path, target: Path) -> None:
    """A consistent copy at `target`, on the disk when this returns."""
    db = open_reader(path)
    try:
        db.execute("PRAGMA query_only = OFF")  # the copy is a write, though not to us; the file stays opened read-only
        # One snapshot is read, so the copy is consistent while the owner goes on writing.
        db.execute("VACUUM INTO ?", (str(target),))
    except sqlite3.Error as error:
        raise translate(error) from error
    finally:
        db.close()
    with target.open("rb") as file:
        os.fsync(file.fileno())


class FolderLock:
    """The lock is the truth; the pid inside the file is only for the message to whoever comes second."""

    def __init__(self, folder: Path) -> None:
        try:
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnusable(
                f"{folder / 'lock'} cannot be opened ({error.strerror}): make it yours and writable"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise StoreOwned(folder.parent, int(owner) if owner.isdigit() else None) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)


def owner_of(folder: Path) -> int | None:
    """The pid of the process that runs the society in `folder`, if one does."""
    with contextlib.suppress(FileNotFoundError), (folder / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read(32).decode(errors="replace").strip()
            return int(owner) if owner.isdigit() else -1
    return None


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
