"""Selectors of the panel."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Locator, Page

COMPOSER = "#composer"
SEND = '[data-testid="send"]'
CHIP = '[data-testid="attachment"]'
TOAST = ".toast"
WAITING = '[data-testid="waiting"]'
DRAFT = '[data-testid="draft"]'
CONNECTION = '[data-testid="connection"]'
STOP = '[data-testid="stop"]'
FEED = "[role=feed]"


def message(page: Page, message_id: str) -> Locator:
    return page.locator(f'article[data-message-id="{message_id}"]')


def messages(page: Page) -> Locator:
    return page.locator(f"{FEED} article[data-message-id]")


def row(page: Page, agent: str) -> Locator:
    return page.locator(f'[data-testid="agent-{agent}"]')


def state_line(page: Page, message_id: str) -> Locator:
    return page.locator(f'[id="qr-{message_id}"]')


async def send(page: Page, text: str) -> None:
    await page.locator(COMPOSER).fill(text)
    await page.locator(COMPOSER).press("Enter")


async def to_end(page: Page) -> None:
    await page.locator(FEED).evaluate(
        "feed => { const box = feed.closest('.scroller') ?? feed.parentElement; box.scrollTop = box.scrollHeight; }"
    )


async def sideways(page: Page) -> list[str]:
    """Elements that scroll horizontally, without tables, graphs and code, which may."""
    found: list[Any] = await page.evaluate(
        """() => [document.scrollingElement, ...document.querySelectorAll('body *')]
            .filter(el => el.scrollWidth > el.clientWidth + 1 && el.clientWidth > 1)
            .filter(el => el === document.scrollingElement || /auto|scroll/.test(getComputedStyle(el).overflowX))
            .filter(el => !el.matches('.table-frame, .graph-frame, pre, .md-table, .palette-list'))
            .map(el => `${el.tagName}.${el.className} ${el.scrollWidth} > ${el.clientWidth}`)"""
    )
    return [str(element) for element in found]
