"""Keys in tool results are redacted in requests, in the store and in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.testing.model_server import Calls, Says
from tests.agent.stage import each, stage

KEY = "canary-Zq7Vx2Lm9Tb4"
TOOLS = """
from coterie import tool
import os

@tool
async def leak() -> str:
    "Fail."
    raise RuntimeError("cannot log in with " + os.environ["CANARY_API_KEY"])

@tool
def show() -> str:
    "Return the environment."
    return str(dict(os.environ))
"""


async def test_keys_of_the_environment_are_redacted_from_tool_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CANARY_API_KEY", KEY)
    async with stage(tmp_path, agents="[agents.ada]\n", tools=TOOLS) as here:
        here.server.default = each(ada=[Says(calls=(Calls("leak"), Calls("show"))), "done"])
        await here.say("go")
        assert await here.texts() == ["done"]
        asked = here.server.requests[-1].raw
        assert b"cannot log in with ***" in asked and KEY.encode() not in asked
    assert KEY not in caplog.text
    kept = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert [path for path in kept if KEY.encode() in path.read_bytes()] == []
