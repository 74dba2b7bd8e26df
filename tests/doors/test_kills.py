"""SIGKILL of the server while it streams an answer: the client asks again and gets the answer, which was asked once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from coterie.config import read_address
from coterie.society import Society
from coterie.store import Page
from coterie.testing import ModelServer, Says
from coterie.testing.model_server import ReceivedRequest, Reply
from tests.agent.held_answer import HeldAnswer
from tests.cli.commands import ServeProcess
from tests.web.conftest import TOKEN


class Model:
    """Holds the first answer of each round in the middle, and completes the next ones."""

    def __init__(self) -> None:
        self.held: HeldAnswer | None = None
        self.asked = asyncio.Event()

    def __call__(self, request: ReceivedRequest) -> Reply:
        self.asked.set()
        held, self.held = self.held, None
        return held(request) if held else Says("The answer begins and ends.")


async def stream(client: AsyncOpenAI, door: str, text: str, began: asyncio.Event) -> str:
    """The whole text of a streamed answer. Sets `began` when the first piece of it comes."""
    pieces = list[str]()
    if door == "chat":
        message: Any = {"role": "user", "content": text}
        async for chunk in await client.chat.completions.create(model="ada", messages=[message], stream=True):
            pieces.append(chunk.choices[0].delta.content or "")
            if pieces[-1]:
                began.set()
    else:
        async for event in await client.responses.create(model="ada", input=text, stream=True):
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
                began.set()
    return "".join(pieces)


async def start(folder: Path) -> tuple[ServeProcess, AsyncOpenAI]:
    running = await asyncio.to_thread(ServeProcess(folder).__enter__)
    address = read_address(folder / "data")
    assert address is not None
    return running, AsyncOpenAI(base_url=f"{address.url}/v1", api_key=TOKEN, max_retries=0)


async def kill_rounds(folder: Path, rounds: int) -> None:
    folder.mkdir()
    model = Model()
    async with ModelServer() as server:
        server.default = model
        services = [{"id": "main", "model": "m", "baseURL": server.base_url}]
        (folder / "llmservices.json").write_text(json.dumps({"services": services}))
        (folder / "coterie.toml").write_text("[agents.ada]\n")
        (folder / "data").mkdir(mode=0o700)
        (folder / "data/token").write_text(TOKEN)
        running, client = await start(folder)
        try:
            for number in range(rounds):
                door, text, began = ("chat", "response")[number % 2], f"question {number}", asyncio.Event()
                model.held, model.asked = HeldAnswer(), asyncio.Event()
                first = asyncio.create_task(stream(client, door, text, began))
                # In the middle of the text, or before any of it has come.
                reached = asyncio.create_task((model.asked if number % 3 == 2 else began).wait())
                await asyncio.wait({first, reached}, return_when=asyncio.FIRST_COMPLETED)
                assert reached.done(), first
                running.process.kill()
                with pytest.raises(openai.APIConnectionError):
                    await first
                await asyncio.to_thread(running.__exit__, None, None, None)
                await client.close()
                running, client = await start(folder)
                again = await stream(client, door, text, asyncio.Event())
                assert again == "The answer begins and ends.", (number, again)
        finally:
            await client.close()
            await asyncio.to_thread(running.__exit__, None, None, None)
    async with Society.open_read_only(folder) as society:
        found = await society.store.messages(Page(limit=10 * rounds))
        asked = [one.payload["text"] for one in found if one.sender == "user"]
        answers = [one.in_reply_to for one in found if one.to == "user"]
        assert sorted(asked) == sorted(f"question {number}" for number in range(rounds))
        assert len(answers) == len(set(answers)) == rounds
        assert [violation async for violation in society.store.violations()] == []


@pytest.mark.slow
async def test_a_client_whose_server_is_killed_in_the_middle_of_a_stream_gets_the_answer_asked_once(
    tmp_path: Path,
) -> None:
    await kill_rounds(tmp_path / "home", 3)


@pytest.mark.full
async def test_fifty_kills_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    await kill_rounds(tmp_path / "home", 50)
