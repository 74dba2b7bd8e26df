"""A society at work: the parts put together, opened and closed in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from coterie.agents import Agent
from coterie.artifacts import Bytes
from coterie.bus import MessageBus
from coterie.clock import Clock, SystemClock
from coterie.config import Config, read_config
from coterie.errors import ConfigError, CoterieError, Lagged, Problem, StoreBroken
from coterie.folder import SocietyFolder
from coterie.inspection import require_society
from coterie.library import Library
from coterie.messages import PERSON, Message, Receipt
from coterie.store import Limits, Retention
from coterie.stores.folder import FolderBytes
from coterie.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from coterie.agent.directory import Directory
    from coterie.crew import Crew
    from coterie.llm.registry import Services
    from coterie.llm.router import CapabilityRouter

log = logging.getLogger(__name__)

TIDY_EVERY = timedelta(hours=1)
BEHIND = timedelta(minutes=5)


class Society:
    """Use it as `async with Society.open(folder) as society`; leaving is a graceful stop."""

    def __init__(self, config: Config, store: SqliteStore, artifacts: Library, kept: Bytes, clock: Clock) -> None:
        self.config, self.store, self.artifacts = config, store, artifacts
        self.bus = MessageBus(store, clock)
        self._kept, self._clock = kept, clock
        self._crew: Crew | None = None
        self._stopping = asyncio.Event()
        self._tidier: asyncio.Task[None] | None = None

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
        check_engine(config)
        limits = Limits(max_hops=config.limits.max_hops, mailbox=config.limits.mailbox)
        store = await SqliteStore.open(place.data, clock, limits=limits, durability=config.store.durability)
        try:
            kept = FolderBytes(place.artifacts)
            artifacts = Library(store, kept, clock, limit=config.limits.upload_mb * 1_000_000)
            people = [Agent(id=PERSON, name="You", kind="person")]
            agents = [Agent(id=entry.id, name=entry.name or entry.id) for entry in config.agents]
            await store.add_agents(people + agents)
        except BaseException:
            await store.close()
            raise
        return cls(config, store, artifacts, kept, clock)

    def _hire(self, place: SocietyFolder) -> Crew:
        from coterie.crew import Crew  # models and tools take a while to import, and an errand needs none of them

        return Crew(place, self.config, self.store, self.bus, self.artifacts, self._kept, self._clock)

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
        """End what the agent is doing now. Its mail is kept, and begins the next turn. False: it was doing nothing."""
        return self._at_work().stop_turn(agent_id)

    async def pause(self, agent_id: str) -> None:
        """The agent ends its turn and rests until `resume`; its mail waits."""
        await self.store.pause(agent_id)

    async def resume(self, agent_id: str) -> None:
        """A paused agent takes up its mail, a blocked one tries again."""
        await self.store.resume(agent_id)
        self.bus.stored(None)

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

    async def stop(self, *, deliver_delayed: bool | None = None) -> int:
        """The graceful stop: delayed messages are dealt with as configured. How many went out early. Once is enough.

        `deliver_delayed`: decided here instead, by somebody who ran the society for a moment only.
        """
        if self._stopping.is_set():
            return 0
        await self._end_tidying()
        try:
            if self._crew:
                await self._crew.stop_claiming()
            if deliver_delayed is None:
                deliver_delayed = self.config.shutdown.delayed == "deliver"
            early = await self.bus.stop(deliver_delayed=deliver_delayed)
            if self._crew:
                await self._crew.stop(timedelta(seconds=self.config.shutdown.drain_seconds))
            return early
        finally:
            await self.store.close()

    async def abandon(self) -> None:
        """The forced stop: say what stays behind; it is all in the store."""
        await self._end_tidying()
        try:
            if self._crew:
                await self._crew.stop_claiming()
                await self._crew.stop(timedelta(0))
            await self.bus.abandon()
        finally:
            await self.store.close()

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
        if crew:
            await crew.start()
        self._crew = crew
        self._tidier = asyncio.create_task(self._tidy_now_and_then(), name="coterie-tidier")

    async def _tidy_now_and_then(self) -> None:
        keep = self.config.store.keep_days
        retention = Retention(messages=timedelta(days=keep) if keep else None)
        while not await self._clock.wait(self._stopping, TIDY_EVERY):
            await self.artifacts.tidy(retention)

    async def _end_tidying(self) -> None:
        self._stopping.set()
        if self._tidier:
            await self._tidier


def check_engine(config: Config) -> None:
    if config.store.url != "sqlite":
        sentence = 'PostgreSQL is not supported by this version yet: use "sqlite"'
        raise ConfigError([Problem("coterie.toml: store.url", sentence, fatal=True)])
