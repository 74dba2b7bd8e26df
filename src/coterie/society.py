"""Wires the parts of a society together; starts and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from msgspec.structs import asdict

from coterie.agents import Agent
from coterie.answers import Answer, AnswerDelta, AnswerFollower, follow_inbox, wait_for_answer
from coterie.artifact_service import ArtifactService
from coterie.artifacts import BlobStore
from coterie.bus import MessageBus
from coterie.clock import Clock, SystemClock
from coterie.config import Config, SocietyFolder, read_config
from coterie.configuration import Configuration, DatabaseConfiguration, FileConfiguration, FilesRole, Settings, agent_of
from coterie.errors import CoterieError, Problem, Refused, StoreBroken, StoreUnusable
from coterie.files import DiskMonitor
from coterie.live import LiveRelay, LiveReplies
from coterie.messages import PERSON, Message, Receipt, thread_of
from coterie.retention import RetentionService
from coterie.running_configuration import RunningConfiguration, max_file_bytes
from coterie.store import Page, Worker
from coterie.stores.open import (
    growing_folder,
    is_shared,
    open_store,
    open_store_read_only,
    require_database,
    require_society,
    worker_names,
)
from coterie.stores.sql.store import SqlStore
from coterie.supervision import Shutdown
from coterie.task_service import SentMessage, TaskService
from coterie.tasks import StoppedTask, Task, TaskState, TaskTree
from coterie.text_indexer import TextIndexer

if TYPE_CHECKING:
    from coterie.agent.service import AgentDirectory
    from coterie.agent.toolbox import ListedTool
    from coterie.agent_definitions import AgentDefinitions
    from coterie.agent_runtime import AgentRuntime
    from coterie.agents import Profile
    from coterie.llm.call_metrics import ModelCallMetrics
    from coterie.llm.config import ServiceRegistry
    from coterie.llm.routing import CapabilityRouter
    from coterie.setup import Setup

log = logging.getLogger(__name__)

CLOCK_BEHIND_LIMIT = timedelta(minutes=5)


class AskOptions(TypedDict, total=False):
    """Options of `Society.ask` and `Society.stream`, with the meaning that they have for `Society.send`."""

    attachments: Sequence[str]
    client_id: str | None
    in_reply_to: str | None
    option: int | None


class Society:
    """A running society. Use `async with Society.open(folder) as society`; leaving stops it gracefully."""

    def __init__(
        self,
        folder: SocietyFolder,
        settings: Settings,
        *,
        configuration: Configuration,
        store: SqlStore,
        blobs: BlobStore,
        clock: Clock,
    ) -> None:
        self.store = store
        self.artifacts = artifacts = ArtifactService(
            store, blobs, clock, max_file_bytes=max_file_bytes(settings.config)
        )
        self.disk = DiskMonitor(growing_folder(folder, settings.config), clock)
        self.bus = MessageBus(store, clock)
        self._configuration = configuration
        self.configuration = RunningConfiguration(
            folder, configuration, settings, store=store, artifacts=artifacts, on_change=self.bus.notify
        )
        self.retention = RetentionService(
            store, artifacts, clock, lambda: self.config.store, is_shared=is_shared(self.config)
        )
        self._indexer = TextIndexer(store, clock)
        store.subscribe_changes(self.bus.notify_others)
        self.live = LiveReplies()
        self._tasks = TaskService(store, self.bus, clock)
        self._relay = LiveRelay(self.live, store, clock, self._stop_turn_here) if is_shared(self.config) else None
        self._folder, self._blobs, self._clock = folder, blobs, clock
        self._runtime: AgentRuntime | None = None
        self._directory: AgentDirectory | None = None
        self._setup: Setup | None = None
        self._definitions: AgentDefinitions | None = None
        self._stopping = asyncio.Event()
        self._late_stops: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        folder: str | Path,
        *,
        clock: Clock | None = None,
        work: bool = True,
        run_turns: bool = True,
        max_turns: int | None = None,
    ) -> AsyncIterator[Self]:
        """Run the society in `folder`; create it with templates if it is missing.

        With SQLite one process at a time can. Without `work` messages are delivered, but agents do not run. Without
        `run_turns` their turns are left to other processes, which needs PostgreSQL. `max_turns`: the most turns that
        run in this process at the same time.
        """
        society = await cls.start(folder, clock=clock, work=work, run_turns=run_turns, max_turns=max_turns)
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
        society = await cls._assemble(require_society(Path(folder)), clock or SystemClock(), "first")
        try:
            yield society
        finally:
            await society.store.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def open_read_only(cls, folder: str | Path, *, clock: Clock | None = None) -> AsyncIterator[Self]:
        """Open the society in `folder` for a look: no agent runs, nothing is written or delivered.

        Other processes may run it meanwhile.
        """
        from coterie.agent_runtime import read_directory

        society_folder, clock = require_society(Path(folder)), clock or SystemClock()
        config = read_config(society_folder.path)
        require_database(society_folder, config)
        store, blobs = await open_store_read_only(society_folder, config, clock)
        try:
            configuration = _configuration(society_folder, config, store, "never")
            settings = await configuration.load()
            society = cls(society_folder, settings, configuration=configuration, store=store, blobs=blobs, clock=clock)
            society._directory = await read_directory(society_folder, settings, store, clock)
            yield society
        finally:
            await store.close()

    @classmethod
    async def start(
        cls,
        folder: str | Path,
        *,
        clock: Clock | None = None,
        work: bool = True,
        files: FilesRole = "write",
        run_turns: bool = True,
        max_turns: int | None = None,
    ) -> Self:
        """Start the society as `open` does. The caller must call `stop`.

        `files`: with PostgreSQL, whether agents, services and limits of the folder's files go to the database.
        """
        society_folder = SocietyFolder(Path(folder))
        society_folder.create()
        if not run_turns and not is_shared(read_config(society_folder.path)):
            raise StoreUnusable(
                "without agents here, other processes must run them, which needs a PostgreSQL: set store.url in"
                " coterie.toml, or run coterie serve without --no-agents"
            )
        society = await cls._assemble(society_folder, clock or SystemClock(), files)
        try:
            runtime = society._make_runtime(max_turns, leaves_keyless=files == "never") if work else None
            await society._start(runtime, run_turns=run_turns)
        except BaseException:
            await society.stop(quick=True)
            raise
        return society

    @classmethod
    async def _assemble(cls, folder: SocietyFolder, clock: Clock, files: FilesRole = "write") -> Self:
        """Open the store and add the configured agents. Starts nothing."""
        config = read_config(folder.path)
        store, blobs = await open_store(folder, config, clock)
        try:
            configuration = _configuration(folder, config, store, files)
            found = await configuration.synchronize()
            settings = await configuration.load()
            settings = replace(settings, config=replace(settings.config, problems=(*found, *settings.config.problems)))
            if not is_shared(config):
                person = Agent(id=PERSON, name="You", kind="person")
                await store.add_agents([person, *map(agent_of, settings.config.all_agents)])
        except BaseException:
            await store.close()
            raise
        return cls(folder, settings, configuration=configuration, store=store, blobs=blobs, clock=clock)

    def _make_runtime(self, max_turns: int | None = None, *, leaves_keyless: bool = False) -> AgentRuntime:
        # Models and tools are slow to import, and a single command does not need them.
        from coterie.agent_definitions import AgentDefinitions, AgentsFile, AgentsInDatabase
        from coterie.agent_runtime import AgentRuntime, make_service
        from coterie.setup import Setup

        runtime = AgentRuntime(
            self._folder,
            self.configuration.settings,
            configuration=self.configuration,
            store=self.store,
            bus=self.bus,
            artifacts=self.artifacts,
            blobs=self._blobs,
            live=self.live,
            disk=self.disk,
            clock=self._clock,
            leaves_keyless=leaves_keyless,
            **({} if max_turns is None else {"max_turns": max_turns}),
        )

        async def follow() -> None:
            await self.configuration.follow()
            await runtime.refresh_agents()

        async def is_agent(agent_id: str) -> bool:
            return await self.store.agent(agent_id) is not None

        self._setup = Setup(
            self._folder,
            configuration=self._configuration,
            services=runtime.services,
            directory=runtime.directory,
            follow=follow,
            reload=self.configuration.reload_services,
            make_service=lambda entry: make_service(entry, self._clock),
            clock=self._clock,
        )
        shared = is_shared(self.config)
        self._definitions = AgentDefinitions(
            self._folder,
            AgentsInDatabase(self._configuration) if shared else AgentsFile(self._folder.path),
            reload=self.configuration.follow if shared else self.reload,
            is_taken=is_agent,
            clock=self._clock,
        )
        self.configuration.set_user(runtime)
        return runtime

    async def send(
        self,
        *,
        to: str,
        text: str | None = None,
        payload: dict[str, object] | None = None,
        sender: str = PERSON,
        delay_ms: float | None = None,
        every: str | None = None,
        time_zone: str | None = None,
        quick_replies: Sequence[str] | None = None,
        attachments: Sequence[str] = (),
        client_id: str | None = None,
        in_reply_to: str | None = None,
        option: int | None = None,
        unless_answered: str | None = None,
        asks_back: bool = False,
    ) -> SentMessage:
        """Send a message, by default from the person. It is durable when this returns.

        The result is its receipt and a handle on its task: `wait()`, `stop()`. `every` makes it recurring
        (`"weekdays 08:00"`), in the time zone `time_zone` or that of this machine. `unless_answered`: a question of
        the sender; its answer withdraws this delayed message. `asks_back`: with `in_reply_to`, an approval question:
        the agent answers, and its call keeps waiting for the decision.
        """
        content = dict(payload or {})
        if text is not None:
            content["text"] = text
        if attachments:
            content["attachments"] = [{"artifactRef": ref} for ref in attachments]
        receipt = await self.bus.send(
            sender=sender,
            to=to,
            payload=content,
            delay_ms=delay_ms,
            every=every,
            time_zone=time_zone,
            quick_replies=quick_replies,
            client_id=client_id,
            in_reply_to=in_reply_to,
            option=option,
            unless_answered=unless_answered,
            asks_back=asks_back,
        )
        return SentMessage(**asdict(receipt), tasks=self._tasks)

    async def tasks(
        self, *, state: TaskState | None = None, agent: str | None = None, before: int | None = None, limit: int = 50
    ) -> Sequence[Task]:
        """Newest first. `agent`: only those that it got the first message of or worked on. `before`: a `Task.seq`."""
        return await self.store.tasks(Page(before=before, limit=limit), state=state, agent=agent)

    async def task(self, message_id: str) -> TaskTree:
        """The task of this message, with its messages and turns. `Refused("unknown_task")` if there is none."""
        return await self._tasks.tree(message_id)

    async def stop_task(self, task_id: str) -> StoppedTask:
        """End everything of the task that runs or would run. What tools have done stays done. Idempotent.

        `Refused("unknown_task")` if there is none.
        """
        return await self._tasks.stop(task_id)

    async def continue_task(self, task_id: str) -> Task:
        """Grant the task one more budget. `Refused`: `unknown_task`, `task_stopped`."""
        return await self._tasks.grant_budget(task_id)

    @property
    def currency(self) -> str | None:
        """The currency of all costs; None if no service has a price, or the agents are not loaded."""
        directory = self._runtime.directory if self._runtime else self._directory
        return directory.currency if directory else None

    @property
    def config(self) -> Config:
        """The settings that this process runs with."""
        return self.configuration.config

    async def create_agent(
        self,
        *,
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        prompt: str = "",
        service: str | None = None,
        tools: Sequence[str] | None = None,
        parent: str | None = None,
        description: str = "",
    ) -> Profile:
        """Create an agent. It survives restarts. `description`: what it is for, for other agents and people.

        `Refused`: `id_taken`, `payload_invalid` (invalid id or description), `unknown_service`, `unknown_agent` (the
        parent).
        """
        profile = await self._require_runtime().create_agent(
            id=id, name=name, prompt=prompt, service=service, tools=tools, parent=parent, description=description
        )
        self.bus.notify()
        return profile

    async def terminate_agent(self, agent_id: str) -> Sequence[str]:
        """End the agent and all agents it created; return their ids."""
        terminated = await self._require_runtime().terminate_agent(agent_id)
        self.bus.notify()
        return terminated

    async def retire_agent(self, agent_id: str, version: str | None = None) -> None:
        """End the agent's turn and remove it from the configuration. It keeps its mail; an undo brings it back.

        `version`: see `AgentDefinitions.create`. `Refused`: `unknown_agent`, `definitions_changed`, `last_agent`.
        """
        await self.definitions.retire(agent_id, version)
        if (agent := await self.store.agent(agent_id)) and agent.state != "terminated":
            self._stop_turn_here(agent_id)
            await self.store.stop_waiting_turn(agent_id)
            self.bus.notify()

    async def reload(self) -> Sequence[Problem]:
        """Read coterie.toml, llmservices.json and the owner's tools again.

        Returns the problems found, and the changes that need a restart. `ConfigError`: a file cannot be read, and
        nothing changed.
        """
        self._require_runtime()
        return await self.configuration.reload()

    async def ask(self, to: str, text: str, *, timeout: float | None = None, **options: Unpack[AskOptions]) -> Answer:
        """Send a message from the person and return the agent's answer, which then counts as read.

        `timeout`: seconds. `NoAnswer` says why there is no answer; after a timeout it may still come. An agent that
        waits for an approval answers with its question.
        """
        answer = await wait_for_answer(self.stream(to, text, timeout=timeout, **options))
        await self.mark_read(answer.message)
        return answer

    async def stream(
        self, to: str, text: str, *, timeout: float | None = None, **options: Unpack[AskOptions]
    ) -> AsyncGenerator[AnswerDelta | Answer, None]:
        """Send a message from the person; yield the text as the model writes it, and at the end the `Answer`.

        As `ask`, but nothing is marked as read.
        """
        if not is_shared(self.config):
            self._require_runtime()  # otherwise no agent would answer
        follower = AnswerFollower(to, store=self.store, bus=self.bus, live=self.live, clock=self._clock)

        async def send() -> Receipt:
            return await self.send(to=to, text=text, **options)

        async with contextlib.aclosing(
            follower.follow(send, None if timeout is None else timedelta(seconds=timeout))
        ) as pieces:
            async for piece in pieces:
                yield piece

    async def mark_read(self, message: Message) -> None:
        """Record that the person has read the conversation up to this message, which must be one to the person."""
        if message.to != PERSON:
            raise Refused(
                "unknown_message", f"only messages to {PERSON} are marked as read, this one is to {message.to}"
            )
        await self.store.mark_read(thread_of(message), message.id)
        self.bus.notify()

    def inbox(self, recipient: str = PERSON, *, mark_read: bool = True) -> AsyncGenerator[Message, None]:
        """Yield the unread messages of `recipient`, then each new one, in order, without end.

        A message to the person counts as read when the next one is asked for, so after a crash the last one comes
        again. With `mark_read=False` the caller marks them.
        """
        after_each = self._mark_read_if_there if mark_read and recipient == PERSON else None
        return follow_inbox(self.store, self.bus, recipient, after_each)

    async def _mark_read_if_there(self, message: Message) -> None:
        with contextlib.suppress(Refused):  # the conversation was cleared meanwhile
            await self.mark_read(message)

    def stop_turn(self, agent_id: str) -> bool:
        """Stop the agent's current turn; its mail starts the next one. False if no turn runs in this process.

        In that case the other processes of the society are asked to stop it.
        """
        if not (stopped := self._require_runtime().stop_turn(agent_id)) and self._relay:
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
    def definitions(self) -> AgentDefinitions:
        """Creates, changes and retires the agents of the configuration, with a history of changes."""
        self._require_runtime()
        assert self._definitions is not None  # noqa: S101
        return self._definitions

    @property
    def tools(self) -> Sequence[ListedTool]:
        """All tools of the society, with their sources."""
        return self._require_runtime().tools

    def tools_of(self, agent_id: str) -> frozenset[str]:
        """Names of the tools that the agent's model is given."""
        return self._require_runtime().tools_of(agent_id)

    @property
    def services(self) -> ServiceRegistry:
        """The model services and their capabilities."""
        return self._require_runtime().services

    @property
    def agents(self) -> AgentDirectory:
        """The agents and their capabilities."""
        return self._require_runtime().directory if self._directory is None else self._directory

    def system_prompt(self, agent_id: str) -> str:
        """The system prompt that the agent's next request has."""
        if self._directory is None:
            return self._require_runtime().system_prompt(agent_id)
        from coterie.agent_runtime import offline_requests

        return offline_requests(self._directory).system_prompt(self._directory.profile(agent_id))

    @property
    def router(self) -> CapabilityRouter:
        return self._require_runtime().router

    @property
    def model_metrics(self) -> ModelCallMetrics | None:
        """Metrics of the model requests of this process; None if it runs no agents."""
        return self._runtime.model_metrics if self._runtime else None

    def _require_runtime(self) -> AgentRuntime:
        if self._runtime is None:
            raise CoterieError("this society was opened without agents: open it without work=False")
        return self._runtime

    async def waiting(self, agent_id: str) -> Sequence[Message]:
        """Messages delivered to the agent and not yet taken, in order."""
        return await self.store.waiting(agent_id)

    async def shared_workers(self) -> Sequence[Worker]:
        """The live processes of a society on PostgreSQL. Empty with SQLite, where only one process can run it."""
        return await self.store.workers() if is_shared(self.config) else ()

    async def worker_names(self) -> Callable[[Agent], str | None]:
        """Return a function from an agent to its worker's name, `host/pid`; `gone` if that process has ended."""
        return await worker_names(self._folder, self.config, self.store)

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
        await shutdown.step("stop pruning", self.retention.stop)
        await shutdown.step("stop indexing", self._indexer.stop)
        if self._runtime:
            await shutdown.step("stop claiming turns", self._runtime.stop_claiming)
        # While other processes run, they deliver the delayed messages when due.
        deliver = settings.delayed == "deliver" and not quick
        deliver = deliver and bool(await shutdown.step("see whether other processes run", self.store.is_only_process))
        early = await shutdown.step("stop deliveries", lambda: self.bus.stop(deliver_delayed=deliver)) or 0
        if self._runtime:
            drain = timedelta(seconds=0 if quick or shutdown.cancelled else settings.drain_seconds)
            await shutdown.step("stop the agents", partial(self._runtime.stop, drain))
            # Turns that ended meanwhile may have sent delayed messages.
            settle = partial(self.bus.settle_delayed, deliver_delayed=deliver)
            early += await shutdown.step("settle the last delayed messages", settle) or 0
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
        await shutdown.step("stop pruning", self.retention.stop)
        await shutdown.step("stop indexing", self._indexer.stop)
        if self._runtime:
            await shutdown.step("stop claiming turns", self._runtime.stop_claiming)
            await shutdown.step("stop the agents", partial(self._runtime.stop, timedelta(0)))
        await shutdown.step("close the relay", self._close_relay)
        await shutdown.step("stop deliveries", self.bus.abandon)
        await shutdown.step("close the store", self.store.close)
        shutdown.finish()

    async def _start(self, runtime: AgentRuntime | None, *, run_turns: bool = True) -> None:
        self._runtime = runtime
        for warning in self.store.info.warnings:
            log.info("%s", warning)
        if self.store.info.unclean:
            log.warning("the last run did not stop cleanly; the database was checked and is intact")
        if self._clock.now() < self.store.info.last_seen - CLOCK_BEHIND_LIMIT:
            log.warning("the clock is behind the last run by more than five minutes; times shown do not go back")
        for problem in self.configuration.file_problems:
            log.warning("%s", problem)
        self.bus.start()
        if self._relay:
            self._relay.start()
        if runtime:
            await runtime.start(run_turns=run_turns)
            self.configuration.start(runtime.problems)
        self.retention.start()
        self._indexer.start()

    async def _close_relay(self) -> None:
        if self._relay:
            await self._relay.close()
        await asyncio.gather(*self._late_stops, return_exceptions=True)


def _configuration(folder: SocietyFolder, config: Config, store: SqlStore, files: FilesRole) -> Configuration:
    return DatabaseConfiguration(folder, store, files=files) if is_shared(config) else FileConfiguration(folder)
