"""Restore a society from a backup: unpack into a staging folder, check, then move it into place."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import tarfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coterie.admin.backup import DATABASE, FORMAT, MANIFEST, ROOT
from coterie.admin.copy import StoreLocation, move_into_place, open_target, require_no_data, staging_folder
from coterie.admin.inspect import Inspection
from coterie.config import (
    CONFIG_FILE,
    SQLITE,
    Config,
    SocietyFolder,
    read_config,
    read_store_url,
    redact_url,
    replace_store_url,
)
from coterie.errors import ConfigError, StoreUnusable
from coterie.ids import new_id
from coterie.stores.open import require_driver
from coterie.stores.sql.rows import set_meta
from coterie.stores.sqlite import engine
from coterie.stores.sqlite.connection import DATABASE_ERRORS, open_writer
from coterie.stores.sqlite.migrate import migrate
from coterie.stores.transfer import OnProgress, SqliteSource, check_transfer, transfer

CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 64 << 20
_ARTIFACT_NAME = re.compile(r"data/artifacts/([0-9a-f]{2})/(\1[0-9a-f]{62})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    created_at: str
    """When the backup was made, according to its manifest."""
    artifacts: int
    lost: tuple[str, ...]
    """Hashes of artifacts whose bytes were missing when the backup was made."""


def restore(archive: Path, folder: Path, on_progress: OnProgress, store: str | None = None) -> RestoreResult:
    """Restore `archive` into `folder`, whole or not at all. It blocks; an event loop must call it in a thread.

    `store`: the new store.url. None keeps the old one, which is allowed for SQLite only.
    """
    society_folder = SocietyFolder(folder)
    require_no_data(society_folder)
    with archive.open("rb") as file, staging_folder(society_folder) as staging:
        on_progress("Unpacking the backup")
        manifest = _unpack(archive, file, staging, on_progress)
        _choose_store(archive, staging, store)
        on_progress("Checking what was unpacked")
        _prepare_database(archive, staging / DATABASE)
        asyncio.run(_check(archive, staging, manifest, on_progress))
        location = StoreLocation(_config(staging).store, society_folder)
        if location.store.url == SQLITE:
            move_into_place(staging, society_folder)
        else:
            _write_to_database(staging, location, on_progress)
    return RestoreResult(
        created_at=manifest["createdAt"], artifacts=manifest["artifacts"], lost=tuple(manifest["lost"])
    )


def _choose_store(archive: Path, staging: Path, store: str | None) -> None:
    """Set store.url in the staged coterie.toml."""
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
    """Migrate the database and mark it as stopped cleanly: it may be the copy of a running society."""
    try:
        with closing(open_writer(database, "full")) as db:
            migrate(db)
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
