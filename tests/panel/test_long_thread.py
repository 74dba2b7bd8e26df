"""Scrolling in a thread that is too long for the document."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Page, Route, expect

from coterie.clock import to_rfc3339
from coterie.testing import Calls, Says
from tests.panel import ui
from tests.panel.harness import Panel, eventually_in, options_of

MANY = 300
HELD = "async () => (await import('/static/state.js')).state.messages.size"
SHOWN = "async () => (await import('/static/state.js')).state.threads.get('ada').ids.length"
MORE = 750

GLIDED = """
async () => {
  const box = document.querySelector('.thread');
  const articles = () => [...box.querySelectorAll('article')];
  const stood = () => articles().map(one => [one.dataset.key, one.getBoundingClientRect().top]);
  let hasty = 0, later = 0, since = 0;
  const watch = new MutationObserver(all => {
    const moves = all.filter(one => one.oldValue?.includes('translate')).length;
    if (performance.now() < since + 140) hasty += moves; else later += moves;
  });
  watch.observe(box, {subtree: true, attributeFilter: ['style'], attributeOldValue: true});
  // From the event on, as the page counts: a busy machine sends it long after the scrolling.
  box.addEventListener('scroll', () => { since = performance.now(); }, {capture: true});
  for (let n = 0; n < 12; n += 1) {
    const scrolled = new Promise(done => box.addEventListener('scroll', done, {once: true}));
    box.scrollTop -= 400;
    await scrolled;
  }
  const before = stood();
  while (!later && performance.now() < since + 3000) await new Promise(requestAnimationFrame);
  return {before, after: stood(), hasty, later};
}
"""
BUILT = """
async () => {
  const box = document.querySelector('.thread');
  const articles = () => [...box.querySelectorAll('article')];
  const known = new Set(articles());
  const fresh = () => articles().filter(one => !known.has(one));
  const scrolled = new Promise(done => box.addEventListener('scroll', done, {once: true}));
  box.scrollTop /= 2;
  await scrolled;
  const shown = box.getBoundingClientRect();
  const within = ({top, bottom}) => bottom > shown.top && top < shown.bottom;
  const seen = fresh().filter(one => within(one.getBoundingClientRect()));
  const counts = [fresh().length, seen.length];
  const end = performance.now() + 5000;
  while (fresh().length < seen.length + 20 && performance.now() < end) await new Promise(requestAnimationFrame);
  return [...counts, fresh().length];
}
"""
AT_FIRST = """
() => {
  const box = document.querySelector('.thread');
  const first = [...box.querySelectorAll('article')].find(one => one.textContent.includes('Message 0:'));
  return box.scrollTop === 0 && first?.getBoundingClientRect().top === box.getBoundingClientRect().top;
}
"""


async def _long_thread(panel: Panel) -> Page:
    for n in range(MANY):
        await panel.send_as_agent(f"Message {n}: " + "some words " * (n * 7 % 90))
    page = await panel.open()
    await page.evaluate("() => import('/static/state.js').then(state => state.loadAround('ada', 'all of it'))")
    await page.locator(".thread").hover()
    return page


async def test_the_visible_messages_do_not_move_when_heights_are_corrected(panel: Panel) -> None:
    page = await _long_thread(panel)

    seen = await page.evaluate(GLIDED)

    assert seen["hasty"] == 0, "what had been painted was put elsewhere while someone scrolled over it"
    assert seen["later"] > 0, "the numbers are put right when the window rests"
    after = dict(seen["after"])
    both = [(top, after[key]) for key, top in seen["before"] if key in after and -400 < top < 1200]
    assert len(both) > 3
    assert all(abs(was - top) <= 1 for was, top in both), "it moved under the eyes"


async def test_the_first_message_can_be_reached_by_scrolling(panel: Panel) -> None:
    page = await _long_thread(panel)

    for _ in range(MANY):
        await page.mouse.wheel(0, -3_000)
        if await page.evaluate(AT_FIRST):
            break

    assert await page.evaluate(AT_FIRST), "the wheel ended before the first message"


async def test_a_page_that_stays_open_holds_few_messages_and_reads_the_others_again(panel: Panel) -> None:
    panel.server.script(Says("First I look.", calls=(Calls("look", {}),)), "Done")
    await panel.stage.say("Look")
    await panel.stage.state("ada", "idle")
    question = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open()
    await expect(page.get_by_test_id("said")).to_be_visible()
    for first in range(0, MORE, 25):
        together = range(first, first + 25)
        await asyncio.gather(*(panel.send_as_agent(f"Message {n}") for n in together))
        await asyncio.gather(*(panel.send_as_agent(f"Aside {n}", by="bob", to="seer") for n in together))
    await expect(ui.messages(page).last).to_contain_text(f"Message {MORE - 1}")
    held = await page.evaluate(HELD)
    assert held <= 1_300, held
    assert await page.evaluate(SHOWN) < MORE

    await page.locator(".thread").hover()
    for _ in range(MANY):
        await page.mouse.wheel(0, -20_000)
        if await page.get_by_test_id("said").count():
            break
    await expect(page.get_by_test_id("said")).to_contain_text("First I look.")
    await expect(page.get_by_test_id("runs")).to_be_visible()
    assert await page.evaluate(SHOWN) == MORE + 3
    await options_of(page, question).first.click()
    await expect(ui.state_line(page, question)).not_to_be_empty()


async def test_a_jump_renders_only_the_visible_messages(panel: Panel) -> None:
    page = await _long_thread(panel)

    built, seen, soon = await page.evaluate(BUILT)

    assert 0 < seen <= built <= seen + 4
    assert soon >= seen + 20, "what is near is built when there is time"


async def test_older_messages_are_not_counted_as_new(panel: Panel) -> None:
    for n in range(120):
        await panel.send_as_agent(f"Message {n}: " + "some words " * 40)
    page = await panel.open()
    await expect(ui.messages(page).last).to_contain_text("Message 119")
    await page.locator(".thread").hover()
    await page.mouse.wheel(0, -20_000)
    await eventually_in(page, "async () => !(await import('/static/state.js')).state.threads.get('ada').older")
    await expect(page.get_by_test_id("jump")).to_have_text("")
    await panel.send_as_agent("One more")
    await expect(page.get_by_test_id("jump")).to_have_text("1 new message")


async def test_older_messages_that_arrive_after_a_new_snapshot_leave_no_gap(panel: Panel) -> None:
    sent = [await panel.send_as_agent(f"Message {n}") for n in range(60)]
    is_read, may_arrive = asyncio.Event(), asyncio.Event()

    async def answer_late(route: Route) -> None:
        answer = await route.fetch()
        is_read.set()
        await may_arrive.wait()
        await route.fulfill(response=answer)

    context = await panel.browser()
    await context.route("**/threads/ada/messages?before=*", answer_late)
    page = await panel.open(context=context)
    panel.allow("Failed to load resource|ERR_|net::")
    await page.evaluate("async () => { window.older = (await import('/static/state.js')).loadOlder('ada'); }")
    await is_read.wait()
    await page.route("**/api/v1/events?*", lambda route: route.abort())
    panel.drop_streams()
    sent += [await panel.send_as_agent(f"Message {n}") for n in range(60, 280)]  # more than a snapshot loads
    await page.evaluate("async () => { await (await import('/static/state.js')).resync(); }")
    may_arrive.set()
    held = await page.evaluate(
        """async () => { const { loadAround, state } = await import('/static/state.js');
            await window.older; await loadAround('ada', 'all of it'); return state.threads.get('ada').ids; }"""
    )
    assert held == sent


async def _many_messages_while_an_agent_writes(panel: Panel) -> tuple[str, str]:
    """Fill the thread with more messages than a page keeps, and let Bob write; return an old message and Bob's task."""
    first = [await panel.send_as_agent(text) for text in ("The beginning", "A needle")]
    for begin in range(0, 1_600, 50):
        await asyncio.gather(*(panel.send_as_agent(f"Message {n}") for n in range(begin, begin + 50)))
    panel.server.script(Says("word " * 20_000, token_delay=0.02))
    return first[1], await panel.stage.say("Write", to="bob")


