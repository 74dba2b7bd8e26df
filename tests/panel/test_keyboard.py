"""The page without a mouse: all tasks, visible focus, and a focus that is kept."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import FileChooser, Page, Route, expect

from coterie.testing import Says
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.colours import COLOURS
from tests.panel.conftest import Figure
from tests.panel.harness import PHONE, WIDE, Panel, eventually
from tests.panel.test_conversation import PNG, at_work

RING = (
    "() => {"
    + COLOURS
    + """
  const el = document.activeElement;
  if (el === document.body) return ['BODY', 0, 0, true];
  const boxed = el.matches('.composer-text') ? el.parentElement : el; // the ring is around the whole box
  const style = getComputedStyle(boxed);
  const width = style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth);
  // A ring drawn inside lies on the element itself, one outside on what is behind it.
  const ground = groundOf(parseFloat(style.outlineOffset) < 0 ? boxed : boxed.parentElement);
  const box = el.getBoundingClientRect();
  const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return [el.outerHTML.slice(0, 160), width, ratio(rgb(style.outlineColor), ground), el.contains(hit)];
}"""
)
WORST = 3.0


async def ringed(page: Page) -> list[Any]:
    """Check that the focused element has a visible ring and is not covered."""
    stop: list[Any] = await page.evaluate(RING)
    assert stop[0] != "BODY"
    assert stop[1] >= 2, stop
    assert stop[2] >= WORST, stop
    assert stop[3], stop
    return stop


async def focus_stops(page: Page, place: str) -> dict[str, float]:
    """Press Tab until the focus comes round; return the contrast of the ring at each stop."""
    stops: dict[str, float] = {}
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await page.evaluate("() => document.activeElement === document.body"):
            break
        stop = await ringed(page)
        again = "place => { const e = document.activeElement, was = e.__seen; e.__seen = place; return was === place; }"
        if await page.evaluate(again, place):
            break
        stops[stop[0]] = stop[2]
    return stops


@pytest.mark.check(25)
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
async def test_every_focus_stop_has_a_visible_ring(panel: Panel, figure: Figure, scheme: Any) -> None:
    await panel.send_as_agent("Which?", "one", "two")
    await panel.send_as_agent("```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | [two](https://example.com) |")
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=3_600_000)
    await panel.society.artifacts.put(b"hello", "a.txt")
    lowest, count = 21.0, 0
    for size in (WIDE, PHONE):
        page = await panel.open(color_scheme=scheme, viewport=size)
        for place in ("a/ada", "inbox", "timeline", "org", "delayed", "artifacts", "setup"):
            await page.goto(f"{panel.url}/#/{place}")
            await page.wait_for_selector(f'[data-testid="screen-{place.split("/")[0]}"] > *')
            await page.locator(".skip").focus()
            stops = await focus_stops(page, place)
            assert len(stops) >= 3, place
            lowest, count = min(lowest, *stops.values()), count + len(stops)
    figure(f"{count} stops, weakest ring {lowest:.1f}:1")


@pytest.mark.check(25)
async def test_all_tasks_can_be_done_by_keyboard(panel: Panel) -> None:
    asked = await panel.send_as_agent("Which?", "one", "two")
    await panel.send_as_agent("Nothing to choose here")
    # Due after the end of this test, even on a slow machine.
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=3_600_000)
    page = await panel.open()
    keys = page.keyboard
    # Subscribed early: the browser may report the file dialog late.
    choosers = asyncio.Queue[FileChooser]()
    page.on("filechooser", choosers.put_nowait)

    # Picks an agent
    await tab_to(page, "[role=treeitem]")
    await keys.press("ArrowDown")
    await keys.press("b")
    await ringed(page)
    await keys.press("Enter")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Bob")
    await keys.press("Alt+ArrowUp")
    await keys.press("Alt+ArrowUp")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Ada")
    await expect(ui.message(page, asked)).to_be_visible()

    # Reads
    await tab_to(page, ".thread")
    await keys.press("ArrowUp")
    await ringed(page)
    await expect(page.locator("article:focus")).to_contain_text("Nothing to choose here")
    await keys.press("ArrowUp")
    await expect(page.locator("article:focus")).to_contain_text("Which?")
    await ringed(page)

    # Attaches, and replies to that message
    await keys.press("Enter")
    await expect(page.locator("article .msg-reply:focus")).to_have_count(1)
    await ringed(page)
    await keys.press("Enter")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    await ringed(page)
    await keys.press("Shift+Tab")
    await ringed(page)
    await expect(page.locator('[data-testid="attach"]')).to_be_focused()
    await keys.press("Enter")
    await (await choosers.get()).set_files({"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    await expect(page.locator(ui.CHIP)).to_contain_text("a.png")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    await keys.type("By hand")
    await keys.press("Enter")
    await eventually(lambda: _said(panel, "By hand"))
    (said,) = await panel.sent()
    assert (said.in_reply_to, [one["filename"] for one in said.payload["attachments"]]) == (asked, ["a.png"])
    await panel.stage.state("ada", "idle")

    # Answers by an option
    await panel.send_as_agent("And now?", "three", "four")
    await expect(page.locator(".quick-reply-btn").last).to_have_text("four")
    await keys.press("Alt+q")
    await expect(page.locator(".quick-reply-btn:focus")).to_have_text("three")
    await ringed(page)
    await keys.press("2")
    await eventually(lambda: _said(panel, "four"))
    await ringed(page)
    await panel.stage.state("ada", "idle")

    # Withdraws what waits, and stops
    await keys.press("Escape")
    await at_work(panel, "Read")
    await keys.type("Never mind this")
    await keys.press("Enter")
    await expect(page.locator(ui.WAITING)).to_have_count(1)
    await keys.press("Shift+F6")
    await expect(page.locator(ui.WAITING).get_by_role("button", name="Unsend")).to_be_focused()
    await ringed(page)
    await keys.press("Enter")
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    assert "Never mind this" not in await panel.texts()
    Bell.may_end.set()
    await panel.stage.state("ada", "idle")
    # The next request may be of Bob, too.
    panel.server.default = Says(" ".join(f"w{n}" for n in range(500)), token_delay=0.05)
    await keys.type("Tell me much")
    await keys.press("Enter")
    await expect(page.locator(ui.DRAFT)).to_contain_text("w3")
    await keys.press("Alt+.")
    await expect(page.locator('[data-testid="stopped"]')).to_be_visible()
    await panel.stage.state("ada", "idle")
    panel.society.stop_turn("bob")  # it may read the same long answer

    # Cancels what is delayed
    await keys.press("Control+k")
    await ringed(page)
    await keys.type("scheduled")
    await keys.press("Enter")
    await expect(page.locator('[data-testid="screen-delayed"] .delayed-item')).to_have_count(1)
    await tab_to(page, ".screen .delayed-item button")
    await keys.press("Enter")
    await expect(page.locator(".screen .delayed-item")).to_have_count(0)
    assert await panel.society.bus.delayed_count() == 0

    # Searches
    await keys.press("Control+k")
    await keys.type("nothing to choose")
    await expect(page.get_by_role("option")).to_have_count(1)
    await keys.press("Enter")
    await expect(page.locator("article.is-found")).to_contain_text("Nothing to choose here")


async def test_two_fast_key_presses_move_two_agents(panel: Panel) -> None:
    page = await panel.open("#/a/bob")
    await page.evaluate(
        """() => [1, 2].forEach(() =>
            document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowUp', altKey: true, bubbles: true})))"""
    )
    await expect(page.locator('[data-testid="title"]')).to_have_text("Ada")


