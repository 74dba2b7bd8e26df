"""The store ports for both engines: `SqlOverview` and `SqlStore`, on what `SqlDatabase` provides.

They use `commands`, `claims` and `queries`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import from_ms, to_ms
from coterie.errors import Refused, StoreError
from coterie.keys import Key, NewKey
from coterie.llm.service import Completion, TokenUsage
from coterie.messages import PERSON, Envelope, Message, Receipt, Schedule, State
from coterie.push_configs import OpenPushConfig, PushConfig
from coterie.retention_store import Pruned, Retention, StorageFigures, UnusedArtifacts
from coterie.store import (
    MAX_LISTED,
    SOCIETY_EVENTS,
    Event,
    Page,
    Promotion,
    Role,
    Snapshot,
    Statistics,
    StoredConfiguration,
    StoredProfile,
    Usage,
    Worker,
)
from coterie.stores.sql import (
    claims,
    commands,
    keys,
    push_configs,
    queries,
    retention,
    schedules,
    task_control,
    task_queries,
)
from coterie.stores.sql.database import SqlDatabase
from coterie.stores.sql.invariants import INVARIANTS, describe_violation
from coterie.stores.sql.quarantine import UnclaimableAgent, UnreadableMessage, quarantine
from coterie.stores.sql.retention import DatabaseSize, Pruner
from coterie.stores.sql.rows import (
    AGENT_COLUMNS,
    AGENTS_WITH_CALL,
    ARTIFACT_COLUMNS,
    IS_BUSY,
    IS_READABLE,
    MESSAGE_COLUMNS,
    SELECT_READABLE_ARTIFACTS,
    Connection,
    find_message,
    json_keys,
    to_agent,
    to_artifact,
    to_message,
)
from coterie.stores.sql.session import SELECT_PAUSED
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.tasks import Away, StoppedTask, Task, TaskState, TaskTree
from coterie.turn import Event as TurnEvent
from coterie.turn import ModelAnswered, Rules
from coterie.turn_store import Admission, Claim, ClaimKey, FoundRuns, HistoryRow, HistoryView, PlanRecord, StaleClaim

log = logging.getLogger(__name__)

T = TypeVar("T")

_MS = timedelta(milliseconds=1)
_SELECT_AGENTS = f"SELECT {AGENT_COLUMNS} FROM {AGENTS_WITH_CALL} WHERE id > :after ORDER BY id LIMIT :limit"
_SELECT_AGENT = f"SELECT {AGENT_COLUMNS} FROM {AGENTS_WITH_CALL} WHERE id = :id"
_SELECT_AGENTS_BY_ID = f"""
SELECT {AGENT_COLUMNS} FROM {AGENTS_WITH_CALL} WHERE id IN (SELECT key FROM json_each(:ids))
"""
_SELECT_MESSAGES_BY_ID = f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE id IN (SELECT key FROM json_each(:ids))"
_SELECT_WAITING = f"""
SELECT {MESSAGE_COLUMNS} FROM messages WHERE recipient = :recipient AND state = 'pending'
   AND in_seq > (SELECT taken_seq FROM agents WHERE id = :recipient) ORDER BY in_seq LIMIT :limit
"""
_SELECT_DELAYED = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE state = 'delayed' AND (deliver_at, seq) > (:deliver_at, :seq)
   AND (:recipient IS NULL OR recipient = :recipient) AND (:sender IS NULL OR sender = :sender)
 ORDER BY deliver_at, seq LIMIT :limit
"""
_COUNT_DELAYED = f"SELECT coalesce(sum(delayed), 0) FROM agents WHERE {IS_BUSY}"
_COUNT_DELAYED_OF = "SELECT coalesce(sum(delayed), 0) FROM agents WHERE id = :recipient"
_SELECT_ARTIFACTS = f"SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE ref IN (SELECT key FROM json_each(:refs))"
_SELECT_READABLE_BY_REF = f"{_SELECT_ARTIFACTS} AND {IS_READABLE}"
_SELECT_BLOBS = """
SELECT DISTINCT sha256, size FROM artifacts WHERE (sha256, size) > (:sha256, :size) ORDER BY sha256, size LIMIT :limit
"""
_SELECT_CONFIGURATION = "SELECT key, value FROM meta WHERE key IN ('configuration', 'configuration_version')"
_SELECT_EVENTS = """
SELECT seq, at, kind, subject, data FROM events WHERE seq > :after AND seq <= :upto ORDER BY seq LIMIT :limit
"""
# The kinds are those of a partial index.
_SOCIETY_KINDS = ", ".join(f"'{kind}'" for kind in SOCIETY_EVENTS)
_SELECT_SOCIETY_EVENTS = f"""
SELECT seq, at, kind, subject, data FROM events
 WHERE seq > :after AND seq <= :upto AND kind IN ({_SOCIETY_KINDS}) ORDER BY seq LIMIT :limit
"""


