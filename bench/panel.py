"""The panel in a real browser: how soon it is there, how smoothly it scrolls, what twenty talking agents cost it.

Needs a Chromium, as the panel's tests do; `./dev test` installs one.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page
from tests.panel import chromium
from tests.panel.room import Room, room

from bench.report import Report, percentile
from coterie.testing import Says

ROUNDS = 3
MANY = 5_000
AGENTS, TOKENS, SECONDS = 20, 50, 12

PAINTS = """
window.shifts = 0;
new PerformanceObserver(list => list.getEntries().forEach(
    one => { if (!one.hadRecentInput) window.shifts += one.value; })).observe({type: 'layout-shift', buffered: true});
"""
FIRST = """async () => {
  const until = async holds => { while (!holds()) await new Promise(requestAnimationFrame); return performance.now(); };
  const painted = () => performance.getEntriesByName('first-contentful-paint')[0];
  const usable = await until(() => document.querySelector('#composer'));
  await until(painted);
  await until(() => document.documentElement.dataset.ready === '' && performance.now() > usable + 1000);
  return [painted().startTime, usable, window.shifts];
}"""
SCROLLS = """async ([ms, agent]) => {
  const feed = document.querySelector('[role=feed]');
  const box = feed.closest('.thread');
  const frames = []; let nodes = 0, articles = 0, blank = 0, last = performance.now();
  const end = last + ms;
  while (performance.now() < end) {
    box.scrollTop -= 60;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last); last = now;
    if (frames.length % 10) continue;
    nodes = Math.max(nodes, document.querySelectorAll('*').length);
    const shown = [...feed.querySelectorAll('article')];
    articles = Math.max(articles, shown.length);
    const [a, b] = [box.getBoundingClientRect().top, box.getBoundingClientRect().bottom];
    if (!shown.some(one => one.getBoundingClientRect().bottom > a && one.getBoundingClientRect().top < b)) blank += 1;
  }
  return {frames, nodes, articles, blank};
}"""
FRAMES = """async ms => {
  const frames = []; let longest = 0, last = performance.now();
  new PerformanceObserver(list => list.getEntries().forEach(
    one => { longest = Math.max(longest, one.duration); })).observe({type: 'longtask'});
  const end = last + ms;
  while (performance.now() < end) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last); last = now;
  }
  return {frames, longest};
}"""


def run() -> None:
    asyncio.run(_measure(Report("panel")))


async def _measure(report: Report) -> None:
    async with chromium.launched() as browser:
        await _first_paint(report, browser)
        await _long_thread(report, browser)
        await _many_voices(report, browser)


async def _first_paint(report: Report, browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with room(Path(folder), browser) as panel:
            for n in range(60):
                await panel.tell(f"Message {n}")
            for name, slower, paint, usable in (("", 1, 800, 1_500), (" on a slow processor", 4, 1_200, 3_000)):
                rounds = [await _opened(panel, slower) for _ in range(ROUNDS)]
                report.line(f"first paint{name}", min(one[0] for one in rounds), "ms", at_most=paint)
                report.line(f"composer usable{name}", min(one[1] for one in rounds), "ms", at_most=usable)
                report.line(f"layout shift{name}", min(one[2] for one in rounds), "", at_most=0.05)


async def _opened(panel: Room, slower: int) -> list[float]:
    context = await panel.browser()
    await context.add_init_script(PAINTS)
    page = await context.new_page()
    cdp = await context.new_cdp_session(page)
    await cdp.send("Emulation.setCPUThrottlingRate", {"rate": slower})
    await page.goto(f"{panel.url}/#/a/ada", wait_until="commit")
    figures = list[float](await page.evaluate(FIRST))
    await context.close()
    panel.watched.pop()
    return figures


async def _long_thread(report: Report, browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with room(Path(folder), browser) as panel:
            for n in range(MANY):
                await panel.tell(f"Message {n}: " + "some words " * (n % 40))
            page = await panel.open()
            await page.evaluate(
                "() => import('/static/state.js').then(s => s.loadAround('ada', 'all of it').catch(() => {}))"
            )
            rounds = [await _scrolled(page) for _ in range(ROUNDS)]
            best = min(rounds, key=lambda one: percentile(one["frames"], 0.95))
            _frames(report, "scrolling 5,000 messages", best["frames"], fps=55, p95=20)
            report.line("nodes in the document", max(one["nodes"] for one in rounds), "nodes", at_most=1_500)
            report.line("articles in the document", max(one["articles"] for one in rounds), "articles", at_most=80)
            report.line("blank screens", min(one["blank"] for one in rounds), "frames", at_most=0)


async def _scrolled(page: Page) -> dict[str, Any]:
    await page.locator("[role=feed]").evaluate(
        "feed => { const b = feed.closest('.thread'); b.scrollTop = b.scrollHeight; }"
    )
    return dict(await page.evaluate(SCROLLS, [6_000, "ada"]))


async def _many_voices(report: Report, browser: Browser) -> None:
    agents = "".join(f'[agents.a{n}]\nname = "Agent {n}"\n' for n in range(AGENTS))
    with tempfile.TemporaryDirectory() as folder:
        async with room(Path(folder), browser, agents=agents) as panel:
            words = " ".join(f"word{n}" for n in range(TOKENS * SECONDS))
            panel.server.default = Says(words, token_delay=1 / TOKENS)
            page = await panel.open("#/a/a0")
            for n in range(AGENTS):
                await panel.society.send(to=f"a{n}", text="Talk")
            seen = dict(await page.evaluate(FRAMES, SECONDS * 1000))
            _frames(report, f"{AGENTS} agents talk", seen["frames"], fps=58)
            slow = sum(one > 25 for one in seen["frames"]) / len(seen["frames"])
            report.line(f"{AGENTS} agents talk: frames over 25 ms", slow * 100, "%", at_most=1)
            report.line(f"{AGENTS} agents talk: longest task", seen["longest"], "ms", at_most=100)
            for n in range(AGENTS):
                await panel.stage.state(f"a{n}", "idle")


def _frames(report: Report, name: str, frames: list[float], *, fps: float, p95: float | None = None) -> None:
    report.line(f"{name}: mean", 1000 * len(frames) / sum(frames), "fps", at_least=fps)
    report.line(f"{name}: p95 frame", percentile(frames, 0.95), "ms", at_most=p95)
