"""A society at work: the parts put together, opened and closed in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from coterie.admin.inspect import require_society
from coterie.agents import Agent
from coterie.artifact_service import Library
from coterie.artifacts import Bytes
from coterie.bus import MessageBus
from coterie.clock import Clock, SystemClock
from coterie.config import AgentEntry, Config, SocietyFolder, after_restart, read_config, running
from coterie.errors import CoterieError, Lagged, Problem, StoreBroken
from coterie.files import Disk
from coterie.live import Live, Relay
from coterie.messages import PERSON, Message, Receipt
from coterie.store import Retention
from coterie.stores.open import check_engine, filled_by, is_shared, limits_of, open_store
from coterie.stores.sql.store import SqlStore
from coterie.supervision import Shutdown, supervise

if TYPE_CHECKING:
    from coterie.agent.service import Directory
    from coterie.agent_runtime import Crew
    from coterie.agents import Profile
    from coterie.llm.config import Services
    from coterie.llm.routing import CapabilityRouter
    from coterie.setup import Setup

log = logging.getLogger(__name__)

TIDY_EVERY = timedelta(hours=1)
BEHIND = timedelta(minutes=5)


class Society:
    """Use it as `async with Society.open(folder) as society`; leaving is a graceful stop."""

    def __init__(
        self, config: Config, store: SqlStore, artifacts: Library, kept: Bytes, clock: Clock, disk: Disk
    ) -> None:
        self.config, self.store, self.artifacts, self.disk = config, store, artifacts, disk
        self.bus = MessageBus(store, clock)
        store.news = lambda: self.bus.stored(None)
        self.live = Live()
        self._relay = Relay(self.live, store, clock, self._stop_here) if is_shared(config) else None
        self._kept, self._clock = kept, clock
        self._crew: Crew | None = None
        self._setup: Setup | None = None
        self._reloading = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._tidier: asyncio.Task[None] | None = None
        self._late_stops: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: str | Path, *, clock: Clock | None = None, work: bool = True) -> AsyncIterator[Self]:
        """Run the society in `folder`, made with templates if missing. One process at a time.

        Without `work` messages are taken in and delivered, but no agent answers.
        """
        society = await cls.start(folder, clock=clock, work=work)
        try:
            yield society
        finally:
            await society.stop()

    @classmethod
    @contextlib.asynccontextmanager
    async def visit(cls, folder: str | Path, *, clock: Clock | None = None) -> AsyncIterator[Self]:
        """Own the society in `folder` for one errand: what is sent is stored, but nothing is delivered or tidied up.

        So leaving is no stop: whatever is delayed stays delayed.
        """
        society = await cls._put_together(require_society(Path(folder)), clock or SystemClock())
        try:
            yield society
        finally:
            await society.store.close()

    @classmethod
    async def start(cls, folder: str | Path, *, clock: Clock | None = None, work: bool = True) -> Self:
        place = SocietyFolder(Path(folder))
        place.make()
        society = await cls._put_together(place, clock or SystemClock())
        try:
            await society._begin(society._hire(place) if work else None)
        except BaseException:
            await society.store.close()
            raise
        return society

    @classmethod
    async def _put_together(cls, place: SocietyFolder, clock: Clock) -> Self:
        """With its agents known to the store, and nothing moving yet."""
        config = read_config(place.path)
        store, kept = await open_store(place, config, clock)
        try:
            artifacts = Library(store, kept, clock, limit=config.limits.upload_mb * 1_000_000)
            people = [Agent(id=PERSON, name="You", kind="person")]
            await store.add_agents([*people, *map(_agent, config.agents)])
        except BaseException:
            await store.close()
            raise
        return cls(config, store, artifacts, kept, clock, Disk(filled_by(place, config), clock))

    def _hire(self, place: SocietyFolder) -> Crew:
        # Models and tools take a while to import, and an errand needs none of them.
        from coterie.agent_runtime import Crew
        from coterie.setup import Setup

        parts = (self.store, self.bus, self.artifacts, self._kept, self._clock, self.live, self.disk)
        crew = Crew(place, self.config, *parts)
        self._setup = Setup(place, crew.services, crew.directory, self._reload_services, self._clock)
        self._place = place
        return crew

    async def send(
        self,
        *,
        to: str,
        text: str | None = None,
        payload: dict[str, object] | None = None,
        sender: str = PERSON,
        delay_ms: float | None = None,
        quick_replies: Sequence[str] | None = None,
        attachments: Sequence[str] = (),
        client_id: str | None = None,
        in_reply_to: str | None = None,
        option: int | None = None,
    ) -> Receipt:
        """A message from the person, durable when this returns."""
        whole = dict(payload or {})
        if text is not None:
            whole["text"] = text
        if attachments:
            whole["attachments"] = [{"artifactRef": ref} for ref in attachments]
        return await self.bus.send(
            sender=sender,
            to=to,
            payload=whole,
            delay_ms=delay_ms,
            quick_replies=quick_replies,
            client_id=client_id,
            in_reply_to=in_reply_to,
            option=option,
        )

    async def create_agent(
        self,
        *,
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        prompt: str = "",
        service: str | None = None,
        tools: Sequence[str] | None = None,
        parent: str | None = None,
    ) -> Profile:
        """A new agent, kept over restarts.

        `Refused`: `id_taken`, `payload_invalid` (no possible id), `unknown_service`; `unknown_agent` for the parent.
        """
        made = await self._at_work().create_agent(
            id=id, name=name, prompt=prompt, service=service, tools=tools, parent=parent
        )
        self.bus.stored(None)
        return made

    async def terminate_agent(self, agent_id: str) -> Sequence[str]:
        """It, and all it made, read and answer nothing more; who that was."""
        ended = await self._at_work().terminate_agent(agent_id)
        self.bus.stored(None)
        return ended

    async def reload(self) -> Sequence[Problem]:
        """Read coterie.toml, llmservices.json and the owner's tools again; what is wrong, or waits for a restart.

        `ConfigError`: one of the files cannot be read, and everything stays as it was.
        """
        from coterie.agent_runtime import load_services

        crew = self._at_work()
        async with self._reloading:
            config = read_config(self._place.path)
            check_engine(config)
            services = load_services(self._place)
            changed = [entry for entry in config.agents if entry not in self.config.agents]
            await self.store.add_agents([_agent(entry) for entry in changed])
            later = after_restart(self.config, config)
            self.config = running(self.config, config)
            self.store.limits = limits_of(config)
            self.artifacts.limit = config.limits.upload_mb * 1_000_000
            problems = (*config.problems, *later, *await crew.adopt(services, config))
        self.bus.stored(None)
        log.info("the configuration was read again; %d problems", len(problems))
        return problems

    async def _reload_services(self) -> None:
        """Those alone: a slip of the pen in coterie.toml is no reason to go without a model."""
        from coterie.agent_runtime import load_services

        async with self._reloading:
            await self._at_work().adopt(load_services(self._place))
        self.bus.stored(None)

    async def inbox(self, who: str = PERSON) -> AsyncGenerator[Message, None]:
        """What reaches `who` and was not read yet, then whatever comes, in order; for ever."""
        seen, lagged = 0, True
        while lagged:
            lagged = False
            async with self.bus.watch() as watcher:
                try:
                    while True:
                        for message in await self.store.waiting(who):
                            if (message.in_seq or 0) > seen:
                                seen = message.in_seq or 0
                                yield message
                        await anext(watcher)
                except Lagged:
                    lagged = True  # the mailbox has it all
                except StopAsyncIteration:
                    return

    def stop_turn(self, agent_id: str) -> bool:
        """End what the agent is doing now. Its mail is kept, and begins the next turn. False: it did nothing here.

        Where several processes run the society, the one that works for the agent is asked to.
        """
        stopped = self._at_work().stop_turn(agent_id)
        if not stopped and self._relay:
            self._relay.stop_elsewhere(agent_id)
        return stopped

    def _stop_here(self, agent_id: str) -> None:
        """Somebody at another process of this society wants it."""
        with contextlib.suppress(CoterieError):  # whom only the others know yet does nothing here
            if self._crew and not self._crew.stop_turn(agent_id):
                late = asyncio.create_task(self._stop_when_it_comes(agent_id), name=f"coterie-stop-{agent_id}")
                self._late_stops.add(late)
                late.add_done_callback(self._late_stops.discard)

    async def _stop_when_it_comes(self, agent_id: str) -> None:
        """A claim may be stored and seen by the others, and still be on its way here."""
        with contextlib.suppress(CoterieError):  # what was written before this has come, whatever becomes of this
            await self.store.catch_up()
        with contextlib.suppress(CoterieError):
            self._at_work().stop_turn(agent_id)

    async def stop_waiting(self, agent_id: str) -> bool:
        """The same for a turn that nobody works on, because it waits for the next try or for the person's word."""
        stopped = await self.store.stop(agent_id)
        self.bus.stored(None)
        # A claim that was on its way here when somebody asked has come by now.
        return stopped or (self._crew is not None and self._crew.stop_turn(agent_id))

    async def pause(self, agent_id: str) -> None:
        """The agent ends its turn and rests until `resume`; its mail waits."""
        await self.store.pause(agent_id)
        self.bus.stored(None)

    async def resume(self, agent_id: str) -> None:
        """A paused agent takes up its mail, a blocked one tries again."""
        await self.store.resume(agent_id)
        self.bus.stored(None)

    async def pause_all(self) -> None:
        """Nothing begins from now on, on any process: no turn, no model call, no tool; not for new agents either.

        What is inside a model call or a tool ends that step, and the turn goes on after `resume_all`.
        """
        await self.store.pause_all()
        if self._crew:
            self._crew.defer_queued()
        self.bus.stored(None)

    async def resume_all(self) -> None:
        """The society goes on. Agents that were paused individually stay paused; blocked ones try again."""
        await self.store.resume_all()
        self.bus.stored(None)

    @property
    def setup(self) -> Setup:
        """Services added, changed, tried out and removed while the society runs."""
        self._at_work()
        assert self._setup is not None  # noqa: S101
        return self._setup

    @property
    def services(self) -> Services:
        """The model services, and what each can do."""
        return self._at_work().services

    @property
    def agents(self) -> Directory:
        """Who the agents are, and who can do what."""
        return self._at_work().directory

    @property
    def router(self) -> CapabilityRouter:
        return self._at_work().router

    def _at_work(self) -> Crew:
        if self._crew is None:
            raise CoterieError("this society was opened without its agents: leave out work=False")
        return self._crew

    async def waiting(self, agent_id: str) -> Sequence[Message]:
        """Delivered to the agent and not yet taken up, in order."""
        return await self.store.waiting(agent_id)

    @property
    def broken(self) -> asyncio.Future[StoreBroken]:
        """Set when the disk can no longer be trusted: the process must stop, its next start recovers."""
        return self.store.broken

    async def stop(
        self,
        last_words: Callable[[int], Awaitable[None]] | None = None,
        *,
        briefly: bool = False,
    ) -> int:
        """The graceful stop: delayed messages are dealt with as configured. How many went out early. Once is enough.

        `last_words` is called with that number when all is done, and the store still open. `briefly`: it ran for a
        moment only, so what is delayed stays so, and nobody waits for turns under way: the next start resumes them.
        Every step runs, whatever fails before it. The first error is raised after the last step.
        """
        if self._stopping.is_set():
            return 0
        self._stopping.set()
        shutdown, settings = Shutdown(), self.config.shutdown
        await shutdown.step("end the cleaner", self._end_tidying)
        if self._crew:
            await shutdown.step("claim no more turns", self._crew.stop_claiming)
        # One of several that leaves changes nothing: the others deliver what is due.
        deliver = settings.delayed == "deliver" and not briefly
        deliver = deliver and bool(await shutdown.step("see whether other processes run", self.store.is_last))
        early = await shutdown.step("stop deliveries", lambda: self.bus.stop(deliver_delayed=deliver)) or 0
        if self._crew:
            drain = timedelta(seconds=0 if briefly or shutdown.cancelled else settings.drain_seconds)
            await shutdown.step("stop the agents", partial(self._crew.stop, drain))
        await shutdown.step("leave the other processes", self._hear_no_more)
        if last_words:
            await shutdown.step("tell the listeners", partial(last_words, early))
        await shutdown.step("close the store", self.store.close)
        shutdown.finish()
        return early

    async def abandon(self) -> None:
        """The forced stop: say what stays behind; it is all in the store. Every step runs, as in `stop`."""
        self._stopping.set()
        shutdown = Shutdown()
        await shutdown.step("end the cleaner", self._end_tidying)
        if self._crew:
            await shutdown.step("claim no more turns", self._crew.stop_claiming)
            await shutdown.step("stop the agents", partial(self._crew.stop, timedelta(0)))
        await shutdown.step("leave the other processes", self._hear_no_more)
        await shutdown.step("stop deliveries", self.bus.abandon)
        await shutdown.step("close the store", self.store.close)
        shutdown.finish()

    async def _begin(self, crew: Crew | None) -> None:
        for warning in self.store.info.warnings:
            log.info("%s", warning)
        if self.store.info.unclean:
            log.warning("the last run did not stop in order; the database was checked and is sound")
        if self._clock.now() < self.store.info.last_seen - BEHIND:
            log.warning("the clock is behind the last run by more than five minutes; times shown do not go back")
        for problem in self.config.problems:
            log.warning("%s", problem)
        self.bus.start()
        if self._relay:
            self._relay.start()
        if crew:
            await crew.start()
        self._crew = crew
        self._tidier = asyncio.create_task(self._tidy_now_and_then(), name="coterie-tidier")

    async def _tidy_now_and_then(self) -> None:
        while not await self._clock.wait(self._stopping, TIDY_EVERY):
            await supervise("removing old messages and files", self._tidy, self._clock, stopping=self._stopping)

    async def _tidy(self) -> None:
        keep = self.config.store.keep_days
        await self.artifacts.tidy(Retention(messages=timedelta(days=keep) if keep else None))

    async def _end_tidying(self) -> None:
        if self._tidier:
            await self._tidier

    async def _hear_no_more(self) -> None:
        if self._relay:
            await self._relay.close()
        await asyncio.gather(*self._late_stops, return_exceptions=True)


def _agent(entry: AgentEntry) -> Agent:
    return Agent(id=entry.id, name=entry.name or entry.id, parent=entry.parent)
