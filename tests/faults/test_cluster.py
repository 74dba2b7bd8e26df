"""Several processes of one society on PostgreSQL: notifications between them, and behaviour without them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psycopg
import pytest

from coterie import bus
from coterie.agent import scheduler
from coterie.clock import SystemClock
from coterie.config import Config, read_config
from coterie.errors import StoreUnavailable, StoreUnusable
from coterie.files import MIN_SPACE_BYTES
from coterie.live import CallProgress
from coterie.llm.service import Completion, ModelRequest, TextDelta
from coterie.messages import PERSON, Receipt
from coterie.society import Society
from coterie.store import SOCIETY_EVENTS
from coterie.stores.postgres import cluster
from coterie.stores.sql import unit_of_work
from coterie.stores.sql.jobs import Job
from coterie.text import to_storable
from coterie.web.sse import Hub
from tests.engines import Postgres
from tests.web.test_stream import listening

from .fake_model import agent_of, fake_models
from .harness import scaled_timeout
from .proxy import Proxy
from .scenarios import make_home

T = TypeVar("T")
SOON = 180
"""Timeout in seconds, generous for slow machines."""


class ManualModel:
    """Model that streams the words a test puts into its queue, and records cancellation."""

    id = "slow"

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self.words: asyncio.Queue[str | None] = asyncio.Queue()
        self.cut_off: float | None = None
        self.times = 0

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        self.times += 1
        self.asked.put_nowait(time.monotonic())
        said = ""
        try:
            while (word := await self.words.get()) is not None:
                said += word
                yield TextDelta(word)
        except asyncio.CancelledError:
            self.cut_off = time.monotonic()
            raise
        yield Completion(text=to_storable(said) or f"{agent_of(request)} answers")

    async def close(self) -> None:
        pass


def home(folder: Path, url: str) -> Path:
    make_home(folder)
    with (folder / "coterie.toml").open("a") as toml:
        toml.write(f"[store]\nurl = {json.dumps(url)}\n")
    entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m"}
    (folder / "llmservices.json").write_text(json.dumps({"services": [entry]}))
    return folder


@asynccontextmanager
async def process(
    folder: Path, url: str, model: ManualModel | None = None, *, work: bool = True
) -> AsyncIterator[Society]:
    """One more process that runs the society with `model`."""
    with fake_models(lambda _: model or ManualModel()):
        society = await Society.start(home(folder, url), work=work)
        if work:
            # Created now, because a later process patches the factory again.
            society._require_runtime()._models.queue("main")
    try:
        yield society
    finally:
        settings = society.configuration.config
        society.configuration.config = replace(settings, shutdown=replace(settings.shutdown, drain_seconds=0))
        await society.stop()


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling, so that only notifications inform a process."""
    monkeypatch.setattr(bus, "SWEEP_INTERVAL", timedelta(hours=1))
    monkeypatch.setattr(scheduler, "CLAIM_INTERVAL", timedelta(hours=1))


def configured(monkeypatch: pytest.MonkeyPatch, **store: Any) -> None:
    def changed(folder: Path) -> Config:
        config = read_config(folder)
        return replace(config, store=replace(config.store, **store))

    for module in ("society", "configuration"):
        monkeypatch.setattr(f"coterie.{module}.read_config", changed)


async def soon(happens: Awaitable[T]) -> T:
    async with asyncio.timeout(SOON):
        return await happens


async def wait_for_event_about(society: Society, message_id: str) -> None:
    async with asyncio.timeout(SOON), society.bus.watch(after=0) as watcher:
        async for event in watcher:
            if event.subject == message_id:
                return


# Two servers


@pytest.fixture
async def two_servers(shared: Postgres, tmp_path: Path, no_polls: None) -> AsyncIterator[tuple[Society, Any]]:
    """A server, and the event stream of another server."""
    url = shared.url(tmp_path)
    async with (
        process(tmp_path / "a", url, work=False) as first,
        process(tmp_path / "b", url, work=False) as other,
        stream(other) as reader,
    ):
        yield first, reader


