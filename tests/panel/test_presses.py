"""A press on an element of a list becomes a click, although the list changes before the button is released."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Locator, Page, expect

from coterie.testing import Calls, Says
from tests.agent.stage import Bell
from tests.panel.harness import Panel, eventually
from tests.panel.words import Words


@asynccontextmanager
async def pressed(page: Page, element: Locator) -> AsyncIterator[None]:
    """Hold the button of the mouse down on an element."""
    box = await element.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + min(20, box["width"] / 2), box["y"] + box["height"] / 2)
    await page.mouse.down()
    yield
    await page.mouse.up()


async def test_a_press_on_a_task_survives_the_end_of_another_one(panel: Panel, words: Words) -> None:
    Bell.may_end.clear()
    panel.server.default = Says(calls=(Calls("ring", {"name": "bell"}),))
    other = await panel.stage.say("Ring twice", to="bob")
    sent = await panel.stage.say("Ring it")
    page = await panel.open("#/tasks", locale=words.locale)
    await expect(page.get_by_role("heading", name=words("tasksWorking", n=2))).to_be_visible()
    async with pressed(page, page.locator(f'[data-task="{sent}"] .item-text')):
        await panel.society.stop_task(other)
        await expect(page.get_by_role("heading", name=words("tasksEnded", n=1))).to_be_visible()
    await expect(page).to_have_url(re.compile(f"#/tasks/{sent}$"))
    await panel.society.stop_task(sent)


async def test_a_press_in_the_timeline_survives_a_new_message(panel: Panel) -> None:
    panel.server.script(Says(calls=(Calls("look", {"name": "bell"}),)), "Done")
    await panel.stage.say("Look")
    await panel.stage.heard()
    page = await panel.open("#/timeline?kind=tool")
    details = page.get_by_test_id("run").locator("details").first
    async with pressed(page, details.locator("summary")):
        async with page.expect_response(lambda response: "/runs?" in response.url):
            await panel.send_as_agent("Meanwhile")
        await page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
    await expect(details).to_have_attribute("open", "")


@pytest.mark.parametrize("view", ["org_tree", "org_graph"])
async def test_a_press_in_the_organisation_survives_a_change_of_the_agents(
    panel: Panel, words: Words, view: str
) -> None:
    page = await panel.open("#/org", locale=words.locale)
    await page.get_by_role("button", name=words(view), exact=True).click()
    rows = page.locator(".org [data-agent], .org .node")
    await expect(rows).to_have_count(3)
    async with pressed(page, rows.filter(has_text="Ada").locator(".org-name, .node-name")):
        await panel.society.pause("ada")
        await panel.society.pause("bob")
        await expect(rows.filter(has_text=words("paused"))).to_have_count(2)
    await expect(page).to_have_url(re.compile("#/a/ada$"))


async def test_a_press_in_the_inspector_survives_a_change_of_the_agent(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    inspector = page.locator(".inspector-body")
    async with pressed(page, inspector.locator('a[href="#/timeline?agent=ada"]')):
        await panel.society.pause("ada")
        await expect(inspector.locator(".about-facts")).to_contain_text(words("paused"))
    await expect(page).to_have_url(re.compile("#/timeline"))


async def test_the_inspector_does_not_react_to_other_agents(panel: Panel) -> None:
    page = await panel.open()
    await page.evaluate(
        """() => { window.changes = 0;
            const watch = new MutationObserver(() => { changes += 1; });
            for (const part of document.querySelectorAll('.about, .about-facts, .about-links'))
                watch.observe(part, { childList: true, subtree: true, characterData: true }); }"""
    )
    await panel.society.pause("bob")
    await eventually(lambda: _is_paused(page))
    assert await page.evaluate("() => changes") == 0


async def _is_paused(page: Page) -> bool:
    return "is-paused" in str(await page.get_by_test_id("agent-bob").get_attribute("class"))
