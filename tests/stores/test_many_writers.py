"""Several processes on one PostgreSQL: every message is stored once and in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coterie.errors import Refused, StoreError
from coterie.ids import new_id
from coterie.store import Limits
from coterie.stores.postgres import PostgresStore
from coterie.stores.postgres.cluster import NotifyChannels
from coterie.stores.postgres.connection import PgConnection, owner_connection
from coterie.stores.postgres.session import PostgresSession
from coterie.stores.sql import claims, commands
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import AskModel, Stopped
from coterie.turn_store import StaleClaim
from tests.engines import EXPIRED, Postgres

from .processes import Opener, envelope, texts
from .steps import RULES, Society, advance, ask, call, claim_agent, done, history_lines, says
from .workers import TIMEOUT_SECONDS

SELECT_LIMIT = 1_024
"""`select` refuses file descriptors from this number on."""


async def test_crossing_messages_of_three_processes_all_arrive_in_the_order_of_their_sender(process: Opener) -> None:
    stores = [await process() for _ in range(3)]
    names = ("ada", "bob", "cyd")

    async def write(store: PostgresStore, sender: str) -> None:
        for n in range(30):
            await asyncio.gather(*(store.send(envelope(sender, to, f"{sender} {n}")) for to in names if to != sender))

    await asyncio.gather(*map(write, stores, names))
    for name in names:
        got = await texts(stores[0], name)
        assert len(got) == 60
        for sender in names:
            mine = [text for text in got if text.startswith(sender)]
            assert mine == ([f"{sender} {n}" for n in range(30)] if sender != name else [])


async def test_the_same_client_id_sent_by_several_processes_at_once_is_one_message(process: Opener) -> None:
    stores = [await process() for _ in range(3)]
    receipts = await asyncio.gather(
        *(s.send(envelope("user", "ada", client_id="c")) for s in stores for _ in range(10))
    )
    assert len({(receipt.message_id, receipt.state) for receipt in receipts}) == 1
    assert await texts(stores[0], "ada") == ["hello"]


async def test_a_follower_of_the_event_log_misses_none(process: Opener) -> None:
    stores = [await process() for _ in range(3)]
    ended = asyncio.Event()

    async def follow() -> list[int]:
        seen: list[int] = []
        while True:
            last = ended.is_set()
            seen += [event.seq for event in await stores[0].events(seen[-1] if seen else 0)]
            if last:
                return seen

    following = asyncio.create_task(follow())
    await asyncio.gather(*(s.send(envelope("user", "ada", str(n))) for s in stores for n in range(50)))
    ended.set()
    seen = await following
    assert len(seen) >= 150
    assert seen == [event.seq for event in await stores[0].events(0, 10_000)]
    assert seen[-1] == await stores[0].last_event()


async def test_events_are_read_up_to_the_oldest_open_transaction_and_then_all(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    start = await store.last_event()
    with owner_connection(shared.url(tmp_path)) as db:
        session = PostgresSession(db, [], 30_000, NotifyChannels(store.info.log_id, "slow"))
        session.append_events([(1, "read", "slow", None)])
        session.close()
        await store.send(envelope("user", "ada"))
        assert await store.events(start) == [] and (await store.statistics(start)).events == {}
        assert await store.last_event() == (await store.snapshot()).seq == start
        db.execute_now("COMMIT")
    events = await store.events(start)
    assert [event.kind for event in events[:2]] == ["read", "message.created"]
    assert await store.last_event() == (await store.snapshot()).seq == events[-1].seq


async def test_an_agent_is_claimed_by_one_process_only(process: Opener) -> None:
    stores: list[Society] = [await process() for _ in range(3)]
    for _ in range(5):
        await asyncio.gather(*(ask(stores[0], name) for name in ("ada", "bob", "cyd")))
        found = await asyncio.gather(*(store.claim_ready(f"w{n}", RULES, 10) for n, store in enumerate(stores)))
        claims = [claim for claims in found for claim in claims]
        assert sorted(claim.agent_id for claim in claims) == ["ada", "bob", "cyd"]
        await asyncio.gather(*(stores[0].advance(claim, says("done"), RULES) for claim in claims))


async def test_due_messages_are_delivered_once_and_in_order_by_several_processes(process: Opener) -> None:
    stores = [await process() for _ in range(3)]
    for n in range(40):
        await stores[0].send(envelope("user", "ada", str(n), delay_ms=1 + n % 3))
    left = 40
    while left:
        rounds = await asyncio.gather(*(store.promote_due(7) for store in stores))
        left -= sum(len(one.delivered) for one in rounds)
    by_due = sorted(await stores[0].waiting("ada", 100), key=lambda one: (one.deliver_at, one.seq))
    assert [one.mailbox_position for one in by_due] == sorted(one.mailbox_position or 0 for one in by_due)
    assert len(by_due) == 40


async def test_a_process_whose_claim_was_taken_over_writes_nothing(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    zombie, other = await process(), await process()
    await ask(zombie)
    stale = await claim_agent(zombie)
    assert await other.claim_ready("other", RULES, 5) == []
    with shared.behind(tmp_path) as db:
        db.execute(EXPIRED)
    claim = await claim_agent(other, "other")
    assert claim.epoch == stale.epoch + 1
    with pytest.raises(StaleClaim):
        await zombie.advance(stale, says("from a stale worker"), RULES, sends=envelope("ada", "bob"))
    assert await texts(other, "bob") == []
    await advance(other, claim, says("in time"))
    assert (await history_lines(other))[-1] == "assistant: in time"


async def test_a_process_that_hangs_while_it_reads_or_indexes_keeps_no_transaction_open(
    process: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle_timeout(db: PgConnection, *_: object) -> None:
        timeouts.append(db.execute("SHOW idle_in_transaction_session_timeout").fetchone()[0])

    timeouts: list[str] = []
    store = await process()
    monkeypatch.setattr("coterie.stores.postgres.search.read_batch", idle_timeout)
    await store.index_messages()
    await store._read(idle_timeout, in_snapshot=True)
    assert timeouts == ["3s", "15s"]


async def test_commits_are_synchronous_even_if_the_server_defaults_to_off(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.behind(tmp_path) as db:
        (database,) = db.execute("SELECT current_database()").fetchone()
        (role,) = db.execute("SELECT current_user").fetchone()
        db.execute(f"ALTER ROLE {role} IN DATABASE {database} SET synchronous_commit = off")
    try:
        store = await process()
        found = await store._transact(lambda db, _: db.execute("SHOW synchronous_commit").fetchone())
        assert found[0] == "on"
    finally:
        with shared.behind(tmp_path) as db:
            db.execute(f"ALTER ROLE {role} IN DATABASE {database} RESET synchronous_commit")


@pytest.mark.slow
async def test_a_process_that_lost_its_claim_at_any_step_writes_nothing(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    zombie, other = await process(), await process()
    fenced = 0
    for n in range(30):
        await ask(zombie, text=f"question {n}")
        stale = await claim_agent(zombie, f"zombie {n}")
        for _ in range(n % 3):  # in the first model call, in the tool, in the second model call
            said = says("", call("look", "unsafe")) if isinstance(stale.action, AskModel) else done()
            stale = await zombie.advance(stale, said, RULES)
        with shared.behind(tmp_path) as db:
            db.execute(EXPIRED)
        claim = await claim_agent(other, f"other {n}")
        for late in (says("from a stale worker"), says("", call("look")), done(), Stopped("partial")):
            with pytest.raises(StaleClaim):
                await zombie.advance(stale, late, RULES, sends=envelope("ada", "bob"))
            fenced += 1
        with pytest.raises(StaleClaim):
            await zombie.summarise(stale, 1, "a summary")
        fenced += 1
        await advance(other, claim, says(f"answer {n}"))
    assert fenced == 150
    assert await texts(other, "bob") == []
    assert await texts(other, "user") == [f"answer {n}" for n in range(30)]
    unknown = [row.text for row in await other.history("ada") if row.role == "tool" and "unknown" in row.text]
    assert len(unknown) == 10, "an interrupted tool call has an unknown result"


async def test_an_expired_lease_that_was_not_taken_over_still_allows_writes(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    await ask(store)
    claim = await claim_agent(store)
    with shared.behind(tmp_path) as db:
        db.execute(EXPIRED)
    await advance(store, claim, says("after the lease"))
    assert await texts(store, "user") == ["after the lease"]


async def test_a_process_is_notified_of_writes_of_another(process: Opener) -> None:
    speaker, listener = await process(), await process()
    notified = asyncio.Event()
    listener.subscribe_changes(lambda _: notified.set())
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not notified.is_set():  # the listener may start after the first message
            await speaker.send(envelope("ada", "user"))


async def test_a_process_with_many_open_files_is_notified(process: Opener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SELECT_LIMIT), hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (number := os.open(os.devnull, os.O_RDONLY)) < SELECT_LIMIT:
            opened.callback(os.close, number)
        opened.callback(os.close, number)
        writer, reader = await process(), await process()
        received: asyncio.Queue[str] = asyncio.Queue()
        reader.subscribe_broadcasts(received.put_nowait)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while received.empty():  # the listener may start after the first text
                await writer.broadcast(["hello"])
        assert received.get_nowait() == "hello"


async def test_a_process_is_woken_by_unclaimed_work_only(process: Opener) -> None:
    speaker, listener = await process(), await process()
    notices: list[bool] = []
    texts: asyncio.Queue[str] = asyncio.Queue()
    listener._listener._on_change = lambda change: notices.append(change.has_work)  # type: ignore[union-attr]
    listener.subscribe_broadcasts(texts.put_nowait)

    async def notices_of(action: Awaitable[Any]) -> list[bool]:
        """Return the notices of `action`: all arrive before a text that is broadcast afterwards."""
        notices.clear()
        await action
        last = new_id()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await speaker.broadcast([last])
            while await texts.get() != last:
                pass
        return [*notices]

    async with asyncio.timeout(TIMEOUT_SECONDS):
        while texts.empty():  # until it listens
            await speaker.broadcast(["hello"])
    assert await notices_of(speaker.send(envelope("ada", "user"))) == [False]
    assert await notices_of(speaker.send(envelope("user", "ada"))) == [True]
    assert await notices_of(listener.send(envelope("user", "bob"))) == [], "no notices of its own writes"
    assert await notices_of(speaker.claim_ready("w", RULES, 9)) == [False]
    assert await notices_of(speaker.release_claims("w", failed=False)) == [True], "a released claim is announced"


# Pipelined statements


async def test_a_job_that_fails_before_its_first_statement_fails_alone(process: Opener) -> None:
    store = await process()

    def refuse(*_: object) -> None:
        raise Refused("unknown_agent", "not this one")

    refused = store._transact(refuse)
    roles = [store.put_role(f"role {n}", "") for n in range(3)]
    results = await asyncio.gather(refused, *roles, return_exceptions=True)
    assert [isinstance(result, Refused) for result in results] == [True, False, False, False]
    assert len(await store.roles()) == 3


async def test_a_wrong_statement_in_a_batch_fails_alone(process: Opener) -> None:
    store = await process()
    wrong = [store._transact(lambda db, _: db.execute("INSERT INTO roles (name) VALUES ('x')")) for _ in range(2)]
    right = [store.put_role(f"role {n}", "") for n in range(3)]
    sends = [store.send(envelope("user", "ada", str(n))) for n in range(3)]
    results = await asyncio.gather(*wrong, *right, *sends, return_exceptions=True)
    assert [isinstance(result, StoreError) for result in results] == [True] * 2 + [False] * 6
    assert sorted(await store.roles()) == ["role 0", "role 1", "role 2"]
    assert await texts(store, "ada") == ["0", "1", "2"]


async def test_prefetched_mail_is_dropped_when_a_job_is_rolled_back(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    sent = {name: (await store.send(envelope("user", name))).message_id for name in ("ada", "bob")}
    with owner_connection(shared.url(tmp_path)) as db:
        session = PostgresSession(db, ["ada"], 30_000, NotifyChannels("society", "process"))

        def waiting(name: str) -> list[str]:
            unit_of_work = UnitOfWork(db, now=session.now, limits=Limits(), session=session)
            return [row.id for row in unit_of_work.read_waiting(name)]

        session.prefetch(["bob"])
        assert (waiting("ada"), waiting("bob")) == ([sent["ada"]], [sent["bob"]])
        session.prefetch(["ada"])
        checkpoint = session.begin_job()
        db.execute("UPDATE messages SET state = 'withdrawn' WHERE recipient = 'ada'")
        session.roll_back_to(checkpoint)  # invalidates the prefetched mail
        assert (waiting("ada"), waiting("bob")) == ([], [sent["bob"]])
        db.execute_now("ROLLBACK")


# Races between two statements of a transaction


def _until_done_or_blocked(work: Future[Any], url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        blocked = (
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND application_name = current_setting('application_name')"
        )
        while not work.done() and not db.execute(blocked).fetchone():
            pass


async def test_an_agent_selected_for_a_claim_is_not_claimed_by_another_process(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await process(), await process()
    loop, url = asyncio.get_running_loop(), shared.url(tmp_path)
    await ask(first)
    meanwhile: list[Future[Any]] = []
    claim_one, is_first = claims._claim_agent, threading.Lock()

    def interrupted(*arguments: Any) -> Any:
        if is_first.acquire(blocking=False):  # in the thread of `first` only
            meanwhile.append(asyncio.run_coroutine_threadsafe(second.claim_ready("second", RULES, 5), loop))
            _until_done_or_blocked(meanwhile[0], url)
        return claim_one(*arguments)

    monkeypatch.setattr(claims, "_claim_agent", interrupted)
    claimed = [*await first.claim_ready("first", RULES, 5), *await asyncio.wrap_future(meanwhile[0])]
    assert [claim.agent_id for claim in claimed] == ["ada"]


async def test_a_message_selected_as_due_is_not_delivered_by_another_process(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await process(), await process()
    loop, url = asyncio.get_running_loop(), shared.url(tmp_path)
    for n in range(6):
        await first.send(envelope("user", "ada", str(n), delay_ms=1))
    await asyncio.to_thread(_until_due, url)
    meanwhile: list[Future[Any]] = []
    is_first = threading.Lock()

    def interrupted(name: str) -> None:
        if name == "promote.selected" and is_first.acquire(blocking=False):  # in the thread of `first` only
            meanwhile.append(asyncio.run_coroutine_threadsafe(second.promote_due(3), loop))
            _until_done_or_blocked(meanwhile[0], url)

    monkeypatch.setattr(commands, "hit", interrupted)
    delivered = [*(await first.promote_due(3)).delivered]
    promotion = await asyncio.wrap_future(meanwhile[0])
    assert promotion.is_elsewhere and not promotion.delivered, "later messages overtake none that are being delivered"
    delivered += (await second.promote_due(3)).delivered
    assert len(delivered) == len({one.message_id for one in delivered}) == 6
    assert await texts(first, "ada") == [str(n) for n in range(6)]


def _until_due(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("SELECT pg_sleep(0.005)")  # the database supplies the time
