from __future__ import annotations

import asyncio

import pytest

from coterie.cli.client import Client
from coterie.cli.conversation import ChatMessage, Conversation, UnreadMessages
from coterie.config import ServerAddress
from coterie.errors import Refused
from tests.faults.harness import patience


def message(message_id: str, state: str = "taken") -> ChatMessage:
    return ChatMessage(id=message_id, sender="user", to="ada", text="", state=state, json={})


async def test_a_message_sent_during_a_lookup_is_looked_up_next() -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def get_message(message_id: str) -> ChatMessage:
        looking.set()
        await go_on.wait()
        return message(message_id)

    unread = UnreadMessages(get_message)
    unread.add("first")
    lookup = asyncio.create_task(unread.take_read())
    await looking.wait()
    unread.add("second")
    go_on.set()

    assert await lookup == {"first"}
    assert await unread.take_read() == {"second"}


async def test_a_deleted_message_is_no_longer_unread() -> None:
    async def get_message(message_id: str) -> ChatMessage:
        raise Refused("unknown_message", f"there is no message {message_id!r}")

    unread = UnreadMessages(get_message)
    unread.add("gone")

    assert await unread.take_read() == frozenset()


async def test_an_event_that_cannot_be_read_ends_the_wait_for_events() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        writer.write(b"event: hello\ndata: {}\n\nevent: agent.state\ndata: no JSON\n\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(patience(10)):
        host, port = server.sockets[0].getsockname()
        async with (
            Client(ServerAddress(url=f"http://{host}:{port}", pid=1), "token") as client,
            Conversation.open(client, "ada") as conversation,
        ):
            with pytest.raises(ValueError, match="Expecting value"):
                await conversation.next_event()