async def test_a_message_sent_at_one_server_is_on_the_stream_of_another_without_polling(
    two_servers: tuple[Society, Any],
) -> None:
    first, reader = two_servers
    receipt = await first.send(to="ada", text="hello")
    event = await reader.next("message.created")
    assert event.data["id"] == receipt.message_id


async def test_a_quick_reply_at_one_server_closes_the_question_at_another(
    two_servers: tuple[Society, Any],
) -> None:
    first, reader = two_servers
    question = await first.bus.send(sender="ada", to=PERSON, payload={"text": "well?"}, quick_replies=["yes", "no"])
    await reader.next("message.created")
    await first.send(to="ada", text="yes", in_reply_to=question.message_id, option=0)
    event = await reader.next("quick_replies.changed")
    assert (event.data["messageId"], event.data["answer"]["option"]) == (question.message_id, 0)


@asynccontextmanager
async def stream(society: Society) -> AsyncIterator[Any]:
    """An event stream client of this server."""
    hub = Hub(society, society.live, SystemClock())
    try:
        async with listening(hub) as reader:
            yield reader
    finally:
        await hub.shut_down(0)


async def test_a_reply_is_streamed_at_servers_that_do_not_generate_it(shared: Postgres, tmp_path: Path) -> None:
    url, model = shared.url(tmp_path), ManualModel()
    async with (
        process(tmp_path / "a", url, model) as worker,
        process(tmp_path / "b", url, work=False) as other,
        stream(other) as reader,
    ):
        await worker.send(to="ada", text="hello")
        await model.asked.get()
        text = ""
        for word in ("one ", "two ", "three" * 1_000, "\x00\ud83d end"):
            model.words.put_nowait(word)
            while not text.endswith(word.replace("\x00", "\ufffd").replace("\ud83d", "\ufffd")):
                event = await reader.next("draft.delta")
                assert event.data["from"] == len(text)
                text += event.data["delta"]
        model.words.put_nowait(None)
        ended = await reader.next("draft.ended")
        assert (ended.data["agent"], ended.data["outcome"], len(ended.data["messages"])) == ("ada", "stored", 1)
        assert other.live.replies == ()


async def test_the_progress_of_a_tool_call_is_shown_at_servers_that_do_not_run_it(
    shared: Postgres, tmp_path: Path
) -> None:
    url = shared.url(tmp_path)
    async with (
        process(tmp_path / "a", url, ManualModel()) as worker,
        process(tmp_path / "b", url, work=False) as other,
        stream(other) as reader,
    ):
        message = "\x00 copying" + "\u4e2d" * 200
        report = CallProgress(agent_id="ada", call_id="c1", tool="copy", progress=1, total=4, message=message)
        worker.live.report_progress(report)
        data = (await reader.next("tool.progress")).data
        assert (data["agent"], data["callId"], data["name"]) == ("ada", "c1", "copy")
        assert (data["progress"], data["total"], data["message"]) == (1, 4, message.replace("\x00", "\ufffd"))
        assert other.live.progress == ()  # the process of the call knows when it ends


async def test_a_server_that_starts_later_gets_the_text_streamed_before(shared: Postgres, tmp_path: Path) -> None:
    url, model = shared.url(tmp_path), ManualModel()
    async with process(tmp_path / "a", url, model) as worker:
        await worker.send(to="ada", text="hello")
        await model.asked.get()
        model.words.put_nowait("long before, ")
        async with process(tmp_path / "b", url, work=False) as other:
            said: asyncio.Queue[str] = asyncio.Queue()
            other.live.subscribe(lambda draft: said.put_nowait(draft.text))
            before = [draft.text for draft in other.live.replies] or [await soon(said.get())]
            model.words.put_nowait("and now")
            assert (before, await soon(said.get())) == (["long before, "], "long before, and now")


