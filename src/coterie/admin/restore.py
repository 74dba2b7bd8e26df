"""A society out of a backup: unpacked beside its place, checked there, and only then moved in."""

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
from coterie.admin.copy import Whereabouts, move_in, refuse_data, staged, writing
from coterie.admin.inspect import Inspection
from coterie.config import FILE as CONFIG
from coterie.config import SQLITE, Config, SocietyFolder, read_config, shown, with_store_url, written_in
from coterie.errors import ConfigError, StoreUnusable
from coterie.ids import new_id
from coterie.stores.open import check_package
from coterie.stores.sql.connection import set_meta
from coterie.stores.sqlite import engine
from coterie.stores.sqlite.connection import DATABASE_ERRORS, open_writer
from coterie.stores.sqlite.migrate import migrate
from coterie.stores.transfer import SqliteSource, Tell, carry, check

PIECE = 1 << 20
MAX_MANIFEST = 64 << 20
_ARTIFACT = re.compile(r"data/artifacts/([0-9a-f]{2})/(\1[0-9a-f]{62})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    created_at: str
    """When the backup was made, as it says itself."""
    artifacts: int
    lost: tuple[str, ...]
    """Artifacts whose bytes were gone already when the backup was made."""


def restore(archive: Path, folder: Path, tell: Tell, store: str | None = None) -> Restored:
    """The society of `archive` is in `folder`, wholly or not at all. It blocks, like `back_up`.

    `store`: what store.url shall be; None: as it was, which goes without saying for SQLite only.
    """
    place = SocietyFolder(folder)
    refuse_data(place)
    with archive.open("rb") as file, staged(place) as stage:
        tell("Unpacking the backup")
        manifest = _unpack(archive, file, stage, tell)
        _choose_store(archive, stage, store)
        tell("Checking what was unpacked")
        _make_ready(archive, stage / DATABASE)
        asyncio.run(_check(archive, stage, manifest, tell))
        where = Whereabouts(_config(stage).store, place)
        if where.store.url == SQLITE:
            move_in(stage, place)
        else:
            _hand_over(stage, where, tell)
    return Restored(created_at=manifest["createdAt"], artifacts=manifest["artifacts"], lost=tuple(manifest["lost"]))


def _choose_store(archive: Path, stage: Path, store: str | None) -> None:
    file = stage / CONFIG
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    was = written_in(text)
    if store is None and was != SQLITE:
        # Perhaps it is still there, or another by now: where a society goes is for its owner to say.
        raise StoreUnusable(
            f"the society in {archive} was kept by {shown(was)}: say where it shall go, with --store sqlite"
            " or the address of an empty database"
        )
    if store is not None and store != was:
        file.write_text(with_store_url(text, store), encoding="utf-8")


def _config(stage: Path) -> Config:
    try:
        return read_config(stage)
    except ConfigError:
        return Config()  # the file is the owner's, and comes back as it was; `coterie check` says what is wrong with it


def _hand_over(stage: Path, where: Whereabouts, tell: Tell) -> None:
    """To the database; the owner's files last, when only its commit is left to do."""
    check_package(where.store)
    assert where.place  # noqa: S101
    remedy = "name one that is empty, or sqlite, with --store"
    with (
        SqliteSource.open(stage / DATABASE, stage / "data" / "artifacts") as source,
        writing(where, remedy) as target,
    ):
        check(target.db, carry(source, target, tell), tell)
        shutil.rmtree(stage / "data")
        move_in(stage, where.place)


# Unpacking: what a stranger put into the file can only end up inside the stage, or be refused


def _unpack(archive: Path, file: IO[bytes], stage: Path, tell: Tell) -> dict[str, Any]:
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            manifest, hashes = _unpack_all(archive, tar, stage, tell)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        if next(stage.iterdir(), None):
            raise _cut_short(archive) from error
        raise _foreign(archive) from error
    if manifest is None:
        raise _cut_short(archive) if hashes else _foreign(archive)
    if manifest["files"] != hashes or DATABASE not in hashes:
        raise _damaged(archive, "its content is not what its manifest says")
    return manifest


def _unpack_all(
    archive: Path, tar: tarfile.TarFile, stage: Path, tell: Tell
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    hashes: dict[str, str] = {}
    manifest, count = None, 0
    for member in tar:
        name = _safe_name(archive, member)
        content = tar.extractfile(member)
        assert content is not None  # noqa: S101 - it is a regular file
        if name == MANIFEST:
            manifest = _read_manifest(archive, content.read(MAX_MANIFEST))
            continue
        # The owner's files keep their mode, but for what only a system's owner grants.
        mode = 0o600 if name.startswith("data/") else member.mode & 0o755 | 0o600
        digest = _write(content, stage / name, mode)
        if (stage / name).stat().st_size != member.size:
            raise _cut_short(archive)
        if artifact := _ARTIFACT.fullmatch(name):
            count += 1
            tell(f"Unpacking artifacts: {count:,}")
            if digest != artifact[2]:
                raise _damaged(archive, f"artifact {artifact[2]} holds other bytes than its name says")
        else:
            hashes[name] = digest
    return manifest, hashes


def _safe_name(archive: Path, member: tarfile.TarInfo) -> str:
    """Its path inside the society's folder."""
    root, _, name = member.name.partition("/")
    parts = name.split("/")
    if not member.isreg() or member.issparse():
        raise _foreign(archive)
    if root != ROOT or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _foreign(archive)
    # In data/ only what a backup puts there: a token or keys from a file would let its author in.
    if parts[0].lower() == "data" and name != DATABASE and not _ARTIFACT.fullmatch(name):
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
    """Durably; the hash of what was written."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = hashlib.sha256()
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while piece := content.read(PIECE):
            digest.update(piece)
            file.write(piece)
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


# Checking


def _make_ready(archive: Path, database: Path) -> None:
    """The copy of a running society, as one that nobody runs."""
    try:
        with closing(open_writer(database, "full")) as db:
            migrate(db)
            engine.end_boot(db)
            # From here on other events follow than followed the backup: whoever has seen those must start anew.
            set_meta(db, "log_id", new_id())
    except DATABASE_ERRORS as error:
        raise _damaged(archive, str(error)) from error


async def _check(archive: Path, stage: Path, manifest: dict[str, Any], tell: Tell) -> None:
    async with Inspection.of_file(stage) as society:
        found = [finding async for finding in society.findings(lost=manifest["lost"], tell=tell)]
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise _damaged(archive, f"{found[0]}{more}")
