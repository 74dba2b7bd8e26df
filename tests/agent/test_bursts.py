"""Bursts of mail against a model with a small context window: no request is too long, and every message is answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie.agent.context_window import ASSUMED_WINDOW, mail_budget
from coterie.testing import Calls, Says
from coterie.testing.model_server import ReceivedRequest, Reply
from tests.agent.stage import stage
from tests.agent.tool_calls import HANG_SECONDS


def test_a_request_takes_mail_for_a_quarter_of_the_window() -> None:
    assert mail_budget(8_000) == 6_000  # bytes, 3 of them per token
    assert mail_budget(None) == mail_budget(ASSUMED_WINDOW)


def new_messages(request: ReceivedRequest) -> list[str]:
    """Names of the messages after the last answer of the model."""
    names: list[str] = []
    for message in reversed(request.body["messages"]):
        if message["role"] != "user":
            break
        content = message["content"]
        text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        names += reversed([word for word in text.split() if word.startswith("burst-")])
    return names[::-1]


@pytest.mark.parametrize("planning", [False, True], ids=["it answers", "it plans first"])
async def test_sixty_queued_messages_become_several_requests_that_fit(tmp_path: Path, planning: bool) -> None:
    async with stage(tmp_path, window=16_000, contextTokens=16_000) as here, asyncio.timeout(4 * HANG_SECONDS):
        held, seen = asyncio.Event(), list[list[str]]()

        def reply(request: ReceivedRequest) -> Reply:
            if request.body["messages"][0]["content"].startswith("Summarise"):
                return Says("a summary")
            if not seen:
                seen.append([])
                return Says("first", gate=held)
            seen.append(new_messages(request))
            is_last = "burst-59" in seen[-1]
            return Says(calls=(Calls("look"),)) if planning and not is_last else Says(f"part {len(seen)}")

        here.server.default = reply
        await here.say("begin")
        await here.server.wait_for_request(1)
        for number in range(60):
            await here.say(f"burst-{number} " + "x" * 2_400)
        held.set()
        await here.state("ada", "idle")

        assert here.server.refused == [], "no request was longer than the window"
        taken = [text.split()[0] for role, text in await here.history() if role == "user"]
        assert taken == ["begin", *(f"burst-{number}" for number in range(60))]
        assert 10 <= len(seen) <= 40
        assert len({name for part in seen for name in part}) == 60
