from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie import Society
from coterie.cli.server import greet
from coterie.messages import PERSON

from .commands import coterie

SERVICE = '{"services": [{"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m"}]}'


@pytest.mark.parametrize(("lang", "first"), [("en_US.UTF-8", "Hello!"), ("zh_CN.UTF-8", "你好！")])
async def test_the_tour_sends_one_greeting_with_quick_replies(tmp_path: Path, lang: str, first: str) -> None:
    for _ in range(2):
        async with Society.open(tmp_path) as society:
            await greet(society, {"LANG": lang})
    async with Society.open(tmp_path, work=False) as society:
        [greeting] = await society.store.thread("assistant")
    assert (greeting.sender, greeting.to) == ("assistant", PERSON)
    assert greeting.payload["text"].startswith(first)
    assert len(greeting.payload["quickReplies"]) == 7


def test_the_task_of_the_greeting_is_listed_with_the_agent_that_sent_it(tmp_path: Path) -> None:
    async def start() -> None:
        async with Society.open(tmp_path) as society:
            await greet(society, {"LANG": "en_US.UTF-8"})

    asyncio.run(start())
    _, task = coterie("tasks", "--agent", "assistant", "--dir", tmp_path).stdout.splitlines()
    assert task.split()[1:3] == ["waiting", "assistant"]


async def test_there_is_no_greeting_in_a_thread_with_messages(tmp_path: Path) -> None:
    async with Society.open(tmp_path, work=False) as society:
        await society.send(to="assistant", text="I was first")
    async with Society.open(tmp_path) as society:
        await greet(society, {})
        assert [message.sender for message in await society.store.thread("assistant")] == [PERSON]


async def test_there_is_no_greeting_with_a_configured_model(tmp_path: Path) -> None:
    (tmp_path / "llmservices.json").write_text(SERVICE)
    async with Society.open(tmp_path) as society:
        await greet(society, {})
        assert list(await society.store.thread("assistant")) == []
