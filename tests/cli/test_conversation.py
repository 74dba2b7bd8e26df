from __future__ import annotations

import asyncio
import json

import pytest

from coterie.cli.client import Client
from coterie.cli.conversation import ChatMessage, Conversation, UnreadMessages, wait_for_answers, wait_for_task
from coterie.config import ServerAddress
from coterie.errors import NoAnswer, Refused
from coterie.messages import Receipt
from tests.faults.harness import scaled_timeout


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


async def test_an_event_that_cannot_be_decoded_ends_the_wait_for_events() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        writer.write(b"event: hello\ndata: {}\n\nevent: agent.state\ndata: no JSON\n\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(scaled_timeout(10)):
        host, port = server.sockets[0].getsockname()
        async with (
            Client(ServerAddress(url=f"http://{host}:{port}", pid=1), "token") as client,
            Conversation.open(client, "ada") as conversation,
        ):
            with pytest.raises(ValueError, match="Expecting value"):
                await conversation.next_event()


async def test_a_request_that_fails_while_the_server_stops_reports_the_stop() -> None:
    failed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/events" in await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nevent: hello\ndata: {}\n\n")
            await failed.wait()
            writer.write(b"event: shutdown\ndata: {}\n\n")
            await writer.drain()
        else:
            failed.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(scaled_timeout(10)):
        host, port = server.sockets[0].getsockname()
        async with (
            Client(ServerAddress(url=f"http://{host}:{port}", pid=1), "token") as client,
            Conversation.open(client, "ada") as conversation,
        ):
            with pytest.raises(NoAnswer, match="the society stopped before ada answered"):
                await wait_for_answers(conversation, "message")


@pytest.mark.parametrize("others_work", [False, True])
async def test_the_wait_ends_if_an_agent_is_paused_after_it_was_looked_at(others_work: bool) -> None:
    """At first the mail waits for a slot. The events of other tasks do not delay the next look."""
    write_event, looks = asyncio.Event(), 0
    task = {"id": "task", "state": "working", "active": 0}
    task |= {"nodes": [{"kind": "message", "to": "bob", "state": "pending"}]}

    def body_of(path: str) -> object:
        nonlocal looks
        looks += path.endswith("/agents/bob")
        return {
            "/agents/ada": {"state": "idle"},
            "/agents/bob": {"state": "idle" if looks == 1 else "paused"},
            "/messages/sent": {"id": "sent", "from": "user", "to": "ada", "payload": {}, "state": "taken"},
            "/tasks/task": task,
        }[path.removeprefix("/api/v1")]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode().partition("?")[0]
        if not path.endswith("/events"):
            body = json.dumps(body_of(path)).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nevent: hello\ndata: {}\n\n")
        while others_work and looks < 2:
            writer.write(b'event: task.changed\ndata: {"id": "other", "state": "working", "active": 1}\n\n')
            await writer.drain()
            await write_event.wait()
            write_event.clear()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(scaled_timeout(10)):
        host, port = server.sockets[0].getsockname()
        async with (
            Client(ServerAddress(url=f"http://{host}:{port}", pid=1), "token") as client,
            Conversation.open(client, "ada") as conversation,
        ):
            with pytest.raises(NoAnswer, match="the task waits for another agent: bob is paused"):
                receipt = Receipt(message_id="sent", state="pending", task="task")
                await wait_for_task(conversation, receipt, lambda _: write_event.set())
            write_event.set()
    assert looks == 2
