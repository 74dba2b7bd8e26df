"""Read a stored society without running it. Another process may run it meanwhile; nothing is written."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from coterie.agents import Agent
from coterie.artifacts import BlobStore
from coterie.clock import Clock, SystemClock, to_rfc3339
from coterie.config import Config, SocietyFolder, read_config
from coterie.errors import ConfigError, Problem
from coterie.messages import PERSON, CutOff, Message
from coterie.store import Overview
from coterie.stores.open import is_shared, open_store_read_only, require_database, require_society
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite.connection import find_lost_commits, open_reader, sqlite_errors
from coterie.stores.sqlite.engine import DATABASE

BLOB_PAGE_ROWS = 500
THREAD_PAGE_MESSAGES = 200
MAX_FILE_FINDINGS = 20
"""The most findings that SQLite reports about a damaged file."""


class Inspection:
    def __init__(self, folder: SocietyFolder, store: SqlStore, blobs: BlobStore, *, shared: bool = False) -> None:
        """`shared`: the store is PostgreSQL."""
        self.folder, self.store, self.blobs, self.shared = folder, store, blobs, shared

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, *, clock: Clock | None = None) -> AsyncIterator[Self]:
        """Open the store that coterie.toml names; SQLite if that file cannot be read."""
        society_folder = require_society(folder)
        try:
            config = read_config(folder)
        except ConfigError:
            config = Config()
        require_database(society_folder, config)
        store, blobs = await open_store_read_only(society_folder, config, clock or SystemClock())
        try:
            yield cls(society_folder, store, blobs, shared=is_shared(config))
        finally:
            await store.close()

    @classmethod
    @asynccontextmanager
    async def open_sqlite(cls, folder: Path) -> AsyncIterator[Self]:
        """Open the SQLite file in `folder`, whatever coterie.toml says."""
        society_folder = SocietyFolder(folder)
        store, blobs = await open_store_read_only(society_folder, Config(), SystemClock())
        try:
            yield cls(society_folder, store, blobs)
        finally:
            await store.close()

    async def find_problems(
        self, *, deep: bool = False, lost: Collection[str] = (), on_progress: Callable[[str], None] = lambda _: None
    ) -> AsyncIterator[str]:
        """Check the file, the invariants and the artifacts.

        `deep`: hash all artifact bytes. `lost`: hashes of artifacts that are known to be missing.
        """
        if not self.shared:
            on_progress("Checking the database file")
            if loss := await asyncio.to_thread(find_lost_commits, self._database):
                yield f"database file: {loss}"
            file_findings = await asyncio.to_thread(_check_file, self._database, deep)
            for finding in file_findings:
                yield f"database file: {finding}"
            if file_findings:
                return  # results of further queries would be unreliable
        on_progress("Checking the invariants")
        async for violation in self.store.violations():
            yield violation
        count = 0
        async for sha256, size in self._artifact_blobs():
            count += 1
            on_progress(f"Checking artifacts: {count:,}")
            if sha256 not in lost and (problem := await self._check_blob(sha256, size, deep)):
                yield f"artifacts: {problem}"

    @property
    def _database(self) -> Path:
        return self.folder.data / DATABASE

    async def _artifact_blobs(self) -> AsyncIterator[tuple[str, int]]:
        """Hash and size of every referenced blob."""
        last = ("", -1)
        while page := await self.store.artifact_blobs(last, BLOB_PAGE_ROWS):
            for last in page:
                yield last

    async def _check_blob(self, sha256: str, size: int, deep: bool) -> str | None:
        with suppress(FileNotFoundError):
            stored_size = await self.blobs.size(sha256)
            if stored_size is not None and stored_size != size:
                return f"{sha256} has {stored_size:,} bytes, but {size:,} were stored"
            if stored_size is not None:
                actual = await _hash_blob(self.blobs, sha256) if deep else sha256
                if actual != sha256:
                    return f"{sha256} holds other bytes than were stored, with the hash {actual}"
                return None
        # The running society may have deleted the artifact meanwhile, so look again.
        if (sha256, size) in await self.store.artifact_blobs((sha256, size - 1), 1):
            return f"{sha256} is referenced by the database, but its bytes are gone"
        return None


def storage_problems(folder: SocietyFolder) -> Sequence[Problem]:
    """Problems of the SQLite file that prevent a start."""
    loss = find_lost_commits(folder.data / DATABASE)
    return (Problem(f"data/{DATABASE}", loss, fatal=True),) if loss else ()


def artifact_hashes(database: Path) -> list[tuple[str, int]]:
    """Hash and size of every blob that artifacts in the SQLite file reference."""
    with _open_file(database) as db:
        return db.execute("SELECT DISTINCT sha256, size FROM artifacts ORDER BY sha256, size").fetchall()


def _check_file(database: Path, deep: bool) -> list[str]:
    with _open_file(database) as db:
        rows = db.execute(f"PRAGMA {'integrity' if deep else 'quick'}_check({MAX_FILE_FINDINGS})").fetchall()
    return [str(row[0]) for row in rows if row[0] != "ok"]


@contextmanager
def _open_file(database: Path) -> Iterator[sqlite3.Connection]:
    with sqlite_errors(database), closing(open_reader(database)) as db:
        yield db


async def _hash_blob(blobs: BlobStore, sha256: str) -> str:
    digest = hashlib.sha256()
    async for chunk in blobs.open(sha256):
        digest.update(chunk)
    return digest.hexdigest()


async def read_thread(store: Overview, agent_id: str) -> Sequence[Message]:
    """All messages between the person and the agent, oldest first."""
    pages: list[Sequence[Message]] = []
    before = None
    while page := await store.thread(agent_id, before=before, limit=THREAD_PAGE_MESSAGES):
        pages.append(page)
        before = page[0].id
    return [message for page in reversed(pages) for message in page]


def render_markdown(agent: Agent, messages: Sequence[Message]) -> str:
    parts = [f"# {agent.name}\n"]
    for message in messages:
        sender = "You" if message.sender == PERSON else agent.name if message.sender == agent.id else message.sender
        at = to_rfc3339(message.delivered_at or message.created_at)
        early = f" (delivered early, due {to_rfc3339(message.deliver_at)})" if message.early else ""
        parts.append(f"## {sender}, {at}{early}\n")
        parts.append(f"{_render_body(message)}\n")
    return "\n".join(parts)


_ENDINGS: dict[CutOff | None, str] = {
    None: "stopped here",
    "length": "cut off at the length limit",
    "content_filter": "cut off by the content filter",
}


def _render_body(message: Message) -> str:
    """Text, an early end, attachments and quick replies; `[x]` marks the chosen reply."""
    payload: dict[str, Any] = message.payload
    lines = [str(payload["text"])] if payload.get("text") else []
    if message.stopped or message.cut_off:
        lines.append(f"\n*({_ENDINGS[message.cut_off]})*\n")
    lines += [f"- file: {attachment.get('filename', 'file')}" for attachment in payload.get("attachments", [])]
    chosen = message.answer.option if message.answer else None
    for number, option in enumerate(payload.get("quickReplies", [])):
        lines.append(f"- [{'x' if number == chosen else ' '}] {option}")
    return "\n".join(lines)
