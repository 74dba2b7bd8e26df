"""A phone: narrow, operated by touch, with a keyboard on the screen."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.panel import ui
from tests.panel.harness import PHONE, Panel, options_of
from tests.panel.words import Words

TOUCH: dict[str, Any] = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
KEYBOARD = 300
"""Pixels that the keyboard takes."""


async def show_keyboard(page: Page, height: int) -> None:
    """Let the keyboard cover the page as Safari does: only the visual viewport becomes smaller."""
    await page.evaluate(
        """height => {
          Object.defineProperty(visualViewport, 'height', { value: innerHeight - height, configurable: true });
          visualViewport.dispatchEvent(new Event('resize'));
        }""",
        height,
    )


async def bottom(page: Page) -> float:
    """The lower edge of the message box."""
    box = await page.locator(".composer").bounding_box()
    assert box is not None
    return box["y"] + box["height"]


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
async def test_a_conversation_by_touch_with_the_keyboard_on_the_screen(panel: Panel, locale: str) -> None:
    panel.server.script("Hello yourself", "Tea then")
    page = await panel.open("#/a/bob", locale=locale, **TOUCH)
    await page.locator('[aria-controls="side"]').tap()
    await ui.row(page, "ada").tap()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Ada")
    await page.locator(ui.COMPOSER).tap()
    await show_keyboard(page, KEYBOARD)
    assert await bottom(page) <= PHONE["height"] - KEYBOARD
    await page.keyboard.type("Hello")
    await page.locator(ui.SEND).tap()
    await expect(ui.messages(page).filter(has_text="Hello yourself")).to_be_in_viewport()
    await show_keyboard(page, 0)
    assert await bottom(page) > PHONE["height"] - KEYBOARD
    question = await panel.send_as_agent("Tea or coffee?", "Tea", "Coffee")
    await options_of(page, question).first.tap()
    await expect(ui.messages(page).filter(has_text="Tea then")).to_be_visible()
    assert await panel.texts() == ["Hello", "Tea"]
    assert await ui.sideways(page) == []


async def touch(page: Page, *steps: list[tuple[float, float]]) -> None:
    """Touch the screen with as many fingers as the first step has, and move them to the positions of the others."""
    session = await page.context.new_cdp_session(page)
    for at, fingers in enumerate(steps):
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(fingers)]
        kind = "touchMove" if at else "touchStart"
        await session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    await session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


async def test_fingers_move_and_zoom_the_organisation_graph_and_scroll_the_page_while_it_fits(
    panel: Panel, words: Words
) -> None:
    low = {"width": 390, "height": 440}
    page = await panel.open("#/org", locale=words.locale, **(TOUCH | {"viewport": low}))
    await page.get_by_role("button", name=words("org_graph"), exact=True).tap()
    await page.locator(".node").first.wait_for()
    graph = page.locator(".graph")
    scrolled = "() => Math.max(scrollY, ...[...document.querySelectorAll('main, main *')].map((one) => one.scrollTop))"
    box = await page.locator(".graph-frame").bounding_box()
    assert box is not None
    x, y = 195.0, min(box["y"] + 120, 400)
    up = [[(x, y - step * 12)] for step in range(10)]

    node = page.locator(".node rect").first
    before = await node.bounding_box()
    await touch(page, *([(x - 20 - step * 8, y), (x + 20 + step * 8, y)] for step in range(8)))
    after = await node.bounding_box()
    assert before is not None and after is not None
    assert after["width"] > before["width"] * 1.5

    zoomed = await graph.get_attribute("viewBox")
    await touch(page, *up)
    moved = await graph.get_attribute("viewBox")
    assert moved is not None and zoomed is not None
    assert moved.split()[2:] == zoomed.split()[2:]
    assert float(moved.split()[1]) > float(zoomed.split()[1])
    assert await page.evaluate(scrolled) == 0
    await page.get_by_test_id("zoom-fit").tap()
    await node.tap()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Seer")

    # Last, because the page goes on scrolling after the touch.
    await page.goto(f"{panel.url}/#/org")
    await graph.wait_for()
    fitted = await graph.get_attribute("viewBox")
    await touch(page, *up)
    await page.wait_for_function(f"() => ({scrolled})() > 0")
    assert await graph.get_attribute("viewBox") == fitted
