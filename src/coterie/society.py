"""Wires the parts of a society together; starts and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from coterie.agents import Agent
from coterie.artifact_service import ArtifactService
from coterie.artifacts import BlobStore
from coterie.bus import MessageBus
from coterie.clock import Clock, SystemClock
from coterie.config import AgentEntry, Config, SocietyFolder, changes_needing_restart, merge_reloaded, read_config
from coterie.errors import CoterieError, Lagged, Problem, StoreBroken
from coterie.files import DiskMonitor
from coterie.live import LiveRelay, LiveReplies
from coterie.messages import PERSON, Message, Receipt
from coterie.store import Retention
from coterie.stores.open import growing_folder, is_shared, open_store, require_driver, require_society, store_limits
from coterie.stores.sql.store import SqlStore
from coterie.supervision import Shutdown, supervise

if TYPE_CHECKING:
    from coterie.agent.service import AgentDirectory
    from coterie.agent_runtime import AgentRuntime
    from coterie.agents import Profile
    from coterie.llm.config import ServiceRegistry
    from coterie.llm.routing import CapabilityRouter
    from coterie.setup import Setup

log = logging.getLogger(__name__)

PRUNE_INTERVAL = timedelta(hours=1)
CLOCK_BEHIND_LIMIT = timedelta(minutes=5)


class Society:
    """A running society. Use `async with Society.open(folder) as society`; leaving stops it gracefully."""

    def __init__(
        self,
        folder: SocietyFolder,
        config: Config,
        *,
        store: SqlStore,
        blobs: BlobStore,
        artifacts: ArtifactService,
        disk: DiskMonitor,
        clock: Clock,
    ) -> None:
        self.config, self.store, self.artifacts, self.disk = config, store, artifacts, disk
        self.bus = MessageBus(store, clock)
        store.subscribe_changes(self.bus.notify)
        self.live = LiveReplies()
        self._relay = LiveRelay(self.live, store, clock, self._stop_turn_here) if is_shared(config) else None
        self._folder, self._blobs, self._clock = folder, blobs, clock
        self._runtime: AgentRuntime | None = None
        self._setup: Setup | None = None
        self._reload_lock = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._prune_task: asyncio.Task[None] | None = None
        self._late_stops: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: str | Path, *, clock: Clock | None = None, work: bool = True) -> AsyncIterator[Self]:
        """Run the society in `folder`; create it with templates if it is missing.

        With SQLite one process at a time can. Without `work` messages are delivered, but agents do not run.
        """
        society = await cls.start(folder, clock=clock, work=work)
        try:
            yield society
        finally:
            await society.stop()

    @classmethod
    @contextlib.asynccontextmanager
    async def open_offline(cls, folder: str | Path, *, clock: Clock | None = None) -> AsyncIterator[Self]:
        """Open the society in `folder` for one command: sends are stored, but nothing is delivered or pruned.

        Leaving is not a stop: delayed messages stay delayed.
        """
        society = await cls._assemble(require_society(Path(folder)), clock or SystemClock())
        try:
            yield society
        finally:
            await society.store.close()

    @classmethod
    async def start(cls, folder: str | Path, *, clock: Clock | None = None, work: bool = True) -> Self:
        """Start the society as `open` does. The caller must call `stop`."""
        society_folder = SocietyFolder(Path(folder))
        society_folder.create()
        society = await cls._assemble(society_folder, clock or SystemClock())
        try:
            await society._start(society._make_runtime() if work else None)
        except BaseException:
            await society.store.close()
            raise
        return society

    @classmethod
    async def _assemble(cls, folder: SocietyFolder, clock: Clock) -> Self:
        """Open the store and add the configured agents. Starts nothing."""
        config = read_config(folder.path)
        store, blobs = await open_store(folder, config, clock)
        try:
            person = Agent(id=PERSON, name="You", kind="person")
            await store.add_agents([person, *map(_agent, config.agents)])
        except BaseException:
            await store.close()
            raise
        return cls(
            folder,
            config,
            store=store,
            blobs=blobs,
            artifacts=ArtifactService(store, blobs, clock, max_file_bytes=_max_file_bytes(config)),
            disk=DiskMonitor(growing_folder(folder, config), clock),
            clock=clock,
        )

    def _make_runtime(self) -> AgentRuntime:
        # Models and tools are slow to import, and a single command does not need them.
        from coterie.agent_runtime import AgentRuntime
        from coterie.setup import Setup

        runtime = AgentRuntime(
            self._folder,
            self.config,
            store=self.store,
            bus=self.bus,
            artifacts=self.artifacts,
            blobs=self._blobs,
            live=self.live,
            disk=self.disk,
            clock=self._clock,
        )
        self._setup = Setup(
            self._folder,
            services=runtime.services,
            directory=runtime.directory,
            reload=self._reload_services,
            clock=self._clock,
        )
        return runtime

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
        """Send a message, by default from the person. It is durable when this returns."""
        content = dict(payload or {})
        if text is not None:
            content["text"] = text
        if attachments:
            content["attachments"] = [{"artifactRef": ref} for ref in attachments]
        return await self.bus.send(
            sender=sender,
            to=to,
            payload=content,
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
        """Create an agent. It survives restarts.

        `Refused`: `id_taken`, `payload_invalid` (invalid id), `unknown_service`, `unknown_agent` (the parent).
        """
        profile = await self._require_runtime().create_agent(
            id=id, name=name, prompt=prompt, service=service, tools=tools, parent=parent
        )
        self.bus.notify()
        return profile

    async def terminate_agent(self, agent_id: str) -> Sequence[str]:
        """End the agent and all agents it created; return their ids."""
        terminated = await self._require_runtime().terminate_agent(agent_id)
        self.bus.notify()
        return terminated

    async def reload(self) -> Sequence[Problem]:
        """Read coterie.toml, llmservices.json and the owner's tools again.

        Returns the problems found, and the changes that need a restart. `ConfigError`: a file cannot be read, and
        nothing changed.
        """
        from coterie.agent_runtime import load_services

        runtime = self._require_runtime()
        async with self._reload_lock:
            config = read_config(self._folder.path)
            require_driver(config.store)
            services = load_services(self._folder)
            changed = [entry for entry in config.agents if entry not in self.config.agents]
            await self.store.add_agents([_agent(entry) for entry in changed])
            pending = changes_needing_restart(self.config, config)
            self.config = merge_reloaded(self.config, config)
            self.store.set_limits(store_limits(config))
            self.artifacts.set_max_file_bytes(_max_file_bytes(config))
            problems = (*config.problems, *pending, *await runtime.apply(services, config))
        self.bus.notify()
        log.info("configuration reloaded; %d problems", len(problems))
        return problems

    async def _reload_services(self) -> None:
        """Reload llmservices.json only, so that an error in coterie.toml does not matter."""
        from coterie.agent_runtime import load_services

        async with self._reload_lock:
            await self._require_runtime().apply(load_services(self._folder))
        self.bus.notify()

    async def inbox(self, recipient: str = PERSON) -> AsyncGenerator[Message, None]:
        """Yield the unread messages of `recipient`, then each new one, in order, without end."""
        seen, lagged = 0, True
        while lagged:
            lagged = False
            async with self.bus.watch() as watcher:
                try:
                    while True:
                        for message in await self.store.waiting(recipient):
                            if (message.mailbox_position or 0) > seen:
                                seen = message.mailbox_position or 0
                                yield message
                        await anext(watcher)
                except Lagged:
                    lagged = True  # read the mailbox again
                except StopAsyncIteration:
                    return

    def stop_turn(self, agent_id: str) -> bool:
        """Stop the agent's current turn; its mail starts the next one. False if no turn runs in this process.

        In that case the other processes of the society are asked to stop it.
        """
        stopped = self._require_runtime().stop_turn(agent_id)
        if not stopped and self._relay:
            self._relay.request_stop(agent_id)
        return stopped

    def _stop_turn_here(self, agent_id: str) -> None:
        """Handle a stop request from another process."""
        with contextlib.suppress(CoterieError):  # this process may not know the agent yet
            if self._runtime and not self._runtime.stop_turn(agent_id):
                task = asyncio.create_task(self._stop_turn_late(agent_id), name=f"coterie-stop-{agent_id}")
                self._late_stops.add(task)
                task.add_done_callback(self._late_stops.discard)

    async def _stop_turn_late(self, agent_id: str) -> None:
        """Stop a turn whose claim is committed, so that others see it, but has not reached the scheduler yet."""
        with contextlib.suppress(CoterieError):  # earlier writes are done even if this flush fails
            await self.store.flush()
        with contextlib.suppress(CoterieError):
            self._require_runtime().stop_turn(agent_id)

    async def stop_waiting(self, agent_id: str) -> bool:
        """Stop a turn that waits for a retry or an approval. False if there is none."""
        stopped = await self.store.stop_waiting_turn(agent_id)
        self.bus.notify()
        # A claim that was in flight when this was called has arrived by now.
        return stopped or (self._runtime is not None and self._runtime.stop_turn(agent_id))

    async def pause(self, agent_id: str) -> None:
        """Let the agent end its turn and start no other until `resume`; its mail waits."""
        await self.store.pause(agent_id)
        self.bus.notify()

    async def resume(self, agent_id: str) -> None:
        """Let a paused agent read its mail, or a blocked one retry."""
        await self.store.resume(agent_id)
        self.bus.notify()

    async def pause_all(self) -> None:
        """Pause the society: no process starts a turn, a model call or a tool, also not for new agents.

        A running model call or tool finishes its step; the turn continues after `resume_all`.
        """
        await self.store.pause_all()
        if self._runtime:
            self._runtime.defer_queued()
        self.bus.notify()

    async def resume_all(self) -> None:
        """Resume the society. Individually paused agents stay paused; blocked ones retry."""
        await self.store.resume_all()
        self.bus.notify()

    @property
    def setup(self) -> Setup:
        """Adds, changes, tests and removes model services."""
        self._require_runtime()
        assert self._setup is not None  # noqa: S101
        return self._setup

    @property
    def services(self) -> ServiceRegistry:
        """The model services and their capabilities."""
        return self._require_runtime().services

    @property
    def agents(self) -> AgentDirectory:
        """The agents and their capabilities."""
        return self._require_runtime().directory

    @property
    def router(self) -> CapabilityRouter:
        return self._require_runtime().router

    def _require_runtime(self) -> AgentRuntime:
        if self._runtime is None:
            raise CoterieError("this society was opened without agents: open it without work=False")
        return self._runtime

    async def waiting(self, agent_id: str) -> Sequence[Message]:
        """Messages delivered to the agent and not yet taken, in order."""
        return await self.store.waiting(agent_id)

    @property
    def broken(self) -> asyncio.Future[StoreBroken]:
        """Done when written data may not be on disk: the process must stop; the next start recovers."""
        return self.store.broken

    async def stop(
        self,
        before_close: Callable[[int], Awaitable[None]] | None = None,
        *,
        quick: bool = False,
    ) -> int:
        """Stop gracefully and return the number of delayed messages delivered early. Later calls do nothing.

        `before_close` is called with that number before the store is closed. `quick`: keep delayed messages and do
        not wait for running turns; the next start resumes them. Every step runs, even if an earlier one fails. The
        first error is raised after the last step.
        """
        if self._stopping.is_set():
            return 0
        self._stopping.set()
        shutdown, settings = Shutdown(), self.config.shutdown
        await shutdown.step("stop pruning", self._stop_pruning)
        if self._runtime:
            await shutdown.step("stop claiming turns", self._runtime.stop_claiming)
        # While other processes run, they deliver the delayed messages when due.
        deliver = settings.delayed == "deliver" and not quick
        deliver = deliver and bool(await shutdown.step("see whether other processes run", self.store.is_only_process))
        early = await shutdown.step("stop deliveries", lambda: self.bus.stop(deliver_delayed=deliver)) or 0
        if self._runtime:
            drain = timedelta(seconds=0 if quick or shutdown.cancelled else settings.drain_seconds)
            await shutdown.step("stop the agents", partial(self._runtime.stop, drain))
        await shutdown.step("close the relay", self._close_relay)
        if before_close:
            await shutdown.step("call before_close", partial(before_close, early))
        await shutdown.step("close the store", self.store.close)
        shutdown.finish()
        return early

    async def abandon(self) -> None:
        """Stop without waiting for turns or delivering delayed messages. Every step runs, as in `stop`."""
        self._stopping.set()
        shutdown = Shutdown()
        await shutdown.step("stop pruning", self._stop_pruning)
        if self._runtime:
            await shutdown.step("stop claiming turns", self._runtime.stop_claiming)
            await shutdown.step("stop the agents", partial(self._runtime.stop, timedelta(0)))
        await shutdown.step("close the relay", self._close_relay)
        await shutdown.step("stop deliveries", self.bus.abandon)
        await shutdown.step("close the store", self.store.close)
        shutdown.finish()

    async def _start(self, runtime: AgentRuntime | None) -> None:
        for warning in self.store.info.warnings:
            log.info("%s", warning)
        if self.store.info.unclean:
            log.warning("the last run did not stop cleanly; the database was checked and is intact")
        if self._clock.now() < self.store.info.last_seen - CLOCK_BEHIND_LIMIT:
            log.warning("the clock is behind the last run by more than five minutes; times shown do not go back")
        for problem in self.config.problems:
            log.warning("%s", problem)
        self.bus.start()
        if self._relay:
            self._relay.start()
        if runtime:
            await runtime.start()
        self._runtime = runtime
        self._prune_task = asyncio.create_task(self._prune_regularly(), name="coterie-prune")

    async def _prune_regularly(self) -> None:
        while not await self._clock.wait(self._stopping, PRUNE_INTERVAL):
            await supervise("removing old messages and files", self._prune, self._clock, stopping=self._stopping)

    async def _prune(self) -> None:
        days = self.config.store.keep_days
        await self.artifacts.prune(Retention(messages=timedelta(days=days) if days else None))

    async def _stop_pruning(self) -> None:
        if self._prune_task:
            await self._prune_task

    async def _close_relay(self) -> None:
        if self._relay:
            await self._relay.close()
        await asyncio.gather(*self._late_stops, return_exceptions=True)


def _max_file_bytes(config: Config) -> int:
    return config.limits.upload_mb * 1_000_000


def _agent(entry: AgentEntry) -> Agent:
    return Agent(id=entry.id, name=entry.name or entry.id, parent=entry.parent)
