"""A society in one file: the database, the artifacts it names and the owner's files, as a plain tar archive.

    coterie-backup/data/coterie.db          first, so that a foreign file is known at once
    coterie-backup/data/artifacts/ab/ab…    each under its content hash
    coterie-backup/coterie.toml …           what the owner wrote
    coterie-backup/manifest.json            last, so that a file cut short has none; with the hash of everything else

It looks the same whichever engine kept the society, so it can be restored to either.

Whoever holds a backup must not be able to speak for the society: the access token, the keys of services and the
password of a database stay out.
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
from coterie.admin.copy import Whereabouts, flush_folder, whereabouts
from coterie.admin.inspect import Inspection, require_society, stored_bytes
from coterie.clock import SystemClock, to_ms, to_wire
from coterie.config import FILE as CONFIG
from coterie.config import (
    SQLITE,
    SocietyFolder,
    Storage,
    is_shared_url,
    read_config,
    with_store_url,
    without_password,
    written_in,
)
from coterie.errors import ConfigError, StoreUnusable
from coterie.stores.blobs import path_of
from coterie.stores.open import check_package
from coterie.stores.transfer import SqliteTarget, Tell, carry

ROOT = "coterie-backup"
FORMAT = 1
DATABASE = "data/coterie.db"
MANIFEST = "manifest.json"
OWNERS_FILES = ("coterie.toml", "llmservices.json", "tools.py")
OWNERS_FOLDERS = ("prompts", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    path: Path
    size: int
    artifacts: int
    lost: tuple[str, ...]
    """Content hashes that the database names and whose bytes are gone."""
    outside: tuple[str, ...]
    """Files that the configuration names and that lie outside the folder, so they are not in it."""
    password: bool
    """The address of the database had one in it, which was left out."""


def back_up(folder: Path, target: Path, tell: Tell) -> Backup:
    """Write the backup `target`, complete or not at all. It blocks: an event loop calls it in a thread of its own."""
    place = require_society(folder)
    if target.exists():
        raise StoreUnusable(f"{target} exists already: choose another name with --to, or move it away")
    with _scratch(target) as scratch:
        tell("Copying the database")
        copy = scratch / "coterie.db"
        artifacts = _copy(place, copy, tell)
        draft = scratch / "backup.tar"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            packer = _pack(place, copy, artifacts, file, tell)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        draft.replace(target)
        flush_folder(target.parent)
    return Backup(
        path=target,
        size=size,
        artifacts=packer.artifacts,
        lost=tuple(packer.lost),
        outside=tuple(name for name in _named_prompts(place) if not _inside(place, name)),
        password=packer.password,
    )


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A private folder beside `target`, gone afterwards."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StoreUnusable(
            f"{target.parent} cannot be written ({error.strerror}): choose another place with --to"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(place: SocietyFolder, database: Path, tell: Tell) -> Path:
    """All rows as they are now; the folder with the bytes that belong to them."""
    try:
        where = whereabouts(place)
    except ConfigError:
        where = Whereabouts(Storage(), place)  # the file is in the backup as it is
    if where.store.url == SQLITE:
        asyncio.run(_copy_database(place.path, database))
        return place.artifacts
    check_package(where.store)
    from coterie.stores.postgres.transfer import PostgresSource

    artifacts = database.parent / "artifacts"
    with (
        PostgresSource.open(where.store.url, where.artifacts) as source,
        SqliteTarget.make(database, artifacts) as file,
    ):
        carry(source, file, tell)
    return artifacts


async def _copy_database(folder: Path, target: Path) -> None:
    async with Inspection.open(folder) as society:
        await society.store.backup(target)


def _pack(place: SocietyFolder, database: Path, artifacts: Path, file: IO[bytes], tell: Tell) -> _Packer:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        packer = _Packer(tar)
        packer.add(database, DATABASE)
        for sha256, _ in stored_bytes(database):
            packer.add_bytes(artifacts, sha256)
            tell(f"Packing artifacts: {packer.artifacts:,}")
        for path, name in _owners_files(place):
            packer.add_owners(path, name)
        packer.close()
    return packer


@dataclass(slots=True)
class _Packer:
    tar: tarfile.TarFile
    hashes: dict[str, str] = field(default_factory=dict)
    artifacts: int = 0
    lost: list[str] = field(default_factory=list)
    password: bool = False

    def add(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            hashed = _Hashed(file)
            self._write(name, hashed, os.fstat(file.fileno()))
        self.hashes[name] = hashed.digest.hexdigest()

    def add_owners(self, path: Path, name: str) -> None:
        if name != CONFIG or (text := _without_password(path)) is None:
            self.add(path, name)
            return
        self.password = True
        data = text.encode()
        info = tarfile.TarInfo(f"{ROOT}/{name}")
        info.size, info.mtime, info.mode = len(data), int(path.stat().st_mtime), path.stat().st_mode & 0o777
        self.tar.addfile(info, io.BytesIO(data))
        self.hashes[name] = hashlib.sha256(data).hexdigest()

    def add_bytes(self, artifacts: Path, sha256: str) -> None:
        try:
            with path_of(artifacts, sha256).open("rb") as file:
                self._write(f"data/artifacts/{sha256[:2]}/{sha256}", file, os.fstat(file.fileno()))
            self.artifacts += 1
        except FileNotFoundError:
            self.lost.append(sha256)

    def close(self) -> None:
        now = SystemClock().now()
        manifest = {
            "format": FORMAT,
            "coterie": __version__,
            "createdAt": to_wire(now),
            "artifacts": self.artifacts,
            "lost": self.lost,
            "files": self.hashes,
        }
        data = json.dumps(manifest, indent=1).encode()
        info = tarfile.TarInfo(f"{ROOT}/{MANIFEST}")
        info.size, info.mode, info.mtime = len(data), 0o600, to_ms(now) // 1000
        self.tar.addfile(info, io.BytesIO(data))

    def _write(self, name: str, file: IO[bytes] | _Hashed, status: os.stat_result) -> None:
        info = tarfile.TarInfo(f"{ROOT}/{name}")
        info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), status.st_mode & 0o777
        self.tar.addfile(info, file)


class _Hashed:
    """A file that remembers the hash of what was read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _without_password(path: Path) -> str | None:
    """The owner's file with the address of the database only; None: there is no password in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    url = written_in(text)
    bare = without_password(url) if is_shared_url(url) else url
    return with_store_url(text, bare) if bare != url else None


def _owners_files(place: SocietyFolder) -> Iterator[tuple[Path, str]]:
    """What the owner wrote, each once, with its place in the folder."""
    names = dict.fromkeys(name for name in OWNERS_FILES if (place.path / name).is_file())
    for folder in OWNERS_FOLDERS:
        for parent, folders, files in os.walk(place.path / folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            here = Path(parent).relative_to(place.path)
            names |= dict.fromkeys((here / name).as_posix() for name in sorted(files) if Path(parent, name).is_file())
    names |= dict.fromkeys(name for name in _named_prompts(place) if _inside(place, name))
    for name in names:
        yield place.path / name, name


def _named_prompts(place: SocietyFolder) -> list[str]:
    try:
        return [os.path.normpath(agent.prompt_file) for agent in read_config(place.path).agents if agent.prompt_file]
    except ConfigError:
        return []  # the file itself is in the backup; what is wrong with it is for `coterie check` to say


def _inside(place: SocietyFolder, name: str) -> bool:
    top = Path(name).parts[0]
    return top not in ("..", "data") and not Path(name).is_absolute() and (place.path / name).is_file()
