"""Wires the parts that run agents: model services and gateway, tools, turn handler and scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from coterie.agent.builtins import SEND_MESSAGE, agent_management_tools, built_in_tools
from coterie.agent.context import HistoryCache, RequestBuilder, TurnPrompt
from coterie.agent.context_window import estimate_tokens, mail_budget
from coterie.agent.mcp import McpServers
from coterie.agent.mcp_connection import secrets_of
from coterie.agent.runner import LlmHandler
from coterie.agent.running_call import STORE_RETRY_DELAY
from coterie.agent.scheduler import MAX_TURNS, Scheduler, ServiceAdmission
from coterie.agent.service import AgentDirectory, AgentService
from coterie.agent.toolbox import ListedTool, Toolbox
from coterie.agent.tools import CallTimer, Tool, ToolContext
from coterie.agent.user_tools import load_user_tools
from coterie.agents import Profile
from coterie.answer_schema import WrongSchema, read_answer_schema
from coterie.artifact_service import AgentArtifacts, ArtifactService
from coterie.artifacts import BlobStore
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.config import CONFIG_FILE, AgentEntry, Config, SocietyFolder, unknown_service
from coterie.configuration import Settings
from coterie.errors import Lagged, Problem, Refused, StoreUnavailable
from coterie.files import DiskMonitor
from coterie.ids import new_id
from coterie.live import LiveReplies
from coterie.llm.call_metrics import ModelCallMetrics
from coterie.llm.concurrency import ServiceQueues
from coterie.llm.config import (
    REMOTE_AGENT,
    KeyLookup,
    SecretsFile,
    ServiceEntry,
    ServiceRegistry,
    key_lookup,
    read_headers,
)
from coterie.llm.gateway import ModelGateway
from coterie.llm.json_node import JsonNode
from coterie.llm.learned_limits import LearnedLimits
from coterie.llm.providers.any_llm import AnyLLMService
from coterie.llm.providers.openai import OpenAIService
from coterie.llm.routing import CapabilityRouter, ContentAdapter
from coterie.llm.service import Capabilities, LLMService, PermanentError, Sampling, UnknownService
from coterie.messages import PERSON, Payload, Receipt
from coterie.problem_texts import ProblemText
from coterie.redaction import find_secrets
from coterie.running_configuration import RunningConfiguration
from coterie.store import Event
from coterie.stores.open import is_shared
from coterie.stores.sql.store import SqlStore
from coterie.supervision import Shutdown, supervise
from coterie.telemetry import make_tracing
from coterie.tour.provider import SEER, TOUR_ENTRIES, TOUR_VISION, TourSeer, TourService
from coterie.turn import Rules

log = logging.getLogger(__name__)

MCP_START_TIMEOUT = timedelta(seconds=5)
MCP_RETRY_INTERVAL = timedelta(minutes=1)
_EVERY_INPUT = frozenset({"text", "vision", "audio", "file"})
MAX_ANSWER_WAIT = timedelta(hours=1)
"""How long a tool waits for the person's answer to its question."""


