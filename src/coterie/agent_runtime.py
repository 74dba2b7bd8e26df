"""The agents at work: models, tools, handler and scheduler, put together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from coterie.agent.builtins import SEND_MESSAGE, built_in_tools, people_tools
from coterie.agent.mcp import McpServers
from coterie.agent.runner import LlmHandler
from coterie.agent.scheduler import Scheduler, ServiceAdmission
from coterie.agent.service import Directory, Registrar
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext
from coterie.agent.user_tools import load_owner_tools
from coterie.agents import Profile
from coterie.artifact_service import AgentLibrary, Library
from coterie.artifacts import Bytes
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.config import AgentEntry, Config, SocietyFolder, unknown_service
from coterie.errors import Lagged, Problem, Refused
from coterie.files import Disk
from coterie.ids import new_id
from coterie.live import Live
from coterie.llm.concurrency import ServiceQueues
from coterie.llm.config import ServiceEntry, Services
from coterie.llm.gateway import Models
from coterie.llm.learned_limits import Refusals
from coterie.llm.providers.factory import TOUR_ENTRIES, make_service
from coterie.llm.routing import CapabilityRouter, ContentAdapter
from coterie.messages import PERSON, Payload, Receipt
from coterie.redaction import secrets_of
from coterie.stores.open import is_shared
from coterie.stores.sql.store import SqlStore
from coterie.supervision import Shutdown, supervise
from coterie.telemetry import tracing_for
from coterie.tour.agent import SEER, TourSeer
from coterie.turn import Rules

log = logging.getLogger(__name__)

MCP_PATIENCE = timedelta(seconds=5)
MCP_AGAIN = timedelta(minutes=1)


class Crew:
    """Whoever is in it answers what reaches them, until `stop`."""

    def __init__(
        self,
        place: SocietyFolder,
        config: Config,
        store: SqlStore,
        bus: MessageBus,
        artifacts: Library,
        kept: Bytes,
        clock: Clock,
        live: Live,
        disk: Disk,
    ) -> None:
        self._place, self._store, self._bus, self._artifacts, self._clock = place, store, bus, artifacts, clock
        profiles, unread = read_profiles(config, place)
        self._described = {profile.id for profile in profiles}
        self._config = config
        self._following: asyncio.Task[None] | None = None
        self._tokens_per_day = config.limits.tokens_per_day
        self.services = load_services(place)
        refusals = Refusals(clock, place.data / "refusals.json")
        self.directory = Directory(self.services, refusals, profiles)
        self.router = CapabilityRouter(store, kept, ContentAdapter(self.directory), refusals)
        self._tracing = tracing_for(store.message)
        self._models = Models(
            self.services,
            self.router,
            refusals,
            lambda entry: self._tracing.service(make_service(entry, clock), entry),
            clock,
            ServiceQueues(clock, store if is_shared(config) else None),
        )
        self._registrar = Registrar(store, self.directory)
        self._tour_seer = TourSeer(self._registrar, self.directory, self.services)
        self._toolbox = Toolbox(
            (*built_in_tools(self.directory, bus, store), *people_tools(self._registrar)),
            deadline=timedelta(seconds=config.limits.tool_seconds),
        )
        self._toolbox.secrets = self._secrets()
        self._mcp = McpServers(config.mcp, clock, self._toolbox.adopt)
        self._connecting: asyncio.Task[None] | None = None
        self._tried_mcp = asyncio.Event()
        self._noticed = (*unread, *self._adopt_owner_tools())
        rules = _rules(config)
        self._handler = LlmHandler(
            store,
            bus,
            self._models,
            self.directory,
            self._toolbox,
            self._context,
            clock,
            rules,
            live=live,
            tokens_per_day=config.limits.tokens_per_day,
            tracing=self._tracing,
            recall=self._registrar.recall,
            keep=lambda agent_id: AgentLibrary(artifacts, agent_id).put,
            paused=lambda: store.seen_paused,
        )
        admission = ServiceAdmission(self._models, self.directory)
        self._scheduler = Scheduler(store, self._handler, clock, rules, new_id(), disk, admission)
        self._models.subscribe(self._scheduler.on_room)

    async def start(self) -> None:
        await self._registrar.recall()
        await self._settle_tour()
        for problem in self.problems:
            log.warning("%s", problem)
        connecting = supervise("connecting to MCP servers", self._connect_all, self._clock, first_pause=MCP_AGAIN)
        self._connecting = asyncio.create_task(connecting, name="coterie-mcp")
        # Agents shall find their tools when they begin, but one slow server must not keep everybody waiting.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MCP_PATIENCE.total_seconds()):
                await self._tried_mcp.wait()
        self._toolbox.watch_loop()
        self._scheduler.start()
        if is_shared(self._config):
            following = supervise("reading which agents other processes made", self._follow_others, self._clock)
            self._following = asyncio.create_task(following, name="coterie-roster")

    async def _follow_others(self) -> None:
        """Whom other processes make or end is known here, too."""
        while True:
            try:
                async with self._bus.watch() as watcher:
                    await self._registrar.recall()
                    if await self._store.society_paused():
                        self.defer_queued()
                    async for event in watcher:
                        if event.kind in ("agent.upsert", "agent.removed"):
                            await self._registrar.recall()
                        elif event.kind == "society.state" and await self._store.society_paused():
                            self.defer_queued()
                    return
            except Lagged:
                continue

    async def _connect_all(self) -> None:
        """Until every MCP server is there: tools that nobody has heard of are never called, so no call finds them."""
        try:
            while await self._mcp.connect():
                self._tried_mcp.set()
                await self._clock.sleep(MCP_AGAIN)
        finally:
            self._tried_mcp.set()

    async def create_agent(
        self,
        *,
        id: str | None,  # noqa: A002
        name: str | None,
        prompt: str,
        service: str | None,
        tools: Sequence[str] | None,
        parent: str | None,
    ) -> Profile:
        return await self._registrar.create(
            id=id, name=name, prompt=prompt, service=service, tools=tools, parent=parent
        )

    async def terminate_agent(self, agent_id: str) -> Sequence[str]:
        ended = await self._registrar.terminate(agent_id, by=PERSON)
        for one in ended:
            self._handler.stop(one)  # what it is in the middle of counts for nothing any more
        return ended

    def stop_turn(self, agent_id: str) -> bool:
        """End what the agent is doing now; its mail is kept, and begins the next turn."""
        if self._handler.stop(agent_id):
            return True
        self.directory.profile(agent_id)
        return False

    def defer_queued(self) -> None:
        """The society was paused: turns that wait for their model service stop here."""
        self._handler.defer_queued()

    async def adopt(self, services: Services, config: Config | None = None) -> Sequence[Problem]:
        """From now on it is as the owner's files say. Agents that were blocked for want of just that go on."""
        blocked = {agent.id: self._mind(agent.id) for agent in await self._registrar.blocked()}
        missing = self._adopt_config(config) if config else ()
        self.services.adopt(services)
        self._toolbox.secrets = self._secrets()
        await self._settle_tour()
        await self._store.unblock([one for one, mind in blocked.items() if self._mind(one) not in (None, mind)])
        return (*self.problems, *missing)

    async def _settle_tour(self) -> None:
        if self._tour_seer.is_wanted(self._config):
            await self._tour_seer.come()
        elif self._tour_seer.is_there:
            await self.terminate_agent(SEER)

    def _adopt_config(self, config: Config) -> Sequence[Problem]:
        """The agents that are described no more."""
        self._config = config
        profiles, unread = read_profiles(config, self._place)
        gone = self._described - {profile.id for profile in profiles}
        for one in gone:
            self.directory.forget(one)
        for profile in profiles:
            self.directory.add(profile)
        self._described = {profile.id for profile in profiles}
        self._tokens_per_day = config.limits.tokens_per_day
        self._noticed = (*unread, *self._adopt_owner_tools())
        self._toolbox.deadline = timedelta(seconds=config.limits.tool_seconds)
        self._handler.adopt(_rules(config), config.limits.tokens_per_day)
        self._scheduler.adopt(_rules(config))
        return [_missing(one) for one in sorted(gone) if not self.directory.has_ended(one)]

    @property
    def problems(self) -> Sequence[Problem]:
        """What is wrong with the owner's files, apart from coterie.toml itself."""
        known = [entry.id for entry in self.services]
        wanted = [(one.id, one.service) for one in self.directory.everybody() if one.id in self._described]
        return (
            *self._noticed,
            *self.services.problems,
            *self._ended_but_described(),
            *(unknown_service(agent, service, known) for agent, service in wanted if service and service not in known),
        )

    def _mind(self, agent_id: str) -> tuple[ServiceEntry | int, ...] | None:
        """All that decides whether its model answers; None when it has none."""
        try:
            first = self.directory.service_of(agent_id)
        except Refused:
            return None
        return (self._tokens_per_day, first, *map(self.services.entry, first.fallback))

    def _ended_but_described(self) -> Sequence[Problem]:
        words = "was terminated and stays so: take it out of the file, or give the new one another id"
        ended = sorted(one for one in self._described if self.directory.has_ended(one))
        return [Problem(f"coterie.toml: agents.{one}", words) for one in ended]

    async def stop_claiming(self) -> None:
        await self._scheduler.stop_claiming()

    async def stop(self, drain: timedelta) -> None:
        """Turns under way may end within `drain`; what does not is resumed at the next start."""
        shutdown = Shutdown()
        await shutdown.step("hand turns over", partial(self._scheduler.finish, drain))
        for task in filter(None, (self._connecting, self._following)):
            task.cancel()
            await shutdown.step(f"end {task.get_name()}", partial(asyncio.wait, {task}))
        await shutdown.step("close MCP servers", self._mcp.close)
        await shutdown.step("stop tools", self._toolbox.close)
        await shutdown.step("close model services", self._models.close)
        await shutdown.step("close tracing", self._tracing.close)
        shutdown.finish()

    def _secrets(self) -> tuple[str, ...]:
        keys = [entry.api_key.reveal() for entry in self.services if entry.api_key]
        servers = [part for entry in self._config.mcp for part in (entry.env, entry.args, entry.url)]
        return secrets_of(os.environ, *servers, {f"{n}_KEY": key for n, key in enumerate(keys)})

    def _adopt_owner_tools(self) -> Sequence[Problem]:
        owned = load_owner_tools(self._place.path, taken={SEND_MESSAGE.name})
        return (*owned.problems, *self._toolbox.adopt("tools", owned.tools))

    def _context(self, profile: Profile, key: str, cause: str | None) -> ToolContext:
        sent = itertools.count()

        async def send(
            to: str, payload: Payload, *, delay_ms: float | None = None, quick_replies: list[str] | None = None
        ) -> Receipt:
            return await self._bus.send(
                sender=profile.id,
                to=to,
                payload=payload,
                delay_ms=delay_ms,
                quick_replies=quick_replies,
                # The n-th message of this very call: run again, it is the same one.
                client_id=f"{key}/{next(sent)}",
                cause=cause,
            )

        return ToolContext(
            agent_id=profile.id,
            capabilities=self.directory.capabilities_of(profile.id),
            router=self.router,
            send=send,
            artifacts=AgentLibrary(self._artifacts, profile.id, shared=self._store.limits.shared_artifacts),
            idempotency_key=key,
        )


