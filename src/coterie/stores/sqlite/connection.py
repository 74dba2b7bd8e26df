"""Open and guard the SQLite file: connections, error translation, folder lock, detection of lost files and commits.

One process owns the data folder; it holds a file lock for its lifetime.

`data/last-commit` holds the numbers of the last committed event and of the last one that was flushed to disk. It is
written after each commit and never fsynced, so it costs microseconds. A database that lacks the committed event has
lost commits: its `-wal` was deleted, truncated or replaced after a kill. After a crash of the machine only the flushed
event counts. A clean close removes the file once the WAL is merged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coterie.errors import StoreBroken, StoreError, StoreOwned, StoreUnavailable, StoreUnusable
from coterie.stores.sql.migrations import sqlite_version
from coterie.stores.sql.session import SELECT_LAST_EVENT

log = logging.getLogger(__name__)

Durability = Literal["full", "relaxed"]

RECOMMENDED_VERSION = (3, 51, 3)
"""Older SQLite can corrupt a WAL that several connections checkpoint. Only our writer checkpoints, so we only warn."""

BUSY_TIMEOUT_SECONDS = 5.0
"""How long a connection waits for another program's lock."""

PAGE_BYTES = 2048
"""A step changes a few rows on about twelve pages, and each page is written to the WAL whole."""

# Same result as without them, but faster: sqlite3 otherwise raises and catches an exception for each None and bool.
sqlite3.register_adapter(type(None), {None: None}.get)
sqlite3.register_adapter(bool, int)

_WRITE_CODES = {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMOPEN}
"""Errors of writes, not of fsync. SQLite reports a reached quota like this and rolls back the transaction."""
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_BROKEN_CODES = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def open_writer(path: Path, durability: Durability) -> sqlite3.Connection:
    """Open the only writing connection. A database of another program is refused before anything is written."""
    db = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=256, timeout=BUSY_TIMEOUT_SECONDS
    )
    try:
        sqlite_version(db)
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        if not db.execute("PRAGMA page_count").fetchone()[0]:
            # A new file can give free pages back. In an older one the statement would write, before any check.
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # the writer thread checkpoints
        # With full durability the first commit flushes WAL and folder. From then on the writer flushes the WAL itself.
        db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
        _set_pragmas(db)
    except BaseException:
        db.close()
        raise
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that can neither write nor checkpoint."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_SECONDS)
    _set_pragmas(db)
    db.execute("PRAGMA query_only = ON")
    return db


