"""Requests of MCP servers to the model of the calling agent: allowed or not, limits, usage."""

from __future__ import annotations

import asyncio
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.clock import UNIX_EPOCH
from coterie.config import read_config
from coterie.testing import FakeClock
from coterie.testing.model_server import Calls, ReceivedRequest, Reply, Says, Status
from tests.agent.mcp_harness import HttpServer
from tests.agent.stage import Stage, stage

pytestmark = pytest.mark.slow

PICTURE = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()
SEES = {"input": ["text", "vision"], "output": ["text", "tool_calling"]}
OpenStage = Callable[..., Any]


@pytest.fixture(autouse=True)
def long_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.agent_runtime.MCP_START_TIMEOUT", timedelta(minutes=10))


@pytest.fixture
def open_stage(tmp_path: Path, sdk_script: Path, clock: FakeClock) -> OpenStage:
    """Open a society whose agent ada uses the server, which may ask her model if `sampling` says so."""

    @asynccontextmanager
    async def opened(
        transport: str = "http with sessions", *, sampling: bool = True, toml: str = ""
    ) -> AsyncIterator[Stage]:
        server = None
        if transport == "child":
            entry = f'command = "{sys.executable}"\nargs = ["{sdk_script}"]\n'
        else:
            server = HttpServer(sdk_script, "404" if transport == "http with sessions" else "")
            entry = f'url = "{server.entry.url}"\n'
        allowed = "sampling = true\n" if sampling else ""
        try:
            agents = f"[agents.ada]\ntemperature = 0.1\n[agents.bob]\n[mcp.demo]\n{entry}{allowed}{toml}"
            async with stage(tmp_path, agents=agents, clock=clock, capabilities=SEES) as here:
                yield here
        finally:
            if server:
                server.close()

    return opened


class Model:
    """Lets ada call a tool, and answers the requests of the server."""

    def __init__(self, here: Stage, call: Calls, answer: Reply = "a poem END of it") -> None:
        self.here, self._call, self._answer = here, call, answer
        self.asked: list[ReceivedRequest] = []
        here.server.default = self._reply

    def _reply(self, request: ReceivedRequest) -> Reply:
        if "(id: ada)" not in str(request.messages[0]["content"]):
            self.asked.append(request)
            return self._answer
        return "done" if request.messages[-1]["role"] == "tool" else Says(calls=(self._call,))

    async def result(self) -> str:
        """Return the result of the tool."""
        heard = len(await self.here.society.waiting("user"))
        await self.here.say("go on")
        await self.here.heard(heard + 1)
        for message in reversed(self.here.server.requests[-1].messages):
            if message["role"] == "tool":
                return str(message["content"])
        raise AssertionError("the tool was not called")


async def requests_counted(here: Stage, agent: str = "ada") -> int:
    return sum(one.requests for one in await here.society.store.usage(UNIX_EPOCH) if one.agent_id == agent)


async def test_a_server_asks_the_model_of_the_calling_agent_and_its_tokens_count(open_stage: OpenStage) -> None:
    async with open_stage() as here:
        model = Model(here, Calls("demo__ask_model", {"text": "Write a poem"}))
        assert await model.result() == "a poem |stopSequence"
        [asked] = model.asked
        assert [(one["role"], one["content"]) for one in asked.messages] == [
            ("system", "You serve a tool."),
            ("user", "Write a poem"),
        ]
        assert asked.body["temperature"] == 0.5 and "tools" not in asked.body
        assert 50 in asked.body.values()  # max_tokens
        assert await requests_counted(here) == 3
        assert "Write a poem" not in str(await here.history())  # it is no part of the conversation


