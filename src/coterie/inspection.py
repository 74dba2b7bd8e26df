"""A stored society, looked at without running it and beside whoever does. Nothing is written."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from coterie.clock import Clock, SystemClock
from coterie.config import Config, read_config
from coterie.errors import ConfigError, StoreBroken, StoreUnusable
from coterie.folder import SocietyFolder
from coterie.storage import is_shared, open_to_look
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite.connections import ADVISED, DATABASE_ERRORS, open_reader, translate
from coterie.stores.sqlite.database import DATABASE
from coterie.stores.sqlite.lock import owner_of
from coterie.stores.sqlite.store import SqliteStore

PAGE = 500
FINDINGS = 20
"""What SQLite says about a damaged file, at most: it is no use to read a thousand."""


class Inspection:
    def __init__(self, place: SocietyFolder, store: SqlStore, *, shared: bool = False) -> None:
        """`shared`: it is kept by PostgreSQL, artifacts and all."""
        self.place, self.store, self.shared = place, store, shared

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, *, clock: Clock | None = None) -> AsyncIterator[Self]:
        place, shared = require_society(folder), _shared(folder)
        if shared:
            store = await open_to_look(place, shared, clock or SystemClock())
        else:
            if not (place.data / DATABASE).exists():
                raise StoreUnusable(f"the society in {folder} has not run yet: start it with coterie serve {folder}")
            store = await SqliteStore.open_read_only(place.data, clock or SystemClock())
        try:
            yield cls(place, store, shared=shared is not None)
        finally:
            await store.close()

    async def findings(
        self, *, deep: bool = False, lost: Collection[str] = (), tell: Callable[[str], None] = lambda _: None
    ) -> AsyncIterator[str]:
        """Everything that contradicts a promise. `deep` reads all bytes again; those in `lost` are known to be gone."""
        if self.shared:
            tell("Checking the invariants")
            async for violation in self.store.violations():
                yield violation
            return  # its bytes are as safe as the rows beside them
        tell("Checking the database file")
        damage = await asyncio.to_thread(_check_file, self._database, deep)
        for finding in damage:
            yield f"database file: {finding}"
        if damage:
            return  # whatever else it says cannot be trusted
        tell("Checking the invariants")
        async for violation in self.store.violations():
            yield violation
        count = 0
        async for sha256, size in self._stored_bytes():
            count += 1
            tell(f"Checking artifacts: {count:,}")
            if sha256 not in lost:
                for finding in await asyncio.to_thread(self._check_bytes, sha256, size, deep):
                    yield f"artifacts: {finding}"

    @property
    def _database(self) -> Path:
        return self.place.data / DATABASE

    async def _stored_bytes(self) -> AsyncIterator[tuple[str, int]]:
        last = ("", -1)
        while page := await asyncio.to_thread(_page_of_bytes, self._database, last):
            for last in page:
                yield last

    def _check_bytes(self, sha256: str, size: int, deep: bool) -> list[str]:
        path = bytes_path(self.place, sha256)
        try:
            found = path.stat().st_size
            if found != size:
                return [f"{sha256} has {found:,} bytes, but {size:,} were stored"]
            if deep and (now := _sha256(path)) != sha256:
                return [f"{sha256} holds other bytes than were stored, with the hash {now}"]
        except FileNotFoundError:
            # Whoever runs the society may have let go of it a moment ago.
            if _is_named(self._database, sha256):
                return [f"{sha256} is named by the database, but its bytes are gone"]
        return []


def _shared(folder: Path) -> Config | None:
    """The configuration of a society that PostgreSQL keeps; None for all others, also when it cannot be read."""
    with suppress(ConfigError):
        config = read_config(folder)
        return config if is_shared(config) else None
    return None


def require_society(folder: Path) -> SocietyFolder:
    place = SocietyFolder(folder)
    if not place.exists:
        raise StoreUnusable(
            f"there is no society in {folder}: name its folder with --dir, or make one with coterie init {folder}"
        )
    return place


def owner(place: SocietyFolder) -> int | None:
    """The process that runs the society, if one does."""
    return owner_of(place.data)


def engine_version() -> str:
    return sqlite3.sqlite_version


def engine_warnings() -> Sequence[str]:
    if sqlite3.sqlite_version_info >= ADVISED:
        return ()
    return (f"SQLite {sqlite3.sqlite_version} is older than {'.'.join(map(str, ADVISED))}, which is advised",)


def bytes_path(place: SocietyFolder, sha256: str) -> Path:
    """Where an artifact's bytes lie. Asked of the keeper of these files, it would tidy up beside its running owner."""
    return place.artifacts / sha256[:2] / sha256


def stored_bytes(database: Path) -> Iterator[tuple[str, int]]:
    """Content hash and size of everything that an artifact names."""
    last = ("", -1)
    while page := _page_of_bytes(database, last):
        for last in page:
            yield last


def _page_of_bytes(database: Path, after: tuple[str, int]) -> list[tuple[str, int]]:
    with _reading(database) as db:
        return db.execute(
            "SELECT DISTINCT sha256, size FROM artifacts WHERE (sha256, size) > (?, ?) ORDER BY sha256, size LIMIT ?",
            (*after, PAGE),
        ).fetchall()


def _is_named(database: Path, sha256: str) -> bool:
    with _reading(database) as db:
        return bool(db.execute("SELECT 1 FROM artifacts WHERE sha256 = ?", (sha256,)).fetchone())


def _check_file(database: Path, deep: bool) -> list[str]:
    with _reading(database) as db:
        rows = db.execute(f"PRAGMA {'integrity' if deep else 'quick'}_check({FINDINGS})").fetchall()
    return [str(row[0]) for row in rows if row[0] != "ok"]


@contextmanager
def _reading(database: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(open_reader(database)) as db:
            yield db
    except DATABASE_ERRORS as error:
        meaning = translate(error)
        if isinstance(meaning, StoreBroken):
            meaning = StoreUnusable(f"{database} is damaged ({error}): restore a backup with coterie restore FILE")
        raise meaning from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
