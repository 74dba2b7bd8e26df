"""Kills of the process do not make a society exceed its daily token budget."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from coterie import Society
from coterie.testing import ModelServer
from coterie.testing.model_server import count_tokens

from .harness import ForkServer
from .scenarios import wait_until_idle_or_blocked

AGENTS = ("ada", "bob", "carol")
LIMIT = 4_000
STARTS = 10


@pytest.mark.parametrize("moment", ["turn.answered", "turn.fenced"])
async def test_a_society_killed_repeatedly_does_not_exceed_its_token_budget(
    fork_server: ForkServer, tmp_path: Path, moment: str
) -> None:
    agents = "".join(f"[agents.{name}]\ntools = []\nprompt = '{'x' * 2_000}'\n" for name in AGENTS)
    (tmp_path / "coterie.toml").write_text(f"[limits]\ntokens_per_day = {LIMIT}\n{agents}")
    async with ModelServer() as server:
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
        kills = 0
        for n in range(STARTS):
            async with Society.open_offline(tmp_path) as society:
                for name in AGENTS:
                    await society.send(to=name, text=f"message {n}")
            arm = f"{moment}:1:kill"
            ended = await asyncio.to_thread(fork_server.run, "run_until_idle_or_blocked", tmp_path, arm=arm)
            assert ended["status"] in (0, -signal.SIGKILL), ended
            kills += ended["status"] != 0
        assert kills >= 1
        costs = [count_tokens(request.raw) for request in server.requests]

        assert sum(costs) <= LIMIT + len(AGENTS) * max(costs, default=0)
        async with Society.open(tmp_path) as society:  # a run without a kill
            before = len(server.requests)
            await wait_until_idle_or_blocked(society)
            spent = sum(costs) + sum(count_tokens(request.raw) for request in server.requests[before:])
        assert spent <= LIMIT + len(AGENTS) * max(costs, default=LIMIT)
