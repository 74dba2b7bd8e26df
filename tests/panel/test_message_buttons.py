"""The buttons of an agent's message cover neither its words nor its links."""

from __future__ import annotations

from playwright.async_api import expect

from coterie.testing import Calls, Says
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.harness import Panel

TALL = {"width": 1280, "height": 6_000}
COVERED = """
() => [...document.querySelectorAll('.feed article a')].map(link => {
  const {right, top, bottom} = [...link.getClientRects()].at(-1);
  const [x, y] = [right - 3, (top + bottom) / 2];
  return {x, y, isReached: document.elementFromPoint(x, y)?.closest('a') === link};
}).sort((a, b) => b.x - a.x)
"""
WIDTH = "el => el.querySelector('.md, .bubble > *').getBoundingClientRect().width"


async def test_the_end_of_a_full_line_can_be_read_and_clicked(panel: Panel) -> None:
    for n in range(60, 100):  # the last line of some of them is full
        await panel.send_as_agent(f"[{'go ' * n}on](https://example.com/)")
    page = await panel.open(viewport=TALL)
    await expect(ui.messages(page).filter(has=page.locator("a"))).to_have_count(40)
    ends = await page.evaluate(COVERED)
    assert [one for one in ends if not one["isReached"]] == []
    for end in ends[:3]:
        await page.mouse.move(end["x"], end["y"])
        assert [one for one in await page.evaluate(COVERED) if not one["isReached"]] == []


async def test_a_text_keeps_its_width_when_its_writing_ends(panel: Panel) -> None:
    text = "Some words that need more than one line. " * 6
    held = HeldAnswer(text, " ")
    panel.server.script(held, Says(text, calls=(Calls("ring", {"name": "bell"}),)), "Done")
    page = await panel.open()
    await ui.send(page, "Write")
    widths = [await page.locator(ui.DRAFT).evaluate(WIDTH)]
    held.may_end.set()
    stored = ui.messages(page).filter(has_text="Some words")
    await expect(stored).to_be_visible()
    widths.append(await stored.evaluate(WIDTH))
    Bell.may_end.clear()
    await ui.send(page, "Ring")
    await expect(page.get_by_test_id("said")).to_be_visible()
    widths.append(await page.get_by_test_id("said").evaluate(WIDTH))
    Bell.may_end.set()
    assert len(set(widths)) == 1, widths
