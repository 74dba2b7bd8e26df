"""Several processes on one PostgreSQL: whatever they do to each other, each message is there once and in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coterie.errors import StoreError
from coterie.ids import new_id
from coterie.store import Limits
from coterie.stores.postgres import PostgresStore
from coterie.stores.postgres.cluster import Herald
from coterie.stores.postgres.connection import errand
from coterie.stores.postgres.session import BatchLedger
from coterie.stores.sql import claims, commands
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Ask, Stopped
from coterie.turn_store import StaleOwner
from tests.engines import EXPIRED, Postgres
from tests.faults.harness import patience

from .processes import Opener, letter, texts
from .steps import RULES, Society, ask, call, done, go_on, says, take, told


async def test_crossing_letters_of_three_processes_all_arrive_and_each_senders_in_their_order(process: Opener) -> None:
    stores = [await process() for _ in range(3)]
    names = ("ada", "bob", "cyd")

    async def write(store: PostgresStore, sender: str) -> None:
        for n in range(30):
            await asyncio.gather(*(store.send(letter(sender, to, f"{sender} {n}")) for to in names if to != sender))

    await asyncio.gather(*map(write, stores, names))
    for name in names:
        got = await texts(stores[0], name)
        assert len(got) == 60
        for sender in names:
            mine = [text for text in got if text.startswith(sender)]
            assert mine == ([f"{sender} {n}" for n in range(30)] if sender != name else [])


async def test_the_same_letter_sent_by_several_processes_at_once_is_one(process: Opener) -> None:
    stores = [await process() for _ in range(3)]
    receipts = await asyncio.gather(*(s.send(letter("user", "ada", client_id="c")) for s in stores for _ in range(10)))
    assert len({(receipt.message_id, receipt.state) for receipt in receipts}) == 1
    assert await texts(stores[0], "ada") == ["hello"]


async def test_events_are_dense_and_nobody_who_reads_on_misses_one(process: Opener) -> None:
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
    await asyncio.gather(*(s.send(letter("user", "ada", str(n))) for s in stores for n in range(50)))
    ended.set()
    seen = await following
    assert seen == list(range(1, await stores[0].last_event() + 1))


async def test_an_agent_is_claimed_by_one_of_them(process: Opener) -> None:
    stores: list[Society] = [await process() for _ in range(3)]
    for _ in range(5):
        await asyncio.gather(*(ask(stores[0], name) for name in ("ada", "bob", "cyd")))
        found = await asyncio.gather(*(store.claim(f"w{n}", RULES, 10) for n, store in enumerate(stores)))
        claims = [claim for claims in found for claim in claims]
        assert sorted(claim.agent_id for claim in claims) == ["ada", "bob", "cyd"]
        await asyncio.gather(*(stores[0].advance(claim, says("done"), RULES) for claim in claims))


async def test_what_is_due_is_delivered_once_and_in_order_whoever_looks(process: Opener) -> None:
    stores = [await process() for _ in range(3)]
    for n in range(40):
        await stores[0].send(letter("user", "ada", str(n), delay_ms=1 + n % 3))
    left = 40
    while left:
        rounds = await asyncio.gather(*(store.promote(7) for store in stores))
        left -= sum(len(one.delivered) for one in rounds)
    by_due = sorted(await stores[0].waiting("ada", 100), key=lambda one: (one.deliver_at, one.seq))
    assert [one.in_seq for one in by_due] == sorted(one.in_seq or 0 for one in by_due)
    assert len(by_due) == 40


async def test_one_that_was_taken_over_writes_nothing(process: Opener, shared: Postgres, tmp_path: Path) -> None:
    zombie, other = await process(), await process()
    await ask(zombie)
    stale = await take(zombie)
    assert await other.claim("other", RULES, 5) == []
    with shared.behind(tmp_path) as db:
        db.execute(EXPIRED)
    claim = await take(other, "other")
    assert claim.epoch == stale.epoch + 1
    with pytest.raises(StaleOwner):
        await zombie.advance(stale, says("from the grave"), RULES, sends=letter("ada", "bob"))
    assert await texts(other, "bob") == []
    await go_on(other, claim, says("in time"))
    assert (await told(other))[-1] == "assistant: in time"


async def test_what_is_answered_is_on_the_disk_even_where_the_server_does_not_insist(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.behind(tmp_path) as db:
        (database,) = db.execute("SELECT current_database()").fetchone()
        (role,) = db.execute("SELECT current_user").fetchone()
        db.execute(f"ALTER ROLE {role} IN DATABASE {database} SET synchronous_commit = off")
    try:
        store = await process()
        found = await store._post(lambda db, _: db.execute("SHOW synchronous_commit").fetchone())
        assert found[0] == "on"
    finally:
        with shared.behind(tmp_path) as db:
            db.execute(f"ALTER ROLE {role} IN DATABASE {database} RESET synchronous_commit")


@pytest.mark.slow
async def test_100_zombies_wherever_they_were_held_up_write_nothing(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    zombie, other = await process(), await process()
    fenced = 0
    for n in range(100):
        await ask(zombie, text=f"question {n}")
        stale = await take(zombie, f"zombie {n}")
        for _ in range(n % 3):  # in the model call, in a tool, in the model call behind it
            said = says("", call("look", "unsafe")) if isinstance(stale.effect, Ask) else done()
            stale = await zombie.advance(stale, said, RULES)
        with shared.behind(tmp_path) as db:
            db.execute(EXPIRED)
        claim = await take(other, f"other {n}")
        for late in (says("from the grave"), says("", call("look")), done(), Stopped("half a word")):
            with pytest.raises(StaleOwner):
                await zombie.advance(stale, late, RULES, sends=letter("ada", "bob"))
            fenced += 1
        with pytest.raises(StaleOwner):
            await zombie.summarise(stale, 1, "what a ghost remembers")
        fenced += 1
        await go_on(other, claim, says(f"answer {n}"))
    assert fenced == 500
    assert await texts(other, "bob") == []
    assert await texts(other, "user") == [f"answer {n}" for n in range(100)]
    unknown = [row.text for row in await other.history("ada") if row.role == "tool" and "unknown" in row.text]
    assert len(unknown) == 33, "what a zombie was doing is told as it is"


async def test_a_lease_that_ran_out_and_was_not_taken_is_still_good_to_write(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    await ask(store)
    claim = await take(store)
    with shared.behind(tmp_path) as db:
        db.execute(EXPIRED)
    await go_on(store, claim, says("late, and nobody minds"))
    assert await texts(store, "user") == ["late, and nobody minds"]


async def test_a_process_hears_of_what_another_writes(process: Opener) -> None:
    speaker, listener = await process(), await process()
    heard = asyncio.Event()
    listener.news = heard.set
    for _ in range(50):  # it may not listen yet when the first is sent
        await speaker.send(letter("user", "ada"))
        await asyncio.wait([asyncio.ensure_future(heard.wait())], timeout=0.2)
        if heard.is_set():
            break
    assert heard.is_set()


async def test_a_process_is_woken_by_work_that_is_left_and_by_nothing_else(process: Opener) -> None:
    speaker, listener = await process(), await process()
    news: list[bool] = []
    words: asyncio.Queue[str] = asyncio.Queue()
    listener._listening._on_news, listener.heard = news.append, words.put_nowait  # type: ignore[union-attr]

    async def heard(happens: Awaitable[Any]) -> list[bool]:
        """What it is told of this: a word that is whispered afterwards comes behind it."""
        news.clear()
        await happens
        last = new_id()
        async with asyncio.timeout(patience(10)):
            await speaker.whisper([last])
            while await words.get() != last:
                pass
        return [*news]

    async with asyncio.timeout(patience(10)):
        while words.empty():  # it does not listen yet
            await speaker.whisper(["hello"])
    assert await heard(speaker.send(letter("ada", "user"))) == [False]
    assert await heard(speaker.send(letter("user", "ada"))) == [True]
    assert await heard(listener.send(letter("user", "bob"))) == [], "what it wrote itself it knows"
    assert await heard(speaker.claim("w", RULES, 9)) == [False]
    assert await heard(speaker.release("w", failed=False)) == [True], "whoever lets go says so"


# Statements that wait for each other


async def test_one_that_is_wrong_among_many_fails_alone(process: Opener) -> None:
    store = await process()
    wrong = [store._post(lambda db, _: db.execute("INSERT INTO roles (name) VALUES ('x')")) for _ in range(2)]
    right = [store.put_role(f"role {n}", "") for n in range(3)]
    letters = [store.send(letter("user", "ada", str(n))) for n in range(3)]
    outcomes = await asyncio.gather(*wrong, *right, *letters, return_exceptions=True)
    assert [isinstance(one, StoreError) for one in outcomes] == [True] * 2 + [False] * 6
    assert sorted(await store.roles()) == ["role 0", "role 1", "role 2"]
    assert await texts(store, "ada") == ["0", "1", "2"]


async def test_mail_that_is_read_ahead_is_what_waits_at_that_moment(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    sent = {name: (await store.send(letter("user", name))).message_id for name in ("ada", "bob")}
    with errand(shared.url(tmp_path)) as db:
        ledger = BatchLedger(db, ["ada"], 30_000, Herald("society", "process"))

        def waiting(name: str) -> list[str]:
            post = UnitOfWork(db, now=ledger.now, limits=Limits(), ledger=ledger)
            return [id_ for _, id_, *_ in post.waiting(name)]

        ledger.foresee(["bob"])
        assert (waiting("ada"), waiting("bob")) == ([sent["ada"]], [sent["bob"]])
        ledger.foresee(["ada"])
        mark = ledger.next_job()
        db.execute("UPDATE messages SET state = 'withdrawn' WHERE recipient = 'ada'")
        ledger.forget(mark)  # what was undone, or done behind its back, is read anew
        assert (waiting("ada"), waiting("bob")) == ([], [sent["bob"]])
        db.say("ROLLBACK")


# Between two statements of a transaction


def _until_done_or_blocked(work: Future[Any], url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        blocked = (
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND application_name = current_setting('application_name')"
        )
        while not work.done() and not db.execute(blocked).fetchone():
            pass


async def test_whoever_was_found_to_have_work_is_not_claimed_by_another_meanwhile(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await process(), await process()
    loop, url = asyncio.get_running_loop(), shared.url(tmp_path)
    await ask(first)
    meanwhile: list[Future[Any]] = []
    claim_one = claims._claim_one

    def interrupted(*arguments: Any) -> Any:
        if not meanwhile:
            meanwhile.append(asyncio.run_coroutine_threadsafe(second.claim("second", RULES, 5), loop))
            _until_done_or_blocked(meanwhile[0], url)
        return claim_one(*arguments)

    monkeypatch.setattr(claims, "_claim_one", interrupted)
    claimed = [*await first.claim("first", RULES, 5), *await asyncio.wrap_future(meanwhile[0])]
    assert [claim.agent_id for claim in claimed] == ["ada"]


async def test_what_was_found_to_be_due_is_not_delivered_by_another_meanwhile(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await process(), await process()
    loop, url = asyncio.get_running_loop(), shared.url(tmp_path)
    for n in range(6):
        await first.send(letter("user", "ada", str(n), delay_ms=1))
    await asyncio.to_thread(_until_due, url)
    meanwhile: list[Future[Any]] = []

    def interrupted(name: str) -> None:
        if name == "promote.selected" and not meanwhile:
            meanwhile.append(asyncio.run_coroutine_threadsafe(second.promote(3), loop))
            _until_done_or_blocked(meanwhile[0], url)

    monkeypatch.setattr(commands, "hit", interrupted)
    delivered = [*(await first.promote(3)).delivered, *(await asyncio.wrap_future(meanwhile[0])).delivered]
    assert len(delivered) == len({one.message_id for one in delivered}) == 6
    assert await texts(first, "ada") == [str(n) for n in range(6)]


def _until_due(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("SELECT pg_sleep(0.005)")  # the clock is the database's
