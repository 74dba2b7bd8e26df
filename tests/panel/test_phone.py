"""A phone: narrow, operated by touch, with a keyboard on the screen."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.panel import ui
from tests.panel.harness import PHONE, Panel, options_of

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
