"""A society that nobody has set up yet speaks first: the tour's guide says hello."""

from __future__ import annotations

import os
from collections.abc import Mapping

from coterie.messages import PERSON
from coterie.society import Society
from coterie.store import Page
from coterie.tour import script as script

NAME = "tour greeting"
"""Under this name it is one message, however often the society starts."""


async def greet(society: Society, environ: Mapping[str, str] = os.environ) -> None:
    """Only where a script answers, and where nothing was ever said."""
    if not society.config.agents or any(entry.provider != "tour" for entry in society.services):
        return
    if await society.store.messages(Page(limit=1)):
        return
    chinese = _chinese(environ)
    options = [scene.option.text(chinese) for scene in (*script.SCENES, script.LANGUAGE)]
    payload = {"text": script.WELCOME.then.text(chinese)}
    guide = society.config.agents[0].id
    await society.bus.send(sender=guide, to=PERSON, payload=payload, quick_replies=options, client_id=NAME)


def _chinese(environ: Mapping[str, str]) -> bool:
    """The language of the machine; the guide answers in the one it is spoken to in."""
    found = next(filter(None, map(environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return found.lower().startswith("zh")