def _pages_asked(page: Page) -> list[str]:
    """Return a list that collects the addresses of requests for pages of a thread from now on."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/threads/ada/messages" in request.url else None)
    return asked


async def test_find_reaches_an_old_message_while_an_agent_writes(panel: Panel) -> None:
    old, task = await _many_messages_while_an_agent_writes(panel)
    page = await panel.open()
    await expect(ui.messages(page).last).to_be_visible()
    await expect(ui.row(page, "bob")).to_contain_text("word")
    asked = _pages_asked(page)
    await page.keyboard.press("Control+f")
    await page.get_by_test_id("find").fill("needle")
    await expect(ui.message(page, old)).to_be_in_viewport()
    assert len(asked) < 15
    await panel.society.stop_task(task)


async def test_a_link_leads_to_an_old_message_while_an_agent_writes(panel: Panel) -> None:
    old, task = await _many_messages_while_an_agent_writes(panel)
    page = await panel.open("#/a/bob")
    await expect(ui.row(page, "bob")).to_contain_text("word")
    asked = _pages_asked(page)
    await page.goto(f"{panel.url}/#/a/ada?m={old}")
    await expect(ui.message(page, old)).to_be_in_viewport()
    assert len(asked) < 15
    await panel.society.stop_task(task)


class _Plans:
    """Route handler that lists steps of an agent, each with a text before its call. The oldest has the needle."""

    def __init__(self, agent: str, count: int, begin: datetime, end: datetime) -> None:
        self.items = [self._plan(agent, n, begin + (end - begin) * n / count) for n in range(count)]

    def _plan(self, agent: str, n: int, at: datetime) -> dict[str, Any]:
        call = {"callId": f"call-{n}", "name": "look", "arguments": "{}", "state": "done", "result": "ok"}
        return {
            "position": str(n),
            "agent": agent,
            "turn": 1,
            "step": n,
            "at": to_rfc3339(at),
            "text": f"Step {n}" if n else "The needle is here",
            "calls": [{**call, "startedAt": None, "endedAt": None}],
            "outcome": "done",
            "interruptedBy": None,
        }

    async def __call__(self, route: Route) -> None:
        asked = {key: value for key, [value] in parse_qs(urlsplit(route.request.url).query).items()}
        limit, before = int(asked["limit"]), int(asked.get("before", len(self.items)))
        found = [plan for plan in self.items if asked.get("q", "") in plan["text"]][:before]
        page = found[-limit:][::-1]
        following = page[-1]["position"] if len(page) == limit else None
        await route.fulfill(json={"items": page, "next": following})


async def _find_needle(page: Page) -> None:
    await page.keyboard.press("Control+f")
    await page.get_by_test_id("find").fill("needle")
    await expect(page.get_by_test_id("find-count")).to_have_text("1 of 1")
    await expect(page.get_by_test_id("said").filter(has_text="The needle is here")).to_be_in_viewport()


@pytest.mark.parametrize("count", [450, 2_500])
async def test_find_reaches_a_text_before_a_tool_call_of_long_ago(panel: Panel, count: int) -> None:
    for n in range(61):
        await panel.send_as_agent(f"Message {n} " + "some words " * 40)
    begin, end = (message.created_at for message in (await panel.sent(by="ada"))[:2])
    context = await panel.browser()
    await context.route("**/api/v1/runs?*", _Plans("ada", count, begin, end))
    page = await panel.open(context=context)
    await expect(ui.messages(page).last).to_contain_text("Message 60")
    await _find_needle(page)


async def test_all_steps_of_an_agent_without_messages_can_be_reached(panel: Panel) -> None:
    now = datetime.now(UTC)
    context = await panel.browser()
    await context.route("**/api/v1/runs?*", _Plans("bob", 1_200, now - timedelta(hours=1), now))
    page = await panel.open("#/a/bob", context=context)
    last = page.get_by_test_id("said").filter(has_text="Step 1199")
    await expect(last).to_be_visible()
    await _find_needle(page)
    await page.reload()
    await expect(last).to_be_visible()
    earlier, first = page.get_by_test_id("earlier"), page.get_by_test_id("said").filter(has_text="The needle is here")
    for _ in range(3):
        await page.locator(".thread").focus()
        await page.keyboard.press("Home")
        await earlier.get_by_role("button").click()
        await expect(earlier.locator("[aria-disabled]")).to_have_count(0)
        if not await earlier.count():
            break
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    await page.locator(".thread").focus()
    await page.keyboard.press("Home")
    await expect(first).to_be_in_viewport()


async def test_steps_that_are_left_out_between_messages_can_be_loaded(panel: Panel) -> None:
    for n in range(2):
        await panel.send_as_agent(f"Message {n}")
    begin, end = (message.created_at for message in await panel.sent(by="ada"))
    context = await panel.browser()
    await context.route("**/api/v1/runs?*", _Plans("ada", 2_500, begin, end))
    page = await panel.open(context=context)
    earlier, first = page.get_by_test_id("earlier"), page.get_by_test_id("said").filter(has_text="The needle is here")
    await eventually_in(page, "async () => (await import('/static/state.js')).state.plans.get('ada')?.length > 2000")
    await page.locator(".thread").focus()
    await page.keyboard.press("Home")
    await earlier.get_by_role("button").click()
    await expect(first).to_be_visible()
    await expect(earlier).to_have_count(0)
