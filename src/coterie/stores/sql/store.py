"""The store port, in transitions and queries that both engines share.

What an engine gives to the shared half of the store: transactions that write, and readers.

The overview port, in queries that both engines share.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import Clock, from_ms, to_ms
from coterie.errors import Refused, StoreBroken, StoreError
from coterie.events import Event
from coterie.llm.concurrency import Share, fair
from coterie.llm.types import Answer
from coterie.messages import PERSON, Envelope, Message, Receipt, State
from coterie.store import (
    SHOWN,
    Limits,
    Page,
    PlanRecord,
    Promotion,
    Pruned,
    Retention,
    Role,
    Snapshot,
    Statistics,
    StoreInfo,
    Tally,
    Usage,
    Worker,
)
from coterie.stores.sql import claims, commands, queries
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.invariants import INVARIANTS, broken
from coterie.stores.sql.poison import Unclaimable, Unreadable, limit_damage
from coterie.stores.sql.queries import statistics
from coterie.stores.sql.rows import (
    AGENT,
    AGENTS,
    ARTIFACT,
    LATEST_READABLE,
    MESSAGE,
    READABLE,
    find_message,
    to_agent,
    to_artifact,
    to_message,
)
from coterie.stores.sql.session import PAUSED
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Event as TurnEvent
from coterie.turn import Rules
from coterie.turn_store import Admission, Claim, HistoryRow, StaleOwner, Taker, View

T = TypeVar("T")


class SqlDatabase(ABC):
    info: StoreInfo
    limits: Limits
    broken: asyncio.Future[StoreBroken]
    """Set when writing can no longer be trusted and the process must stop."""
    news: Callable[[], None] = staticmethod(lambda: None)
    """Called on the event loop when somebody else has written something; set by whoever wants to know."""
    heard: Callable[[str], None] = staticmethod(lambda word: None)
    """Called on the event loop with what somebody whispered, we ourselves included."""
    room: Callable[[], None] = staticmethod(lambda: None)
    """Called on the event loop when somebody wants a place at a model service, or has given one back."""
    seen_paused: bool = False
    """Whether the society was paused when this process last looked. A hint for what was decided before: a decision
    itself asks the database, in its own transaction."""
    tally: Tally
    _clock: Clock
    _taker: Taker | None = None

    def __init__(self) -> None:
        self.tally = Tally()

    @property
    @abstractmethod
    def healthy(self) -> bool: ...

    @property
    def trouble(self) -> str | None:
        """Why writes do not get through, in one sentence, as far as it is known without trying."""
        return None

    async def is_last(self) -> bool:
        """Whether no other process runs this society."""
        return True

    async def whisper(self, words: Sequence[str]) -> None:  # noqa: B027 - where nobody else is, nobody hears
        """Told to every process that runs this society just now, if all goes well; nothing of it is stored.

        A word is not empty, and has fewer than 8,000 bytes.
        """

    async def share(self, service: str, limit: int, keeps: int, waiting: int, urgent: int = 0) -> Share:
        """Where nobody else is, nobody else wants a place."""
        return fair(limit, keeps, waiting, (), urgent=urgent)

    def attend(self, taker: Taker) -> None:
        self._taker = taker

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _post(
        self,
        run: Callable[[Connection, UnitOfWork], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
    ) -> asyncio.Future[T]:
        """One transition, with a post office of its own; whoever it gives something to do is claimed with it.

        `touches`: agents whose rows it is known to change, so that an engine with locks takes them in order.
        `messages`: as many are sent to these. `small`: it is soon done.
        """
        ...

    @abstractmethod
    async def _read(self, run: Callable[[Connection], T], *, one_moment: bool = False) -> T:
        """`one_moment`: all statements see the same state."""
        ...

    @abstractmethod
    async def _now(self) -> int:
        """What due times are measured against."""
        ...

    async def _query(self, sql: str, *parameters: Any) -> list[Any]:
        return await self._read(lambda db: db.execute(sql, parameters).fetchall())


class SqlOverview(SqlDatabase):
    @abstractmethod
    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]: ...

    async def snapshot(self) -> Snapshot:
        return await self._read(queries.snapshot, one_moment=True)

    async def thread(
        self,
        agent_id: str,
        *,
        before: str | None = None,
        after: str | None = None,
        around: str | None = None,
        limit: int = 50,
    ) -> Sequence[Message]:
        return await self._read(lambda db: queries.part(db, agent_id, before, after, around, limit))

    async def clear_thread(self, agent_id: str) -> int:
        return await self._post(lambda db, post: commands.clear_thread(db, post, agent_id), touches=[agent_id, PERSON])

    async def unread(self, agent_ids: Sequence[str]) -> Mapping[str, int]:
        return await self._read(lambda db: {one: queries.unread(db, one) for one in agent_ids})

    async def open_questions(self, agent_id: str | None = None, limit: int = SHOWN) -> Sequence[Message]:
        return await self._read(lambda db: queries.open_questions(db, agent_id, limit))

    async def runs(self, page: Page, agent_id: str | None = None) -> Sequence[PlanRecord]:
        return await self._read(lambda db: queries.runs(db, page, agent_id))

    async def usage(self, since: datetime) -> Sequence[Usage]:
        return await self._read(lambda db: queries.usage(db, to_ms(since)))

    async def artifacts_before(self, ref: str | None, limit: int) -> Sequence[Artifact]:
        return await self._read(lambda db: queries.artifacts_before(db, ref, limit))


SMALL = 16
"""Messages sent together that are written without a change of threads, where nothing is flushed."""


class SqlStore(SqlOverview):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outbox: list[tuple[Envelope, asyncio.Future[Receipt]]] = []

    # Agents

    async def add_agents(self, agents: Sequence[Agent]) -> None:
        await self._post(lambda db, post: commands.add_agents(db, post, agents), touches=[agent.id for agent in agents])

    async def terminate(self, agent_id: str) -> None:
        await self._post(lambda db, post: commands.terminate(db, post, agent_id), touches=[agent_id])

    async def pause(self, agent_id: str) -> None:
        await self._post(lambda db, post: commands.pause(db, post, agent_id), touches=[agent_id])

    async def resume(self, agent_id: str) -> None:
        await self._post(lambda db, post: commands.resume(db, post, agent_id), touches=[agent_id])

    async def pause_all(self) -> None:
        await self._post(commands.pause_all)
        self.seen_paused = True

    async def resume_all(self) -> None:
        await self._post(commands.resume_all)
        self.seen_paused = False

    async def society_paused(self) -> bool:
        self.seen_paused = bool((await self._query(PAUSED))[0][0])
        return self.seen_paused

    async def stop(self, agent_id: str) -> bool:
        return await self._post(lambda db, post: commands.stop(db, post, agent_id), touches=[agent_id])

    async def catch_up(self) -> None:
        await self._post(lambda *_: None)

    async def unblock(self, agent_ids: Sequence[str]) -> Sequence[str]:
        return await self._post(lambda _, post: commands.unblock(post, agent_ids), touches=agent_ids)

    async def put_role(self, name: str, profile: str, maker: str = PERSON) -> None:
        await self._post(lambda db, _: commands.put_role(db, name, profile, maker))

    async def roles(self) -> Mapping[str, Role]:
        rows = await self._query("SELECT name, profile, maker FROM roles ORDER BY name")
        return {name: Role(profile, maker) for name, profile, maker in rows}

    async def agents(self, after: str = "", limit: int = 200) -> Sequence[Agent]:
        rows = await self._query(f"SELECT {AGENT} FROM {AGENTS} WHERE id > ? ORDER BY id LIMIT ?", after, limit)
        return [to_agent(row) for row in rows]

    async def agent(self, agent_id: str) -> Agent | None:
        rows = await self._query(f"SELECT {AGENT} FROM {AGENTS} WHERE id = ?", agent_id)
        return to_agent(rows[0]) if rows else None

    async def agents_named(self, ids: Sequence[str]) -> Mapping[str, Agent]:
        if not ids:
            return {}
        marks = ", ".join("?" * len(ids))
        rows = await self._query(f"SELECT {AGENT} FROM {AGENTS} WHERE id IN ({marks})", *ids)
        return {row[0]: to_agent(row) for row in rows}

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
            job = self._post(
                lambda _, post: post.accept_all([envelope for envelope, _ in batch]),
                touches=[envelope.to for envelope, _ in batch],
                messages=len(batch),
                small=len(batch) <= SMALL,
            )
        except StoreError as error:
            _answer_all(batch, error)
        else:
            job.add_done_callback(lambda done: _answer_all(batch, done.exception() or done.result()))

    async def promote(self, limit: int, *, early: bool = False) -> Promotion:
        return await self._post(lambda db, post: commands.promote(db, post, limit, early))

    async def until_next_due(self) -> timedelta | None:
        rows = await self._query("SELECT deliver_at FROM messages WHERE state = 'delayed' ORDER BY deliver_at LIMIT 1")
        return from_ms(rows[0][0]) - from_ms(await self._now()) if rows else None

    async def withdraw(self, message_id: str, by: str) -> Message:
        return await self._post(lambda db, post: commands.withdraw(db, post, message_id, by))

    async def move(self, message_id: str, delay: timedelta, by: str) -> Message:
        return await self._post(lambda db, post: commands.move(db, post, message_id, delay, by))

    async def read(self, thread: str, upto: str) -> int:
        return await self._post(lambda db, post: commands.mark_read(db, post, thread, upto), touches=[PERSON])

    async def resend(self, message_id: str) -> Receipt:
        return await self._post(lambda db, post: commands.resend(db, post, message_id))

    async def forget(self, message_id: str) -> None:
        await self._post(lambda db, post: commands.forget(db, post, message_id))

    async def message(self, message_id: str) -> Message | None:
        return await self._read(lambda db: find_message(db, message_id))

    async def messages_named(self, ids: Sequence[str]) -> Mapping[str, Message]:
        if not ids:
            return {}
        marks = ", ".join("?" * len(ids))
        rows = await self._query(f"SELECT {MESSAGE} FROM messages WHERE id IN ({marks})", *ids)
        return {message.id: message for message in map(to_message, rows)}

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

    async def claim(
        self, worker: str, rules: Rules, limit: int, *, others: int | None = None, admission: Admission | None = None
    ) -> Sequence[Claim]:
        claims = await self._despite_damage(
            lambda db, post: claims.claim(db, post, worker, rules, limit, others=others, admission=admission)
        )
        self.tally.takeovers += sum(claim.taken_over for claim in claims)
        return claims

    async def release(self, worker: str, *, busy: Sequence[str] = (), failed: bool) -> None:
        await self._post(lambda db, post: claims.release(db, post, worker, busy, failed))

    async def advance(self, claim: Claim, event: TurnEvent, rules: Rules, *, sends: Envelope | None = None) -> Claim:
        touches = [claim.agent_id, sends.to] if sends else [claim.agent_id]
        return await self._despite_damage(
            lambda db, post: claims.advance(db, post, claim, event, rules, sends), touches=touches, small=True
        )

    async def history(self, agent_id: str, after: int = 0) -> Sequence[HistoryRow]:
        return await self._read(lambda db: queries.history(db, agent_id, after))

    async def view(self, agent_id: str, claim: Claim | None = None) -> View:
        try:
            return await self._read(lambda db: queries.view(db, agent_id, claim), one_moment=True)
        except StaleOwner:
            self.tally.fenced += 1
            raise

    async def summarise(self, claim: Claim, upto: int, text: str, answer: Answer | None = None) -> Claim:
        return await self._despite_damage(
            lambda db, post: claims.summarise(db, post, claim, upto, text, answer), touches=[claim.agent_id]
        )

    async def set_aside(self, claim: Claim, service: str, tokens: int, *, since: datetime, limit: int) -> bool:
        return await self._post(
            lambda db, post: claims.set_aside(db, post, claim, service, tokens, to_ms(since), limit),
            touches=[claim.agent_id],
        )

    async def tokens_since(self, start: datetime) -> int:
        return await self._read(lambda db: queries.tokens_since(db, to_ms(start)))

    async def _despite_damage(
        self, run: Callable[[Connection, UnitOfWork], T], *, touches: Sequence[str] = (), small: bool = False
    ) -> T:
        """What stands in the way is dealt with in transactions of its own, each of which brings that to an end."""
        while True:
            try:
                return await self._post(run, touches=touches, small=small)
            except (Unreadable, Unclaimable) as trouble:
                await self._post(partial(limit_damage, trouble=trouble))
            except StaleOwner:
                self.tally.fenced += 1
                raise

    # Artifacts

    async def add_artifact(self, artifact: Artifact, maker: str | None = None) -> Artifact:
        return await self._post(lambda db, post: commands.add_artifact(db, post, artifact, maker))

    async def artifacts(self, refs: Sequence[str], *, reader: str | None = None) -> Mapping[str, Artifact]:
        if not refs:
            return {}
        marks = ", ".join("?" * len(refs))
        if reader is None:
            rows = await self._query(f"SELECT {ARTIFACT} FROM artifacts WHERE ref IN ({marks})", *refs)
        else:
            sql = f"SELECT {ARTIFACT} FROM artifacts WHERE ref IN ({marks}) AND {READABLE}"
            rows = await self._query(sql, *refs, reader, reader)
        return {row[0]: to_artifact(row) for row in rows}

    async def latest_artifacts(self, limit: int = 50, *, reader: str | None = None) -> Sequence[Artifact]:
        if reader is None:
            return await self.artifacts_before(None, limit)
        return [to_artifact(row) for row in await self._query(LATEST_READABLE, reader, limit)]

    async def named_bytes(self, after: tuple[str, int], limit: int) -> Sequence[tuple[str, int]]:
        """Content hash and size of what artifacts name, in that order, behind `after`."""
        return await self._query(
            "SELECT DISTINCT sha256, size FROM artifacts WHERE (sha256, size) > (?, ?) ORDER BY sha256, size LIMIT ?",
            *after,
            limit,
        )

    # The log, and care

    async def events(self, after: int, limit: int = 500) -> Sequence[Event]:
        rows = await self._query(
            "SELECT seq, at, kind, subject, data FROM events WHERE seq > ? ORDER BY seq LIMIT ?", after, limit
        )
        return [Event(seq, from_ms(at), kind, subject, data) for seq, at, kind, subject, data in rows]

    async def last_event(self) -> int:
        rows = await self._query("SELECT max(seq) FROM events")
        return int(rows[0][0] or 0)

    async def statistics(self, after: int) -> Statistics:
        return await self._read(lambda db: statistics(db, after))

    async def prune(self, retention: Retention) -> Pruned:
        return await self._post(lambda db, post: commands.prune(db, post, retention))

    @abstractmethod
    async def workers(self) -> Sequence[Worker]: ...

    @abstractmethod
    async def backup(self, target: Path) -> None: ...

    async def violations(self) -> AsyncIterator[str]:
        for name, (_, sql) in INVARIANTS.items():
            for row in await self._query(sql):
                yield broken(name, row)


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
