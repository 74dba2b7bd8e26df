"""Back up a society into one tar archive: database, artifacts and the owner's files.

    coterie-backup/data/coterie.db          first, so that a foreign file is detected at once
    coterie-backup/data/artifacts/ab/ab…    one file per blob, named by its SHA-256
    coterie-backup/coterie.toml …           the owner's files
    coterie-backup/manifest.json            last, so that a truncated archive has none; holds the other files' hashes

The format does not depend on the engine, so a backup can be restored to SQLite or PostgreSQL. It contains no secrets:
the access token, the API keys and the database password are left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from coterie import __version__
from coterie.admin.copy import StoreLocation, read_location
from coterie.admin.inspect import Inspection, artifact_hashes
from coterie.clock import SystemClock, to_ms, to_rfc3339
from coterie.config import (
    CONFIG_FILE,
    SQLITE,
    SocietyFolder,
    StoreSettings,
    is_postgres_url,
    read_config,
    read_store_url,
    replace_store_url,
    without_password,
)
from coterie.errors import ConfigError, StoreUnusable
from coterie.stores.blobs import blob_path, fsync_folder
from coterie.stores.open import require_driver, require_society
from coterie.stores.transfer import OnProgress, SqliteTarget, transfer

ROOT = "coterie-backup"
FORMAT = 1
DATABASE = "data/coterie.db"
MANIFEST = "manifest.json"
OWNER_FILES = ("coterie.toml", "llmservices.json", "tools.py")
OWNER_FOLDERS = ("prompts", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupResult:
    path: Path
    size: int
    artifacts: int
    lost: tuple[str, ...]
    """Hashes of artifacts whose bytes are missing."""
    outside_files: tuple[str, ...]
    """Prompt files outside the folder. They are not in the backup."""
    had_password: bool
    """True if the database URL contained a password, which was left out."""


def back_up(folder: Path, target: Path, on_progress: OnProgress) -> BackupResult:
    """Write the archive `target`, whole or not at all. It blocks; an event loop must call it in a thread."""
    society_folder = require_society(folder)
    if target.exists():
        raise StoreUnusable(f"{target} exists already: choose another name with --to, or move it away")
    with _temporary_folder(target) as temporary:
        on_progress("Copying the database")
        database = temporary / "coterie.db"
        artifacts = _copy_data(society_folder, database, on_progress)
        draft = temporary / "backup.tar"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            packer = _pack(society_folder, database, artifacts, file, on_progress)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        draft.replace(target)
        fsync_folder(target.parent)
    return BackupResult(
        path=target,
        size=size,
        artifacts=packer.artifacts,
        lost=tuple(packer.lost),
        outside_files=tuple(name for name in _prompt_files(society_folder) if not _is_inside(society_folder, name)),
        had_password=packer.had_password,
    )


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Private folder beside `target`, deleted afterwards."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StoreUnusable(
            f"{target.parent} cannot be written ({error.strerror}): choose another file with --to"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_data(folder: SocietyFolder, database: Path, on_progress: OnProgress) -> Path:
    """Copy all rows to the new file `database`. Return the folder with the artifact bytes."""
    try:
        location = read_location(folder)
    except ConfigError:
        location = StoreLocation(StoreSettings(), folder)  # back up the invalid file as it is
    if location.store.url == SQLITE:
        asyncio.run(_copy_database(folder.path, database))
        return folder.artifacts
    require_driver(location.store)
    from coterie.stores.postgres.transfer import PostgresSource

    artifacts = database.parent / "artifacts"
    with (
        PostgresSource.open(location.store.url, location.artifacts) as source,
        SqliteTarget.create(database, artifacts) as sqlite,
    ):
        transfer(source, sqlite, on_progress)
    return artifacts


async def _copy_database(folder: Path, target: Path) -> None:
    async with Inspection.open(folder) as society:
        await society.store.backup(target)


def _pack(folder: SocietyFolder, database: Path, artifacts: Path, file: IO[bytes], on_progress: OnProgress) -> _Packer:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        packer = _Packer(tar)
        packer.add(database, DATABASE)
        for sha256, _ in artifact_hashes(database):
            packer.add_blob(artifacts, sha256)
            on_progress(f"Packing artifacts: {packer.artifacts:,}")
        for path, name in _owner_files(folder):
            packer.add_owner_file(path, name)
        packer.close()
    return packer


@dataclass(slots=True)
class _Packer:
    tar: tarfile.TarFile
    hashes: dict[str, str] = field(default_factory=dict)
    artifacts: int = 0
    lost: list[str] = field(default_factory=list)
    had_password: bool = False

    def add(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            reader = _HashingReader(file)
            self._write(name, reader, os.fstat(file.fileno()))
        self.hashes[name] = reader.digest.hexdigest()

    def add_owner_file(self, path: Path, name: str) -> None:
        """Add a file; remove a database password from coterie.toml."""
        if name != CONFIG_FILE or (text := _without_password(path)) is None:
            self.add(path, name)
            return
        self.had_password = True
        data = text.encode()
        info = tarfile.TarInfo(f"{ROOT}/{name}")
        info.size, info.mtime, info.mode = len(data), int(path.stat().st_mtime), path.stat().st_mode & 0o777
        self.tar.addfile(info, io.BytesIO(data))
        self.hashes[name] = hashlib.sha256(data).hexdigest()

    def add_blob(self, artifacts: Path, sha256: str) -> None:
        try:
            with blob_path(artifacts, sha256).open("rb") as file:
                self._write(f"data/artifacts/{sha256[:2]}/{sha256}", file, os.fstat(file.fileno()))
            self.artifacts += 1
        except FileNotFoundError:
            self.lost.append(sha256)

    def close(self) -> None:
        """Write the manifest."""
        now = SystemClock().now()
        manifest = {
            "format": FORMAT,
            "coterie": __version__,
            "createdAt": to_rfc3339(now),
            "artifacts": self.artifacts,
            "lost": self.lost,
            "files": self.hashes,
        }
        data = json.dumps(manifest, indent=1).encode()
        info = tarfile.TarInfo(f"{ROOT}/{MANIFEST}")
        info.size, info.mode, info.mtime = len(data), 0o600, to_ms(now) // 1000
        self.tar.addfile(info, io.BytesIO(data))

    def _write(self, name: str, file: IO[bytes] | _HashingReader, status: os.stat_result) -> None:
        info = tarfile.TarInfo(f"{ROOT}/{name}")
        info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), status.st_mode & 0o777
        self.tar.addfile(info, file)


class _HashingReader:
    """File that hashes what is read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _without_password(path: Path) -> str | None:
    """Text of coterie.toml without the database password; None if it has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    url = read_store_url(text)
    bare = without_password(url) if is_postgres_url(url) else url
    return replace_store_url(text, bare) if bare != url else None


def _owner_files(folder: SocietyFolder) -> Iterator[tuple[Path, str]]:
    """Path and archive name of each file that the owner wrote."""
    names = dict.fromkeys(name for name in OWNER_FILES if (folder.path / name).is_file())
    for subfolder in OWNER_FOLDERS:
        for parent, folders, files in os.walk(folder.path / subfolder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            relative = Path(parent).relative_to(folder.path)
            names |= dict.fromkeys(
                (relative / name).as_posix() for name in sorted(files) if Path(parent, name).is_file()
            )
    names |= dict.fromkeys(name for name in _prompt_files(folder) if _is_inside(folder, name))
    for name in names:
        yield folder.path / name, name


def _prompt_files(folder: SocietyFolder) -> list[str]:
    try:
        return [os.path.normpath(agent.prompt_file) for agent in read_config(folder.path).agents if agent.prompt_file]
    except ConfigError:
        return []  # the invalid file is backed up as it is; `coterie check` explains it


def _is_inside(folder: SocietyFolder, name: str) -> bool:
    top = Path(name).parts[0]
    return top not in ("..", "data") and not Path(name).is_absolute() and (folder.path / name).is_file()
