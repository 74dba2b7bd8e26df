"""A message sent at one server ends the answer that a model writes at another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.config import Config, read_config
from coterie.messages import Message
from coterie.society import Society
from coterie.store import Page
from coterie.stores.postgres import cluster
from tests.engines import Postgres

from .test_cluster import SOON, ManualModel, process


@pytest.fixture(autouse=True)
def cuts_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(folder: Path) -> Config:
        config = read_config(folder)
        return replace(config, interruption=replace(config.interruption, interrupt="stream"))

    for module in ("society", "configuration"):
        monkeypatch.setattr(f"coterie.{module}.read_config", changed)


async def answer(society: Society) -> Message:
    async for message in society.inbox():
        return message
    raise AssertionError("the society stopped")


async def streaming(society: Society, model: ManualModel, word: str) -> None:
    """Let the model say a word, and wait until it is shown."""
    shown = asyncio.Event()
    end = society.live.subscribe(lambda reply: shown.set() if reply.text.endswith(word) else None)
    model.words.put_nowait(word)
    await shown.wait()
    end()


async def test_a_message_at_another_server_cuts_the_answer(shared: Postgres, tmp_path: Path) -> None:
    url, model, idle = shared.url(tmp_path), ManualModel(), ManualModel()
    async with (
        process(tmp_path / "a", url, model) as worker,
        process(tmp_path / "b", url, idle) as other,
        asyncio.timeout(SOON),
    ):
        await worker.send(to="ada", text="one")
        await model.asked.get()
        await streaming(worker, model, "The answer begins")
        second = await other.send(to="ada", text="two")
        await model.asked.get()
        assert model.cut_off is not None and idle.times == 0
        model.words.put_nowait("to both")
        model.words.put_nowait(None)
        got = await answer(other)
        assert (got.payload["text"], got.in_reply_to) == ("to both", second.message_id)
        (record,) = await other.store.runs(Page(limit=5), "ada")
        assert (record.text, record.interrupted_by) == ("The answer begins", second.message_id)
        lines = [(row.role, row.message.payload["text"] if row.message else row.text) for row in
                 await other.store.history("ada")]  # fmt: skip
        assert lines == [("user", "one"), ("user", "two"), ("assistant", "to both")]


async def test_without_the_notification_the_message_is_read_after_the_answer(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.NotifyChannels, "interruptions", lambda channels, notice: [])
    url, model, idle = shared.url(tmp_path), ManualModel(), ManualModel()
    async with (
        process(tmp_path / "a", url, model) as worker,
        process(tmp_path / "b", url, idle) as other,
        asyncio.timeout(SOON),
    ):
        await worker.send(to="ada", text="one")
        await model.asked.get()
        await other.send(to="ada", text="two")
        model.words.put_nowait("whole")
        model.words.put_nowait(None)
        await model.asked.get()
        assert model.cut_off is None
        lines = [(row.role, row.message.payload["text"] if row.message else row.text) for row in
                 await other.store.history("ada")]  # fmt: skip
        assert lines == [("user", "one"), ("assistant", "whole"), ("user", "two")]