class SqlOverview(SqlDatabase):
    @abstractmethod
    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]: ...

    @abstractmethod
    async def index_messages(self) -> bool: ...

    async def snapshot(self) -> Snapshot:
        # The position is read before the snapshot, which then has the changes of all events up to it.
        last, attempts_left, snapshot = await self._event_horizon(), SNAPSHOT_ATTEMPTS, None
        while snapshot is None:
            upto, attempts_left = last if attempts_left else None, attempts_left - 1
            snapshot = await self._read(partial(queries.read_snapshot, upto=upto), in_snapshot=True)
            last = last if snapshot else await self._event_horizon()
        await self._flush_commits()  # see `events`
        return snapshot if last is None else replace(snapshot, seq=last)

    async def thread(
        self,
        agent_id: str,
        *,
        before: str | None = None,
        after: str | None = None,
        around: str | None = None,
        limit: int = 50,
    ) -> Sequence[Message]:
        return await self._read(lambda db: queries.read_thread(db, agent_id, before, after, around, limit))

    async def clear_thread(self, agent_id: str) -> int:
        return await self._transact(partial(commands.clear_thread, agent_id=agent_id), touches=[agent_id, PERSON])

    async def unread(self, agent_ids: Sequence[str]) -> Mapping[str, int]:
        return await self._read(lambda db: queries.count_unread(db, agent_ids))

    async def open_questions(self, agent_id: str | None = None, limit: int = MAX_LISTED) -> Sequence[Message]:
        return await self._read(lambda db: queries.read_open_questions(db, agent_id, limit))

    async def runs(self, page: Page, agent_id: str | None = None) -> Sequence[PlanRecord]:
        return await self._read(lambda db: queries.read_runs(db, page, agent_id))

    async def search_runs(self, words: str, page: Page, agent_id: str | None = None) -> FoundRuns:
        return await self._read(lambda db: queries.search_runs(db, words, page, agent_id))

    async def usage(self, since: datetime) -> Sequence[Usage]:
        return await self._read(lambda db: queries.read_usage(db, to_ms(since)))

    async def artifacts_before(self, ref: str | None, limit: int) -> Sequence[Artifact]:
        return await self._read(lambda db: queries.read_artifacts_before(db, ref, limit))

    # Tasks

    async def tasks(self, page: Page, *, state: TaskState | None = None, agent: str | None = None) -> Sequence[Task]:
        return await self._read(lambda db: task_queries.read_tasks(db, page, state, agent), in_snapshot=True)

    async def tasks_by_id(self, ids: Sequence[str]) -> Mapping[str, Task]:
        return await self._read(lambda db: task_queries.read_tasks_by_id(db, ids), in_snapshot=True) if ids else {}

    async def open_tasks(self, limit: int) -> tuple[Sequence[Task], int]:
        return await self._read(lambda db: task_queries.read_open_tasks(db, limit), in_snapshot=True)

    async def away(self, since: datetime, limit: int) -> Away:
        return await self._read(lambda db: task_queries.read_away(db, to_ms(since), limit), in_snapshot=True)

    async def task_tree(self, message_id: str) -> TaskTree | None:
        return await self._read(lambda db: task_queries.read_tree(db, message_id), in_snapshot=True)

    async def task_with_messages(self, task_id: str, *, after: int = 0) -> tuple[Task | None, Sequence[Message]]:
        return await self._read(lambda db: task_queries.read_with_messages(db, task_id, after))

    async def stop_task(self, task_id: str) -> StoppedTask:
        involved = await self._query(task_control.SELECT_INVOLVED, task=task_id)
        return await self._transact(
            lambda db, uow: task_control.stop_task(db, uow, task_id), touches=[agent_id for (agent_id,) in involved]
        )

    async def continue_task(self, task_id: str) -> None:
        involved = await self._query(task_control.SELECT_INVOLVED, task=task_id)
        await self._transact(
            lambda db, uow: task_control.continue_task(db, uow, task_id), touches=[agent_id for (agent_id,) in involved]
        )


