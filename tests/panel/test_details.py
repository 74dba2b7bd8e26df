"""What a demanding eye sees: keys by their right names, nothing in the way of a finger, clocks that agree."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Page, expect

from coterie.testing import Calls, Says
from tests.panel import ui
from tests.panel.room import PHONE, WIDE, Room

MAC = "Object.defineProperty(Navigator.prototype, 'platform', {get: () => 'MacIntel'})"
NARROW = {"width": 360, "height": 740}
COVERED = """() => {
  const button = document.querySelector('.jump').getBoundingClientRect();
  const thread = document.querySelector('.thread').getBoundingClientRect();
  const shown = (el) => [...el.getClientRects()].some((box) => box.bottom > thread.top && box.top < thread.bottom);
  const over = (el) => [...el.getClientRects()].some((box) => box.left < button.right && box.right > button.left
    && box.top < button.bottom && Math.min(box.bottom, thread.bottom) > button.top);
  const found = [...document.querySelectorAll('.thread :is(button, a, summary)')].filter(shown);
  return [found.length, found.filter(over).map((el) => el.textContent)]; }"""
CLOCKS = """async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const apart = [];
  for (const start = performance.now(); performance.now() - start < 3_000;) {
    for (const place of ['#/inbox', '#/delayed']) {
      location.hash = place;
      while (!document.querySelector(`[data-testid="screen-${place.slice(2)}"] > *`)) await frame();
    }
    const shown = [...document.querySelectorAll('.countdown')].map((el) => el.textContent);
    if (new Set(shown).size > 1) apart.push(shown.join(' '));
  }
  return [document.querySelectorAll('.countdown').length, apart]; }"""


@pytest.mark.parametrize(("mac", "name", "key", "other"), [(True, "⌘", "Meta", "Control"), (False, "Ctrl", "Control", "Meta")])
async def test_the_key_that_is_shown_is_the_one_of_this_board_and_works(
    panel: Room, mac: bool, name: str, key: str, other: str
) -> None:
    context = await panel.browser()
    await context.add_init_script(MAC if mac else "")
    page = await panel.open(context=context)
    await expect(page.locator('[data-testid="search"] kbd')).to_have_text(f"{name} K")
    # On a Mac the other one deletes to the end of the line.
    await page.locator(ui.COMPOSER).focus()
    await page.keyboard.press(f"{other}+k")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    await page.keyboard.press(f"{key}+k")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press(f"{key}+/")
    sheet = page.get_by_role("dialog")
    await expect(sheet).to_contain_text(f"{name}+K")
    await expect(sheet).to_contain_text("⌥+Q" if mac else "Alt+Q")
    assert (await sheet.get_by_text("Ctrl").count() == 0) is mac


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_the_way_to_the_newest_lies_over_nothing_that_can_be_pressed(panel: Room, size: Any) -> None:
    for n in range(16):
        await panel.tell(f"Which of these, {n}?\n\n```\ncode\n```", "The weather, as every morning", "My calendar of today")
    page = await panel.open(viewport=size)
    await expect(page.locator(".quick-reply-btn").first).to_be_visible()
    await page.locator(ui.FEED).hover()
    jump = page.locator('[data-testid="jump"]')
    met = 0
    for _ in range(20):
        await page.mouse.wheel(0, 45)
        await page.evaluate("() => new Promise(requestAnimationFrame)")
        if await jump.is_visible():
            met += 1
            there, covered = await page.evaluate(COVERED)
            assert there > 0
            assert covered == []
    assert met > 5
    await jump.click()
    await expect(jump).to_be_hidden()
    await expect(page.locator(".quick-reply-btn").last).to_be_in_viewport()


async def test_what_deletes_looks_like_it_and_stays_so_under_the_mouse(panel: Room) -> None:
    page = await panel.open("#/setup")
    delete = page.get_by_role("button", name="Delete main")
    danger = await _colour(page, "var(--danger)")
    await expect(delete).to_have_css("color", danger)
    await delete.click()
    sure = page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True)
    await expect(sure).to_have_css("color", danger)
    await sure.hover()
    await expect(sure).to_have_css("color", danger)


@pytest.mark.parametrize("width", [360, 768])
async def test_what_a_service_can_do_is_read_without_scrolling_sideways(panel: Room, width: int) -> None:
    page = await panel.open("#/setup", viewport={"width": width, "height": 900})
    table = page.locator(".table-frame")
    await expect(table).to_contain_text("in + out")
    await expect(table).to_contain_text("text")
    assert await table.evaluate("el => el.scrollWidth <= el.clientWidth")


async def test_an_empty_conversation_begins_with_what_follows_from_the_role(panel: Room) -> None:
    role = {"name": "proof-reader", "prompt": "You read proofs."}
    made = {"role": "proof-reader", "name": "Pia", "id": "pia"}
    panel.server.script(Says(calls=(Calls("create_role", role), Calls("spawn_agent", made))), "Done")
    await panel.tell("Find somebody who reads proofs", by="bob", to="ada")
    await panel.stage.state("ada", "idle")
    page = await panel.open("#/a/pia", viewport=PHONE)
    lines = page.locator(".starter")
    await expect(lines).to_have_text(
        ["What can you do?", "As proof-reader, what do you need from me to begin?", "What has Ada asked you to do?"]
    )
    await lines.nth(2).click()
    await expect(page.locator(ui.COMPOSER)).to_have_value("What has Ada asked you to do?")


async def test_two_countdowns_to_one_moment_never_differ(panel: Room) -> None:
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=60_000)
    page = await panel.open("#/delayed", viewport={"width": 1440, "height": 900})
    await expect(page.locator(".countdown")).to_have_count(2)
    there, apart = await page.evaluate(CLOCKS)
    assert there == 2
    assert apart == []


async def _colour(page: Page, name: str) -> str:
    found: str = await page.evaluate(
        """name => { const el = document.createElement('i'); el.style.color = name; document.body.append(el);
            const colour = getComputedStyle(el).color; el.remove(); return colour; }""",
        name,
    )
    return found
