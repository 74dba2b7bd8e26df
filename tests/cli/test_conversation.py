from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie.cli.conversation import Line, Speech, Unread
from coterie.cli.in_process import OwnConversation
from coterie.errors import Refused
from coterie.society import Society
from tests.faults.harness import patience


def line(message_id: str, state: str = "taken") -> Line:
    return Line(id=message_id, sender="user", to="ada", text="", state=state, wire={})


async def test_what_is_said_while_earlier_words_are_looked_up_is_looked_up_next() -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def look_up(message_id: str) -> Line:
        looking.set()
        await go_on.wait()
        return line(message_id)

    unread = Unread(look_up)
    unread.add("first")
    found = asyncio.create_task(unread.read_by_now())
    await looking.wait()
    unread.add("second")
    go_on.set()

    assert await found == {"first"}
    assert await unread.read_by_now() == {"second"}


async def test_words_that_were_cleared_away_are_waited_for_no_more() -> None:
    async def look_up(message_id: str) -> Line:
        raise Refused("unknown_message", f"there is no message {message_id!r}")

    unread = Unread(look_up)
    unread.add("gone")

    assert await unread.read_by_now() == frozenset()


async def test_whoever_waits_for_news_hears_that_there_will_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Society.open(tmp_path, work=False) as society,
        OwnConversation.open(society, "assistant") as conversation,
    ):

        async def broken(message_id: str) -> None:
            raise RuntimeError("nobody planned for this")

        monkeypatch.setattr(society.store, "message", broken)
        await conversation.say(Speech(text="Hello"))

        with pytest.raises(RuntimeError, match="nobody planned for this"):
            async with asyncio.timeout(patience(10)):
                while True:
                    await conversation.news()
