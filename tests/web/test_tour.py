"""The first minute: a newcomer who has set up nothing starts it and walks through the whole tour, over HTTP alone."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.config import read_address
from coterie.tour import script as script
from coterie.tour.script import Translated
from tests.cli.commands import ServeProcess
from tests.faults.harness import patience

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8) + (640).to_bytes(4) + (480).to_bytes(4) + bytes(16)
Holds = Callable[[dict[str, Any]], bool]


class Newcomer:
    """Somebody with a browser: everything that happens reaches them as an event, in order."""

    def __init__(self, client: httpx.AsyncClient, events: AsyncIterator[tuple[str, dict[str, Any]]]) -> None:
        self.client, self._events = client, events
        self.seen: list[tuple[str, dict[str, Any]]] = []

    async def get(self, path: str, **parameters: Any) -> Any:
        return (await self.client.get(path, params=parameters)).raise_for_status().json()

    async def says(self, text: str, **more: Any) -> dict[str, Any]:
        body = {"to": "assistant", "payload": {"text": text, **more.pop("payload", {})}, **more}
        answer = await self.client.post("/messages", json=body)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def clicks(self, question: dict[str, Any], option: str) -> dict[str, Any]:
        return await self.says(
            option, inReplyTo=question["id"], option=question["payload"]["quickReplies"].index(option)
        )

    async def sees(self, kind: str, holds: Holds = lambda _: True) -> dict[str, Any]:
        """The next event of that kind that is as described."""
        async for name, data in self._events:
            self.seen.append((name, data))
            if name == kind and holds(data):
                return data
        raise AssertionError("the stream ended")

    async def hears(self, text: str) -> dict[str, Any]:
        """The next message to the person that holds `text`."""
        event = await self.sees("message.created", lambda one: is_for_me(one) and text in words(one))
        return dict(event["message"])

    async def open_question(self) -> dict[str, Any]:
        (question,) = (await self.get("/snapshot"))["openQuestions"]
        return dict(question)


def is_for_me(event: dict[str, Any]) -> bool:
    return bool(event["message"]["to"] == "user")


def words(event: dict[str, Any]) -> str:
    return str(event["message"]["payload"].get("text", ""))


@asynccontextmanager
async def newcomer(folder: Path, monkeypatch: pytest.MonkeyPatch, lang: str) -> AsyncIterator[Newcomer]:
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    monkeypatch.setenv("LANG", lang)
    with ServeProcess(folder) as serving:
        assert any("a scripted tour answers" in line for line in serving.banner)
        where = read_address(folder / "data")
        assert where is not None
        token = (folder / "data" / "token").read_text().strip()
        async with (
            httpx.AsyncClient(
                base_url=f"{where.url}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=60
            ) as client,
            client.stream("GET", "/events") as stream,
        ):
            yield Newcomer(client, events_of(stream))
        assert serving.stop() == 0


async def events_of(stream: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in stream.aiter_lines():
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield name, json.loads(line.removeprefix("data:"))


@pytest.mark.slow
@pytest.mark.parametrize("chinese", [False, True], ids=["english", "chinese"])
async def test_a_newcomer_has_seen_everything_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chinese: bool
) -> None:
    def say(line: Translated) -> str:
        return line.text(chinese)

    began = time.monotonic()
    async with newcomer(tmp_path / "new", monkeypatch, "zh_CN.UTF-8" if chinese else "en_US.UTF-8") as me:
        await me.sees("hello")

        # It speaks first, and says what it is.
        welcome = await me.open_question()
        assert welcome["payload"]["text"] == say(script.WELCOME.then)

        # A quick reply, answered with the next ones within two seconds; what it asked for comes later.
        asked = time.monotonic()
        await me.clicks(welcome, say(script.DELAY.option))
        scheduled = await me.sees("delayed.scheduled")
        menu = await me.hears(say(script.DELAY.then))
        assert time.monotonic() - asked < patience(2)
        assert len(menu["payload"]["quickReplies"]) == 4 and (await me.get("/delayed"))["count"] == 1
        assert (await me.get(f"/messages/{welcome['id']}"))["answer"]["option"] == 0

        # A tool.
        await me.clicks(menu, say(script.TOOL.option))
        await me.sees("tool.ended", lambda one: one["name"] == "list_agents" and one["ok"])
        menu = await me.hears(say(script.TOOL.then))

        # An interruption: the plan is withdrawn, the words are heard.
        await me.clicks(menu, say(script.INTERJECTION.option))
        await me.sees("draft.delta")
        assert (await me.says("Stop!" if not chinese else "停！"))["state"] == "queued"
        withdrawn = await me.sees("queue.changed", lambda one: one.get("withdrawnCalls", 0) > 0)
        assert withdrawn["withdrawnCalls"] == 1
        menu = await me.hears(say(script.INTERRUPTED.then))

        # A picture for an agent that cannot see, passed on to one that can.
        files = {"file": ("chart.png", PNG, "image/png")}
        put = (await me.client.post("/artifacts", files=files)).raise_for_status().json()
        await me.says("", payload={"attachments": [{"artifactRef": put["artifactRef"]}]})
        passed_on = await me.sees("message.created", lambda one: one["message"]["to"] == "tour-seer")
        assert passed_on["message"]["from"] == "assistant"
        assert passed_on["message"]["payload"]["attachments"][0]["artifactRef"] == put["artifactRef"]
        menu = await me.hears("640 × 480")
        assert menu["from"] == "assistant" and say(script.SHOWN.then) in menu["payload"]["text"]

        # And how to go on with a real model.
        assert menu["payload"]["quickReplies"] == [say(script.SETUP.option)]
        await me.clicks(menu, say(script.SETUP.option))
        last = await me.hears("llmservices.json")
        assert "quickReplies" not in last["payload"]

        # What was asked for in the beginning has come, and not a moment early.
        arrived = await me.get(f"/messages/{scheduled['id']}")
        if arrived["state"] == "delayed":
            await me.sees("delayed.delivered")
            arrived = await me.get(f"/messages/{scheduled['id']}")
        assert arrived["deliveredAt"] >= arrived["deliverAt"] and not arrived["early"]
        assert not [data for name, data in me.seen if name == "problem"]
        assert time.monotonic() - began < patience(60)


@pytest.mark.slow
async def test_everything_of_the_tour_is_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with newcomer(tmp_path / "new", monkeypatch, "en_US.UTF-8") as me:
        agents = (await me.get("/agents"))["items"]
        assert {one["id"]: one["service"] for one in agents} == {"assistant": "tour", "tour-seer": "tour-sees"}
        assert {one["id"]: "vision" in one["capabilities"]["input"] for one in agents} == {
            "assistant": False,
            "tour-seer": True,
        }
        assert agents[1]["name"] == "Seer (tour)"
        services = (await me.get("/services"))["items"]
        assert [one["tour"] for one in services] == [True, True]
        assert all("(scripted)" in one["name"] for one in services)
        assert "script" in (await me.open_question())["payload"]["text"]
