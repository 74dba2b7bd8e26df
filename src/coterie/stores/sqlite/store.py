"""The store port on SQLite."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

from coterie.agent.turn import Event as TurnEvent
from coterie.agent.turn import Rules
from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import EPOCH, Clock, from_ms, to_ms
from coterie.errors import Refused, StoreBroken, StoreError, StoreUnusable
from coterie.events import Event
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.invariants import INVARIANTS
from coterie.messages import Envelope, Message, Receipt, State
from coterie.store import Limits, Page, Promotion, Pruned, Retention, StoreInfo
from coterie.stores.sqlite import history, transitions, turns
from coterie.stores.sqlite.connections import (
    ADVISED,
    DATABASE_ERRORS,
    Durability,
    check_filesystem,
    open_reader,
    open_writer,
    translate,
)
from coterie.stores.sqlite.lock import FolderLock
from coterie.stores.sqlite.migrate import check_version, migrate
from coterie.stores.sqlite.post import Post
from coterie.stores.sqlite.rows import AGENT, ARTIFACT, MESSAGE, find_message, to_agent, to_artifact, to_message
from coterie.stores.sqlite.writer import Writer
from coterie.text import one_line
from coterie.turns import Claim, HistoryRow, View

T = TypeVar("T")
log = logging.getLogger(__name__)

DATABASE = "coterie.db"
READERS = 2


class SqliteStore:
    def __init__(
        self,
        path: Path,
        db: sqlite3.Connection | None,
        info: StoreInfo,
        clock: Clock,
        limits: Limits,
        lock: FolderLock | None = None,
    ) -> None:
        self.info = info
        self._path, self._clock, self.limits = path, clock, limits
        self._last_stamp = to_ms(info.last_seen)
        self._db, self._lock = db, lock
        self.on_wake: list[Callable[[], None]] = []
        """Called when an agent has got something to do."""
        self._outbox: list[tuple[Envelope, asyncio.Future[Receipt]]] = []
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="coterie-reader")
        self._local = threading.local()
        self._reading: list[sqlite3.Connection] = []
        self.broken: asyncio.Future[StoreBroken] = asyncio.get_running_loop().create_future()
        """Set when writing can no longer be trusted and the process must stop."""
        self._writer = Writer(db, self._on_broken) if db else None

    @classmethod
    async def open(
        cls, folder: Path, clock: Clock, *, limits: Limits | None = None, durability: Durability = "full"
    ) -> Self:
        """Own the society's data in `folder`, made if missing. Only one process can."""
        _make_private(folder)
        check_filesystem(folder)
        lock = FolderLock(folder)
        try:
            db, info = await asyncio.to_thread(_open, folder / DATABASE, durability)
        except BaseException:
            lock.release()
            raise
        return cls(folder / DATABASE, db, info, clock, limits or Limits(), lock)

    @classmethod
    async def open_read_only(cls, folder: Path, clock: Clock) -> Self:
        """Look at the society's data beside whoever owns it; every write is refused."""
        path = folder / DATABASE
        if not path.exists():
            raise StoreUnusable(f"there is no society in {folder.parent}: make one with coterie init or coterie serve")
        try:
            db = open_reader(path)
            check_version(db)
            log_id = transitions.get_meta(db, "log_id") or ""
            db.close()
        except DATABASE_ERRORS as error:
            raise _unusable(error) from error
        info = StoreInfo(engine="sqlite", version=sqlite3.sqlite_version, log_id=log_id)
        return cls(path, None, info, clock, Limits())

    @property
    def healthy(self) -> bool:
        return self._writer is not None and self._writer.healthy and not self.broken.done()

    async def close(self) -> None:
        try:
            if self._writer and not self.broken.done():
                await self._write(transitions.end_boot)
        except StoreError as error:
            log.warning("the orderly end could not be noted (%s): the next start checks the database", error)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        if self._writer:
            await self._writer.close()
        self._readers.shutdown()
        for connection in self._reading:
            connection.close()
        if self._db:
            self._db.close()
        if self._lock:
            self._lock.release()
            self._lock = None

    # Agents

    async def add_agents(self, agents: Sequence[Agent]) -> None:
        await self._post(lambda db, post: transitions.add_agents(db, post, agents))

    async def terminate(self, agent_id: str) -> None:
        await self._post(lambda db, post: transitions.terminate(db, post, agent_id))

    async def pause(self, agent_id: str) -> None:
        await self._post(lambda db, post: transitions.pause(db, post, agent_id))

    async def resume(self, agent_id: str) -> None:
        await self._post(lambda db, post: transitions.resume(db, post, agent_id))

    async def unblock(self, agent_ids: Sequence[str]) -> Sequence[str]:
        return await self._post(lambda db, post: transitions.unblock(db, post, agent_ids))

    async def put_role(self, name: str, profile: str) -> None:
        await self._write(lambda db: transitions.put_role(db, name, profile))

    async def roles(self) -> Mapping[str, str]:
        return dict(await self._query("SELECT name, profile FROM roles ORDER BY name"))

    async def agents(self, after: str = "", limit: int = 200) -> Sequence[Agent]:
        rows = await self._query(f"SELECT {AGENT} FROM agents WHERE id > ? ORDER BY id LIMIT ?", after, limit)
        return [to_agent(row) for row in rows]

    async def agent(self, agent_id: str) -> Agent | None:
        rows = await self._query(f"SELECT {AGENT} FROM agents WHERE id = ?", agent_id)
        return to_agent(rows[0]) if rows else None

    # Messages

    async def send(self, envelope: Envelope) -> Receipt:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Receipt] = loop.create_future()
        if not self._outbox:
            # Everyone who sends in this round of the event loop shares one set-based write.
            loop.call_soon(self._hand_over)
        self._outbox.append((envelope, answer))
        return await answer

    def _hand_over(self) -> None:
        batch, self._outbox = self._outbox, []
        try:
            job = self._post(lambda _, post: _accept_all(post, batch))
        except StoreError as error:
            _answer_all(batch, error)
        else:
            job.add_done_callback(lambda done: _answer_all(batch, done.exception() or done.result()))

    async def promote(self, limit: int, *, early: bool = False) -> Promotion:
        return await self._post(lambda db, post: transitions.promote(db, post, limit, early))

    async def until_next_due(self) -> timedelta | None:
        rows = await self._query("SELECT deliver_at FROM messages WHERE state = 'delayed' ORDER BY deliver_at LIMIT 1")
        return from_ms(rows[0][0]) - self._clock.now() if rows else None

    async def withdraw(self, message_id: str, by: str) -> Message:
        return await self._post(lambda db, post: transitions.withdraw(db, post, message_id, by))

    async def move(self, message_id: str, delay: timedelta, by: str) -> Message:
        return await self._post(lambda db, post: transitions.move(db, post, message_id, delay, by))

    async def read(self, sender: str, upto: int) -> int:
        return await self._post(lambda db, post: transitions.read(db, post, sender, upto))

    async def resend(self, message_id: str) -> Receipt:
        return await self._post(lambda db, post: transitions.resend(db, post, message_id))

    async def forget(self, message_id: str) -> None:
        await self._post(lambda db, post: transitions.forget(db, post, message_id))

    async def message(self, message_id: str) -> Message | None:
        return await self._read(lambda db: find_message(db, message_id))

    async def messages(self, page: Page, *, agent: str | None = None, state: State | None = None) -> Sequence[Message]:
        rows = await self._query(
            f"SELECT {MESSAGE} FROM messages WHERE (?1 IS NULL OR seq < ?1)"
            " AND (?2 IS NULL OR ?2 IN (sender, recipient)) AND (?3 IS NULL OR state = ?3) ORDER BY seq DESC LIMIT ?4",
            page.before, agent, state, page.limit,
        )  # fmt: skip
        return [to_message(row) for row in rows]

    async def waiting(self, recipient: str, limit: int = 200) -> Sequence[Message]:
        rows = await self._query(
            f"SELECT {MESSAGE} FROM messages WHERE recipient = ?1 AND state = 'pending'"
            " AND in_seq > (SELECT taken_seq FROM agents WHERE id = ?1) ORDER BY in_seq LIMIT ?2",
            recipient, limit,
        )  # fmt: skip
        return [to_message(row) for row in rows]

    async def delayed(
        self, recipient: str | None = None, *, sender: str | None = None, after: Message | None = None, limit: int = 50
    ) -> Sequence[Message]:
        place = (to_ms(after.deliver_at), after.seq) if after and after.deliver_at else (0, 0)
        rows = await self._query(
            f"SELECT {MESSAGE} FROM messages WHERE state = 'delayed' AND (deliver_at, seq) > (?1, ?2)"
            " AND (?3 IS NULL OR recipient = ?3) AND (?4 IS NULL OR sender = ?4) ORDER BY deliver_at, seq LIMIT ?5",
            *place, recipient, sender, limit,
        )  # fmt: skip
        return [to_message(row) for row in rows]

    async def delayed_count(self, recipient: str | None = None) -> int:
        rows = await self._query("SELECT coalesce(sum(delayed), 0) FROM agents WHERE ?1 IS NULL OR id = ?1", recipient)
        return int(rows[0][0])

    # Turns

    async def claim(self, worker: str, rules: Rules, limit: int) -> Sequence[Claim]:
        return await self._post(lambda db, post: turns.claim(db, post, worker, rules, limit))

    async def release(self, worker: str, *, busy: Sequence[str] = (), failed: bool) -> None:
        await self._post(lambda db, post: turns.release(db, post, worker, busy, failed))

    async def advance(self, claim: Claim, event: TurnEvent, rules: Rules, *, sends: Envelope | None = None) -> Claim:
        return await self._post(lambda db, post: turns.advance(db, post, claim, event, rules, sends))

    async def history(self, agent_id: str, after: int = 0) -> Sequence[HistoryRow]:
        return await self._read(lambda db: history.history(db, agent_id, after))

    async def view(self, agent_id: str) -> View:
        return await self._read(lambda db: history.view(db, agent_id))

    async def summarise(self, claim: Claim, upto: int, text: str) -> None:
        await self._post(lambda db, post: turns.summarise(db, post, claim, upto, text))

    async def tokens_since(self, start: datetime) -> int:
        return await self._read(lambda db: history.tokens_since(db, to_ms(start)))

    # Artifacts

    async def add_artifact(self, artifact: Artifact) -> Artifact:
        return await self._post(lambda db, post: transitions.add_artifact(db, post, artifact))

    async def artifacts(self, refs: Sequence[str]) -> Mapping[str, Artifact]:
        marks = ", ".join("?" * len(refs))
        rows = await self._query(f"SELECT {ARTIFACT} FROM artifacts WHERE ref IN ({marks})", *refs)
        return {row[0]: to_artifact(row) for row in rows}

    async def latest_artifacts(self, limit: int = 50) -> Sequence[Artifact]:
        rows = await self._query(f"SELECT {ARTIFACT} FROM artifacts ORDER BY created_at DESC, ref DESC LIMIT ?", limit)
        return [to_artifact(row) for row in rows]

    # The log, and care

    async def events(self, after: int, limit: int = 500) -> Sequence[Event]:
        rows = await self._query(
            "SELECT seq, at, kind, subject, data FROM events WHERE seq > ? ORDER BY seq LIMIT ?", after, limit
        )
        return [Event(seq, from_ms(at), kind, subject, data) for seq, at, kind, subject, data in rows]

    async def last_event(self) -> int:
        rows = await self._query("SELECT max(seq) FROM events")
        return int(rows[0][0] or 0)

    async def prune(self, retention: Retention) -> Pruned:
        return await self._post(lambda db, post: transitions.prune(db, post, retention))

    async def violations(self) -> AsyncIterator[str]:
        for name, (sentence, sql) in INVARIANTS.items():
            for row in await self._query(sql):
                yield f"{name}: {sentence.format(*row)}"

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(_copy, self._path, target)

    # Plumbing

    def _write(self, run: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        if self._writer is None:
            raise StoreError("this society was opened for reading only")
        return self._writer.write(run)

    def _post(self, run: Callable[[sqlite3.Connection, Post], T]) -> asyncio.Future[T]:
        """One transition, with a post office of its own."""
        woke = False

        def work(db: sqlite3.Connection) -> T:
            nonlocal woke
            now = to_ms(self._clock.now())
            self._last_stamp = max(self._last_stamp, now)
            post = Post(db, now=now, stamp=self._last_stamp, limits=self.limits)
            result = run(db, post)
            post.close()
            woke = post.woke_somebody
            return result

        def told(_: asyncio.Future[T]) -> None:
            for listener in self.on_wake if woke else ():
                listener()

        written = self._write(work)
        written.add_done_callback(told)
        return written

    async def _query(self, sql: str, *parameters: Any) -> list[Any]:
        return await self._read(lambda db: db.execute(sql, parameters).fetchall())

    async def _read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        def work() -> T:
            try:
                return run(self._reader())
            except DATABASE_ERRORS as error:
                raise translate(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _reader(self) -> sqlite3.Connection:
        """This thread's own connection."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = self._local.db = open_reader(self._path)
            self._reading.append(db)
        return db

    def _on_broken(self, error: StoreBroken) -> None:
        if not self.broken.done():
            self.broken.set_result(error)


def _accept_all(post: Post, batch: list[tuple[Envelope, asyncio.Future[Receipt]]]) -> list[Receipt | Refused]:
    outcomes: list[Receipt | Refused] = []
    for envelope, _ in batch:
        try:
            outcomes.append(post.accept(envelope))
        except Refused as refusal:
            outcomes.append(refusal)
    return outcomes


def _answer_all(
    batch: list[tuple[Envelope, asyncio.Future[Receipt]]], outcome: list[Receipt | Refused] | BaseException
) -> None:
    outcomes = outcome if isinstance(outcome, list) else [outcome] * len(batch)
    for (_, answer), each in zip(batch, outcomes, strict=True):
        if answer.done():  # its caller was cancelled
            continue
        if isinstance(each, Receipt):
            answer.set_result(each)
        else:
            answer.set_exception(each)


def _open(path: Path, durability: Durability) -> tuple[sqlite3.Connection, StoreInfo]:
    try:
        db = open_writer(path, durability)
    except DATABASE_ERRORS as error:
        raise _unusable(error) from error
    try:
        path.chmod(0o600)
        unclean = transitions.was_unclean(db)
        if unclean:
            _check_after_crash(db)
        migrate(db)
        hit("open.checked")
        transitions.begin_boot(db)
        log_id = transitions.get_meta(db, "log_id") or transitions.set_meta(db, "log_id", new_id())
        last = db.execute("SELECT at FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    except DATABASE_ERRORS as error:
        db.close()
        raise _unusable(error) from error
    except BaseException:
        db.close()
        raise
    info = StoreInfo(
        engine="sqlite",
        version=sqlite3.sqlite_version,
        log_id=log_id,
        last_seen=from_ms(last[0]) if last else EPOCH,
        unclean=unclean,
        warnings=_warnings(),
    )
    return db, info


def _check_after_crash(db: sqlite3.Connection) -> None:
    finding = one_line(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    if finding != "ok":
        raise StoreUnusable(f"data/coterie.db is damaged ({finding}): restore a backup with coterie restore FILE")


def _unusable(error: sqlite3.Error | UnicodeDecodeError) -> StoreError:
    meaning = translate(error)
    if isinstance(meaning, StoreBroken):
        return StoreUnusable(f"data/coterie.db is damaged ({error}): restore a backup with coterie restore FILE")
    if "unable to open" in str(error) or "readonly" in str(error):
        return StoreUnusable(f"data/coterie.db cannot be opened ({error}): make the data folder readable and writable")
    return meaning


def _warnings() -> Sequence[str]:
    if sqlite3.sqlite_version_info >= ADVISED:
        return ()
    advised = ".".join(map(str, ADVISED))
    return (f"SQLite {sqlite3.sqlite_version} is older than {advised}, which is advised",)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise StoreUnusable(
            f"{folder} cannot be used ({error.strerror}): make it writable, or choose another with --dir"
        ) from error


def _copy(path: Path, target: Path) -> None:
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
