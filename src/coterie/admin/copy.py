"""Copy a society from one database to another, all or nothing.

New SQLite data is written to a staging folder inside the target folder and moved when it is complete. With it go the
files of a configuration that was in PostgreSQL.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from coterie.admin.configuration_files import key_names, render_files, take_configuration
from coterie.config import TEMPLATE_FILES, TOOLS_FILE, SocietyFolder, StoreSettings, read_config
from coterie.errors import StoreUnusable
from coterie.files import replace_file
from coterie.store_url import SQLITE, is_postgres_url, redact_url
from coterie.stores.blobs import fsync_folder
from coterie.stores.open import require_driver
from coterie.stores.sqlite.connection import FolderLock
from coterie.stores.sqlite.engine import DATABASE
from coterie.stores.transfer import (
    OnProgress,
    Source,
    SqliteSource,
    SqliteTarget,
    Target,
    TransferResult,
    check_transfer,
    transfer,
)

STAGING_PREFIX = ".restoring-"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Database and folder of a society."""

    store: StoreSettings
    folder: SocietyFolder | None = None
    """None if only the database's URL was given."""

    @classmethod
    def parse(cls, text: str) -> StoreLocation:
        """`text`: a PostgreSQL URL, or a society's folder whose coterie.toml names the database."""
        if is_postgres_url(text):
            return cls(StoreSettings(url=text))
        if found := _SCHEME.match(text):
            raise StoreUnusable(
                f"{found[0]} is not an address of a store: name a society's folder, or a PostgreSQL as"
                " postgresql://user@host/name"
            )
        return read_location(SocietyFolder(Path(text)))

    @property
    def artifacts(self) -> Path | None:
        """Folder with the artifact bytes; None if they are in the database."""
        if self.store.url == SQLITE and self.folder:
            return self.folder.artifacts
        return self.folder.path / self.store.artifacts if self.folder and self.store.artifacts else None

    def __str__(self) -> str:
        return str(self.folder.path) if self.store.url == SQLITE and self.folder else redact_url(self.store.url)


