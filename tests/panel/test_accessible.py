"""axe finds no violation in any state of the page: wide and narrow, light and dark (narrow and dark in full runs)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from coterie.errors import ConfigError
from coterie.testing import Calls, Says, Status
from tests.agent.stage import Bell, each
from tests.panel import ui
from tests.panel.colours import COLOURS
from tests.panel.conftest import Figure
from tests.panel.harness import PHONE, TIMEOUT_SECONDS, WIDE, Panel, fail_requests, without_model

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
CONTRAST = (
    "selectors => {"
    + COLOURS
    + """
  return selectors.map(selector => [selector, document.querySelector(selector)]).map(([selector, el]) =>
    el ? [el.outerHTML.slice(0, 120), ratio(inkOf(el), groundOf(el))] : [`not found again: ${selector}`, 0]
  ).filter(([, found]) => found < 4.5);
}"""
)
"""Axe does not decide on text that is partly covered; this script checks its contrast."""

Scene = Callable[[Panel, Page], Awaitable[None]]


COLOUR_RULES = ["color-contrast", "link-in-text-block"]
"""The rules whose result depends on the colours. A colour scheme changes nothing else."""


async def violations(page: Page, *, colours_only: bool = False) -> tuple[list[str], int]:
    """Violations found by axe and by the contrast check, and how many elements axe left undecided."""
    chosen = {"type": "rule", "values": COLOUR_RULES} if colours_only else {"type": "tag", "values": TAGS}
    axe = Axe("null") if await page.evaluate("() => 'axe' in window") else Axe()  # its script has half a megabyte
    found = await axe.run(page, options={"runOnly": chosen, "resultTypes": ["violations"]})
    problems = [
        f"{one['id']}: {node['target']} {node.get('failureSummary', '')[:200]}"
        for one in found.response["violations"]
        for node in one["nodes"]
    ]
    undecided = [
        node["target"][0]
        for one in found.response["incomplete"]
        if one["id"] == "color-contrast"
        for node in one["nodes"]
    ]
    faint = [f"contrast {ratio:.2f}: {what}" for what, ratio in await page.evaluate(CONTRAST, undecided)]
    return problems + faint, len(undecided)


async def empty(panel: Panel, page: Page) -> None:
    await page.goto(f"{panel.url}/#/a/bob")


async def talking(panel: Panel, page: Page) -> None:
    await panel.send_as_agent(
        "# Title\n\nSome *words*, `code`, a [link](https://example.com)\n\n```python\nprint(1)\n```\n\n- one\n- two"
    )
    await panel.send_as_agent(
        "Which?", "one", "two", "A long one that takes more than a line on a narrow phone, and then some more"
    )
    await expect(page.locator(".quick-reply-btn").first).to_be_visible()


async def answered(panel: Panel, page: Page) -> None:
    await talking(panel, page)
    await page.locator(".quick-reply-btn").first.click()
    await expect(page.locator('.quick-reply-btn[aria-pressed="true"]')).to_have_count(1)


async def failed(panel: Panel, page: Page) -> None:
    await talking(panel, page)
    panel.allow("Failed to load resource")
    await fail_requests(page, 503)
    await page.locator(".quick-reply-btn").first.click()
    await expect(page.locator(ui.TOAST)).to_be_visible()


async def at_work(panel: Panel, page: Page) -> None:
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "a"}), Calls("ring", {"name": "b"}))), "Done")
    await panel.society.send(to="ada", text="Ring", sender="bob")
    await asyncio.wait_for(Bell.rang.wait(), TIMEOUT_SECONDS)
    await ui.send(page, "An interjection")
    await expect(page.locator(ui.WAITING).first).to_be_attached()


async def attached(panel: Panel, page: Page) -> None:
    await page.set_input_files("input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"})
    await expect(page.locator(ui.CHIP)).to_be_visible()


async def stuck(panel: Panel, page: Page) -> None:
    panel.server.script(Status(401, "Incorrect API key provided", code="invalid_api_key"))
    await ui.send(page, "Hello")
    await panel.stage.state("ada", "blocked")
    await expect(page.get_by_text("rejected the key").first).to_be_visible()


def at(place: str, ready: str) -> Scene:
    async def go(panel: Panel, page: Page) -> None:
        await panel.send_as_agent("Which?", "one", "two")
        await panel.send_as_agent("From Bob", by="bob", to="ada")
        await panel.society.send(to="user", text="Later", sender="ada", delay_ms=3_600_000)
        await panel.society.artifacts.put(b"hello", "a.txt")
        await page.goto(f"{panel.url}/#/{place}")
        await expect(page.locator(ready).first).to_be_visible()

    return go


async def task(panel: Panel, page: Page) -> None:
    """A task that two agents work on, with its line, and then as a conversation."""
    Bell.may_end.clear()
    ring = Says(calls=(Calls("ring", {"name": "a"}),))
    ask = Says(calls=(Calls("send_message", {"to": "bob", "payload": {"text": "Ring"}}), Calls("ring", {"name": "a"})))
    panel.server.default = each(ada=[ask, "Asked", "Done"], bob=[ring, "Rang"])
    await ui.send(page, "Ring both")
    await expect(page.locator('[data-testid="task-line"]')).to_contain_text("2 agents working")
    await page.locator('[data-testid="task-link"]').click()
    await expect(page.locator('[data-testid="task-turn"]').first).to_be_visible()


async def task_line(panel: Panel, page: Page) -> None:
    await task(panel, page)
    await page.goto(f"{panel.url}/#/a/ada")
    await expect(page.locator('[data-testid="task-line"]')).to_be_visible()


async def waterfall(panel: Panel, page: Page) -> None:
    await task(panel, page)
    await page.locator('[data-testid="task-time"]').click()
    await page.get_by_text("Show as a table").click()
    await expect(page.locator("details[open] table")).to_be_visible()


async def tasks(panel: Panel, page: Page) -> None:
    await task(panel, page)
    await panel.send_as_agent("Which?", "one", by="seer")
    await page.goto(f"{panel.url}/#/tasks")
    await expect(page.locator('[data-testid="task"]')).to_have_count(2)


async def usage(panel: Panel, page: Page) -> None:
    await panel.stage.say("Hello")
    await panel.stage.heard()
    await page.goto(f"{panel.url}/#/tasks?view=usage")
    await page.get_by_text("Show as a table").click()
    await expect(page.locator("rect.usage-bar")).to_have_count(1)


async def budget(panel: Panel, page: Page) -> None:
    used = {"turns": 100, "inputTokens": 5000, "outputTokens": 200, "cost": 0.1, "modelMs": 90_000}
    facts = {"task": "t", "reason": "turns", "limit": 100, "about": "Ring", "agents": ["Ada", "Bob"], "used": used}
    await panel.send_as_agent("May it go on?", "Continue", "Stop", budget=facts)
    await expect(page.locator('[data-testid="budget"]')).to_be_visible()


async def away(panel: Panel, page: Page) -> None:
    await panel.stage.say("Hello", to="bob")
    await panel.stage.heard()
    await panel.send_as_agent("Which?", "one", by="seer")
    await page.evaluate("() => localStorage.setItem('coterie.awaySince', new Date(Date.now() - 9e5).toISOString())")
    await page.reload()
    await expect(page.locator('[data-testid="away"]')).to_be_visible()


async def palette(panel: Panel, page: Page) -> None:
    await page.keyboard.press("Control+k")
    await expect(page.get_by_role("option").first).to_be_visible()


async def shortcuts(panel: Panel, page: Page) -> None:
    await page.keyboard.press("Control+/")
    await expect(page.get_by_role("dialog")).to_be_visible()


async def graph(panel: Panel, page: Page) -> None:
    await page.goto(f"{panel.url}/#/org")
    await page.get_by_role("button", name="Graph").click()
    await expect(page.locator(".node").first).to_be_visible()


async def form(panel: Panel, page: Page) -> None:
    await page.goto(f"{panel.url}/#/setup")
    await page.get_by_role("button", name="Add a service").click()
    await expect(page.locator(".service-form")).to_be_visible()


async def message_menu(panel: Panel, page: Page) -> None:
    await talking(panel, page)
    await page.locator('[data-testid="message-menu"]').last.click()
    await expect(page.get_by_role("menu")).to_be_visible()


async def finding(panel: Panel, page: Page) -> None:
    await talking(panel, page)
    await page.keyboard.press("Control+f")
    await page.get_by_test_id("find").fill("words")
    await expect(page.get_by_test_id("find-count")).to_have_text("1 of 1")


async def send_later(panel: Panel, page: Page) -> None:
    await page.locator(ui.COMPOSER).fill("Later")
    await page.get_by_test_id("send-later").click()
    await page.get_by_test_id("when-repeat").select_option("custom")
    await expect(page.get_by_test_id("when-custom")).to_be_visible()


async def agents(panel: Panel, page: Page) -> None:
    await panel.society.definitions.change("ada", {"role": "Counter"})
    await panel.society.retire_agent("bob")
    await page.goto(f"{panel.url}/#/agents")
    await expect(page.get_by_test_id("undo")).to_have_count(2)


async def agent_form(panel: Panel, page: Page) -> None:
    await page.goto(f"{panel.url}/#/agents/ada/edit")
    await page.get_by_label("Only these").check()
    await expect(page.get_by_test_id("tool-ring")).to_be_visible()


async def agent_page(panel: Panel, page: Page) -> None:
    await page.goto(f"{panel.url}/#/agents/ada")
    await page.get_by_test_id("memory").locator("summary").click()
    await expect(page.get_by_test_id("memory").locator("li").first).to_be_visible()


async def team(panel: Panel, page: Page) -> None:
    await page.goto(f"{panel.url}/#/agents")
    await page.get_by_test_id("template").filter(has_text="Team of three").click()
    await expect(page.get_by_test_id("team-save")).to_be_visible()


async def dead_letters(panel: Panel, page: Page) -> None:
    await panel.society.pause("bob")
    await panel.society.send(to="bob", text="Keep me")
    await panel.society.terminate_agent("bob")
    await page.goto(f"{panel.url}/#/dead")
    await expect(page.get_by_test_id("dead-resend")).to_be_visible()


async def approval(panel: Panel, page: Page) -> None:
    panel.server.script(Says(calls=(Calls("dangerous", {"name": "x"}),)))
    await ui.send(page, "Do it")
    await expect(page.get_by_test_id("ask-back")).to_be_visible()


async def undelivered(panel: Panel, page: Page) -> None:
    """An undelivered message with its task line, then the notice about it in the inbox."""
    await page.goto(f"{panel.url}/#/a/bob")
    await panel.society.pause("bob")
    await ui.send(page, "Read me")
    await panel.society.terminate_agent("bob")
    await expect(page.get_by_test_id("task-line")).to_have_attribute("data-state", "failed")
    assert (await violations(page))[0] == []
    await page.goto(f"{panel.url}/#/inbox")
    await expect(page.locator(".screen")).to_contain_text("Not delivered")


def misconfigured(added: str, shown: str) -> Scene:
    """The banner about a configuration that has two problems, or is refused."""

    async def go(panel: Panel, page: Page) -> None:
        await panel.send_as_agent("Which?", "one", "two")
        file = panel.stage.folder / "coterie.toml"
        before = file.read_text()
        file.write_text(f"{before}\n{added}\n")
        try:
            await panel.society.reload()
        except ConfigError:
            file.write_text(before)  # at the end of a test its society is started again
        await expect(page.get_by_test_id("banner-configuration")).to_contain_text(shown)

    return go


async def start(panel: Panel, page: Page) -> None:
    """The first start: the card above the conversation, then its form."""
    await without_model(panel)
    await page.reload()
    await expect(page.get_by_test_id("start-card")).to_be_visible()
    assert (await violations(page))[0] == []
    await page.get_by_test_id("start-card").get_by_role("link").click()
    await expect(page.locator(".start-form")).to_be_visible()


SCENES: dict[str, Scene] = {
    "empty thread": empty,
    "open questions": talking,
    "answered": answered,
    "toast": failed,
    "at work": at_work,
    "attachment": attached,
    "blocked": stuck,
    "inbox": at("inbox", ".card"),
    "task line": task_line,
    "task": task,
    "task over time": waterfall,
    "tasks": tasks,
    "usage": usage,
    "budget question": budget,
    "while you were away": away,
    "timeline": at("timeline", ".timeline > li"),
    "organisation": at("org", ".org-row"),
    "graph": graph,
    "delayed": at("delayed", ".delayed-item"),
    "artifacts": at("artifacts", ".file-link"),
    "setup": at("setup", ".service"),
    "service form": form,
    "message menu": message_menu,
    "find": finding,
    "send later": send_later,
    "agents": agents,
    "agent form": agent_form,
    "agent page": agent_page,
    "start": start,
    "team": team,
    "dead letters": dead_letters,
    "approval": approval,
    "undelivered": undelivered,
    "problems of the configuration": misconfigured(
        '[agents.cat]\nname = "Cat"\nservice = "nowhere"\n[agents.dan]\nname = "Dan"\nservice = "nowhere"',
        "(and 1 more)",
    ),
    "refused configuration": misconfigured("[server", "cannot be read"),
    "palette": palette,
    "shortcuts": shortcuts,
}


@pytest.mark.check(23)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
async def test_axe_finds_no_violation(panel: Panel, scene: Scene, figure: Figure) -> None:
    page = await panel.open()
    await scene(panel, page)
    wide = await _found(page, WIDE, "light")
    dark = await _found(page, WIDE, "dark", colours_only=True)
    phone = await _found(page, PHONE, "light")
    figure(f"{wide[1] + dark[1] + phone[1]} places looked at again")
    assert (wide[0], dark[0], phone[0]) == ([], [], [])
    Bell.may_end.set()


@pytest.mark.full
@pytest.mark.check(23)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
async def test_axe_finds_no_violation_on_a_dark_phone(panel: Panel, scene: Scene) -> None:
    page = await panel.open(color_scheme="dark")
    await scene(panel, page)
    assert (await _found(page, PHONE, "dark"))[0] == []
    await page.get_by_test_id("menu").evaluate("one => one.click()")  # the drawer covers part of the page
    await expect(page.locator("body")).to_have_attribute("data-slide", "side")
    assert (await _found(page, PHONE, "dark"))[0] == []
    Bell.may_end.set()


async def _found(page: Page, size: Any, scheme: Any, *, colours_only: bool = False) -> tuple[list[str], int]:
    await page.set_viewport_size(size)
    await page.emulate_media(color_scheme=scheme)
    problems, undecided = await violations(page, colours_only=colours_only)
    return [*problems, *[f"sideways {one}" for one in await ui.sideways(page)]], undecided