async def hold_palette(page: Page) -> asyncio.Event:
    """Hold the script of the palette until the event is set."""
    held = asyncio.Event()

    async def late(route: Route) -> None:
        await held.wait()
        await route.continue_()

    await page.route("**/static/screens/palette.js", late)
    return held


async def test_text_typed_before_the_palette_opens_is_not_sent(panel: Panel) -> None:
    page = await panel.open()
    held = await hold_palette(page)
    await page.locator(ui.COMPOSER).press("Control+k")
    await ringed(page)
    await page.keyboard.press("Control+k")
    await page.keyboard.type("scheduled")
    await page.keyboard.press("Enter")
    held.set()
    await expect(page.locator('[data-testid="screen-delayed"]')).to_be_visible()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    assert await panel.texts() == []


async def test_a_palette_that_loads_too_late_does_not_open(panel: Panel) -> None:
    page = await panel.open()
    held = await hold_palette(page)
    await page.locator(ui.COMPOSER).press("Control+k")
    await page.keyboard.type("ne")
    await page.keyboard.press("Escape")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    async with page.expect_response("**/static/screens/palette.js"):
        held.set()
    await expect(page.locator(".early-find")).to_have_count(0)
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await page.keyboard.press("Control+k")
    await page.keyboard.press("Escape")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()


async def test_the_focus_survives_a_repaint_of_its_element(panel: Panel) -> None:
    page = await panel.open()
    await at_work(panel, "Read")
    await ui.send(page, "First")
    await ui.send(page, "Second")
    await expect(page.locator(ui.WAITING)).to_have_count(2)
    for place, change in (
        (page.locator('[data-testid="link-timeline"]'), "unread"),
        (page.locator(ui.WAITING).nth(1).get_by_role("button"), "waiting"),
        (page.locator('[data-testid="link-delayed"]'), "delayed"),
        (ui.row(page, "seer"), "agent"),
    ):
        await place.focus()
        if change == "unread":
            await panel.send_as_agent("New", by="bob")
            await expect(ui.row(page, "bob").locator('[data-testid="unread"]')).to_have_text("1")
        elif change == "waiting":
            await panel.society.send(to="ada", text="Third")
            await expect(page.locator(ui.WAITING)).to_have_count(3)
        elif change == "delayed":
            await panel.society.send(to="user", text="Later", sender="ada", delay_ms=60_000)
            await expect(place).to_have_text(re.compile("1"))
        else:
            await panel.society.create_agent(id="zoe", name="Zoe")
            await expect(ui.row(page, "zoe")).to_be_visible()
        await expect(place).to_be_focused()
    Bell.may_end.set()


async def tab_to(page: Page, selector: str) -> None:
    """Press Tab until the element has the focus; check the ring at every stop."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await page.evaluate("selector => document.activeElement.matches(selector)", selector):
            await ringed(page)
            return
    pytest.fail(f"no Tab leads to {selector}")


async def _said(panel: Panel, text: str) -> bool:
    return text in await panel.texts()
