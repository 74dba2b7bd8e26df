"""How a Coterie database is opened: one connection that writes, any number that only read."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Literal

from coterie.errors import StoreBroken, StoreError, StoreUnavailable, StoreUnusable
from coterie.stores.sqlite.migrate import check_version

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
