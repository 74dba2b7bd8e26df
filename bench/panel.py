"""The panel in a real browser: first paint, scrolling, twenty streaming agents, response times, typing and memory.

Needs Chromium, like the panel's tests; `./dev test` installs it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, CDPSession, Page
from tests.panel import chromium
from tests.panel.harness import Panel, open_panel

from bench import panel_moments, panel_typing
from bench.panel_frames import ALL_OF_IT, EMPTY_SCROLLS, FRAMES, JUMPS, SECONDS, TOKENS, opened, scrolled
from bench.report import Report, percentile
from coterie.testing import Says

ROUNDS = 3
MANY = 5_000
AGENTS = 20
EMPTY = "<div class='thread' style='height:100vh;overflow:auto'><div style='height:9999vh'></div></div>"
COUNTS = """async () => {
  const { watchers } = await import('/static/state.js');
  window.counts = {deltas: 0, writes: 0, said: {}};
  watchers.add((kind, data) => {
    if (kind !== 'draft.delta') return;
    counts.deltas += 1;
    counts.said[data.agent] = (counts.said[data.agent] ?? '') + data.delta;
  });
  new MutationObserver(all => { counts.writes += all.length; })
    .observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
}"""


def run(beside: Path | None = None) -> None:
    """`beside`: another checkout. Typing, memory and frame times of both are measured in turns."""
    asyncio.run(_measure(Report("panel"), beside))


async def _measure(report: Report, beside: Path | None) -> None:
    async with chromium.launch() as browser:
        if beside is not None:
            await panel_typing.compare(report, browser, beside)
            return
        await _first_paint(report, browser)
        await _long_thread(report, browser)
        await _many_streams(report, browser, "a/a0", "a thread", fps=58, p95=None)
        await _many_streams(report, browser, "inbox", "the inbox", fps=55, p95=20)
        await panel_moments.measure(report, browser)
        await panel_typing.measure(report, browser)


# First paint


async def _first_paint(report: Report, browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_panel(Path(folder), browser) as panel:
            for n in range(60):
                await panel.send_as_agent(f"Message {n}")
            for name, slower, paint, usable in (("", 1, 800, 1_500), (" on a slow processor", 4, 1_200, 3_000)):
                rounds = [await _opened(panel, slower) for _ in range(ROUNDS)]
                report.line(f"first paint{name}", min(one[0] for one in rounds), "ms", at_most=paint, check=29)
                report.line(f"composer usable{name}", min(one[1] for one in rounds), "ms", at_most=usable, check=29)
                report.line(f"layout shift{name}", min(one[2] for one in rounds), "", at_most=0.05, check=29)


async def _opened(panel: Panel, slower: int) -> list[float]:
    context = await panel.browser()
    panel.contexts.pop()
    return await opened(context, f"{panel.url}/#/a/ada", slower=slower)


# A long conversation


async def _long_thread(report: Report, browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_panel(Path(folder), browser) as panel:
            for n in range(MANY):
                await panel.send_as_agent(f"Message {n}: " + "some words " * (n % 40))
            page = await panel.open()
            await page.evaluate(ALL_OF_IT)
            cdp = await _metered(page)
            empty = await browser.new_page()
            await empty.set_content(EMPTY)
            before = await _work(cdp)
            rounds = [await scrolled(page)]
            work = await _work(cdp, before)
            plain = [await scrolled(empty, EMPTY_SCROLLS)]
            for _ in range(1, ROUNDS):
                rounds.append(await scrolled(page))
                plain.append(await scrolled(empty, EMPTY_SCROLLS))
            await empty.close()
            best = min(rounds, key=lambda one: percentile(one["frames"], 0.95))
            name = f"scrolling {MANY:,} messages"
            _frames(report, name, best["frames"], fps=55, p95=20, check=30)
            _share(report, name, work, check=30)
            # An empty page on this machine: the upper limit for ours.
            least = min(percentile(one["frames"], 0.95) for one in plain)
            report.line("scrolling a page with nothing on it: p95 frame", least, "ms", check=30)
            for what, most in (("nodes", 1_500), ("articles", 80)):
                value = max(one[what] for one in rounds)
                report.line(f"{what} in the document", value, what, at_most=most, check=30)
            report.line("blank screens", min(one["blanks"] for one in rounds), "frames", at_most=0, check=30)
            jumps = [list[float](await page.evaluate(JUMPS, 40)) for _ in range(ROUNDS)]
            p95 = min(percentile(one, 0.95) for one in jumps)
            report.line("a jump to anywhere: p95", p95, "ms", at_most=100, check=30)


# Many streaming agents


async def _many_streams(
    report: Report, browser: Browser, fragment: str, where: str, *, fps: float, p95: float | None
) -> None:
    agents = "".join(f'[agents.a{n}]\nname = "Agent {n}"\n' for n in range(AGENTS))
    words = " ".join(f"word{n}" for n in range(TOKENS * SECONDS))
    rounds: list[dict[str, Any]] = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            async with open_panel(Path(folder), browser, agents=agents) as panel:
                panel.server.default = Says(words, token_delay=1 / TOKENS)
                page = await panel.open(f"#/{fragment}")
                await page.evaluate(COUNTS)
                rounds.append(await _watched(panel, page))
    best = min(rounds, key=lambda one: percentile(one["frames"], 0.99))
    name = f"{AGENTS} agents talk, {where} open"
    _frames(report, name, best["frames"], fps=fps, p95=p95, check=31)
    if p95 is None:
        slow = sum(one > 25 for one in best["frames"]) / len(best["frames"])
        report.line(f"{name}: frames over 25 ms", slow * 100, "%", at_most=1, check=31)
        report.line(f"{name}: longest task", min(one["longest"] for one in rounds), "ms", at_most=100, check=31)
        whole = min(sum(said == words for said in one["said"]) for one in rounds)
        report.line(f"{name}: replies that came whole", whole, "replies", at_least=AGENTS, check=31)
    _share(report, name, best["work"], check=31)
    report.line(f"{name}: changes of the document for each piece of a reply", best["writes"] / best["deltas"], "")


async def _watched(panel: Panel, page: Page) -> dict[str, Any]:
    cdp = await _metered(page)
    for n in range(AGENTS):
        await panel.society.send(to=f"a{n}", text="Talk")
    before = await _work(cdp)
    seen = dict(await page.evaluate(FRAMES, SECONDS * 1000))
    seen["work"] = await _work(cdp, before)
    for n in range(AGENTS):
        await panel.stage.state(f"a{n}", "idle")
    await page.wait_for_function("() => document.querySelectorAll('[data-testid=\"draft\"]').length === 0")
    counts = await page.evaluate("() => window.counts")
    return seen | {
        "deltas": max(1, counts["deltas"]),
        "writes": counts["writes"],
        "said": list(counts["said"].values()),
    }


# Processor time


async def _metered(page: Page) -> CDPSession:
    cdp = await page.context.new_cdp_session(page)
    await cdp.send("Performance.enable", {"timeDomain": "threadTicks"})
    return cdp


async def _work(cdp: CDPSession, since: dict[str, float] | None = None) -> dict[str, float]:
    reported = await cdp.send("Performance.getMetrics")
    now = {one["name"]: float(one["value"]) for one in reported["metrics"]}
    return {name: value - (since or {}).get(name, 0) for name, value in now.items()}


def _share(report: Report, name: str, work: dict[str, float], check: int) -> None:
    """Report the share of the page's main thread, in processor time."""
    passed = work["Timestamp"]
    for what, metric in (("all work", "TaskDuration"), ("scripts", "ScriptDuration"), ("layout", "LayoutDuration")):
        report.line(f"{name}: {what}", 100 * work[metric] / passed, "%", check=check)


def _frames(
    report: Report, name: str, frames: list[float], *, fps: float, p95: float | None = None, check: int
) -> None:
    report.line(f"{name}: mean", 1000 * len(frames) / sum(frames), "fps", at_least=fps, check=check)
    report.line(f"{name}: p95 frame", percentile(frames, 0.95), "ms", at_most=p95, check=check)
