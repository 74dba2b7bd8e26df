"""A stored society, looked at without running it and beside whoever does. Nothing is written.

A whole conversation, to be kept elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from coterie.agents import Agent
from coterie.artifacts import Bytes
from coterie.clock import Clock, SystemClock, to_wire
from coterie.config import Config, SocietyFolder, read_config
from coterie.errors import ConfigError, Problem, StoreBroken, StoreUnusable
from coterie.messages import PERSON, Message
from coterie.store import Overview, name_of
from coterie.stores.blobs import path_of
from coterie.stores.open import is_shared, open_to_look
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite.connection import ADVISED, DATABASE_ERRORS, lost_commits, open_reader, owner_of, translate
from coterie.stores.sqlite.engine import DATABASE

PAGE = 500
GONE = "gone"
FINDINGS = 20
"""What SQLite says about a damaged file, at most: it is no use to read a thousand."""


class Inspection:
    def __init__(self, place: SocietyFolder, store: SqlStore, kept: Bytes, *, shared: bool = False) -> None:
        """`kept`: the bytes of artifacts. `shared`: it is kept by PostgreSQL."""
        self.place, self.store, self.kept, self.shared = place, store, kept, shared

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, *, clock: Clock | None = None) -> AsyncIterator[Self]:
        place, config = require_society(folder), _config(folder)
        if not is_shared(config) and not (place.data / DATABASE).exists():
            raise StoreUnusable(f"the society in {folder} has not run yet: start it with coterie serve {folder}")
        store, kept = await open_to_look(place, config, clock or SystemClock())
        try:
            yield cls(place, store, kept, shared=is_shared(config))
        finally:
            await store.close()

    @classmethod
    @asynccontextmanager
    async def of_file(cls, folder: Path) -> AsyncIterator[Self]:
        """As SQLite keeps it, whatever coterie.toml says."""
        place = SocietyFolder(folder)
        store, kept = await open_to_look(place, Config(), SystemClock())
        try:
            yield cls(place, store, kept)
        finally:
            await store.close()

    async def findings(
        self, *, deep: bool = False, lost: Collection[str] = (), tell: Callable[[str], None] = lambda _: None
    ) -> AsyncIterator[str]:
        """Everything that contradicts a promise. `deep` reads all bytes again; those in `lost` are known to be gone."""
        if not self.shared:
            tell("Checking the database file")
            if loss := await asyncio.to_thread(lost_commits, self._database):
                yield f"database file: {loss}"
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
            if sha256 not in lost and (wrong := await self._check_bytes(sha256, size, deep)):
                yield f"artifacts: {wrong}"

    async def holders(self) -> Callable[[Agent], str | None]:
        """Tells who is at work on an agent: `host/pid`; `gone`: somebody who is no more."""
        if self.shared:
            names = {worker.id: worker.name for worker in await self.store.workers()}
            return lambda agent: names.get(agent.worker, GONE) if agent.worker else None
        pid = owner(self.place)
        only = name_of(pid) if pid and pid > 0 else GONE
        return lambda agent: only if agent.worker else None

    @property
    def _database(self) -> Path:
        return self.place.data / DATABASE

    async def _stored_bytes(self) -> AsyncIterator[tuple[str, int]]:
        last = ("", -1)
        while page := await self.store.named_bytes(last, PAGE):
            for last in page:
                yield last

    async def _check_bytes(self, sha256: str, size: int, deep: bool) -> str | None:
        with suppress(FileNotFoundError):
            found = await self.kept.size(sha256)
            if found is not None and found != size:
                return f"{sha256} has {found:,} bytes, but {size:,} were stored"
            if found is not None:
                now = await _sha256(self.kept, sha256) if deep else sha256
                return f"{sha256} holds other bytes than were stored, with the hash {now}" if now != sha256 else None
        # Whoever runs the society may have let go of it a moment ago.
        if (sha256, size) in await self.store.named_bytes((sha256, size - 1), 1):
            return f"{sha256} is named by the database, but its bytes are gone"
        return None


def _config(folder: Path) -> Config:
    """Of a society that can be looked at also when its file cannot be read: then it is where it was at first."""
    try:
        return read_config(folder)
    except ConfigError:
        return Config()


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


def stored_problems(place: SocietyFolder) -> Sequence[Problem]:
    """What refuses the start of a society that SQLite keeps, apart from its configuration."""
    loss = lost_commits(place.data / DATABASE)
    return (Problem(f"data/{DATABASE}", loss, fatal=True),) if loss else ()


def engine_version() -> str:
    return sqlite3.sqlite_version


def engine_warnings() -> Sequence[str]:
    if sqlite3.sqlite_version_info >= ADVISED:
        return ()
    return (f"SQLite {sqlite3.sqlite_version} is older than {'.'.join(map(str, ADVISED))}, which is advised",)


def bytes_path(place: SocietyFolder, sha256: str) -> Path:
    """Where an artifact's bytes lie, in a society that SQLite keeps."""
    return path_of(place.artifacts, sha256)


def stored_bytes(database: Path) -> list[tuple[str, int]]:
    """Content hash and size of everything that an artifact in that file names."""
    with _reading(database) as db:
        return db.execute("SELECT DISTINCT sha256, size FROM artifacts ORDER BY sha256, size").fetchall()


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


async def _sha256(kept: Bytes, sha256: str) -> str:
    digest = hashlib.sha256()
    async for piece in kept.open(sha256):
        digest.update(piece)
    return digest.hexdigest()


PAGE_TRANSCRIPT = 200


async def whole_thread(store: Overview, agent_id: str) -> Sequence[Message]:
    """The person's conversation with the agent, oldest first."""
    pages: list[Sequence[Message]] = []
    before = None
    while page := await store.thread(agent_id, before=before, limit=PAGE_TRANSCRIPT):
        pages.append(page)
        before = page[0].id
    return [message for page in reversed(pages) for message in page]


def as_markdown(agent: Agent, messages: Sequence[Message]) -> str:
    parts = [f"# {agent.name}\n"]
    for message in messages:
        who = "You" if message.sender == PERSON else agent.name if message.sender == agent.id else message.sender
        parts.append(f"## {who}, {to_wire(message.delivered_at or message.created_at)}\n")
        parts.append(f"{_words(message)}\n")
    return "\n".join(parts)


def _words(message: Message) -> str:
    payload: dict[str, Any] = message.payload
    lines = [str(payload["text"])] if payload.get("text") else []
    lines += [f"- file: {item.get('filename', 'file')}" for item in payload.get("attachments", [])]
    chosen = message.answer.option if message.answer else None
    for number, option in enumerate(payload.get("quickReplies", [])):
        lines.append(f"- [{'x' if number == chosen else ' '}] {option}")
    return "\n".join(lines)
