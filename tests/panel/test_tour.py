"""The tour in the panel, from the first quick reply to the setup page, without errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from coterie.cli.server import greet
from coterie.tour import script as script
from coterie.tour.script import Translated
from tests.panel import ui
from tests.panel.harness import open_panel

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8) + (640).to_bytes(4) + (480).to_bytes(4) + bytes(16)
DROP = """bytes => {
    const carried = new DataTransfer();
    carried.items.add(new File([new Uint8Array(bytes)], 'chart.png', {type: 'image/png'}));
    const event = new DragEvent('drop', {dataTransfer: carried, bubbles: true, cancelable: true});
    document.querySelector('#composer').dispatchEvent(event); }"""
AT_WORK = {False: "is working", True: "在工作"}


def says(page: Page, text: str) -> Locator:
    """The newest message that contains the text."""
    return ui.messages(page).filter(has_text=text).last


@pytest.mark.parametrize("chinese", [False, pytest.param(True, marks=pytest.mark.full)], ids=["english", "chinese"])
async def test_the_whole_tour_works_in_the_panel(browser: Browser, tmp_path: Path, chinese: bool) -> None:
    def shown(words: Translated) -> str:
        return words.text(chinese).split("`")[0]  # the rest is code, which is rendered differently

    async with open_panel(tmp_path, browser, agents="") as panel:
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": []}))
        await panel.society.reload()
        await greet(panel.society, {"LANG": "zh_CN.UTF-8" if chinese else "en_US.UTF-8"})
        page = await panel.open("", locale="zh-CN" if chinese else "en-US")
        await expect(page.locator('[data-testid="title"]')).to_have_text("Assistant")
        await expect(ui.row(page, "tour-seer")).to_contain_text("tour")

        await ui.send(page, "你好" if chinese else "Hello")
        await expect(says(page, shown(script.HELLO.then))).to_be_visible()
        await expect(ui.messages(page).filter(has_text=shown(script.WELCOME.then))).to_have_count(1)

        async def click(scene: script.Scene) -> None:
            await page.locator(
                ".quick-reply-btn:not([aria-disabled=true])", has_text=scene.option.text(chinese)
            ).click()

        await click(script.DELAY)
        await expect(says(page, shown(script.DELAY.then))).to_be_visible()
        await click(script.ASK)
        await expect(page.locator('[data-testid="task-line"]').last).to_contain_text(AT_WORK[chinese])
        await expect(says(page, shown(script.ANSWERED.then))).to_be_visible()
        await page.locator('[data-testid="task-line"] a').last.click()
        await expect(page.locator('[data-testid="task-turn"]', has_text="Seer (tour)")).to_be_visible()
        await page.go_back()
        await click(script.INTERJECTION)
        await expect(page.locator(ui.DRAFT)).to_be_visible()
        await ui.send(page, "停！" if chinese else "Stop!")
        await expect(says(page, shown(script.INTERRUPTED.then))).to_be_visible()
        await expect(page.locator('.has-withdrawn, [data-state="withdrawn"]').first).to_be_visible()

        await page.evaluate(DROP, list(PNG))
        await expect(page.locator(ui.CHIP)).to_contain_text("chart.png")
        await page.locator(ui.COMPOSER).press("Enter")
        await expect(says(page, "640 × 480")).to_be_visible()
        history = [row.message for row in await panel.society.store.history("tour-seer") if row.message]
        asked = [message for message in history if "attachments" in message.payload]
        assert [(one.sender, one.payload["attachments"][0]["filename"]) for one in asked] == [
            ("assistant", "chart.png")
        ]

        await expect(says(page, script.DELAY.arguments["payload"]["text"].text(chinese))).to_be_visible()
        await click(script.SETUP)
        await expect(says(page, shown(script.SETUP.then))).to_be_visible()
        await page.get_by_test_id("start-card").get_by_role("link").click()
        await page.locator(".start a[href='#/setup']").click()
        await expect(page.locator(".setup")).to_be_visible()
        await expect(page.locator('[data-service="tour-sees"] h3 .tag')).to_be_visible()
        await expect(page.locator(ui.TOAST)).to_have_count(0)
        assert await panel.errors() == []
