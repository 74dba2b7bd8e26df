"""The day's tokens are spent once, whatever becomes of the process that spends them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from coterie import Society
from coterie.testing import ModelServer
from coterie.testing.replies import count_tokens

AGENTS = ("ada", "bob", "carol")
LIMIT = 4_000
STARTS = 10
PATIENCE = 60
"""Seconds. Nothing waits that long; it only keeps what hangs from hanging the tests."""


async def run_until_killed(folder: Path, moment: str) -> None:
    """A start of the society in a process that dies at its first meeting with that failpoint, or has nothing to do."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, str(folder)),
        env=os.environ | {"COTERIE_FAILPOINTS": f"{moment}:1:kill"},
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() in (0, -signal.SIGKILL)


RUN = """
import asyncio, sys
from coterie import Society, failpoints

async def run():
    failpoints.arm()
    async with Society.open(sys.argv[1]) as society:
        async with society.bus.watch() as watcher:
            while any(one.state not in ("idle", "blocked") for one in await society.store.agents()):
                await anext(watcher)

asyncio.run(run())
"""


@pytest.mark.parametrize("moment", ["turn.answered", "turn.fenced"])
async def test_a_society_that_is_killed_over_and_over_does_not_spend_its_budget_twice(
    tmp_path: Path, moment: str
) -> None:
    agents = "".join(f"[agents.{name}]\ntools = []\nprompt = '{'x' * 2_000}'\n" for name in AGENTS)
    (tmp_path / "coterie.toml").write_text(f"[limits]\ntokens_per_day = {LIMIT}\n{agents}")
    async with ModelServer() as server:
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
        for n in range(STARTS):
            async with Society.open_offline(tmp_path) as society:
                for name in AGENTS:
                    await society.send(to=name, text=f"message {n}")
            await run_until_killed(tmp_path, moment)
        costs = [count_tokens(request.raw) for request in server.requests]

        assert sum(costs) <= LIMIT + len(AGENTS) * max(costs, default=0)
        async with Society.open(tmp_path) as society:  # and in order, once more
            before = len(server.requests)
            async with society.bus.watch() as watcher:
                while any(one.state not in ("idle", "blocked") for one in await society.store.agents()):
                    await anext(watcher)
            spent = sum(costs) + sum(count_tokens(request.raw) for request in server.requests[before:])
        assert spent <= LIMIT + len(AGENTS) * max(costs, default=LIMIT)