SNAPSHOT_ATTEMPTS = 50
"""A snapshot that has changes of events after its position is taken again. Clients would count these twice."""
ALL_EVENTS = 1 << 62
"""Number of an event that is never reached."""
MAX_SMALL_BATCH = 16
"""Messages of one batch that may be written on the event loop, if commits do not flush."""


class SqlStore(SqlOverview):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outbox: list[tuple[Envelope, asyncio.Future[Receipt]]] = []

    # Agents

    async def add_agents(self, agents: Sequence[Agent]) -> None:
        await self._transact(partial(commands.add_agents, agents=agents), touches=[agent.id for agent in agents])

    async def create_agent(self, agent: Agent) -> None:
        touches = [agent.id] if agent.parent is None else [agent.id, agent.parent]
        await self._transact(lambda db, uow: commands.create_agent(db, uow, agent), touches=touches)

    async def terminate(self, agent_id: str) -> None:
        await self._transact(lambda db, uow: commands.terminate(db, uow, agent_id), touches=[agent_id])

    async def pause(self, agent_id: str) -> None:
        await self._transact(lambda _, uow: commands.pause(uow, agent_id), touches=[agent_id])

    async def resume(self, agent_id: str) -> None:
        await self._transact(lambda _, uow: commands.resume(uow, agent_id), touches=[agent_id])

    async def pause_all(self) -> None:
        await self._transact(commands.pause_all)
        self.seen_paused = True

    async def resume_all(self) -> None:
        await self._transact(commands.resume_all)
        self.seen_paused = False

    async def is_paused(self) -> bool:
        self.seen_paused = bool((await self._query(SELECT_PAUSED))[0][0])
        return self.seen_paused

    async def stop_waiting_turn(self, agent_id: str) -> bool:
        return await self._transact(lambda db, uow: commands.stop_waiting_turn(db, uow, agent_id), touches=[agent_id])

    async def flush(self) -> None:
        await self._transact(lambda *_: None)

    async def unblock(self, agent_ids: Sequence[str]) -> Sequence[str]:
        return await self._transact(lambda _, uow: commands.unblock(uow, agent_ids), touches=agent_ids)

    async def put_role(self, name: str, profile: str, maker: str = PERSON) -> None:
        await self._transact(lambda db, _: commands.put_role(db, name, profile, maker))

    async def roles(self) -> Mapping[str, Role]:
        rows = await self._query("SELECT name, profile, maker FROM roles ORDER BY name")
        return {name: Role(profile, maker) for name, profile, maker in rows}

    async def agents(self, after: str = "", limit: int = 200) -> Sequence[Agent]:
        return [to_agent(row) for row in await self._query(_SELECT_AGENTS, after=after, limit=limit)]

    async def agent(self, agent_id: str) -> Agent | None:
        rows = await self._query(_SELECT_AGENT, id=agent_id)
        return to_agent(rows[0]) if rows else None

    async def agents_by_id(self, ids: Sequence[str]) -> Mapping[str, Agent]:
        if not ids:
            return {}
        rows = await self._query(_SELECT_AGENTS_BY_ID, ids=json_keys(ids))
        return {agent.id: agent for agent in map(to_agent, rows)}

    async def agent_profiles(self, ids: Sequence[str] | None = None, *, after: str = "") -> Sequence[StoredProfile]:
        return await self._read(lambda db: queries.read_profiles(db, ids, after))

    # Configuration

    async def configuration(self) -> StoredConfiguration:
        found = dict(await self._query(_SELECT_CONFIGURATION))
        return StoredConfiguration(
            version=int(found.get("configuration_version", 0)), document=found.get("configuration", "{}")
        )

    async def write_configuration(self, document: str, expected: int, agents: Sequence[Agent]) -> int:
        return await self._transact(
            lambda db, uow: commands.write_configuration(db, uow, document, expected, agents),
            touches=[agent.id for agent in agents],
        )

    # Messages

    async def send(self, envelope: Envelope) -> Receipt:
        loop = asyncio.get_running_loop()
        receipt: asyncio.Future[Receipt] = loop.create_future()
        if not self._outbox:
            # All sends of this iteration of the event loop share one transaction.
            loop.call_soon(self._flush_outbox)
        self._outbox.append((envelope, receipt))
        return await receipt

    def _flush_outbox(self) -> None:
        batch, self._outbox = self._outbox, []
        try:
            transaction = self._transact(
                lambda _, uow: uow.accept_all([envelope for envelope, _ in batch]),
                touches=[envelope.to for envelope, _ in batch],
                messages=len(batch),
                small=len(batch) <= MAX_SMALL_BATCH,
            )
        except StoreError as error:
            _resolve(batch, error)
        else:
            if transaction.done():  # a callback would wait for the next iteration of the event loop
                _resolve(batch, transaction.exception() or transaction.result())
            else:
                transaction.add_done_callback(lambda done: _resolve(batch, done.exception() or done.result()))

    async def promote_due(self, limit: int, *, early: bool = False) -> Promotion:
        return await self._transact(lambda db, uow: commands.promote_due(db, uow, limit, early), durable=False)

    async def until_next_due(self) -> timedelta | None:
        rows = await self._query("SELECT deliver_at FROM messages WHERE state = 'delayed' ORDER BY deliver_at LIMIT 1")
        return from_ms(rows[0][0]) - from_ms(await self._now_ms()) if rows else None

    async def withdraw(self, message_id: str, by: str) -> Message:
        return await self._transact(lambda db, uow: commands.withdraw(db, uow, message_id, by))

    async def reschedule(self, message_id: str, delay: timedelta, by: str) -> Message:
        return await self._transact(lambda db, uow: commands.reschedule(db, uow, message_id, delay, by))

    async def change_schedule(
        self,
        schedule_id: str,
        by: str,
        *,
        every: str | None = None,
        paused: bool | None = None,
        delay: timedelta | None = None,
    ) -> Schedule:
        return await self._transact(
            lambda db, uow: schedules.change_schedule(db, uow, schedule_id, by, every, paused, delay)
        )

    async def end_schedule(self, schedule_id: str, by: str) -> Schedule:
        return await self._transact(lambda db, uow: schedules.end_schedule(db, uow, schedule_id, by))

    async def schedule(self, schedule_id: str) -> Schedule | None:
        rows = await self._query(schedules.SELECT_SCHEDULE, id=schedule_id)
        return schedules.to_schedule(rows[0]) if rows else None

    async def schedules(
        self, recipient: str | None = None, *, sender: str | None = None, after: str = "", limit: int = 50
    ) -> Sequence[Schedule]:
        rows = await self._query(
            schedules.SELECT_SCHEDULES, recipient=recipient, sender=sender, after=after, limit=limit
        )
        return [schedules.to_schedule(row) for row in rows]

    async def schedule_count(self) -> int:
        return int((await self._query(schedules.COUNT_ACTIVE))[0][0])

    async def mark_read(self, thread: str, upto: str) -> int:
        return await self._transact(lambda db, uow: commands.mark_read(db, uow, thread, upto), touches=[PERSON])

    async def mark_unread(self, thread: str, since: str) -> int:
        return await self._transact(lambda db, uow: commands.mark_unread(db, uow, thread, since), touches=[PERSON])

    async def resend_dead_letter(self, message_id: str) -> Receipt:
        return await self._transact(lambda db, uow: commands.resend_dead_letter(db, uow, message_id))

    async def delete_dead_letter(self, message_id: str) -> None:
        await self._transact(lambda db, uow: commands.delete_dead_letter(db, uow, message_id))

    async def message(self, message_id: str) -> Message | None:
        return await self._read(lambda db: find_message(db, message_id))

    async def messages_by_id(self, ids: Sequence[str]) -> Mapping[str, Message]:
        if not ids:
            return {}
        rows = await self._query(_SELECT_MESSAGES_BY_ID, ids=json_keys(ids))
        return {message.id: message for message in map(to_message, rows)}

    async def messages(self, page: Page, *, agent: str | None = None, state: State | None = None) -> Sequence[Message]:
        return await self._read(lambda db: queries.read_messages(db, page, agent, state))

    async def waiting(self, recipient: str, limit: int = 200) -> Sequence[Message]:
        return [to_message(row) for row in await self._query(_SELECT_WAITING, recipient=recipient, limit=limit)]

    async def delayed(
        self, recipient: str | None = None, *, sender: str | None = None, after: Message | None = None, limit: int = 50
    ) -> Sequence[Message]:
        deliver_at, seq = (to_ms(after.deliver_at), after.seq) if after and after.deliver_at else (0, 0)
        rows = await self._query(
            _SELECT_DELAYED, deliver_at=deliver_at, seq=seq, recipient=recipient, sender=sender, limit=limit
        )
        return [to_message(row) for row in rows]

    async def delayed_count(self, recipient: str | None = None) -> int:
        sql = _COUNT_DELAYED if recipient is None else _COUNT_DELAYED_OF
        return int((await self._query(sql, recipient=recipient))[0][0])

    # Turns

    async def claim_ready(
        self, worker: str, rules: Rules, limit: int, *, others: int | None = None, admission: Admission | None = None
    ) -> Sequence[Claim]:
        delay_ms = self._claim_delay_ms()
        claimed = await self._transact_or_quarantine(
            lambda db, uow: claims.claim_agents(
                db, uow, worker, rules, limit, others=others, admission=admission, delay_ms=delay_ms
            )
        )
        self.counters.takeovers += sum(claim.was_taken_over for claim in claimed)
        return claimed

    async def wake_forgotten(self) -> Sequence[str]:
        found = [agent_id for (agent_id,) in await self._query(claims.SELECT_FORGOTTEN)]
        if not found:
            return []
        woken = await self._transact(
            lambda db, uow: claims.wake_forgotten(db, uow, found), touches=found, durable=False
        )
        for agent_id, waiting in woken:
            log.error("%s was idle although %d messages wait for it: its stored state is repaired", agent_id, waiting)
        return [agent_id for agent_id, _ in woken]

    async def claims_of(self, worker: str) -> Collection[ClaimKey]:
        return [(agent_id, epoch) for agent_id, epoch in await self._query(claims.SELECT_CLAIMED, worker=worker)]

    async def release_claims(self, worker: str, *, only: Collection[ClaimKey] | None = None, failed: bool) -> None:
        release = partial(claims.release_claims, worker=worker, only=only, failed=failed)
        await self._transact(release)

    async def advance(self, claim: Claim, event: TurnEvent, rules: Rules, *, sends: Envelope | None = None) -> Claim:
        touches = [claim.agent_id, sends.to] if sends else [claim.agent_id]
        # A text without calls is sent to the asker.
        if isinstance(event, ModelAnswered) and not event.calls and claim.reply_target:
            touches.append(claim.reply_target.sender)
        return await self._transact_or_quarantine(
            lambda db, uow: claims.advance(db, uow, claim, event, rules, sends),
            touches=touches,
            messages=len(touches) - 1,
            small=True,
        )

    async def history(self, agent_id: str, after: int = 0, limit: int | None = None) -> Sequence[HistoryRow]:
        return await self._read(lambda db: queries.read_history(db, agent_id, after, limit))

    async def history_view(self, agent_id: str, claim: Claim | None = None) -> HistoryView:
        try:
            return await self._read(lambda db: queries.read_history_view(db, agent_id, claim), in_snapshot=True)
        except StaleClaim:
            self.counters.fenced += 1
            raise

    async def summarise(self, claim: Claim, upto: int, text: str, answer: Completion | None = None) -> Claim:
        return await self._transact_or_quarantine(
            lambda db, uow: claims.summarise(db, uow, claim, upto, text, answer), touches=[claim.agent_id]
        )

    async def reserve_tokens(self, claim: Claim, service: str, tokens: int, *, limit: int) -> bool:
        return await self._transact(
            lambda db, uow: claims.reserve_tokens(db, uow, claim, service, tokens, limit),
            touches=[claim.agent_id],
            durable=False,
        )

    async def add_usage(self, claim: Claim, service: str, usage: TokenUsage) -> None:
        await self._transact(
            lambda db, uow: claims.add_usage(db, uow, claim, service, usage), touches=[claim.agent_id], durable=False
        )

    async def add_refused_usage(self, claim: Claim, service: str, usage: TokenUsage) -> None:
        await self._transact(
            lambda db, uow: claims.add_refused_usage(db, uow, claim, service, usage),
            touches=[claim.agent_id],
            durable=False,
        )

    async def tokens_used_today(self) -> int:
        now = await self._now_ms()
        return await self._read(lambda db: queries.count_tokens_of_day(db, now))

    async def _transact_or_quarantine(
        self,
        run: Callable[[Connection, UnitOfWork], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
    ) -> T:
        """Run a step of a turn. Quarantine each poison row that it meets, in a transaction of its own, and retry."""
        while True:
            try:
                return await self._transact(run, touches=touches, messages=messages, small=small, durable=False)
            except (UnreadableMessage, UnclaimableAgent) as error:
                await self._transact(partial(quarantine, error=error), durable=False)
            except StaleClaim:
                self.counters.fenced += 1
                raise

    # Artifacts

    async def add_artifact(self, artifact: Artifact, maker: str | None = None) -> Artifact:
        return await self._transact(lambda db, uow: commands.add_artifact(db, uow, artifact, maker))

    async def artifacts(self, refs: Sequence[str], *, reader: str | None = None) -> Mapping[str, Artifact]:
        if not refs:
            return {}
        if reader is None:
            rows = await self._query(_SELECT_ARTIFACTS, refs=json_keys(refs))
        else:
            rows = await self._query(_SELECT_READABLE_BY_REF, refs=json_keys(refs), reader=reader)
        return {artifact.ref: artifact for artifact in map(to_artifact, rows)}

    async def latest_artifacts(self, limit: int = 50, *, reader: str | None = None) -> Sequence[Artifact]:
        if reader is None:
            return await self.artifacts_before(None, limit)
        rows = await self._query(SELECT_READABLE_ARTIFACTS, reader=reader, limit=limit)
        return [to_artifact(row) for row in rows]

    async def artifact_blobs(self, after: tuple[str, int], limit: int) -> Sequence[tuple[str, int]]:
        """Hashes and sizes of the blobs that artifacts refer to, in order, after the pair `after`."""
        sha256, size = after
        return await self._query(_SELECT_BLOBS, sha256=sha256, size=size, limit=limit)

    # Keys of programs

    async def add_key(self, key: NewKey) -> Key:
        return await self._transact(lambda db, uow: keys.add_key(db, uow, key))

    async def revoke_key(self, name: str) -> Key:
        return await self._transact(partial(keys.revoke_key, name=name))

    async def mark_key_used(self, name: str) -> None:
        await self._transact(lambda db, uow: keys.mark_used(db, uow, name))

    async def find_key(self, digest: str) -> Key | None:
        return await self._read(lambda db: keys.find_key(db, digest))

    async def keys(self) -> Sequence[Key]:
        return await self._read(keys.read_keys)

    # Push notifications

    async def put_push_config(self, config: PushConfig) -> None:
        await self._transact(lambda db, uow: push_configs.put(db, uow, config))

    async def push_configs(self, task: str) -> Sequence[PushConfig]:
        return await self._read(lambda db: push_configs.read(db, task))

    async def delete_push_config(self, task: str, config_id: str) -> bool:
        return await self._transact(lambda db, _: push_configs.delete(db, task, config_id))

    async def open_push_configs(self) -> Sequence[OpenPushConfig]:
        return await self._read(push_configs.read_open)

    async def claim_push_config(self, seen: OpenPushConfig, until: datetime) -> bool:
        return await self._transact(lambda db, _: push_configs.claim(db, seen, to_ms(until)))

    async def record_push(self, seen: OpenPushConfig, *, next_at: datetime | None) -> None:
        at = None if next_at is None else to_ms(next_at)
        await self._transact(lambda db, _: push_configs.record(db, seen, at))

    # Event log and maintenance

    async def events(self, after: int, limit: int = 500, *, about_society: bool = False) -> Sequence[Event]:
        upto = await self._event_horizon()
        sql = _SELECT_SOCIETY_EVENTS if about_society else _SELECT_EVENTS
        rows = await self._query(sql, after=after, upto=ALL_EVENTS if upto is None else upto, limit=limit)
        if rows:
            # The number of an event that a crash takes back is given to another event. A client that has the number
            # would never get that one.
            await self._flush_commits()
        return [Event(seq, from_ms(at), kind, subject, data) for seq, at, kind, subject, data in rows]

    async def last_event(self) -> int:
        last = await self._event_horizon()
        if last is None:
            last = int((await self._query("SELECT coalesce(max(seq), 0) FROM events"))[0][0])
        await self._flush_commits()  # see `events`
        return last

    async def statistics(self, after: int) -> Statistics:
        upto = await self._event_horizon()
        return await self._read(lambda db: queries.read_statistics(db, after, ALL_EVENTS if upto is None else upto))

    async def prune(
        self, retention: Retention, *, dry_run: bool = False, full: bool = True
    ) -> AsyncIterator[Pruned | None]:
        pruner = Pruner(retention, await self._now_ms(), dry_run=dry_run, full=full)
        write = partial(self._transact, alone=True, durable=False)
        async for deleted in pruner.execute(self._read, write):
            yield deleted

    async def unused_artifacts(self, age: timedelta, after: tuple[int, str] = (0, "")) -> UnusedArtifacts:
        before = await self._now_ms() - age // _MS
        return await self._read(lambda db: retention.find_unused_artifacts(db, before, after))

    async def delete_artifacts(self, refs: Sequence[str], age: timedelta) -> tuple[int, Sequence[str]]:
        return await self._transact(
            lambda db, uow: retention.delete_artifacts(db, refs, uow.now - age // _MS), alone=True
        )

    async def named_blobs(self, hashes: Sequence[str]) -> Set[str]:
        return await self._read(lambda db: retention.find_named_blobs(db, hashes))

    async def storage(self) -> StorageFigures:
        size, now = await self._read_size(), await self._now_ms()
        return await self._read(lambda db: retention.read_figures(db, size, now))

    async def age_beyond(self, fraction: float) -> timedelta | None:
        at = await self._read(lambda db: retention.find_time_after(db, fraction))
        return None if at is None else (await self._now_ms() - at) * _MS

    async def record_prune(self, deleted: Pruned) -> None:
        await self._transact(lambda db, uow: retention.record_prune(db, uow.now, deleted), durable=False)

    @abstractmethod
    async def _read_size(self) -> DatabaseSize: ...

    @abstractmethod
    async def release_space(self) -> bool: ...

    @abstractmethod
    async def rewrite(self) -> None: ...

    @abstractmethod
    async def workers(self) -> Sequence[Worker]: ...

    @abstractmethod
    async def backup(self, target: Path) -> None: ...

    async def violations(self) -> AsyncIterator[str]:
        for name, (_, sql) in INVARIANTS.items():
            for row in await self._query(sql):
                yield describe_violation(name, row)


def _resolve(
    batch: list[tuple[Envelope, asyncio.Future[Receipt]]], result: list[Receipt | Refused] | BaseException
) -> None:
    """Set the futures of `batch`: one result each, or the same error for all."""
    results = result if isinstance(result, list) else [result] * len(batch)
    for (_, future), receipt in zip(batch, results, strict=True):
        if future.done():  # its caller was cancelled
            continue
        if isinstance(receipt, Receipt):
            future.set_result(receipt)
        else:
            future.set_exception(receipt)
