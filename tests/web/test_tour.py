"""The tour of a society without a configured model, over HTTP."""

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
from tests.faults.harness import scaled_timeout

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8) + (640).to_bytes(4) + (480).to_bytes(4) + bytes(16)
Holds = Callable[[dict[str, Any]], bool]


class Visitor:
    """A client that sends messages and reads all events in order."""

    def __init__(self, client: httpx.AsyncClient, events: AsyncIterator[tuple[str, dict[str, Any]]]) -> None:
        self.client, self._events = client, events
        self.seen: list[tuple[str, dict[str, Any]]] = []

    async def get(self, path: str, **parameters: Any) -> Any:
        return (await self.client.get(path, params=parameters)).raise_for_status().json()

    async def send(self, text: str, **more: Any) -> dict[str, Any]:
        body = {"to": "assistant", "payload": {"text": text, **more.pop("payload", {})}, **more}
        answer = await self.client.post("/messages", json=body)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def choose(self, question: dict[str, Any], option: str) -> dict[str, Any]:
        return await self.send(
            option, inReplyTo=question["id"], option=question["payload"]["quickReplies"].index(option)
        )

    async def next_event(self, kind: str, holds: Holds = lambda _: True) -> dict[str, Any]:
        """Return the next event of `kind` for which `holds` is true."""
        async for name, data in self._events:
            self.seen.append((name, data))
            if name == kind and holds(data):
                return data
        raise AssertionError("the stream ended")

    async def next_message(self, text: str) -> dict[str, Any]:
        """Return the next message to the person that contains `text`."""
        event = await self.next_event("message.created", lambda event: is_for_person(event) and text in text_of(event))
        return dict(event["message"])

    async def open_question(self) -> dict[str, Any]:
        (question,) = (await self.get("/snapshot"))["openQuestions"]
        return dict(question)


def is_for_person(event: dict[str, Any]) -> bool:
    return bool(event["message"]["to"] == "user")


def text_of(event: dict[str, Any]) -> str:
    return str(event["message"]["payload"].get("text", ""))


@asynccontextmanager
async def visitor(folder: Path, monkeypatch: pytest.MonkeyPatch, lang: str) -> AsyncIterator[Visitor]:
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
            yield Visitor(client, events_of(stream))
        assert serving.stop() == 0


async def events_of(stream: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in stream.aiter_lines():
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield name, json.loads(line.removeprefix("data:"))


@pytest.mark.slow
@pytest.mark.parametrize("chinese", [False, pytest.param(True, marks=pytest.mark.full)], ids=["english", "chinese"])
async def test_the_whole_tour_takes_less_than_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chinese: bool
) -> None:
    def say(line: Translated) -> str:
        return line.text(chinese)

    began = time.monotonic()
    async with visitor(tmp_path / "new", monkeypatch, "zh_CN.UTF-8" if chinese else "en_US.UTF-8") as client:
        await client.next_event("hello")

        # The guide sends the first message.
        welcome = await client.open_question()
        assert welcome["payload"]["text"] == say(script.WELCOME.then)

        # A quick reply is answered within two seconds; the delayed message that it asks for comes later.
        asked = time.monotonic()
        await client.choose(welcome, say(script.DELAY.option))
        scheduled = await client.next_event("delayed.scheduled")
        menu = await client.next_message(say(script.DELAY.then))
        assert time.monotonic() - asked < scaled_timeout(2)
        assert len(menu["payload"]["quickReplies"]) == 5 and (await client.get("/delayed"))["count"] == 1
        assert (await client.get(f"/messages/{welcome['id']}"))["answer"]["option"] == 0

        # A tool call.
        await client.choose(menu, say(script.TOOL.option))
        await client.next_event("tool.ended", lambda event: event["name"] == "list_agents" and event["ok"])
        menu = await client.next_message(say(script.TOOL.then))

        # A task of two agents: the guide asks the second one and passes on its answer.
        sent = await client.choose(menu, say(script.ASK.option))
        await client.next_event("message.created", lambda event: event["message"]["to"] == "tour-seer")
        menu = await client.next_message(say(script.ANSWERED.then))
        assert menu["task"] == sent["task"]
        task = await client.get(f"/tasks/{sent['task']}")
        assert {node["agent"] for node in task["nodes"] if node["kind"] == "turn"} == {"assistant", "tour-seer"}

        # An interruption: the plan is withdrawn and the message is answered.
        await client.choose(menu, say(script.INTERJECTION.option))
        await client.next_event("draft.delta")
        assert (await client.send("Stop!" if not chinese else "停！"))["state"] == "queued"
        withdrawn = await client.next_event("queue.changed", lambda event: event.get("withdrawnCalls", 0) > 0)
        assert withdrawn["withdrawnCalls"] == 1
        menu = await client.next_message(say(script.INTERRUPTED.then))

        # An agent without vision forwards a picture to event with vision.
        files = {"file": ("chart.png", PNG, "image/png")}
        put = (await client.client.post("/artifacts", files=files)).raise_for_status().json()
        await client.send("", payload={"attachments": [{"artifactRef": put["artifactRef"]}]})
        passed_on = await client.next_event("message.created", lambda event: event["message"]["to"] == "tour-seer")
        assert passed_on["message"]["from"] == "assistant"
        assert passed_on["message"]["payload"]["attachments"][0]["artifactRef"] == put["artifactRef"]
        menu = await client.next_message("640 × 480")
        assert menu["from"] == "assistant" and say(script.SHOWN.then) in menu["payload"]["text"]

        # The setup of a real model.
        assert menu["payload"]["quickReplies"] == [say(script.SETUP.option)]
        await client.choose(menu, say(script.SETUP.option))
        last = await client.next_message("llmservices.json")
        assert "quickReplies" not in last["payload"]

        # The delayed message was delivered and was not early.
        arrived = await client.get(f"/messages/{scheduled['id']}")
        if arrived["state"] == "delayed":
            await client.next_event("delayed.delivered")
            arrived = await client.get(f"/messages/{scheduled['id']}")
        assert arrived["deliveredAt"] >= arrived["deliverAt"] and not arrived["early"]
        assert not [data for name, data in client.seen if name == "problem"]
        assert time.monotonic() - began < scaled_timeout(60)


@pytest.mark.slow
async def test_agents_and_services_of_the_tour_are_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with visitor(tmp_path / "new", monkeypatch, "en_US.UTF-8") as client:
        agents = (await client.get("/agents"))["items"]
        assert {agent["id"]: agent["service"] for agent in agents} == {"assistant": "tour", "tour-seer": "tour-sees"}
        assert {agent["id"]: "vision" in agent["capabilities"]["input"] for agent in agents} == {
            "assistant": False,
            "tour-seer": True,
        }
        assert agents[1]["name"] == "Seer (tour)"
        services = (await client.get("/services"))["items"]
        assert [service["tour"] for service in services] == [True, True]
        assert all("(scripted)" in service["name"] for service in services)
        assert "script" in (await client.open_question())["payload"]["text"]
