"""Who the agents are and what their models can do. Descriptions, `find_agents` and tool contexts all ask here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from coterie.agent.profile import Profile
from coterie.artifacts import ArtifactType
from coterie.errors import Refused
from coterie.llm.refusals import Refusals
from coterie.llm.registry import Services
from coterie.llm.service import NEEDS, Capabilities, Direction
from coterie.llm.service_entry import ServiceEntry
from coterie.text import one_line


class Directory:
    def __init__(self, services: Services, refusals: Refusals, agents: Iterable[Profile]) -> None:
        self._services, self._refusals = services, refusals
        self._agents = {profile.id: profile for profile in agents}
        self._ended: set[str] = set()

    def add(self, profile: Profile) -> None:
        """It is there from now on, or is as it says now. Whoever was terminated does not come back."""
        if profile.id in self._ended:
            return
        self._agents[profile.id] = profile

    def remove(self, agent_id: str) -> None:
        """It is terminated: nobody is sent to it any more."""
        self.forget(agent_id)
        self._ended.add(agent_id)

    def forget(self, agent_id: str) -> None:
        """The owner's file describes it no more. It still has its mail, and comes back when it is described again."""
        self._agents.pop(agent_id, None)

    def has_ended(self, agent_id: str) -> bool:
        return agent_id in self._ended

    def __iter__(self) -> Iterator[str]:
        """The agents whose service exists; the others can do nothing until their configuration is mended."""
        known = {entry.id for entry in self._services}
        agents = self._agents.values()
        return (agent.id for agent in agents if known and (agent.service is None or agent.service in known))

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

    def service_of(self, agent_id: str) -> ServiceEntry:
        return self._services.entry(self.profile(agent_id).service)

    def capabilities_of(self, agent_id: str) -> Capabilities:
        return self._refusals.left(self.service_of(agent_id))

    async def with_capability(self, capability: str, direction: Direction = "input") -> Sequence[str]:
        """The ids of the agents whose models have it."""
        return [agent for agent in self if self.capabilities_of(agent).has(capability, direction)]

    async def readers_of(self, kind: ArtifactType, size: int) -> Sequence[str]:
        """Those who can be sent a file of that kind and size and get it as it is."""
        able = await self.with_capability(NEEDS[kind])
        return [agent for agent in able if size <= self.service_of(agent).limits.of(kind)]
