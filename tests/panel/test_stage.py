from __future__ import annotations

from tests.panel.room import Room


async def test_a_browser_with_the_link_gets_the_shell(panel: Room) -> None:
    context = await panel.browser()
    page = await context.new_page()
    await page.goto(panel.url)
    assert (await page.title()).endswith("Coterie")