def read_location(folder: SocietyFolder) -> StoreLocation:
    return StoreLocation(read_config(folder.path).store, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    transfer: TransferResult
    files: tuple[str, ...] = ()
    """The files of the target's folder that were written with the configuration."""
    keys: tuple[str, ...] = ()
    """Names of the keys that this configuration needs."""


def copy_society(source: StoreLocation, target: StoreLocation, on_progress: OnProgress) -> CopyResult:
    """Copy the society of `source` to the empty `target`. It blocks; an event loop must call it in a thread.

    From PostgreSQL to SQLite, the configuration in the database becomes files of the target's folder. Those that were
    there before are kept under another name.
    """
    for location in (source, target):
        require_driver(location.store)
    owner_files, keys = dict[str, bytes](), tuple[str, ...]()
    with open_source(source) as origin, open_target(target, owner_files=owner_files) as destination:
        if not origin.count("agents"):
            raise StoreUnusable(f"there is no society in {source} yet: there is nothing to copy")
        result = transfer(origin, destination, on_progress)
        check_transfer(destination.db, result, on_progress)
        if SQLITE in (source.store.url, target.store.url):  # where only files are the configuration
            document = take_configuration(destination.db)
            if document is not None and source.store.url != SQLITE and target.folder:
                remedy = "correct that file or move it away, then copy again"
                owner_files |= render_files(document, target.folder.path, remedy)
                keys = key_names(document)
        on_progress("Moving it into place")
    return CopyResult(transfer=result, files=tuple(owner_files), keys=keys)


@contextmanager
def open_source(location: StoreLocation) -> Iterator[Source]:
    """Open a society for copying. Raises `StoreError` if a process runs it, and blocks starts meanwhile."""
    if location.store.url != SQLITE:
        from coterie.stores.postgres.transfer import PostgresSource

        with PostgresSource.open(location.store.url, location.artifacts, require_stopped=True) as postgres:
            yield postgres
        return
    folder = location.folder
    if folder is None or not folder.exists:
        raise StoreUnusable(
            f"there is no society in {location}: name the folder of one, or the address of its PostgreSQL"
        )
    if not (folder.data / DATABASE).exists():
        raise StoreUnusable(f"the society in {location} has not run yet: there is nothing to copy")
    lock = FolderLock(folder.data)
    try:
        with SqliteSource.open(folder.data / DATABASE, folder.artifacts) as sqlite:
            yield sqlite
    finally:
        lock.release()


@contextmanager
def open_target(
    location: StoreLocation,
    remedy: str = "name a database that is empty",
    *,
    owner_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Iterator[Target]:
    """Open an empty target. Its data becomes visible only if the block ends without error.

    `remedy`: what the error proposes if the target is not empty. `owner_files`: with SQLite, files of the folder that
    are written with the data, by name; read when the block ends.
    """
    if location.store.url != SQLITE:
        from coterie.stores.postgres.transfer import PostgresTarget

        not_empty_message = f"{location} holds a society already: {remedy}"
        with PostgresTarget.create(location.store.url, location.artifacts, not_empty_message) as postgres:
            yield postgres
        return
    assert location.folder  # noqa: S101 - SQLite is always in a folder
    require_no_data(location.folder)
    with staging_folder(location.folder) as staging:
        (staging / "data").mkdir(mode=0o700)
        with SqliteTarget.create(staging / "data" / DATABASE, staging / "data" / "artifacts") as sqlite:
            yield sqlite
        for name, content in owner_files.items():
            if (location.folder.path / name).exists():
                shutil.copy(location.folder.path / name, staging / name)  # for its mode
            replace_file(staging / name, content)
        move_into_place(staging, location.folder, replaced=owner_files)


def require_no_data(folder: SocietyFolder) -> None:
    if any(folder.data.glob("coterie.db*")) or folder.artifacts.exists():
        raise StoreUnusable(
            f"{folder.path} holds a society with data already: name another folder, or move it away first"
        )


@contextmanager
def staging_folder(folder: SocietyFolder) -> Iterator[Path]:
    """Temporary folder inside the society's folder, which is locked meanwhile.

    It is on the same filesystem, so moving files out of it is a rename. On error, folders created here are deleted.
    """
    created = [path for path in (folder.data, folder.path, *folder.path.parents) if not path.exists()]
    try:
        try:
            folder.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnusable(
                f"{folder.path} cannot be made or written ({error.strerror}): name another folder"
            ) from error
        lock = FolderLock(folder.data)
        try:
            for leftover in folder.path.glob(f"{STAGING_PREFIX}*"):  # of a restore that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder.path))
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        finally:
            lock.release()
    except BaseException:
        if created:
            shutil.rmtree(created[-1], ignore_errors=True)
        raise


def move_into_place(staging: Path, folder: SocietyFolder, *, replaced: Collection[str] = ()) -> None:
    """Move the staged files into the society's folder; undo all moves if one fails.

    `replaced`: names of files that may exist there. They are kept under a new name.
    """
    moves = list[tuple[Path, Path]]()
    for source in sorted(path for path in staging.iterdir() if path.name != "data"):
        target = folder.path / source.name
        if source.name not in replaced:
            _require_replaceable(source, target)
        elif target.exists():
            moves.append((target, _unused_name(target)))
        moves.append((source, target))
    # The database comes last: its presence makes the society exist.
    for name in ("artifacts", "coterie.db"):
        if (staging / "data" / name).exists():
            moves.append((staging / "data" / name, folder.data / name))
    moved: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            source.rename(target)
            moved.append((source, target))
    except BaseException:
        for source, target in reversed(moved):
            target.rename(source)
        raise
    for path in (folder.data, folder.path, folder.path.parent):
        fsync_folder(path)


def _unused_name(file: Path) -> Path:
    """A name for the old version of a file."""
    number = 1
    while (old := file.with_name(f"{file.name}.old{number if number > 1 else ''}")).exists():
        number += 1
    return old


def _require_replaceable(source: Path, target: Path) -> None:
    """Raise `StoreUnusable` if `target` is the owner's own work. Unchanged templates may be replaced."""
    if not target.exists():
        return
    if source.is_file() and target.is_file():
        content = target.read_bytes()
        if content == source.read_bytes():
            return
        is_template = target.name in (*TEMPLATE_FILES, TOOLS_FILE)
        if is_template and content == (files("coterie") / "templates" / target.name).read_bytes():
            return
    raise StoreUnusable(f"{target} exists and differs from the backup's: move it away first, or name another folder")
