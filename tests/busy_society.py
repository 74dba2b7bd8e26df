"""A society with running turns, waiting mail and files, for tests of backups and transfers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from coterie import Society
from coterie.store_url import replace_store_url
from coterie.testing import Calls, ModelServer, Says
from coterie.testing.model_faults import stall
from tests.agent.stage import TOOLS, Bell, Stage, each

CHART = bytes(range(256)) * 3000
"""Stored in three pieces, the last one shorter."""
HOUR_MS = 3_600_000


@contextlib.asynccontextmanager
async def busy_society(folder: Path, url: str = "sqlite") -> AsyncIterator[ModelServer]:
    """A stopped society. At the stop `cyd` waited for its model and `ada` ran a tool.

    It has waiting mail, a delayed message, a question, a call that waits for approval, and two files.
    """
    Bell.reset()
    async with ModelServer() as server:
        folder.mkdir(exist_ok=True)
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
        (folder / "llmservices.json").write_text(json.dumps({"services": services}))
        agents = "".join(f"[agents.{name}]\n" for name in ("ada", "bob", "cyd", "dan"))
        (folder / "coterie.toml").write_text(replace_store_url(agents, url))
        (folder / "tools.py").write_text(TOOLS)
        society = await Society.start(folder)
        await fill(Stage(society, server))
        await society.stop(quick=True)
        Bell.may_end.set()
        yield server
        assert server.refused == []


async def fill(here: Stage) -> None:
    society = here.society
    chart = await society.artifacts.put(CHART, "chart.bin")
    await society.artifacts.put(b"nobody names me yet", "loose.txt")
    here.server.default = each(
        ada=[Says(calls=(Calls("look", {"name": "bell"}),))],
        bob=[Says(calls=(Calls("dangerous", {"name": "it"}),))],
        cyd=[stall()],
        dan=["settled"],
    )
    await here.say("done with", to="dan")
    await here.heard(1)
    await here.say("do it", to="bob")
    await here.state("bob", "wait_approval")
    Bell.may_end.clear()
    await here.say("what does it say?", to="ada", attachments=[chart.ref])
    await Bell.rang.wait()
    await here.say("by the way", to="ada")
    await here.say("and you?", to="cyd")
    await here.server.wait_for_request(4)
    await here.say("think of it", to="dan", delay_ms=HOUR_MS)
    await society.send(sender="dan", to="user", text="tea?", quick_replies=["yes", "no"])
