"""A society whose model is a real llama.cpp server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from coterie import Message, Society
from coterie.agent.context import render_row
from coterie.agent.context_window import message_tokens, summary_limit, text_tokens
from coterie.live import LiveReply

from .conftest import CONTEXT_TOKENS, LlamaServer, open_society, write_society

pytestmark = pytest.mark.real
TOPICS = ("boats", "bread", "clouds", "clocks", "maps", "bees", "rivers")
MESSAGES, PART = 300, 25


async def answer_to(society: Society, text: str) -> Message:
    """Send a message and return the reply to it, also if other messages come first."""
    receipt = await society.send(to="ada", text=text)
    return await reply_to(society, receipt.message_id)


async def reply_to(society: Society, message_id: str) -> Message:
    async with aclosing(society.inbox()) as inbox:
        async for message in inbox:
            if message.in_reply_to == message_id:
                return message
    raise AssertionError("the society stopped")


def begun(society: Society) -> asyncio.Event:
    """Return an event that is set when the model has said something."""
    event = asyncio.Event()

    def on_change(reply: LiveReply) -> None:
        if reply.length:
            event.set()

    society.live.subscribe(on_change)
    return event


@pytest.mark.parametrize("first", range(0, MESSAGES, PART))
async def test_300_messages_in_a_4k_window_are_all_answered(
    long_conversation: tuple[Path, LlamaServer], first: int
) -> None:
    """One conversation, in parts: no test may take longer than 15 minutes. Each part continues after a restart."""
    async with open_society(*long_conversation) as society:
        before = len(await society.store.history("ada"))
        for number in range(first, first + PART):
            topic = TOPICS[number % len(TOPICS)]
            answer = await answer_to(society, f"Message {number}. Tell me something about {topic}. " + f"{topic} " * 4)

            assert "problem" not in answer.payload, answer.payload
            assert answer.payload["text"].strip()
            ada = await society.store.agent("ada")
            assert ada is not None and ada.state != "blocked", ada
            await society.mark_read(answer)
        rows, view = await society.store.history("ada"), await society.store.history_view("ada")
    assert [row.role for row in rows[before:]] == ["user", "assistant"] * PART
    assert text_tokens(view.summary) <= summary_limit(CONTEXT_TOKENS)
    assert sum(message_tokens(render_row(row)) for row in view.rows) < CONTEXT_TOKENS
    if first + PART == MESSAGES:
        said = sum(message_tokens(render_row(row)) for row in rows)
        assert view.summary and said > 3 * CONTEXT_TOKENS, "the conversation is several times as long as the window"


@pytest.mark.parametrize("llama", [200], indirect=True)
async def test_an_answer_is_streamed_before_it_is_stored(tmp_path: Path, llama: LlamaServer) -> None:
    write_society(tmp_path, llama)
    lengths: list[int] = []
    async with open_society(tmp_path, llama) as society:
        society.live.subscribe(lambda reply: lengths.append(reply.length))

        answer = await answer_to(society, "Tell me a long story about a lighthouse.")

    assert len(set(lengths)) > 5
    assert max(lengths) == len(answer.payload["text"])


@pytest.mark.parametrize("llama", [2000], indirect=True)
async def test_a_stop_ends_the_generation_and_keeps_what_was_said(tmp_path: Path, llama: LlamaServer) -> None:
    write_society(tmp_path, llama)
    async with open_society(tmp_path, llama) as society:
        has_begun = begun(society)
        receipt = await society.send(to="ada", text="Count from one to one thousand, in words.")
        await has_begun.wait()

        assert society.stop_turn("ada")
        answer = await reply_to(society, receipt.message_id)

    assert answer.stopped
    assert answer.payload["text"].strip()


@pytest.mark.parametrize("interrupt", ["step", "stream"])
@pytest.mark.parametrize("llama", [300], indirect=True)
async def test_a_message_during_the_generation_is_answered_too(
    tmp_path: Path, llama: LlamaServer, interrupt: str
) -> None:
    write_society(tmp_path, llama, interrupt=interrupt)
    outcomes: dict[str, str | None] = {}
    async with open_society(tmp_path, llama) as society:
        society.live.subscribe(lambda reply: outcomes.update({reply.id: reply.outcome}))
        has_begun = begun(society)
        await society.send(to="ada", text="Tell me a long story about a mountain.")
        await has_begun.wait()

        answer = await answer_to(society, "Stop the story. Say hello.")

    assert answer.payload["text"].strip()
    assert list(outcomes.values()) == ["stored" if interrupt == "step" else "withdrawn", "stored"]


@pytest.mark.parametrize("llama", [400], indirect=True)
async def test_an_answer_survives_the_restart_of_the_model_server(tmp_path: Path, llama: LlamaServer) -> None:
    write_society(tmp_path, llama)
    async with open_society(tmp_path, llama) as society:
        has_begun = begun(society)
        receipt = await society.send(to="ada", text="Tell me a long story about a harbour.")
        await has_begun.wait()

        await asyncio.to_thread(llama.kill)
        await society_waits(society)
        await asyncio.to_thread(llama.start)
        answer = await reply_to(society, receipt.message_id)

    assert answer.payload["text"].strip() and "problem" not in answer.payload


async def society_waits(society: Society) -> None:
    """Wait until ada has noticed that her model is gone."""
    async with society.bus.watch() as watcher:
        while (ada := await society.store.agent("ada")) is None or ada.state != "wait_retry":
            await anext(watcher)
