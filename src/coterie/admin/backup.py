"""Back up a society into one tar archive, and restore it: database, artifacts and the owner's files.

    coterie-backup/data/coterie.db          first, so that a foreign file is detected at once
    coterie-backup/data/artifacts/ab/ab…    one file per blob, named by its SHA-256
    coterie-backup/coterie.toml …           the owner's files
    coterie-backup/manifest.json            last, so that a truncated archive has none; holds the other files' hashes

The format does not depend on the engine, so a backup can be restored to SQLite or PostgreSQL. It contains no secrets:
the access token, the API keys and the database password are left out. `restore` unpacks into a staging folder, checks,
then moves the files into place.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from coterie import __version__
from coterie.admin.configuration_files import key_names, render_files, take_configuration
from coterie.admin.copy import (
    StoreLocation,
    move_into_place,
    open_target,
    read_location,
    require_no_data,
    staging_folder,
)
from coterie.admin.inspect import Inspection, artifact_hashes
from coterie.clock import SystemClock, to_ms, to_rfc3339
from coterie.config import CONFIG_FILE, Config, SocietyFolder, StoreSettings, read_config
from coterie.configuration import Document
from coterie.errors import ConfigError, StoreUnusable
from coterie.files import replace_file
from coterie.ids import new_id
from coterie.store_url import SQLITE, is_postgres_url, read_store_url, redact_url, replace_store_url, without_password
from coterie.stores.blobs import blob_path, fsync_folder
from coterie.stores.open import require_driver, require_society
from coterie.stores.sql.invariants import RECOUNT_MAIL
from coterie.stores.sql.migrations import migrate_sqlite
from coterie.stores.sql.rows import set_meta
from coterie.stores.sqlite import engine
from coterie.stores.sqlite.connection import DATABASE_ERRORS, open_writer
from coterie.stores.transfer import OnProgress, SqliteSource, SqliteTarget, check_transfer, transfer

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
        artifacts, is_configured = _copy_data(society_folder, database, on_progress)
        draft = temporary / "backup.tar"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            packer = _pack(society_folder, database, artifacts, is_configured, file, on_progress)
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
        outside_files=tuple(name for name in _named_files(society_folder) if not _is_inside(society_folder, name)),
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


def _copy_data(folder: SocietyFolder, database: Path, on_progress: OnProgress) -> tuple[Path, bool]:
    """Copy all rows to the new file `database`.

    Return the folder with the artifact bytes, and whether the database has the configuration of the society.
    """
    try:
        location = read_location(folder)
    except ConfigError:
        location = StoreLocation(StoreSettings(), folder)  # back up the invalid file as it is
    if location.store.url == SQLITE:
        asyncio.run(_copy_database(folder.path, database))
        return folder.artifacts, False
    require_driver(location.store)
    from coterie.stores.postgres.transfer import PostgresSource

    artifacts = database.parent / "artifacts"
    with (
        PostgresSource.open(location.store.url, location.artifacts) as source,
        SqliteTarget.create(database, artifacts) as sqlite,
    ):
        transfer(source, sqlite, on_progress)
    return artifacts, True


async def _copy_database(folder: Path, target: Path) -> None:
    async with Inspection.open(folder) as society:
        await society.store.backup(target)


def _pack(
    folder: SocietyFolder,
    database: Path,
    artifacts: Path,
    is_configured: bool,
    file: IO[bytes],
    on_progress: OnProgress,
) -> _Packer:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        packer = _Packer(tar)
        packer.add(database, DATABASE)
        for sha256, _ in artifact_hashes(database):
            packer.add_blob(artifacts, sha256)
            on_progress(f"Packing artifacts: {packer.artifacts:,}")
        for path, name in _owner_files(folder):
            packer.add_owner_file(path, name)
        packer.close(is_configured=is_configured)
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

    def close(self, *, is_configured: bool) -> None:
        """Write the manifest. `is_configured`: the database has the configuration of the society."""
        now = SystemClock().now()
        manifest = {
            "format": FORMAT,
            "coterie": __version__,
            "createdAt": to_rfc3339(now),
            "artifacts": self.artifacts,
            "lost": self.lost,
            "configuration": "database" if is_configured else "files",
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
    names |= dict.fromkeys(name for name in _named_files(folder) if _is_inside(folder, name))
    for name in names:
        yield folder.path / name, name


def _named_files(folder: SocietyFolder) -> list[str]:
    """The files that coterie.toml names."""
    try:
        agents = read_config(folder.path).agents
        return [os.path.normpath(name) for agent in agents for name in agent.named_files]
    except ConfigError:
        return []  # the invalid file is backed up as it is; `coterie check` explains it


def _is_inside(folder: SocietyFolder, name: str) -> bool:
    top = Path(name).parts[0]
    return top not in ("..", "data") and not Path(name).is_absolute() and (folder.path / name).is_file()


# Restore

CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 64 << 20
_CONFIGURATION_REMEDY = "restore it into an empty PostgreSQL with --store and its URL"
_ARTIFACT_NAME = re.compile(r"data/artifacts/([0-9a-f]{2})/(\1[0-9a-f]{62})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    created_at: str
    """When the backup was made, according to its manifest."""
    artifacts: int
    lost: tuple[str, ...]
    """Hashes of artifacts whose bytes were missing when the backup was made."""
    files: tuple[str, ...] = ()
    """The owner's files that were written with the configuration, which was in PostgreSQL."""
    keys: tuple[str, ...] = ()
    """Names of the keys that this configuration needs."""