async def test_a_turn_can_be_stopped_at_any_server(shared: Postgres, tmp_path: Path) -> None:
    url, model, idle = shared.url(tmp_path), ManualModel(), ManualModel()
    async with process(tmp_path / "a", url, model) as worker:
        await worker.send(to="ada", text="hello")
        await model.asked.get()
        async with (
            process(tmp_path / "b", url, idle) as other,
            asyncio.timeout(SOON),
            other.bus.watch() as watcher,
        ):
            assert not other.stop_turn("ada")
            async for event in watcher:
                if event.kind == "agent.state" and (ada := await other.store.agent("ada")) and ada.state == "idle":
                    break
        assert model.cut_off and idle.times == 0


async def test_a_stop_at_another_server_reaches_a_turn_that_its_worker_has_not_started_yet(
    shared: Postgres, tmp_path: Path
) -> None:
    url, model, idle = shared.url(tmp_path), ManualModel(), ManualModel()
    async with (
        process(tmp_path / "a", url, model) as worker,
        process(tmp_path / "b", url, idle) as other,
        asyncio.timeout(SOON),
    ):
        with commits_held(worker) as committed:
            sending = asyncio.create_task(worker.send(to="ada", text="hello"))
            await committed.wait()
            assert (ada := await other.store.agent("ada")) and ada.state == "llm"
            stopped = asyncio.Event()
            worker._relay._stop_turn = both(worker._relay._stop_turn, stopped.set)  # type: ignore[union-attr]
            assert not other.stop_turn("ada")
            await stopped.wait()
        await sending
        async with other.bus.watch() as watcher:
            while (ada := await other.store.agent("ada")) and ada.state != "idle":
                await anext(watcher)
        assert idle.times == 0


@contextlib.contextmanager
def commits_held(society: Society) -> Iterator[asyncio.Event]:
    """Delay the settling of writes in this process; set when one is written."""
    writer = society.store._writer  # type: ignore[attr-defined]
    commit, committed, released = writer._commit, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def held(batch: list[Job]) -> None:
        commit(batch)
        loop.call_soon_threadsafe(committed.set)
        released.wait(SOON)

    writer._commit = held
    try:
        yield committed
    finally:
        released.set()


def both(first: Callable[[str], object], then: Callable[[], object]) -> Callable[[str], None]:
    def run(agent_id: str) -> None:
        first(agent_id)
        then()

    return run


# A worker whose disk is full


