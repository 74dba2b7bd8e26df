"""The tour's second agent."""

from __future__ import annotations

from contextlib import suppress

from coterie.agent.service import AgentDirectory, AgentService
from coterie.config import ASSISTANT, Config
from coterie.errors import Refused
from coterie.llm.config import ServiceRegistry
from coterie.llm.providers.factory import TOUR_VISION

# An id that no owner would choose, because it stays taken after the agent is terminated.
SEER = "tour-seer"
NAME = "Seer (tour)"


class TourSeer:
    """The tour's second agent, which reads images. The first one forwards images to it.

    It exists while the tour's script is the only service and no agent is configured.
    """

    def __init__(self, agents: AgentService, directory: AgentDirectory, services: ServiceRegistry) -> None:
        self._agents, self._directory, self._services = agents, directory, services

    def is_needed(self, config: Config) -> bool:
        return config.agents == (ASSISTANT,) and TOUR_VISION in self._services

    @property
    def exists(self) -> bool:
        profiles = self._directory.all_profiles()
        return any(profile.id == SEER and profile.service == TOUR_VISION for profile in profiles)

    async def ensure_created(self) -> None:
        if self.exists:
            return
        # Refused if it was terminated, if another process created it first, or if the id is taken.
        with suppress(Refused):
            await self._agents.create(id=SEER, name=NAME, prompt="", service=TOUR_VISION, tools=(), parent=None)
