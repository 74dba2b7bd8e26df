"""Faults F32 to F40 outside of a response: connecting, keys, deadlines and cancellation."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from coterie.llm.providers.openai import OpenAIService
from coterie.llm.service import (
    Completion,
    ContextTooLong,
    Deadlines,
    DeadlineTimer,
    ModelRequest,
    PermanentError,
    TransientError,
)
from coterie.testing import model_faults
from coterie.testing.model_server import CustomReply, ModelServer, ServerConnection, chunk

from .helpers import GRACE_SECONDS, HELLO, KEY, LONG, SHORT, Outcome, ask, service, user


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer(api_key=KEY) as opened:
        yield opened


@pytest.fixture
async def main(server: ModelServer) -> AsyncIterator[OpenAIService]:
    opened = service(server.base_url, deadlines=SHORT)
    yield opened
    await opened.close()


async def test_f32_connection_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        outcome = await _ask_at(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")

    assert isinstance(outcome.error, TransientError)
    assert "connection refused" in str(outcome.error) and "baseURL in llmservices.json" in str(outcome.error)


async def test_f32_no_such_host() -> None:
    outcome = await _ask_at("http://unknown.invalid/v1", LONG)

    assert isinstance(outcome.error, TransientError)
    # Without a network the resolver may time out.
    assert re.search(r"cannot be reached at http://unknown.invalid/v1 \((no such host|timed out)\)", str(outcome.error))


async def test_f32_no_tls_where_tls_was_asked_for() -> None:
    async with _Listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        outcome = await _ask_at(f"https://127.0.0.1:{port}/v1", LONG)

    assert isinstance(outcome.error, TransientError)
    assert "the secure connection failed" in str(outcome.error)


async def test_f32_a_tls_handshake_that_never_ends() -> None:
    async with _Listening(b"") as port:
        outcome = await _ask_at(f"https://127.0.0.1:{port}/v1")

    assert isinstance(outcome.error, TransientError)


@pytest.mark.parametrize("address", ["", "main", "ftp://127.0.0.1/v1", "http://", "http://[::1"])
async def test_f32_an_invalid_address(address: str) -> None:
    outcome = await _ask_at(address)

    assert isinstance(outcome.error, PermanentError) and outcome.error.category == "request"
    assert "baseURL in llmservices.json must begin with http" in str(outcome.error)


@pytest.mark.parametrize("key", ["with space", "line\nbreak", "schlüssel", "nul\x00"])
async def test_f39_a_key_that_is_invalid_in_a_header_is_never_shown(key: str, server: ModelServer) -> None:
    one = service(server.base_url, api_key=key)

    outcome = await ask(one)

    assert isinstance(outcome.error, PermanentError) and outcome.error.category == "auth"
    assert key not in str(outcome.error) and outcome.error.__cause__ is None
    assert server.requests == []
    await one.close()


async def test_f38_a_service_counts_tokens() -> None:
    async with ModelServer(context_tokens=500) as server:
        main = service(server.base_url)
        assert (await ask(main)).answer
        outcome = await ask(main, ModelRequest(messages=(user("word " * 1000),)))

        assert isinstance(outcome.error, ContextTooLong)
        await main.close()


async def test_f40_an_abandoned_response_closes_its_connection(server: ModelServer) -> None:
    gone = asyncio.Event()
    main = service(server.base_url, deadlines=LONG)

    async def send_one_chunk(wire: ServerConnection) -> None:
        await wire.begin()
        await wire.event(chunk({"content": "Hello"}))
        await wire.wait_for_close()
        gone.set()

    server.script(CustomReply(send_one_chunk))
    pieces = main.generate(HELLO)
    await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]

    async with asyncio.timeout(GRACE_SECONDS):
        await gone.wait()
    assert len(server.requests) == 1
    await main.close()


async def test_f40_cancelling_while_waiting_ends_the_request_and_stays_a_cancellation(server: ModelServer) -> None:
    main = service(server.base_url, deadlines=LONG)
    server.script(model_faults.no_first_byte())
    asking = asyncio.create_task(ask(main))
    await server.wait_for_request()

    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
    await main.close()


async def test_f40_a_slow_caller_does_not_exceed_the_idle_deadline(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_was_read, second_was_read = asyncio.Event(), asyncio.Event()

    async def reply(wire: ServerConnection) -> None:
        await wire.begin()
        await wire.event(chunk({"content": "one"}))
        await first_was_read.wait()
        await wire.event(chunk({"content": " two"}))
        await second_was_read.wait()
        await wire.event(chunk({"content": " three"}, "stop"))

    server.script(CustomReply(reply))
    main = service(server.base_url, deadlines=replace(LONG, idle=SHORT.idle))
    pieces = main.generate(HELLO)
    await anext(pieces)
    first_was_read.set()
    await anext(pieces)
    loop, time = asyncio.get_running_loop(), asyncio.get_running_loop().time
    monkeypatch.setattr(loop, "time", lambda: time() + 2 * SHORT.idle.total_seconds())
    for _ in range(2):
        await asyncio.sleep(0)  # the loop runs the timers that are due now
    second_was_read.set()
    rest = [piece async for piece in pieces]

    assert isinstance(rest[-1], Completion) and rest[-1].text == "one two three"
    await main.close()


async def test_f40_an_exceeded_deadline_leaves_the_task_uncancelled(server: ModelServer, main: OpenAIService) -> None:
    server.script(model_faults.stall())
    task = asyncio.current_task()
    assert task

    async with asyncio.timeout(GRACE_SECONDS):
        assert isinstance((await ask(main)).error, TransientError)

    assert task.cancelling() == 0


async def test_f40_a_cancellation_that_meets_a_deadline_stays_a_cancellation() -> None:
    timer = DeadlineTimer(SHORT)
    cancellations = 0

    async def step() -> None:
        nonlocal cancellations
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # of the deadline
            cancellations = waiting.cancelling()
            waiting.cancel()
            raise

    waiting = asyncio.create_task(timer.await_first(step))

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (cancellations, waiting.cancelling()) == (1, 1)


async def _ask_at(address: str, deadlines: Deadlines = SHORT) -> Outcome:
    one = service(address, deadlines=deadlines)
    outcome = await ask(one)
    assert outcome.answer is None
    assert outcome.seconds < deadlines.total.total_seconds() + GRACE_SECONDS
    await one.close()
    return outcome


class _Listening:
    """A server that sends the same bytes to every client, then nothing."""

    def __init__(self, greeting: bytes) -> None:
        self._greeting = greeting
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        writer.write(self._greeting)

    async def __aexit__(self, *exception: object) -> None:
        for writer in self._writers:
            writer.close()
        self._server.close()
        await self._server.wait_closed()
