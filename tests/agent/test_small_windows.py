"""No conversation, however long or bursty, blocks an agent whose model can answer one message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coterie import Message
from coterie.agent.context_window import summary_limit, text_tokens
from coterie.testing.model_server import Calls, ReceivedRequest, Reply, Says, Status, count_tokens
from tests.agent.stage import Stage, stage

TEXTS = (
    "Some plain English words about the weather, the harbour and the boats in it. ",
    "今天的天气很好，我们去海边看船，然后回家吃饭。",
    '{"key": "value", "list": [1, 2, 3], "nested": {"a": "b\\n"}}\n',
    "def f(x):\n    return [y ** 2 for y in range(x)]\n",
)
SIZE = 1_500


def is_summary(request: ReceivedRequest) -> bool:
    return str(request.body["messages"][0]["content"]).startswith("Summarise")


class UnreliableModel:
    """Answers every message. Its summaries are good, too long, cut off, empty or missing, in turn."""

    def __init__(self, window: int) -> None:
        self.summaries = 0
        self._window = window

    def __call__(self, request: ReceivedRequest) -> Reply:
        if not is_summary(request):
            return f"answer {len(request.messages)}"
        self.summaries += 1
        good = f"Summary {self.summaries}: the weather, the harbour, the boats."
        replies: tuple[Reply, ...] = (
            good, good, "endless summary " * self._window, Says(good, finish="length"), "", Status(500, "broken"),
        )  # fmt: skip
        return replies[self.summaries % len(replies)]


def shown_summary(request: ReceivedRequest) -> str:
    """The summary in a request; empty if it has none."""
    for message in request.messages[1:2]:
        for line in str(message["content"]).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return str(json.loads(line)["summary"])
    return ""


@contextlib.asynccontextmanager
async def inbox(here: Stage) -> AsyncIterator[AsyncIterator[Message]]:
    async with contextlib.aclosing(here.society.inbox()) as messages:
        yield messages


async def talk(here: Stage, count: int) -> None:
    """Send `count` messages one after the other; each must be answered by the agent."""
    async with inbox(here) as messages:
        for number in range(count):
            text = TEXTS[number % len(TEXTS)]
            await here.say(f"{number} " + text * (SIZE // len(text)))
            answer = await anext(messages)
            assert (answer.sender, answer.payload["text"].split()[0]) == ("ada", "answer"), (number, answer.payload)
            await here.society.store.mark_read("ada", answer.id)


def check_summaries(here: Stage, window: int) -> None:
    """Every summary that was shown has its share of the window and no more."""
    shown = [shown_summary(request) for request in here.server.requests if not is_summary(request)]
    assert any(shown)
    # The estimate may have fewer bytes per token than the service.
    assert max(map(text_tokens, shown)) <= summary_limit(window * 2)


@pytest.mark.slow
@pytest.mark.parametrize("window", [2_000, *(pytest.param(size, marks=pytest.mark.full) for size in (4_000, 8_000))])
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_long_conversation_in_a_small_window_is_never_blocked(
    tmp_path: Path, window: int, is_declared: bool
) -> None:
    entry: dict[str, Any] = {"contextTokens": window} if is_declared else {}
    async with stage(tmp_path, agents="[agents.ada]\n", window=window, **entry) as here:
        here.server.default = UnreliableModel(window)
        await talk(here, 60)
        check_summaries(here, window)
        # A declared window is never exceeded; an unknown one is learned from one error.
        assert len(here.server.refused) <= (0 if is_declared else 2)
        assert all("context length" in refused for refused in here.server.refused)
        here.server.refused.clear()


@pytest.mark.full
@pytest.mark.parametrize("is_declared", [True, False])
async def test_2000_messages_in_a_window_of_8000_tokens_are_never_blocked(tmp_path: Path, is_declared: bool) -> None:
    entry: dict[str, Any] = {"contextTokens": 8_000} if is_declared else {}
    async with stage(tmp_path, agents="[agents.ada]\n", window=8_000, **entry) as here:
        here.server.default = model = UnreliableModel(8_000)
        await talk(here, 2_000)
        check_summaries(here, 8_000)
        assert model.summaries > 100
        assert len(here.server.refused) <= (0 if is_declared else 2)
        here.server.refused.clear()


async def test_a_service_that_names_no_numbers_teaches_its_window_by_refusing(tmp_path: Path) -> None:
    refused = 0

    def answer(request: ReceivedRequest) -> Reply:
        nonlocal refused
        if count_tokens(request.raw) > 3_000:
            refused += 1
            return Status(400, "the request exceeds the available context size, try increasing it")
        return "a summary" if is_summary(request) else "answer"

    async with stage(tmp_path, agents="[agents.ada]\n") as here:
        here.server.default = answer
        await talk(here, 30)
        assert 1 <= refused <= 10


@pytest.mark.parametrize("window", [2_000, 8_000])
async def test_a_message_larger_than_the_context_window_is_shortened_and_answered(tmp_path: Path, window: int) -> None:
    async with stage(tmp_path, window=window) as here:
        await here.say("The beginning. " + "x" * 60_000 + " The end?")
        assert await here.texts() == ["ok"]
        shown = here.server.requests[-1].last_text
        assert "The beginning." in shown and "The end?" in shown and "characters left out" in shown
        (row,) = [row for row in await here.society.store.history("ada") if row.message]
        assert row.message is not None and len(row.message.payload["text"]) > 60_000
        assert len(here.server.refused) == 1
        here.server.refused.clear()


async def test_a_burst_of_messages_is_answered(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, agents="[agents.ada]\n", window=8_000, contextTokens=8_000) as here:
        here.server.script(Says("first", gate=gate))
        await here.say("hello")
        await here.server.wait_for_request(1)
        for number in range(60):
            await here.say(f"{number} " + "x" * 2_400)
        gate.set()
        heard = await here.texts(2)
        assert heard == ["first", "ok"]
        await here.state("ada", "idle")
        assert here.server.refused == []


@pytest.mark.parametrize("size", [20, 1_500])
async def test_a_turn_of_many_tool_calls_is_never_blocked(tmp_path: Path, size: int) -> None:
    async with stage(tmp_path, agents="[agents.ada]\n", window=4_000, contextTokens=4_000) as here:
        made = 0

        def answer(request: ReceivedRequest) -> Reply:
            nonlocal made
            if is_summary(request):
                return "The person wants bells to be looked at."
            made += 1
            return Says(calls=(Calls("look", {"name": f"{made} " + "x" * size}),)) if made <= 40 else "done"

        here.server.default = answer
        await here.say("Look at 40 bells.")
        assert await here.texts() == ["done"]
        assert here.server.refused == []


async def test_many_calls_in_one_answer_are_never_blocked(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[agents.ada]\n", window=3_000, contextTokens=3_000) as here:
        here.server.script(Says(calls=tuple(Calls("look", {"name": f"{n}" * 300}) for n in range(60))))
        await here.say("Look at 60 bells.")
        assert await here.texts() == ["ok"]
        assert "toolResults" in here.server.requests[-1].last_text
        assert here.server.refused == []


async def test_an_agent_is_blocked_with_advice_only_if_no_message_fits(tmp_path: Path) -> None:
    prompt = "You know a lot. " * 600
    async with stage(tmp_path, agents=f'[agents.ada]\nprompt = "{prompt}"\n', contextTokens=2_000) as here:
        await here.say("hi")
        (notice,) = await here.heard()
        assert notice.sender == "system" and "shorten the prompt" in notice.payload["text"]
        assert here.server.requests == []
        await here.state("ada", "blocked")


async def test_a_conversation_that_a_larger_model_summarised_goes_on_with_a_smaller_one(tmp_path: Path) -> None:
    services = tmp_path / "llmservices.json"
    async with stage(tmp_path, agents="[agents.ada]\n", contextTokens=40_000) as here:
        here.server.default = lambda request: "A fact. " * 500 if is_summary(request) else "answer"
        await talk(here, 80)
        assert any(is_summary(request) for request in here.server.requests)
        services.write_text(services.read_text().replace('"contextTokens": 40000', '"contextTokens": 3000'))
        await here.society.reload()
        before = len(here.server.requests)
        await here.say("And now?")
        await here.heard(1)
        last = here.server.requests[-1]
        assert len(here.server.requests) > before and count_tokens(last.raw) < 3_000