def _set_pragmas(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA mmap_size = 0")
    db.execute("PRAGMA trusted_schema = OFF")


DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""A damaged file can make even SQLite's error message undecodable."""


def to_store_error(error: sqlite3.Error | UnicodeDecodeError, folder: Path | None = None) -> StoreError:
    """Translate an SQLite error. `folder` of the database: needed to distinguish a reached quota from a broken disk."""
    if isinstance(error, UnicodeDecodeError):
        return StoreBroken("the database is damaged: restore a backup with coterie restore FILE")
    extended_code = getattr(error, "sqlite_errorcode", 0)
    code = extended_code & 0xFF
    if code == sqlite3.SQLITE_FULL or (extended_code in _WRITE_CODES and folder and not has_free_space(folder)):
        return StoreUnavailable(
            "the disk is full: free some space; nothing was lost and no restart is needed", full=True
        )
    if code in _BUSY_CODES:
        return StoreUnavailable("the database is locked by another program: close it, then try again")
    if code in _BROKEN_CODES:
        return StoreBroken(f"the database could not be written safely ({error}): check the disk, then start again")
    if code == sqlite3.SQLITE_READONLY:
        return StoreUnavailable("the database is read-only: make the data folder writable, then try again")
    if "decode to UTF-8" in str(error):  # one value is damaged; other rows stay usable
        return StoreError("the database is damaged: restore a backup with coterie restore FILE")
    return StoreError(f"the database reported an error ({error}): run coterie verify")


@contextlib.contextmanager
def sqlite_errors(database: Path) -> Iterator[None]:
    """Raise errors of SQLite as store errors; for a damaged file with the advice to restore a backup."""
    try:
        yield
    except DATABASE_ERRORS as error:
        store_error = to_store_error(error)
        if isinstance(store_error, StoreBroken):
            store_error = StoreUnusable(f"{database} is damaged ({error}): restore a backup with coterie restore FILE")
        raise store_error from error


def version_warnings() -> Sequence[str]:
    if sqlite3.sqlite_version_info >= RECOMMENDED_VERSION:
        return ()
    recommended = ".".join(map(str, RECOMMENDED_VERSION))
    return (f"SQLite {sqlite3.sqlite_version} is older than the recommended {recommended}: upgrade it if you can",)


def has_free_space(folder: Path) -> bool:
    """False if disk or quota cannot hold another 64 KB file in `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(64 << 10))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return True


def check_filesystem(folder: Path) -> None:
    """Raise `StoreUnusable` on a network filesystem, where SQLite's locks are unreliable."""
    if os.environ.get("COTERIE_ALLOW_NETWORK_FS") == "1":
        return
    filesystem = _filesystem_type(folder)
    if filesystem in {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "ceph", "glusterfs", "afs"}:
        raise StoreUnusable(
            f"{folder} lies on a network filesystem ({filesystem}), where SQLite can be damaged: choose a local folder,"
            " use a PostgreSQL store, or set COTERIE_ALLOW_NETWORK_FS=1 if you know that its locks work"
        )


def _filesystem_type(folder: Path) -> str:
    """Type of the filesystem that holds `folder`; empty if unknown."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""  # not Linux
    resolved, best, best_type = folder.resolve(), Path("/"), ""
    for mount in mounts:
        _, escaped_path, filesystem, *_ = mount.split()
        mount_point = Path(escaped_path.replace("\\040", " "))
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= len(best.parts):
            best, best_type = mount_point, filesystem
    return best_type


def copy_database(path: Path, target: Path) -> None:
    """Write a consistent, fsynced copy to `target`. The owner may go on writing."""
    db = open_reader(path)
    try:
        db.execute("PRAGMA query_only = OFF")  # VACUUM INTO writes, though not to this file
        db.execute("VACUUM INTO :target", {"target": str(target)})
    except sqlite3.Error as error:
        raise to_store_error(error) from error
    finally:
        db.close()
    with target.open("rb") as file:
        os.fsync(file.fileno())


class FolderLock:
    """Exclusive lock of a data folder. Raises `StoreOwned` if another process holds it.

    The pid in the file is only for the error message; the operating-system lock decides.
    """

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


def lock_owner_pid(folder: Path) -> int | None:
    """Pid of the process that holds the lock; -1 if unknown, None if the folder is not locked."""
    with contextlib.suppress(FileNotFoundError), (folder / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read(32).decode(errors="replace").strip()
            return int(owner) if owner.isdigit() else -1
    return None


LAST_COMMIT_FILE = "last-commit"
_SIZE = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LastCommit(msgspec.Struct, frozen=True):
    """Content of `data/last-commit`. The field names are stored in the file."""

    log_id: str
    event: int
    """The newest committed event. It counts until the machine is started again."""
    boot: str
    """Boot id of the machine; empty if unknown."""
    durable: int | None = None
    """The newest event that was flushed to disk, which always counts. None: commits are not flushed."""
    flushed: bool = False
    """Earlier versions wrote it instead of `durable`: `event` was flushed."""

    @property
    def expected_event(self) -> int | None:
        """The event that the database must have. None: a crash of the machine may have lost any."""
        is_same_boot = bool(self.boot) and self.boot == boot_id()
        return self.event if self.flushed or is_same_boot else self.durable


class LastCommitFile:
    """Writes `data/last-commit`. Errors are ignored: without the file, lost commits are not detected."""

    def __init__(self, folder: Path, log_id: str, event: int, *, is_durable: bool) -> None:
        self._path, self._handle = folder / LAST_COMMIT_FILE, -1
        self._event, self._durable = event, event if is_durable else None
        # It is written at every commit, so the JSON of a `LastCommit` is made from this template.
        self._template = msgspec.json.encode(LastCommit(log_id, 0, boot_id(), 0)).replace(b"%", b"%%")
        self._template = self._template.replace(b'"event":0', b'"event":%d').replace(b'"durable":0', b'"durable":%b')
        with contextlib.suppress(OSError):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._write()

    def record(self, event: int, *, is_durable: bool = False) -> None:
        """Call it after the commit or flush, never before: a kill in between would look like a lost commit."""
        durable = event if is_durable else self._durable
        # The event loop may have committed a newer event during a flush.
        event = max(event, self._event)
        if self._handle < 0 or (event == self._event and durable == self._durable):
            return
        self._event, self._durable = event, durable
        with contextlib.suppress(OSError):
            self._write()

    def close(self, *, remove: bool) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if remove:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _write(self) -> None:
        durable = b"null" if self._durable is None else b"%d" % self._durable
        body = self._template % (self._event, durable)
        os.pwrite(self._handle, b"%08x %s\n" % (zlib.crc32(body), body.ljust(_SIZE - 10)), 0)


def read_last_commit(folder: Path) -> LastCommit | None:
    """None if the file is missing or incomplete after a power cut."""
    try:
        checksum, _, body = (folder / LAST_COMMIT_FILE).read_bytes().partition(b" ")
        if int(checksum, 16) != zlib.crc32(body.rstrip()):
            return None
        return msgspec.json.decode(body, type=LastCommit)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def find_lost_commits(database: Path) -> str | None:
    """Describe commits of the last run that the database lacks, and the remedy; None if it lacks none."""
    last = read_last_commit(database.parent)
    if last is None or (expected := last.expected_event) is None:
        return None
    remedy = (
        "put the file back, or restore a backup with coterie restore FILE into another folder;"
        f" to go on without what is lost, delete {LAST_COMMIT_FILE} in {database.parent} and start again"
    )
    if not database.exists():
        return f"{database} is missing, but a society was stored there when it was last stopped: {remedy}"
    try:
        with contextlib.closing(open_reader(database)) as db:
            log_id = db.execute("SELECT value FROM meta WHERE key = 'log_id'").fetchone()
            event = db.execute(SELECT_LAST_EVENT).fetchone()[0] or 0
    except (sqlite3.Error, UnicodeDecodeError):
        # Opening the store reports a damaged file. A file without tables lost its WAL before the first checkpoint.
        if not _is_empty(database):
            return None
        log_id, event = (last.log_id,), 0
    if log_id is None or log_id[0] != last.log_id or event >= expected:
        return None
    return (
        f"{database} ends at event {event:,}, but event {expected:,} was stored before the last stop, so commits are"
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
    """Detects that a file the writer has open was removed or replaced: later commits would go to a deleted file."""

    def __init__(self, database: Path) -> None:
        """Create it after the first commit, which creates the `-wal`."""
        # Strings: a `Path` is converted for each of the four calls of a commit.
        self._identities = [(path, _identity(path)) for path in (str(database), f"{database}-wal")]
        self._is_reported, self._lock = False, threading.Lock()

    def problem(self) -> str | None:
        """Why nothing can be stored, or None. Costs two `stat` calls, some microseconds."""
        gone = ""
        for path, identity in self._identities:
            if _identity(path) != identity:
                gone = path
                break
        if not gone and not self._is_reported:
            return None
        sentence = None
        if gone:
            sentence = (
                f"{gone} was removed or replaced while the society runs, so nothing is stored any more:"
                " put the same file back, or stop the society and restore a backup with coterie restore FILE"
            )
        with self._lock:
            changed, self._is_reported = bool(gone) != self._is_reported, bool(gone)
        if changed:
            log.critical("%s", sentence) if sentence else log.warning("the database files are back; writing continues")
        return sentence


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - four times per commit
    except OSError:
        return None
    return status.st_dev, status.st_ino
