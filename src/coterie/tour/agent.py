"""The tour's second agent. It sees, so that a picture for the first one, which does not, has somewhere to go."""

from __future__ import annotations

from contextlib import suppress

from coterie.agent.service import Directory, Registrar
from coterie.config import ASSISTANT, Config
from coterie.errors import Refused
from coterie.llm.config import Services
from coterie.llm.providers.factory import TOUR_SEES

# Nobody else would choose this id, so it takes no name from the owner, not even when it is gone.
SEER = "tour-seer"
NAME = "Seer (tour)"


class TourSeer:
    """There while a script answers for everybody and the owner has described nobody; the first real service ends it."""

    def __init__(self, registrar: Registrar, directory: Directory, services: Services) -> None:
        self._registrar, self._directory, self._services = registrar, directory, services

    def is_wanted(self, config: Config) -> bool:
        return config.agents == (ASSISTANT,) and TOUR_SEES in self._services

    @property
    def is_there(self) -> bool:
        return any(one.id == SEER and one.service == TOUR_SEES for one in self._directory.everybody())

    async def come(self) -> None:
        if self.is_there:
            return
        # It was ended and stays so, another process was first, or somebody has that id.
        with suppress(Refused):
            await self._registrar.create(id=SEER, name=NAME, prompt="", service=TOUR_SEES, tools=(), parent=None)
