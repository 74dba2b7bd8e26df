"""Agent cards: what an agent is for, what it reads and writes, and where it is reached."""

from __future__ import annotations

from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import PROTOCOL_VERSION_1_0, TransportProtocol

from coterie import __version__, agents
from coterie.errors import Refused
from coterie.society import Society
from coterie.web import schemas
from coterie.web.caller_scope import CallerScope

_MEDIA = {"vision": ("image/png", "image/jpeg"), "audio": ("audio/wav", "audio/mpeg"), "file": ("application/pdf",)}
"""Media types that stand for a capability of a model."""
TEXT = ("text/plain", "application/json")


class Cards:
    def __init__(self, society: Society, url: str) -> None:
        self._society, self._url = society, url

    async def of_agent(self, scope: CallerScope, agent_id: str | None) -> AgentCard:
        agent = await scope.agent(agent_id or "")
        skill = self._skill(agent)
        return self._card(agent.name, skill.description, agent.id, [skill])

    async def of_society(self, scope: CallerScope, _: str | None = None) -> AgentCard:
        """The card of the society: its first agent receives what is sent there; each agent is a skill."""
        found = await scope.agents()
        if not found:
            raise Refused("unknown_agent", "there is no agent for you")
        order = {entry.id: number for number, entry in enumerate(self._society.config.agents)}
        first = min(found, key=lambda agent: (order.get(agent.id, len(order)), agent.id))
        about = f"A society of {len(found)} agents. {first.name} receives what is sent here. Each skill is an agent."
        return self._card("Coterie", about, first.id, [self._skill(agent) for agent in found])

    def artifact_url(self, ref: str) -> str:
        """The address of a file that is too large for a message."""
        return f"{self._url}/api/v1/artifacts/{ref}"

    def _card(self, name: str, about: str, agent_id: str, skills: list[AgentSkill]) -> AgentCard:
        address, has_push = f"{self._url}/a2a/{agent_id}", bool(self._society.config.doors.push)
        bearer = HTTPAuthSecurityScheme(scheme="Bearer", description="The token of a key: coterie keys add NAME")
        return AgentCard(
            name=name,
            description=about,
            version=__version__,
            supported_interfaces=[
                AgentInterface(url=address, protocol_binding=binding, protocol_version=PROTOCOL_VERSION_1_0)
                for binding in (TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON)
            ],
            capabilities=AgentCapabilities(streaming=True, push_notifications=has_push, extended_agent_card=True),
            security_schemes={"bearer": SecurityScheme(http_auth_security_scheme=bearer)},
            security_requirements=[SecurityRequirement(schemes={"bearer": StringList()})],
            default_input_modes=sorted({mode for skill in skills for mode in skill.input_modes}),
            default_output_modes=sorted({mode for skill in skills for mode in skill.output_modes}),
            skills=skills,
        )

    def _skill(self, agent: agents.Agent) -> AgentSkill:
        about = schemas.Agent.in_society(self._society, agent)
        reads = about.capabilities.input if about.capabilities else []
        writes = about.capabilities.output if about.capabilities else []
        return AgentSkill(
            id=agent.id,
            name=agent.name,
            description=about.description or f"The agent {agent.name}. Its own card: {self._url}/a2a/{agent.id}",
            tags=sorted({*reads, *writes}) or ["text"],
            input_modes=_modes(reads),
            output_modes=_modes(writes),
        )


def _modes(capabilities: list[str]) -> list[str]:
    return [*TEXT, *(mode for name in sorted(capabilities) for mode in _MEDIA.get(name, ()))]
