"""The path of a newcomer: connect a model, create a team of three, ask, see the task, stop it.

The model is a server on loopback. `./dev screenshots` takes pictures on the way, `test_start.py` checks it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from playwright.async_api import Page, expect

from coterie.testing import Calls, ModelServer, Says
from coterie.testing.model_server import ReceivedRequest, Reply
from tests.panel import ui
from tests.panel.harness import Panel, without_model

KEY = "sk-newcomer-0123456789"
WORDS = {
    "en-US": {
        "count": "Models offered: 2",
        "team": "Team of three",
        "lead": "Lead",
        "question": "Which of our three suppliers is the best choice for next year?",
        "plan": "I divide this: facts first, then a short recommendation.",
        "tasks": ("Compare price, delivery time and complaints.", "Prepare the outline of a recommendation."),
        "begun": "So far: all three deliver within",
        "stopped": "stopped",
    },
    "zh-CN": {
        "count": "可用模型：2",
        "team": "三人团队",
        "lead": "组长",
        "question": "我们的三家供应商里，明年选哪一家最好？",
        "plan": "我来分工：先收集事实，再写一份简短的建议。",
        "tasks": ("比较价格、交货时间和投诉。", "准备建议的提纲。"),
        "begun": "目前的结果：三家都能在",
        "stopped": "已停止",
    },
}
Shot = Callable[[Page, str], Awaitable[None]]


@dataclass
class Newcomer:
    """Walks the path in one page. `shot` is called with the name of each step."""

    panel: Panel
    locale: str
    shot: Shot | None = None
    typed: list[str] = field(default_factory=list)
    """Everything that was entered by keyboard."""
    seconds: float = 0
    """How long the path took."""

    async def walk(self) -> None:
        words = WORDS[self.locale]
        await without_model(self.panel)
        async with ModelServer(models={"small", "large"}, api_key=KEY) as model:
            page = await self.panel.open(locale=self.locale)
            began = time.monotonic()
            await self._connect(page, model.base_url, str(words["count"]))
            await self._create_team(page, str(words["team"]), str(words["lead"]))
            model.default = _team_at_work(await self._ids(str(words["lead"])), words)
            await self._type(page, ui.COMPOSER, str(words["question"]))
            await page.locator(ui.COMPOSER).press("Enter")
            line = page.locator('[data-testid="task-line"]').last
            await expect(line).to_contain_text(re.compile("3"))
            await self._take(page, "ask")
            await line.get_by_test_id("task-link").click()
            await expect(page.get_by_test_id("task-message")).to_have_count(3)
            await self._take(page, "task")
            await page.get_by_test_id("task-stop").first.click()
            await page.locator("dialog[open] .danger").click()
            await expect(page.get_by_test_id("task-state")).to_contain_text(str(words["stopped"]))
            self.seconds = time.monotonic() - began
            await self._take(page, "stop")
            assert model.refused == []

    async def _connect(self, page: Page, url: str, count: str) -> None:
        await page.get_by_test_id("start-card").get_by_role("link").click()
        await page.locator(".start-form select").first.select_option("other")
        await self._type(page, '[data-testid="start-url"]', url)
        await self._type(page, '[data-testid="start-key"]', KEY)
        await page.get_by_test_id("start-key").press("Tab")
        await expect(page.get_by_test_id("models-status")).to_have_text(count)
        await page.get_by_test_id("models").select_option("small")
        await self._take(page, "connect")
        await page.get_by_test_id("start-save").click()
        await expect(page.get_by_test_id("start-connected")).to_be_visible()

    async def _create_team(self, page: Page, template: str, lead: str) -> None:
        await page.get_by_test_id("template").filter(has_text=template).click()
        await expect(page.get_by_test_id("team-save")).to_be_visible()
        await self._take(page, "team")
        await page.get_by_test_id("team-save").click()
        await expect(page.locator('[data-testid="title"]')).to_have_text(lead)

    async def _ids(self, lead: str) -> list[str]:
        """The ids of the team, that of its lead first."""
        agents = await self.panel.society.store.agents()
        team = [agent for agent in agents if agent.kind == "agent" and agent.id not in ("ada", "bob", "seer")]
        return [agent.id for agent in sorted(team, key=lambda agent: (agent.name != lead, agent.id))]

    async def _type(self, page: Page, selector: str, text: str) -> None:
        self.typed.append(text)
        await page.locator(selector).fill(text)

    async def _take(self, page: Page, name: str) -> None:
        if self.shot:
            await self.shot(page, name)


def _team_at_work(ids: list[str], words: Mapping[str, object]) -> Callable[[ReceivedRequest], Reply]:
    """The lead gives both their tasks; both are at work until they are stopped."""
    lead, *others = ids
    tasks = words["tasks"]
    assert isinstance(tasks, tuple)
    sends = tuple(
        Calls("send_message", {"to": to, "payload": {"text": text}}) for to, text in zip(others, tasks, strict=True)
    )
    never = asyncio.Event()
    has_planned = False

    def answer(request: ReceivedRequest) -> Reply:
        nonlocal has_planned
        asking = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
        if asking and asking[1] == lead and not has_planned:
            has_planned = True
            return Says(text=str(words["plan"]), calls=sends)
        return Says(text=str(words["begun"]), gate=never)

    return answer
