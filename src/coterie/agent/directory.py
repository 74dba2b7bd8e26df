"""Who the agents are and what their models can do. Descriptions, `find_agents` and tool contexts all ask here."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from coterie.agent.profile import Profile
from coterie.artifacts import ArtifactType
from coterie.errors import Refused
from coterie.llm.refusals import Refusals
from coterie.llm.registry import Services
from coterie.llm.service import NEEDS, Capabilities, Direction, ServiceNotAllowed
from coterie.llm.service_entry import ServiceEntry
from coterie.text import one_line


class Directory:
    def __init__(self, services: Services, refusals: Refusals, agents: Iterable[Profile]) -> None:
        self._services, self._refusals = services, refusals
        self._agents = {profile.id: profile for profile in agents}
        self._ended: set[str] = set()
        self._changes = 0

    def add(self, profile: Profile) -> None:
        """Add an agent, or replace its profile. A terminated agent is not added again."""
        if profile.id in self._ended:
            return
        self._agents[profile.id] = profile
        self._changes += 1

    def remove(self, agent_id: str) -> None:
        """Remove a terminated agent; later calls of `add` for it do nothing."""
        self.forget(agent_id)
        self._ended.add(agent_id)

    def forget(self, agent_id: str) -> None:
        """The owner's file describes it no more. It still has its mail, and comes back when it is described again."""
        self._agents.pop(agent_id, None)
        self._changes += 1

    def has_ended(self, agent_id: str) -> bool:
        return agent_id in self._ended

    def __iter__(self) -> Iterator[str]:
        """The agents whose service exists; the others can do nothing until their configuration is mended."""
        known = {entry.id for entry in self._services}
        return (agent.id for agent in [*self._agents.values()] if known and self._has_service(agent, known))

    def _has_service(self, agent: Profile, known: Container[str]) -> bool:
        wanted = self._service_id(agent)
        if wanted is not None and wanted not in known:
            return False
        return agent.maker is None or self.may_use(agent.id, self._services.entry(wanted).id)

    def __len__(self) -> int:
        return len(self._agents)

    def everybody(self) -> list[Profile]:
        """Also those whose service is not there."""
        return list(self._agents.values())

    def check_service(self, service: str | None) -> None:
        """`UnknownService` when there is none of that id."""
        if service is not None:
            self._services.entry(service)

    def profile(self, agent_id: str) -> Profile:
        if agent_id in self._ended:
            raise Refused("recipient_terminated", f'"{one_line(agent_id)}" was terminated')
        if agent_id not in self._agents:
            raise Refused("unknown_agent", f'there is no agent "{one_line(agent_id)}"')
        return self._agents[agent_id]

    def name_of(self, agent_id: str) -> str:
        """The agent's display name; its id if it has none or is unknown."""
        profile = self._agents.get(agent_id)
        return (profile and profile.name) or agent_id

    def service_of(self, agent_id: str) -> ServiceEntry:
        """Its own, or its maker's. `UnknownService` when there is none, or its maker may not use it."""
        profile = self.profile(agent_id)
        entry = self._services.entry(self._service_id(profile))
        if profile.maker is not None and not self.may_use(agent_id, entry.id):
            raise ServiceNotAllowed(entry.id, profile.maker, gone=self._line(agent_id) is None)
        return entry

    # Rights: those of an agent that an agent made are never more than its maker's, whenever they are looked at

    def tools_of(self, agent_id: str) -> tuple[tuple[str, ...], ...]:
        """Lists of patterns: its own and those of its makers. It may use a tool that every list has a pattern for."""
        line = self._line(agent_id)
        return tuple(dict.fromkeys(one.tools for one in line)) if line else ((),)

    def may_use(self, agent_id: str, service_id: str) -> bool:
        """Whether that service is among the agent's rights: for itself, and for agents that it makes."""
        line = self._line(agent_id)
        if not line or service_id not in {entry.id for entry in self._services}:
            return False
        first = line[-1]  # the owner made it: what its entry says counts for all agents that come from it
        own = self._services.entry(first.service).id if first.service is None else first.service
        return service_id == own or any(fnmatchcase(service_id, pattern) for pattern in first.services)

    def descends_from(self, agent_id: str, maker: str) -> bool:
        """Whether it is that agent, or was made by it, or by one that was."""
        line = self._line(agent_id)
        return any(one.id == maker for one in line or ())

    def _line(self, agent_id: str) -> list[Profile] | None:
        """The agent, its maker, and so on, up to one that the owner made. None: one of them is not there."""
        line, wanted = list[Profile](), agent_id
        while (profile := self._agents.get(wanted)) is not None and profile not in line:
            line.append(profile)
            if profile.maker is None:
                return line
            wanted = profile.maker
        return None

    def _service_id(self, profile: Profile) -> str | None:
        """The id it names, or that its maker thinks with. None: the first service there is."""
        line = self._line(profile.id) or [profile]
        return next((one.service for one in line if one.service is not None), None)

    def capabilities_of(self, agent_id: str) -> Capabilities:
        return self._refusals.left(self.service_of(agent_id))

    @property
    def edition(self) -> tuple[object, ...]:
        """Another one after any change of who is there or of what they can do."""
        return self._changes, self._services.edition, self._refusals.edition

    async def with_capability(self, capability: str, direction: Direction = "input") -> Sequence[str]:
        """The ids of the agents whose models have it."""
        return [agent for agent in self if self.capabilities_of(agent).has(capability, direction)]

    async def readers_of(self, kind: ArtifactType, size: int) -> Sequence[str]:
        """Those who can be sent a file of that kind and size and get it as it is."""
        able = await self.with_capability(NEEDS[kind])
        return [agent for agent in able if size <= self.service_of(agent).limits.of(kind)]