def restore(archive: Path, folder: Path, on_progress: OnProgress, store: str | None = None) -> RestoreResult:
    """Restore `archive` into `folder`, whole or not at all. It blocks; an event loop must call it in a thread.

    `store`: the new store.url. None keeps the old one, which is allowed for SQLite only. If the society was in
    PostgreSQL and comes to SQLite, the configuration in the database becomes its files.
    """
    society_folder = SocietyFolder(folder)
    require_no_data(society_folder)
    with archive.open("rb") as file, staging_folder(society_folder) as staging:
        on_progress("Unpacking the backup")
        manifest = _unpack(archive, file, staging, on_progress)
        is_configured = _choose_store(archive, staging, store) or manifest.get("configuration") == "database"
        location = StoreLocation(_config(staging).store, society_folder)
        on_progress("Checking what was unpacked")
        _prepare_database(archive, staging / DATABASE)
        owner_files, keys = dict[str, bytes](), tuple[str, ...]()
        if location.store.url == SQLITE or not is_configured:  # only files are the configuration
            document = _take_configuration(staging / DATABASE)
            if document is not None and is_configured:
                owner_files, keys = render_files(document, staging, _CONFIGURATION_REMEDY), key_names(document)
        for name, content in owner_files.items():
            replace_file(staging / name, content)
        asyncio.run(_check(archive, staging, manifest, on_progress))
        if location.store.url == SQLITE:
            move_into_place(staging, society_folder)
        else:
            _write_to_database(staging, location, on_progress)
    return RestoreResult(
        created_at=manifest["createdAt"],
        artifacts=manifest["artifacts"],
        lost=tuple(manifest["lost"]),
        files=tuple(owner_files),
        keys=keys,
    )


def _take_configuration(database: Path) -> Document | None:
    with closing(open_writer(database, "full")) as db:
        return take_configuration(db)


def _choose_store(archive: Path, staging: Path, store: str | None) -> bool:
    """Set store.url in the staged coterie.toml. Return whether the society was in PostgreSQL by that file."""
    file = staging / CONFIG_FILE
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    old_url = read_store_url(text)
    if store is None and old_url != SQLITE:
        # The old database may still exist or hold another society, so the owner must decide.
        raise StoreUnusable(
            f"the society in {archive} was stored in {redact_url(old_url)}: choose a store with --store sqlite"
            " or --store and the URL of an empty database"
        )
    if store is not None and store != old_url:
        file.write_text(replace_store_url(text, store), encoding="utf-8")
    return old_url != SQLITE


def _config(staging: Path) -> Config:
    try:
        return read_config(staging)
    except ConfigError:
        return Config()  # an invalid file is restored as it was; `coterie check` explains it


def _write_to_database(staging: Path, location: StoreLocation, on_progress: OnProgress) -> None:
    """Transfer the staged data to PostgreSQL. The owner's files are moved last, just before its commit."""
    require_driver(location.store)
    assert location.folder  # noqa: S101
    remedy = "name one that is empty, or sqlite, with --store"
    with (
        SqliteSource.open(staging / DATABASE, staging / "data" / "artifacts") as source,
        open_target(location, remedy) as target,
    ):
        check_transfer(target.db, transfer(source, target, on_progress), on_progress)
        shutil.rmtree(staging / "data")
        move_into_place(staging, location.folder)


