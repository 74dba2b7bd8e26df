"""An answer that the person's next message ends stays visible as withdrawn."""

from __future__ import annotations

from pathlib import Path

from playwright.async_api import Browser, expect

from tests.agent.held_answer import HeldAnswer
from tests.panel import ui
from tests.panel.harness import AGENTS, open_panel

STREAM = '[interruption]\ninterrupt = "stream"\n'


async def test_a_cut_answer_is_shown_as_withdrawn_before_the_message_that_ended_it(
    browser: Browser, tmp_path: Path
) -> None:
    async with open_panel(tmp_path, browser, agents=STREAM + AGENTS) as panel:
        panel.server.script(HeldAnswer("Once upon <b>a</b> time"), "As you like.")
        page = await panel.open()
        await ui.send(page, "A story")
        await expect(page.get_by_test_id("draft")).to_contain_text("Once upon")
        await ui.send(page, "No, a poem")
        await expect(page.get_by_text("As you like.").first).to_be_visible()
        for _ in ("live", "after a reload"):
            withdrawn = page.get_by_test_id("withdrawn")
            await expect(withdrawn).to_contain_text("Once upon <b>a</b> time")
            await expect(withdrawn).to_contain_text("Stopped by a newer message")
            await expect(page.get_by_test_id("draft")).to_have_count(0)
            shown = await page.locator(".feed article").all_inner_texts()
            order = [next(n for n, text in enumerate(shown) if part in text) for part in
                     ("A story", "Once upon", "No, a poem", "As you like.")]  # fmt: skip
            assert order == sorted(order)
            await page.reload()
            await page.wait_for_selector("[data-ready]")
        timeline = await panel.open("#/timeline", locale="zh-CN")
        await expect(timeline.get_by_text("中断的回答")).to_be_visible()
        assert await panel.errors() == []


async def test_an_answer_cut_while_the_page_is_offline_is_not_shown_as_streaming(
    browser: Browser, tmp_path: Path
) -> None:
    async with open_panel(tmp_path, browser, agents=STREAM + AGENTS) as panel:
        panel.server.script(HeldAnswer("Once upon a time"), "As you like.")
        page = await panel.open()
        panel.allow("Failed to load resource|ERR_|net::|dynamically imported")
        await ui.send(page, "A story")
        await expect(page.get_by_test_id("draft")).to_contain_text("Once upon")
        await page.context.set_offline(True)
        panel.drop_streams()
        await expect(page.locator(ui.CONNECTION)).to_have_text("Offline. You can keep writing.")
        await panel.stage.say("No, a poem")
        await panel.stage.heard()
        await page.context.set_offline(False)
        await expect(page.get_by_text("As you like.").first).to_be_visible()
        await expect(page.get_by_test_id("draft")).to_have_count(0)
        await expect(page.get_by_test_id("withdrawn")).to_contain_text("Once upon a time")
        await expect(ui.row(page, "ada")).to_contain_text("As you like.")
        assert await panel.errors() == []