def load_services(place: SocietyFolder) -> Services:
    """The owner's; where there are none, the tour's."""
    services = Services.load(place.path)
    return services if len(services) else Services(TOUR_ENTRIES, services.problems)


def read_profiles(config: Config, place: SocietyFolder) -> tuple[Sequence[Profile], Sequence[Problem]]:
    """The agents of coterie.toml; one whose prompt cannot be read is left out and reported."""
    profiles, problems = [], list[Problem]()
    for entry in config.agents:
        try:
            profiles.append(_profile(entry, place))
        except OSError as error:
            where = f"coterie.toml: agents.{entry.id}.prompt_file"
            problems.append(Problem(where, f"{entry.prompt_file} cannot be read: {error.strerror}"))
    return profiles, problems


def _rules(config: Config) -> Rules:
    return Rules(max_withdrawals=config.interruption.max_withdrawals, max_rounds=config.limits.max_rounds)


def _missing(agent_id: str) -> Problem:
    words = "is no longer described: it keeps its mail and answers when it is put back; to end it, terminate it"
    return Problem(f"coterie.toml: agents.{agent_id}", words)


def _profile(entry: AgentEntry, place: SocietyFolder) -> Profile:
    prompt = entry.prompt
    if entry.prompt_file:
        prompt = (place.path / entry.prompt_file).read_text(encoding="utf-8", errors="replace")
    return Profile(
        id=entry.id,
        name=entry.name or entry.id,
        service=entry.service,
        prompt=prompt,
        tools=entry.tools,
        services=entry.services,
        parent=entry.parent,
    )