def _unpack(archive: Path, file: IO[bytes], staging: Path, on_progress: OnProgress) -> dict[str, Any]:
    """Unpack into the staging folder and return the manifest. The archive is untrusted; write nowhere else."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            manifest, hashes = _unpack_all(archive, tar, staging, on_progress)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        if next(staging.iterdir(), None):
            raise _cut_short(archive) from error
        raise _foreign(archive) from error
    if manifest is None:
        raise _cut_short(archive) if hashes else _foreign(archive)
    if manifest["files"] != hashes or DATABASE not in hashes:
        raise _damaged(archive, "its content differs from its manifest")
    return manifest


def _unpack_all(
    archive: Path, tar: tarfile.TarFile, staging: Path, on_progress: OnProgress
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    hashes: dict[str, str] = {}
    manifest, count = None, 0
    for member in tar:
        name = _safe_name(archive, member)
        content = tar.extractfile(member)
        assert content is not None  # noqa: S101 - it is a regular file
        if name == MANIFEST:
            manifest = _read_manifest(archive, content.read(MAX_MANIFEST_BYTES))
            continue
        # The owner's files keep their mode, except setuid, setgid, sticky and write bits of others.
        mode = 0o600 if name.startswith("data/") else member.mode & 0o755 | 0o600
        digest = _write(content, staging / name, mode)
        if (staging / name).stat().st_size != member.size:
            raise _cut_short(archive)
        if artifact := _ARTIFACT_NAME.fullmatch(name):
            count += 1
            on_progress(f"Unpacking artifacts: {count:,}")
            if digest != artifact[2]:
                raise _damaged(archive, f"artifact {artifact[2]} holds other bytes than its name says")
        else:
            hashes[name] = digest
    return manifest, hashes


def _safe_name(archive: Path, member: tarfile.TarInfo) -> str:
    """Path inside the society's folder; refuses everything that a backup does not contain."""
    root, _, name = member.name.partition("/")
    parts = name.split("/")
    if not member.isreg() or member.issparse():
        raise _foreign(archive)
    if root != ROOT or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _foreign(archive)
    # Other files in data/ are refused: an access token or keys from the archive would give its author access.
    if parts[0].lower() == "data" and name != DATABASE and not _ARTIFACT_NAME.fullmatch(name):
        raise _foreign(archive)
    return name


def _read_manifest(archive: Path, data: bytes) -> dict[str, Any]:
    manifest = json.loads(data)
    if not isinstance(manifest, dict):
        raise _foreign(archive)
    if manifest.get("format") != FORMAT:
        raise StoreUnusable(f"{archive} was made by a newer Coterie ({manifest.get('coterie')}): install that version")
    kinds = {"createdAt": str, "artifacts": int, "lost": list, "files": dict}
    if any(not isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        raise _damaged(archive, "its manifest is incomplete")
    return manifest


def _write(content: IO[bytes], target: Path, mode: int) -> str:
    """Write and fsync the file. Return its hash."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = hashlib.sha256()
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _foreign(archive: Path) -> StoreUnusable:
    return StoreUnusable(f"{archive} is not a Coterie backup: name a file that coterie backup wrote")


def _cut_short(archive: Path) -> StoreUnusable:
    return StoreUnusable(f"{archive} is cut short: copy it again from where it was made, or use another backup")


def _damaged(archive: Path, how: str) -> StoreUnusable:
    return StoreUnusable(f"{archive} is damaged ({how}): copy it again from where it was made, or use another backup")


def _prepare_database(archive: Path, database: Path) -> None:
    """Migrate the database, count mail anew, and mark it as stopped cleanly: a running society may have been copied."""
    try:
        with closing(open_writer(database, "full")) as db:
            migrate_sqlite(db)
            db.execute(RECOUNT_MAIL)
            engine.mark_stopped(db)
            # Events after the backup are gone, so clients that have seen them must reload.
            set_meta(db, "log_id", new_id())
    except DATABASE_ERRORS as error:
        raise _damaged(archive, str(error)) from error


async def _check(archive: Path, staging: Path, manifest: dict[str, Any], on_progress: OnProgress) -> None:
    async with Inspection.open_sqlite(staging) as society:
        problems = [problem async for problem in society.find_problems(lost=manifest["lost"], on_progress=on_progress)]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise _damaged(archive, f"{problems[0]}{more}")