async def test_a_worker_on_a_full_disk_starts_no_turn_until_space_is_free(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(monkeypatch, artifacts="files")
    free, noticed = [MIN_SPACE_BYTES], asyncio.Event()

    def disk_usage(_: Path) -> SimpleNamespace:
        if free[0] < MIN_SPACE_BYTES:
            noticed.set()
        return SimpleNamespace(free=free[0])

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    url, model = shared.url(tmp_path), ManualModel()
    async with process(tmp_path / "a", url, model) as worker:
        await worker.send(to="bob", text="hello")
        await soon(model.asked.get())
        free[0] -= 1
        # Only the claiming loop looks at the disk here, so no claim that it began earlier is under way now.
        await soon(noticed.wait())
        await worker.send(to="ada", text="hello")
        await worker._require_runtime()._scheduler._claim_round()
        assert (ada := await worker.store.agent("ada")) and (ada.state, model.times) == ("ready", 1)
        free[0] += 1
        await soon(model.asked.get())


# A worker that stops, and one that is disconnected


async def test_released_work_is_claimed_by_another_worker_at_once(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(monkeypatch, lease_seconds=10 * SOON)
    url, first, second = shared.url(tmp_path), ManualModel(), ManualModel()
    async with contextlib.AsyncExitStack() as later:
        async with process(tmp_path / "a", url, first) as worker:
            await worker.send(to="ada", text="hello")
            await first.asked.get()
            await later.enter_async_context(process(tmp_path / "b", url, second))
        await soon(second.asked.get())  # and not at the end of the lease


@pytest.mark.slow
async def test_a_disconnected_worker_drops_its_claims_before_another_takes_over_and_reconnects(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configured(monkeypatch, lease_seconds=4)
    url, first, second = shared.url(tmp_path), ManualModel(), ManualModel()
    with Proxy(shared.server) as proxy:
        async with process(tmp_path / "a", proxy.url(url), first) as worker, contextlib.AsyncExitStack() as later:
            await worker.send(to="ada", text="hello")
            await first.asked.get()
            await later.enter_async_context(process(tmp_path / "b", url, second))
            proxy.drops_data = True
            async with asyncio.timeout(SOON):
                taken_over = await second.asked.get()
            assert first.cut_off is not None and first.cut_off < taken_over
            second.words.put_nowait(None)
            assert proxy.seen["dropped"]
            proxy.heal()
            first.words.put_nowait(None)
            receipt = await retry(lambda: worker.send(to="bob", text="again", client_id="again"))
            second.words.put_nowait(None)
            await wait_for_event_about(worker, receipt.message_id)
            assert worker.store.is_healthy
            assert [violation async for violation in worker.store.violations()] == []
    assert "most of a lease" in caplog.text


async def retry(send: Callable[[], Any]) -> Receipt:
    async with asyncio.timeout(SOON):
        while True:
            with contextlib.suppress(StoreUnavailable):
                receipt: Receipt = await send()
                return receipt


# Missing notifications and connections


@pytest.mark.slow
async def test_without_notifications_changes_are_found_within_a_second_and_a_half(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise psycopg.OperationalError("no notifications")

    monkeypatch.setattr(cluster.Listener, "_listen", fail)
    url, model = shared.url(tmp_path), ManualModel()
    async with process(tmp_path / "a", url, work=False) as first, process(tmp_path / "b", url, model):
        took = []
        for name in ("ada", "bob", "eve"):
            sent = time.monotonic()
            await first.send(to=name, text="hello")
            took.append(await model.asked.get() - sent)
    assert max(took) < scaled_timeout(1.5)


@pytest.mark.slow
async def test_with_too_few_connections_reads_wait_then_fail_and_leases_are_renewed(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(monkeypatch, lease_seconds=1)
    url, model = shared.url(tmp_path), ManualModel()
    with role_with_connections(shared, url, 4) as poor:
        async with process(tmp_path / "a", poor, model) as society:
            await society.send(to="ada", text="hello")
            await model.asked.get()
            held = asyncio.ensure_future(society.store._query("SELECT pg_sleep(3)"))  # takes the last connection
            with pytest.raises(StoreUnavailable):
                while not held.done():
                    await society.store._query("SELECT 1")
            await held
            assert model.cut_off is None  # the lease of one second was renewed meanwhile
            shared.execute(f"ALTER ROLE {schema_of(url)} CONNECTION LIMIT 20")
            model.words.put_nowait(None)
            async with asyncio.timeout(SOON), society.bus.watch(after=0) as watcher:
                async for _ in watcher:  # with enough connections the turn ends
                    if await society.waiting(PERSON):
                        break
            assert [message.sender for message in await society.waiting(PERSON)] == ["ada"]


def schema_of(url: str) -> str:
    return url.rpartition("application_name=")[2]


@contextlib.contextmanager
def role_with_connections(shared: Postgres, url: str, limit: int) -> Any:
    """Database role with a limited number of connections."""
    schema = schema_of(url)
    with psycopg.connect(shared.server, autocommit=True) as db:
        db.execute(f"CREATE ROLE {schema} LOGIN CONNECTION LIMIT {limit}".encode())
        db.execute(f"GRANT ALL ON SCHEMA {schema} TO {schema}".encode())
        db.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {schema}".encode())
        db.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {schema}".encode())
    try:
        yield f"{url}&user={schema}"
    finally:
        with psycopg.connect(shared.server, autocommit=True) as db:
            db.execute(f"REASSIGN OWNED BY {schema} TO CURRENT_USER; DROP OWNED BY {schema}".encode())
            db.execute(f"DROP ROLE {schema}".encode())


async def test_a_message_committed_late_is_ordered_by_its_commit_and_not_missed(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequence number is lower than those of messages committed before it."""
    url, may_go_on, waits = shared.url(tmp_path), threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "flush.done" and threading.current_thread() is late_writer:
            waits.set()
            assert may_go_on.wait(SOON)

    async with process(tmp_path / "a", url, work=False) as late, process(tmp_path / "b", url, work=False) as other:
        late_writer = late.store._writer._thread  # type: ignore[attr-defined]
        monkeypatch.setattr(unit_of_work, "hit", hold)
        async with other.bus.watch() as watcher:
            slow = asyncio.ensure_future(late.send(to="ada", text="late"))
            await asyncio.to_thread(waits.wait, SOON)
            quick = await other.send(to="bob", text="quick")
            behind = asyncio.ensure_future(other.send(to="ada", text="behind"))
            seen = [await anext(watcher)]
            may_go_on.set()
            await asyncio.gather(slow, behind)
            while len({event.subject for event in seen if event.kind == "message.created"}) < 3:
                seen.append(await anext(watcher))
        assert [event.seq for event in seen] == list(range(seen[0].seq, seen[0].seq + len(seen)))
        assert seen[0].subject == quick.message_id
        assert [message.payload["text"] for message in await other.waiting("ada")] == ["late", "behind"]
        numbers = {m.payload["text"]: m.seq for who in ("ada", "bob") for m in await other.waiting(who)}
        assert numbers["late"] < numbers["quick"]


# Processes that run no turns, and processes that nobody watches


async def test_a_server_without_agents_leaves_all_turns_to_a_worker(
    shared: Postgres, tmp_path: Path, no_polls: None
) -> None:
    url, model = shared.url(tmp_path), ManualModel()
    async with process(tmp_path / "worker", url, model) as worker:
        door = await Society.start(home(tmp_path / "door", url), run_turns=False)
        try:
            assert [known.id is None for known in await door.shared_workers()].count(True) == 1
            await door.send(to="ada", text="hello")
            await soon(model.asked.get())
            model.words.put_nowait(None)
            inbox = door.inbox()
            assert (await soon(anext(inbox))).payload["text"] == "ada answers"
            await inbox.aclose()
            profile = await door.create_agent(id="new")  # it has the whole API
            async with asyncio.timeout(SOON):
                while profile.id not in [known.id for known in worker.agents.all_profiles()]:
                    await asyncio.sleep(0.01)
        finally:
            await door.stop()


async def test_a_server_without_agents_needs_postgresql(tmp_path: Path) -> None:
    make_home(tmp_path / "home")
    with pytest.raises(StoreUnusable, match="needs a PostgreSQL"):
        await Society.start(tmp_path / "home", run_turns=False)


async def test_a_process_without_watchers_reads_only_events_about_the_society(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, model = shared.url(tmp_path), ManualModel()
    async with process(tmp_path / "worker", url, model) as worker, process(tmp_path / "door", url, work=False) as door:
        read: list[str] = []
        events = worker.store.events

        async def recorded(*arguments: Any, **options: Any) -> Any:
            found = await events(*arguments, **options)
            read.extend(event.kind for event in found)
            return found

        monkeypatch.setattr(worker.store, "events", recorded)
        for number in range(5):
            await door.send(to="ada", text=str(number))
        await soon(model.asked.get())
        await door.store.pause_all()
        async with asyncio.timeout(SOON):
            while "society.state" not in read:
                await asyncio.sleep(0.01)
        assert {*read} <= {*SOCIETY_EVENTS}