class AgentRuntime:
    """Runs the society's agents between `start` and `stop`."""

    def __init__(
        self,
        folder: SocietyFolder,
        settings: Settings,
        *,
        configuration: RunningConfiguration,
        store: SqlStore,
        bus: MessageBus,
        artifacts: ArtifactService,
        blobs: BlobStore,
        live: LiveReplies,
        disk: DiskMonitor,
        clock: Clock,
        leaves_keyless: bool = False,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """`leaves_keyless`: agents whose service has no key in this process are left to other processes.

        `max_turns`: turns that run in this process at the same time.
        """
        self._folder, self._config, self._configuration = folder, (config := settings.config), configuration
        self._store, self._bus, self._artifacts, self._clock = store, bus, artifacts, clock
        self._follow_task: asyncio.Task[None] | None = None
        self._tracing = make_tracing(store.message)
        self.model_metrics = ModelCallMetrics()

        # Agents and their models
        log_id = store.info.log_id
        profiles, prompt_problems = read_profiles(config, folder)
        self._configured_ids = {profile.id for profile in profiles}
        self.services = self._all_services(settings.services)
        learned_limits = _learned_limits(folder, clock)
        self.directory = AgentDirectory(self.services, learned_limits, profiles)
        self.router = CapabilityRouter(store, blobs, ContentAdapter(self.directory), learned_limits)
        self._models = ModelGateway(
            self.services,
            self.router,
            learned_limits,
            lambda entry: self._tracing.service(make_service(entry, clock, log_id), entry),
            clock,
            ServiceQueues(clock, store if is_shared(config) else None),
            metrics=self.model_metrics,
        )
        self._agents = AgentService(store, self.directory)
        self._tour_seer = TourSeer(self._agents, self.directory, self.services)

        # Tools: built in, of MCP servers, of the owner
        self._toolbox = Toolbox(
            built_ins=(*built_in_tools(self.directory, bus, store), *agent_management_tools(self._agents)),
            deadline=timedelta(seconds=config.limits.tool_seconds),
            secrets=self._secrets(),
        )
        self._mcp = McpServers(config.mcp, clock, self._toolbox.replace_tools, find_key=self._find_key)
        self._mcp_task: asyncio.Task[None] | None = None
        self._mcp_refresh: asyncio.Task[object] | None = None
        self._mcp_attempted = asyncio.Event()
        self._file_problems = (*prompt_problems, *self._load_user_tools())

        # Turns
        rules = _rules(config, self.directory)
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
            refresh_agents=self._agents.refresh_agents,
            follow_configuration=configuration.follow_seen if is_shared(config) else None,
            artifact_writer=lambda agent_id: AgentArtifacts(artifacts, agent_id).put,
            is_paused=lambda: store.seen_paused,
            model_metrics=self.model_metrics,
        )
        admission = ServiceAdmission(self._models, self.directory, leaves_keyless=leaves_keyless)
        self._scheduler = Scheduler(store, self._handler, clock, rules, new_id(), disk, admission, max_turns)
        self._models.subscribe(self._scheduler.on_service_capacity)

    async def start(self, *, run_turns: bool = True) -> None:
        """Load the agents. `run_turns`: run their turns here, too."""
        await load_remote_provider(self._config)
        await self._agents.refresh_directory()
        await self._update_tour_agent()
        for problem in self.problems:
            log.warning("%s", problem)
        if run_turns:
            await self._start_turns()
        if is_shared(self._config):
            following = supervise("following changes of other processes", self._follow_others, self._clock)
            self._follow_task = asyncio.create_task(following, name="coterie-follow")

    async def _start_turns(self) -> None:
        connecting = supervise(
            "connecting to MCP servers", self._connect_all, self._clock, first_pause=MCP_RETRY_INTERVAL
        )
        self._mcp_task = asyncio.create_task(connecting, name="coterie-mcp")
        # Agents should find their tools when they start, but a slow server must not delay all of them.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MCP_START_TIMEOUT.total_seconds()):
                await self._mcp_attempted.wait()
        self._toolbox.watch_loop()
        self._scheduler.start()

    async def _follow_others(self) -> None:
        """Apply changes of the configuration and of agents, and pauses, that other processes make."""
        while True:
            try:
                async with self._bus.watch(about_society=True) as watcher:
                    await self._configuration.follow()
                    await self._agents.refresh_directory()
                    if await self._store.is_paused():
                        self.defer_queued()
                    async for event in watcher:
                        if event.kind == "configuration.changed":
                            await self._configuration.follow()
                        elif event.kind in ("agent.upsert", "agent.removed"):
                            await self._agents.refresh_agents([event.subject])
                        elif event.kind == "society.state" and await self._store.is_paused():
                            self.defer_queued()
                    return
            except Lagged:
                continue

    async def _connect_all(self) -> None:
        """Retry until every MCP server is connected. Tools of a missing server are not offered, so no call needs it."""
        try:
            while await self._mcp.connect():
                self._mcp_attempted.set()
                await self._clock.sleep(MCP_RETRY_INTERVAL)
        finally:
            self._mcp_attempted.set()

    def _refresh_mcp(self) -> None:
        """Check the MCP servers in the background: a slow one must not delay a reload."""
        if self._mcp_task and (self._mcp_refresh is None or self._mcp_refresh.done()):
            self._mcp_refresh = asyncio.create_task(self._mcp.refresh(), name="coterie-mcp-refresh")

    async def create_agent(
        self,
        *,
        id: str | None,  # noqa: A002
        name: str | None,
        prompt: str,
        service: str | None,
        tools: Sequence[str] | None,
        parent: str | None,
        description: str = "",
    ) -> Profile:
        return await self._agents.create(
            id=id, name=name, prompt=prompt, service=service, tools=tools, parent=parent, description=description
        )

    async def refresh_agents(self) -> None:
        """Add the agents that other processes created, and remove those that they terminated."""
        await self._agents.refresh_directory()

    async def terminate_agent(self, agent_id: str) -> Sequence[str]:
        return await self._agents.terminate(agent_id, by=PERSON)

    def system_prompt(self, agent_id: str) -> str:
        return self._handler.system_prompt(self.directory.profile(agent_id))

    @property
    def tools(self) -> Sequence[ListedTool]:
        return self._toolbox.listed()

    def tools_of(self, agent_id: str) -> frozenset[str]:
        """Names of the tools that the agent's model is given."""
        return self._toolbox.given_names(self.directory.tools_of(agent_id))

    def stop_turn(self, agent_id: str) -> bool:
        """Stop the agent's current turn; its mail starts the next one. False if none runs here."""
        if self._handler.stop_turn(agent_id):
            return True
        self.directory.profile(agent_id)
        return False

    def defer_queued(self) -> None:
        """Defer turns that wait for their model service, because the society was paused."""
        self._handler.defer_queued()

    async def apply(self, services: ServiceRegistry, config: Config | None = None) -> Sequence[Problem]:
        """Apply reloaded settings; unblock agents whose model settings changed. Returns all problems."""
        blocked = {agent.id: self._model_settings(agent.id) for agent in await self._agents.list_blocked()}
        removed = self._apply_config(config) if config else ()
        await load_remote_provider(self._config)
        self.services.replace_with(self._all_services(services))
        self._toolbox.set_secrets(self._secrets())
        self._refresh_mcp()
        await self._update_tour_agent()
        changed = [agent for agent, before in blocked.items() if self._model_settings(agent) not in (None, before)]
        await self._store.unblock(changed)
        return (*self.problems, *removed)

    async def _update_tour_agent(self) -> None:
        """Create or terminate the tour's second agent, as the configuration needs."""
        if self._tour_seer.is_needed(self._config):
            await self._tour_seer.ensure_created()
        elif self._tour_seer.exists:
            await self.terminate_agent(SEER)

    def _apply_config(self, config: Config) -> Sequence[Problem]:
        """Apply a new configuration; return one problem for each agent that it no longer describes."""
        self._config = config
        profiles, prompt_problems = read_profiles(config, self._folder)
        removed = self._configured_ids - {profile.id for profile in profiles}
        for agent_id in removed:
            self.directory.remove(agent_id)
        for profile in profiles:
            self.directory.add(profile)
        self._configured_ids = {profile.id for profile in profiles}
        self._file_problems = (*prompt_problems, *self._load_user_tools())
        self._toolbox.set_deadline(timedelta(seconds=config.limits.tool_seconds))
        self._handler.update_limits(_rules(config, self.directory), config.limits.tokens_per_day)
        self._scheduler.update_rules(_rules(config, self.directory))
        return [_not_described(agent_id) for agent_id in sorted(removed) if not self.directory.is_terminated(agent_id)]

    @property
    def problems(self) -> Sequence[Problem]:
        """Problems in the owner's files, except syntax and values of coterie.toml."""
        known = [entry.id for entry in self.services]
        configured = [profile for one in sorted(self._configured_ids) if (profile := self.directory.find(one))]
        return (
            *self._file_problems,
            *self.services.problems,
            *self._terminated_but_described(),
            *(
                unknown_service(profile.id, profile.service, known)
                for profile in configured
                if profile.service and profile.service not in known
            ),
        )

    def _model_settings(self, agent_id: str) -> tuple[ServiceEntry | int, ...] | None:
        """The settings that decide whether its model answers; None if it has no service."""
        try:
            first = self.directory.service_of(agent_id)
        except Refused:
            return None
        return (self._config.limits.tokens_per_day, first, *map(self.services.get, first.fallback))

    def _terminated_but_described(self) -> Sequence[Problem]:
        terminated = sorted(agent_id for agent_id in self._configured_ids if self.directory.is_terminated(agent_id))
        return [Problem(f"coterie.toml: agents.{agent_id}", ProblemText("agent_terminated")) for agent_id in terminated]

    async def stop_claiming(self) -> None:
        await self._scheduler.stop_claiming()

    async def stop(self, drain: timedelta) -> None:
        """Wait up to `drain` for running turns, then stop. The next start resumes unfinished turns."""
        shutdown = Shutdown()
        await shutdown.step("release turns", partial(self._scheduler.finish, drain))
        for task in filter(None, (self._mcp_task, self._mcp_refresh, self._follow_task)):
            task.cancel()
            await shutdown.step(f"end {task.get_name()}", partial(asyncio.wait, {task}))
        await shutdown.step("close MCP servers", self._mcp.close)
        await shutdown.step("stop tools", self._toolbox.close)
        await shutdown.step("close model services", self._models.close)
        await shutdown.step("close tracing", self._tracing.close)
        shutdown.finish()

    def _all_services(self, services: ServiceRegistry) -> ServiceRegistry:
        return with_remote_agents(with_tour(services), self._config, self._find_key)

    def _secrets(self) -> tuple[str, ...]:
        keys = [entry.api_key.reveal() for entry in self.services if entry.api_key]
        keys += [secret for entry in self.services for header in entry.headers for secret in header.secrets]
        servers = [key for entry in self._config.mcp for key in secrets_of(entry, self._find_key)]
        keys += [urlsplit(self._config.store.url).password or "", *servers]
        return find_secrets(os.environ, {f"{n}_KEY": key for n, key in enumerate(keys)})

    def _find_key(self, name: str) -> str | None:
        """The value of `${NAME}` in an MCP entry. The file is read again: the owner may have changed a key."""
        return key_lookup(os.environ, SecretsFile(self._folder.data / "secrets.json").read()[0])(name)

    def _load_user_tools(self) -> Sequence[Problem]:
        loaded = load_user_tools(self._folder.path, reserved_names={SEND_MESSAGE.name})
        return (*loaded.problems, *self._toolbox.replace_tools("tools", loaded.tools))

    def _context(self, profile: Profile, key: str, cause: str | None) -> ToolContext:
        sent = itertools.count()

        async def send(
            to: str,
            payload: Payload,
            *,
            delay_ms: float | None = None,
            quick_replies: list[str] | None = None,
            every: str | None = None,
            time_zone: str | None = None,
            unless_answered: str | None = None,
        ) -> Receipt:
            return await self._bus.send(
                sender=profile.id,
                to=to,
                payload=payload,
                delay_ms=delay_ms,
                quick_replies=quick_replies,
                every=every,
                time_zone=time_zone,
                unless_answered=unless_answered,
                # Numbered within the call, so that a repeated call sends nothing twice.
                client_id=f"{key}/{next(sent)}",
                cause=cause,
            )

        timer = CallTimer()

        async def ask(text: str, quick_replies: list[str]) -> str | None:
            with timer.paused():
                position = await self._store.last_event()
                await send(PERSON, {"text": text}, quick_replies=quick_replies)
                return await self._wait_for_answer(profile.id, position)

        return ToolContext(
            ask=ask,
            timer=timer,
            tools=self._toolbox.given_names(self.directory.tools_of(profile.id)),
            agent_id=profile.id,
            capabilities=self._capabilities_of(profile.id),
            router=self.router,
            send=send,
            artifacts=AgentArtifacts(self._artifacts, profile.id, shared=self._store.limits.shared_artifacts),
            idempotency_key=key,
        )

    def _capabilities_of(self, agent_id: str) -> Capabilities:
        """What its model can do; nothing if its service was removed. A call that the person approved runs even then."""
        try:
            return self.directory.capabilities_of(agent_id)
        except Refused:
            return Capabilities(input=frozenset(), output=frozenset())

    async def _wait_for_answer(self, agent_id: str, position: int) -> str | None:
        """Return the text of the person's next message to the agent. None: there was none within `MAX_ANSWER_WAIT`.

        The message reaches the agent too, like every other. `position`: last event before the question.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_ANSWER_WAIT.total_seconds()):
                while True:
                    try:
                        async with self._bus.watch(position) as watcher:
                            async for event in watcher:
                                if (text := await self._read_answer(event, agent_id)) is not None:
                                    return text
                                position = event.seq
                        return None  # the society stops
                    except Lagged:  # many events came at once: go on behind those that were read
                        continue
                    except StoreUnavailable:
                        await self._clock.sleep(STORE_RETRY_DELAY)
        return None

    async def _read_answer(self, event: Event, agent_id: str) -> str | None:
        """Return the text of the message that the event announces, if the person sent it to the agent."""
        message = await self._store.message(event.subject) if event.kind == "message.created" else None
        is_answer = message is not None and (message.sender, message.to) == (PERSON, agent_id)
        return str(message.payload.get("text", "")) if message and is_answer else None


async def read_directory(folder: SocietyFolder, settings: Settings, store: SqlStore, clock: Clock) -> AgentDirectory:
    """The agents of a society that does not run in this process."""
    profiles, _ = read_profiles(settings.config, folder)
    keys = key_lookup(os.environ, SecretsFile(folder.data / "secrets.json").read()[0])
    services = with_remote_agents(with_tour(settings.services), settings.config, keys)
    directory = AgentDirectory(services, _learned_limits(folder, clock), profiles)
    await AgentService(store, directory).refresh_directory()
    return directory


def fixed_costs(folder: SocietyFolder, config: Config, clock: Clock) -> Mapping[str, tuple[int, ServiceEntry]]:
    """The estimated tokens of system prompt and tools of each agent in coterie.toml, and its service.

    Every request has them. Tools of MCP servers are not counted, because no server is started.
    """
    services = with_tour(ServiceRegistry.load(folder.path))
    directory = AgentDirectory(services, _learned_limits(folder, clock), read_profiles(config, folder)[0])
    user_tools = load_user_tools(folder.path, reserved_names={SEND_MESSAGE.name}).tools
    requests, costs = offline_requests(directory, user_tools), dict[str, tuple[int, ServiceEntry]]()
    for profile in directory.all_profiles():
        with contextlib.suppress(UnknownService):
            fixed = requests.fixed_part(profile, TurnPrompt())
            costs[profile.id] = estimate_tokens(fixed), directory.service_of(profile.id)
    return costs


def offline_requests(directory: AgentDirectory, user_tools: Sequence[Tool] = ()) -> RequestBuilder:
    """Builds system prompts and tools of agents that do not run in this process."""
    # The tools are only described, never run, so they need neither bus nor store.
    nothing: Any = None
    toolbox = Toolbox((*built_in_tools(directory, nothing, nothing), *agent_management_tools(nothing)))
    toolbox.replace_tools("tools", user_tools)
    return RequestBuilder(nothing, directory, toolbox, HistoryCache())


def _learned_limits(folder: SocietyFolder, clock: Clock) -> LearnedLimits:
    return LearnedLimits(clock, folder.data / "refusals.json")


def with_tour(services: ServiceRegistry) -> ServiceRegistry:
    """The services; if there are none, those of the tour."""
    return services if len(services) else ServiceRegistry(TOUR_ENTRIES, services.problems)


def with_remote_agents(services: ServiceRegistry, config: Config, find_key: KeyLookup) -> ServiceRegistry:
    """The services, then one for each agent elsewhere. A header with a missing key makes its service unusable."""
    problems, entries = [*services.problems], list[ServiceEntry]()
    for remote in config.remote:
        headers, missing = read_headers(
            JsonNode(remote.headers, CONFIG_FILE, f"remote.{remote.id}.headers", problems), find_key
        )
        entries.append(
            ServiceEntry(
                id=remote.service,
                name=remote.name or remote.id,
                provider=REMOTE_AGENT,
                base_url=remote.card,
                model="",
                headers=headers,
                missing_key=missing,
                capabilities=Capabilities(input=_EVERY_INPUT, output=frozenset({"text", "tool_calling"})),
                description=remote.description,
            )
        )
    return ServiceRegistry([*services, *entries], problems)


async def load_remote_provider(config: Config) -> None:
    """Import the provider of remote agents, if there are any. In a thread: it takes half a second."""
    if config.remote:
        with contextlib.suppress(ImportError):  # its requests fail with the reason
            await asyncio.to_thread(importlib.import_module, "coterie.llm.providers.a2a")


def make_service(entry: ServiceEntry, clock: Clock, society: str = "") -> LLMService:
    """Return a client of the service that `entry` describes. `society`: an id of the society, for remote agents."""
    key, key_name = (entry.api_key.reveal(), entry.api_key.name) if entry.api_key else ("", "")
    headers = {header.name: header.value.reveal() for header in entry.headers}
    secrets = [secret for header in entry.headers for secret in header.secrets]
    match entry.provider:
        case "tour":
            return TourService(id=entry.id, has_vision=entry.model == TOUR_VISION, clock=clock)
        case "a2a":
            try:
                from coterie.llm.providers.a2a import RemoteAgentService
            except ImportError as error:
                message = "remote agents need a package that is not installed: pip install 'coterie[a2a]'"
                raise PermanentError(message, category="request") from error
            return RemoteAgentService(
                id=entry.id, card=entry.base_url, headers=headers, secrets=secrets, society=society, clock=clock
            )
    is_openai = entry.provider == "openai"
    make = OpenAIService if is_openai else functools.partial(AnyLLMService, provider=entry.provider)
    return make(
        id=entry.id,
        base_url=entry.base_url,
        model=entry.model,
        api_key=key,
        key_name=key_name,
        deadlines=entry.deadlines,
        sampling=entry.sampling,
        headers=headers,
        secrets=secrets,
        clock=clock,
    )


def read_profiles(config: Config, folder: SocietyFolder) -> tuple[Sequence[Profile], Sequence[Problem]]:
    """The agents of coterie.toml, and a problem for each agent skipped because a file of it cannot be used."""
    profiles, problems = [], list[Problem]()
    for entry in config.all_agents:
        try:
            profile = _profile(entry, folder)
        except OSError as error:
            location = f"coterie.toml: agents.{entry.id}.prompt_file"
            problems.append(
                Problem(location, ProblemText("unreadable_file", name=entry.prompt_file, why=error.strerror))
            )
            continue
        try:
            profiles.append(_with_answer_schema(profile, entry, folder))
        except OSError as error:
            location = f"coterie.toml: agents.{entry.id}.answer_schema"
            problems.append(
                Problem(location, ProblemText("unreadable_file", name=entry.answer_schema, why=error.strerror))
            )
        except WrongSchema as error:
            problems.append(Problem(f"coterie.toml: agents.{entry.id}.answer_schema", error.text))
    return profiles, problems


def _with_answer_schema(profile: Profile, entry: AgentEntry, folder: SocietyFolder) -> Profile:
    if entry.answer_schema is None:
        return profile
    return replace(profile, answer_schema=read_answer_schema(entry.answer_schema, folder.path))


def _rules(config: Config, directory: AgentDirectory) -> Rules:
    def budget(agent_id: str) -> int:
        try:
            return mail_budget(directory.service_of(agent_id).context_tokens)
        except Refused:  # it has no service; its turn reports that
            return mail_budget(None)

    interruption = config.interruption
    return Rules(
        max_withdrawals=interruption.max_withdrawals,
        max_rounds=config.limits.max_rounds,
        budget=config.limits.task.budget,
        interrupt=interruption.interrupt,
        max_cuts=interruption.max_cuts,
        mail_budget=budget,
    )


def _not_described(agent_id: str) -> Problem:
    return Problem(f"coterie.toml: agents.{agent_id}", ProblemText("agent_not_described"))


def _profile(entry: AgentEntry, folder: SocietyFolder) -> Profile:
    prompt = entry.prompt
    if entry.prompt_file:
        prompt = (folder.path / entry.prompt_file).read_text(encoding="utf-8", errors="replace")
    return Profile(
        id=entry.id,
        name=entry.name or entry.id,
        role=entry.role or None,
        description=entry.description,
        colour=entry.colour,
        initials=entry.initials,
        service=entry.service,
        prompt=prompt,
        tools=entry.tools,
        services=entry.services,
        parent=entry.parent,
        sampling=Sampling(
            temperature=entry.temperature,
            top_p=entry.top_p,
            max_tokens=entry.max_tokens,
            reasoning_effort=entry.reasoning_effort,
            extra_body=json.dumps(entry.extra_body) if entry.extra_body else "",
        ),
        interrupt=entry.interrupt,
    )
