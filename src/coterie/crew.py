"""The agents at work: models, tools, handler and scheduler, put together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from datetime import timedelta

from coterie.agent.builtins import built_in_tools
from coterie.agent.directory import Directory
from coterie.agent.llm_handler import LlmHandler
from coterie.agent.mcp import McpServers
from coterie.agent.owner_tools import load_owner_tools
from coterie.agent.people_tools import people_tools
from coterie.agent.profile import Profile
from coterie.agent.registrar import Registrar
from coterie.agent.scheduler import Scheduler
from coterie.agent.send_message import SEND_MESSAGE
from coterie.agent.tool_context import ToolContext
from coterie.agent.toolbox import Toolbox
from coterie.agent.turn import Rules
from coterie.artifacts import Bytes
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.config import AgentEntry, Config
from coterie.errors import Problem
from coterie.folder import SocietyFolder
from coterie.ids import new_id
from coterie.library import Library
from coterie.llm.adapter import ContentAdapter
from coterie.llm.models import Models
from coterie.llm.providers.make import TOUR_ENTRIES, make_service
from coterie.llm.refusals import Refusals
from coterie.llm.registry import Services
from coterie.llm.router import CapabilityRouter
from coterie.messages import Payload, Receipt
from coterie.stores.sqlite import SqliteStore

log = logging.getLogger(__name__)

MCP_PATIENCE = timedelta(seconds=5)
MCP_AGAIN = timedelta(minutes=1)


class Crew:
    """Whoever is in it answers what reaches them, until `stop`."""

    def __init__(
        self,
        place: SocietyFolder,
        config: Config,
        store: SqliteStore,
        bus: MessageBus,
        artifacts: Library,
        kept: Bytes,
        clock: Clock,
    ) -> None:
        self._bus, self._artifacts, self._clock = bus, artifacts, clock
        self.services = load_services(place)
        refusals = Refusals(clock, place.data / "refusals.json")
        self.directory = Directory(self.services, refusals, [_profile(entry, place) for entry in config.agents])
        self.router = CapabilityRouter(store, kept, ContentAdapter(self.directory), refusals)
        self._models = Models(self.services, self.router, refusals, lambda entry: make_service(entry, clock), clock)
        self._registrar = Registrar(store, self.directory)
        self._toolbox = Toolbox(
            (*built_in_tools(self.directory, bus, store), *people_tools(self._registrar)),
            deadline=timedelta(seconds=config.limits.tool_seconds),
        )
        self._mcp = McpServers(config.mcp, clock, self._toolbox.adopt)
        self._connecting: asyncio.Task[None] | None = None
        self._tried_mcp = asyncio.Event()
        self.problems = (*self.services.problems, *self._adopt_owner_tools(place))
        rules = Rules(
            max_withdrawals=config.interruption.max_withdrawals,
            max_rounds=config.limits.max_rounds,
        )
        self._handler = LlmHandler(
            store,
            bus,
            self._models,
            self.directory,
            self._toolbox,
            self._context,
            clock,
            rules,
            tokens_per_day=config.limits.tokens_per_day,
        )
        self._scheduler = Scheduler(store, self._handler, clock, rules, worker=new_id())
        store.on_wake.append(self._scheduler.wake.set)

    async def start(self) -> None:
        await self._registrar.recall()
        for problem in self.problems:
            log.warning("%s", problem)
        self._connecting = asyncio.create_task(self._connect_all(), name="coterie-mcp")
        # Agents shall find their tools when they begin, but one slow server must not keep everybody waiting.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MCP_PATIENCE.total_seconds()):
                await self._tried_mcp.wait()
        self._scheduler.start()

    async def _connect_all(self) -> None:
        """Until every MCP server is there: tools that nobody has heard of are never called, so no call finds them."""
        while await self._mcp.connect():
            self._tried_mcp.set()
            await self._clock.sleep(MCP_AGAIN)
        self._tried_mcp.set()

    def stop_turn(self, agent_id: str) -> bool:
        """End what the agent is doing now; its mail is kept, and begins the next turn."""
        return self._handler.stop(agent_id)

    async def stop_claiming(self) -> None:
        await self._scheduler.stop_claiming()

    async def stop(self, drain: timedelta) -> None:
        """Turns under way may end within `drain`; what does not is resumed at the next start."""
        await self._scheduler.finish(drain)
        if self._connecting:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        await self._mcp.close()
        await self._toolbox.close()
        await self._models.close()

    def _adopt_owner_tools(self, place: SocietyFolder) -> Sequence[Problem]:
        owned = load_owner_tools(place.path, taken={SEND_MESSAGE.name})
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
            artifacts=self._artifacts,
            idempotency_key=key,
        )


def load_services(place: SocietyFolder) -> Services:
    """The owner's; where there are none, the tour's."""
    services = Services.load(place.path)
    return services if len(services) else Services(TOUR_ENTRIES, services.problems)


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
        parent=entry.parent,
    )