async def test_a_request_in_the_response_to_a_call_is_paid_by_its_agent_also_if_another_call_is_newer(
    open_stage: OpenStage, tmp_path: Path
) -> None:
    ask, end = tmp_path / "ask", tmp_path / "end"
    async with open_stage() as here:

        def reply(request: ReceivedRequest) -> Reply:
            system, last = str(request.messages[0]["content"]), request.messages[-1]
            if "(id: " not in system:
                end.touch()
                return "a poem"
            if last["role"] == "tool":
                return str(last["content"])
            if "(id: bob)" in system:
                return Says(calls=(Calls("demo__copy", {"files": 1, "until": str(end)}),))
            return Says(calls=(Calls("demo__ask_model_later", {"text": "Write", "until": str(ask)}),))

        here.server.default = reply
        answers = [asyncio.create_task(here.society.ask("ada", "go on"))]
        await here.state("ada", "tools")
        answers.append(asyncio.create_task(here.society.ask("bob", "go on")))
        while not here.society.live.progress:  # until the server runs the call of bob
            await asyncio.sleep(0.01)
        ask.touch()
        assert [(await answer).text for answer in answers] == ["a poem|endTurn", "copied"]
        assert (await requests_counted(here), await requests_counted(here, "bob")) == (3, 2)


@pytest.mark.parametrize("transport", ["child", "http"])
async def test_a_server_of_the_newest_protocol_asks_in_the_result_of_the_call(
    open_stage: OpenStage, transport: str
) -> None:
    async with open_stage(transport) as here:
        model = Model(here, Calls("demo__ask_model_first", {"text": "Write a poem"}))
        assert await model.result() == "a poem END of it"
        assert await requests_counted(here) == 3


@pytest.mark.parametrize(
    ("transport", "tool"), [("http with sessions", "demo__ask_model"), ("child", "demo__ask_model_first")]
)
async def test_a_server_that_may_not_sample_is_not_told_that_it_can(
    open_stage: OpenStage, transport: str, tool: str
) -> None:
    async with open_stage(transport, sampling=False) as here:
        model = Model(here, Calls(tool, {"text": "Write a poem"}))
        result = (await model.result()).lower()
        assert "sampling" in result or "capabilit" in result, result
        assert model.asked == [] and await requests_counted(here) == 2


async def test_requests_of_one_call_run_one_at_a_time_and_their_number_is_limited(open_stage: OpenStage) -> None:
    gate = asyncio.Event()
    async with open_stage() as here:
        model = Model(here, Calls("demo__ask_model", {"text": "Again", "times": 12}), Says("yes", gate=gate))
        waiting = asyncio.create_task(model.result())
        while not model.asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # a second request would arrive now
        assert len(model.asked) == 1
        gate.set()
        result = (await waiting).splitlines()
        assert len(model.asked) == 10 and sorted(result)[-10:] == ["yes|endTurn"] * 10
        assert sum("at most 10 times" in one for one in result) == 2
        assert await requests_counted(here) == 12


async def test_the_length_of_an_answer_is_limited(open_stage: OpenStage) -> None:
    async with open_stage() as here:
        model = Model(here, Calls("demo__ask_model", {"text": "A lot", "max_tokens": 1_000_000}))
        await model.result()
        assert 4096 in model.asked[0].body.values()


async def test_a_picture_of_the_server_reaches_a_model_that_sees(open_stage: OpenStage) -> None:
    async with open_stage() as here:
        model = Model(here, Calls("demo__ask_model", {"text": "What is this?", "picture": PICTURE}))
        assert (await model.result()).startswith("a poem")
        assert [part["type"] for part in model.asked[0].messages[-1]["content"]] == ["text", "image_url"]


async def test_a_failure_of_the_model_is_an_error_of_the_request(open_stage: OpenStage) -> None:
    async with open_stage() as here:
        model = Model(here, Calls("demo__ask_model", {"text": "Write"}), Status(401, "no such key"))
        assert "wants a key" in await model.result()


async def test_a_spent_daily_limit_refuses_requests_of_servers(open_stage: OpenStage) -> None:
    async with open_stage(toml="[limits]\ntokens_per_day = 1\n") as here:
        # The first request of ada herself is allowed, because nothing was used before.
        model = Model(here, Calls("demo__ask_model", {"text": "Write"}))
        await here.say("go on")
        await here.state("ada", "blocked")
        assert model.asked == []
        rows = [text for role, text in await here.history() if role == "tool"]
        assert rows and "today's limit of 1 tokens is spent" in rows[0]


def test_sampling_is_true_or_false(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text('[mcp.demo]\ncommand = "x"\nsampling = "yes"\n')
    [problem] = read_config(tmp_path).problems
    assert "expected true or false" in problem.message
