"""Response times of the panel that its acceptance checks limit.

Measured inside the page with its own clock, so that the browser driver does not count.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from playwright.async_api import Browser, Page
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.harness import Panel, open_panel

from bench.report import Report
from coterie.testing import Calls, Says

ROUNDS = 3
TABS = 8
HOUR = 3_600_000

TOOLS = """
window.wall = () => performance.timeOrigin + performance.now();
window.until = async (holds, ms = 15000) => {
  const end = performance.now() + ms;
  while (!holds()) {
    if (performance.now() > end) return Infinity;
    await new Promise(done => setTimeout(done, 2));
  }
  return performance.now();
};
window.$ = (selector, root = document) => root.querySelector(selector);
window.$$ = (selector, root = document) => [...root.querySelectorAll(selector)];
"""
CHOSEN = """async id => {
  const all = $$(`.quick-replies[data-message-id="${id}"] .quick-reply-btn`);
  const start = performance.now();
  all[1].click();
  return await until(() => all.every(b => b.ariaDisabled === 'true')) - start; }"""
CHOICE_IN_BOTH = """async ([id, n]) => {
  const all = () => $$(`.quick-replies[data-message-id="${id}"] .quick-reply-btn`);
  const start = wall();
  all()[n].click();
  return [start, wall() + await until(() => all().some(b => b.ariaPressed === 'true') &&
      $(`[id="qr-${id}"]`).textContent.startsWith('Your answer')) - performance.now()]; }"""
REFUSED = """async id => {
  const all = () => $$(`.quick-replies[data-message-id="${id}"] .quick-reply-btn`);
  const real = window.fetch;
  let answered = 0;
  window.fetch = async (url, options) => {
    if (options?.method !== 'POST' || !url.endsWith('/messages')) return real(url, options);
    answered = performance.now();
    return new Response('{}', {status: 503});
  };
  all()[0].click();
  await until(() => answered);
  const open = await until(() => all().every(b => b.ariaDisabled !== 'true'));
  window.fetch = real;
  return open - answered; }"""
INTERJECTED = """async text => {
  const before = $$('[data-testid="waiting"]').length;
  const box = $('#composer');
  box.value = text;
  box.dispatchEvent(new Event('input', {bubbles: true}));
  const start = performance.now();
  box.form.requestSubmit();
  return await until(() => $$('[data-testid="waiting"]').length > before) - start; }"""
STOPPED = """async () => {
  const start = performance.now();
  $('[data-testid="stop"]').click();
  return await until(() => !$('[data-testid="agent-state"]').classList.contains('is-active')) - start; }"""
ROW = """async text => {
  await until(() => $$('.screen .delayed-item').some(row => row.textContent.includes(text)));
  return wall(); }"""
TICKS = """async ms => {
  const el = $('.screen .countdown');
  const seen = [];
  const end = performance.now() + ms;
  let last = el.textContent;
  while (performance.now() < end) {
    await new Promise(done => setTimeout(done, 2));
    if (el.textContent === last) continue;
    last = el.textContent;
    seen.push(performance.now());
  }
  return seen; }"""
USABLE = "() => until(() => document.querySelector('#composer') && !document.querySelector('#composer').disabled)"
WATCH_MESSAGES = """async () => { const { watchers } = await import('/static/state.js'); window.arrived = {};
  watchers.add((kind, data) => { if (data.message) arrived[data.message.id] ??= wall(); }); }"""
ARRIVED = "async id => { await until(() => id in window.arrived); return window.arrived[id]; }"
UNREAD_GONE = """async () => {
  await until(() => !$('[data-testid="agent-bob"] [data-testid="unread"]') && !document.title.startsWith('('));
  return wall(); }"""
OPTIONS = """async text => {
  const before = $$('.quick-reply-btn').length;
  const box = $('#composer');
  box.value = text;
  box.dispatchEvent(new Event('input', {bubbles: true}));
  const start = performance.now();
  box.form.requestSubmit();
  return await until(() => $$('.quick-reply-btn').length > before) - start; }"""


async def measure(report: Report, browser: Browser) -> None:
    for moment in (_options, _interjection, _stop, _delayed, _tabs, _unread):
        with tempfile.TemporaryDirectory() as folder:
            async with open_panel(Path(folder), browser) as panel:
                await moment(report, panel)
    await _tour(report, browser)


async def _open(panel: Panel, fragment: str = "#/a/ada") -> Page:
    context = await panel.browser()
    await context.add_init_script(TOOLS)
    return await panel.open(fragment, context=context)


async def _best(measure: Callable[[], Awaitable[float]]) -> float:
    return min([await measure() for _ in range(ROUNDS)])


async def _options(report: Report, panel: Panel) -> None:
    page = await _open(panel)

    async def chosen() -> float:
        question = await panel.send_as_agent("Which?", "one", "two")
        await page.wait_for_selector(f'.quick-replies[data-message-id="{question}"]')
        return float(await page.evaluate(CHOSEN, question))

    async def both() -> float:
        question = await panel.send_as_agent("Which?", "one", "two")
        tabs = [page, other]
        for tab in tabs:
            await tab.wait_for_selector(f'.quick-replies[data-message-id="{question}"]')
        ends = await asyncio.gather(*(tab.evaluate(CHOICE_IN_BOTH, [question, n]) for n, tab in enumerate(tabs)))
        return float(max(end for _, end in ends) - min(start for start, _ in ends))

    async def refused() -> float:
        question = await panel.send_as_agent("Which?", "one", "two")
        await page.wait_for_selector(f'.quick-replies[data-message-id="{question}"]')
        return float(await page.evaluate(REFUSED, question))

    report.line("options closed after a click", await _best(chosen), "ms", at_most=100, check=3)
    other = await panel.open(context=page.context)
    report.line("two tabs agree on one choice", await _best(both), "ms", at_most=1_000, check=4)
    await other.close()
    report.line("options open again after a refusal", await _best(refused), "ms", at_most=200, check=5)


async def _interjection(report: Report, panel: Panel) -> None:
    page = await _open(panel)
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "Read")
    await panel.society.send(to="ada", text="Ring it", sender="bob")
    await asyncio.wait_for(Bell.rang.wait(), 5)
    figures = [float(await page.evaluate(INTERJECTED, f"Number {n}")) for n in range(ROUNDS)]
    report.line("an interjection is in the strip", min(figures), "ms", at_most=200, check=12)
    Bell.may_end.set()
    await panel.stage.state("ada", "idle")


async def _stop(report: Report, panel: Panel) -> None:
    page = await _open(panel)

    async def stopped() -> float:
        panel.server.script(Says(" ".join(f"w{n}" for n in range(500)), token_delay=0.02))
        await ui.send(page, "Tell me much")
        await page.wait_for_function("() => document.querySelector('[data-testid=\"draft\"]:not(.is-stopped)')")
        return float(await page.evaluate(STOPPED))

    report.line("a turn ends after Stop", await _best(stopped), "ms", at_most=1_000, check=16)


async def _delayed(report: Report, panel: Panel) -> None:
    context = await panel.browser()
    await context.add_init_script(TOOLS + f"const real = Date.now; Date.now = () => real() + {HOUR};")
    page = await panel.open("#/delayed", context=context)
    rows: list[float] = []
    for n in range(ROUNDS):
        seen = asyncio.ensure_future(page.evaluate(ROW, f"Later {n}"))
        await asyncio.sleep(0.05)
        start = time.time() * 1000
        await panel.society.send(to="user", text=f"Later {n}", sender="ada", delay_ms=60_000)
        rows.append(await seen - start)
    report.line("a delayed message has its row", min(rows), "ms", at_most=500, check=17)
    rounds = [list[float](await page.evaluate(TICKS, 10_500)) for _ in range(ROUNDS)]
    worst = min(max(abs(later - earlier - 1000) for earlier, later in itertools.pairwise(ticks)) for ticks in rounds)
    report.line("a countdown's second, at worst off by", worst, "ms", at_most=200, check=17)


async def _tabs(report: Report, panel: Panel) -> None:
    context = await panel.browser()
    await context.add_init_script(TOOLS)
    tabs: list[Page] = []
    usable: list[float] = []
    for _ in range(TABS):
        tab = await context.new_page()
        await tab.goto(f"{panel.url}/#/a/ada", wait_until="commit")
        usable.append(float(await tab.evaluate(USABLE)))
        await tab.wait_for_selector("[data-ready]")
        await tab.evaluate(WATCH_MESSAGES)
        tabs.append(tab)

    async def reached() -> float:
        start = time.time() * 1000
        message_id = await panel.send_as_agent("To all of you")
        return float(max(await asyncio.gather(*(tab.evaluate(ARRIVED, message_id) for tab in tabs)))) - start

    report.line(f"each of {TABS} tabs is usable", max(usable), "ms", at_most=1_500, check=22)
    report.line(f"a message reaches {TABS} tabs", await _best(reached), "ms", at_most=500, check=22)
    streams = panel.streams
    after: list[float] = []
    for _ in range(ROUNDS):
        await tabs.pop(0).close()
        after.append(await reached())
    report.line("a message reaches the others when the leading tab is gone", min(after), "ms", at_most=2_000, check=22)
    report.line(f"streams open for {TABS} tabs", max(streams, panel.streams), "streams", at_most=2, check=22)


async def _unread(report: Report, panel: Panel) -> None:
    here = await _open(panel)
    there = await panel.open(context=here.context)
    await here.bring_to_front()

    async def cleared() -> float:
        await here.goto(f"{panel.url}/#/a/ada")
        await panel.send_as_agent("News", by="bob")
        for tab in (here, there):
            await tab.wait_for_selector('[data-testid="agent-bob"] [data-testid="unread"]')
        waits = [asyncio.ensure_future(tab.evaluate(UNREAD_GONE)) for tab in (here, there)]
        start = float(await here.evaluate("() => { $('[data-testid=\"agent-bob\"]').click(); return wall(); }"))
        return float(max(await asyncio.gather(*waits))) - start

    report.line("what was read is read in every tab", await _best(cleared), "ms", at_most=1_000, check=19)


async def _tour(report: Report, browser: Browser) -> None:
    figures = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            async with open_panel(Path(folder), browser, agents="") as panel:
                (Path(folder) / "llmservices.json").write_text(json.dumps({"services": []}))
                await panel.society.reload()
                page = await _open(panel, "#/a/assistant")
                figures.append(float(await page.evaluate(OPTIONS, "Hello")))
    report.line("the tour answers with options", min(figures), "ms", at_most=2_000, check=32)
