"""Typing latency, memory and frame times of one panel, or of two side by side.

Two sides take turns in every measurement, so that noise of the machine affects both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from playwright.async_api import Browser, CDPSession, Page

from bench import panel_frames
from bench.panel_side import AGENTS, HERE, Side, started
from bench.report import Report, percentile

ROUNDS = 3
MANY = 5_000
FEW = 30
"""Messages in each of the other conversations."""
KEYS = 60
KEY_MS = 40
"""Between two keys: a fast typist."""
REPEATS = 10
ALL = [f"a{n}" for n in range(AGENTS)]
SCREENS = (
    *(f"a/{agent}" for agent in ALL),
    *("inbox", "tasks", "tasks?view=usage", "timeline", "org", "delayed", "artifacts", "agents", "agents/a0"),
    *("agents/new", "dead", "start", "setup", "a/a0"),
)
MEGABYTE = 1 << 20

LIMITS = {
    "typing in a thread of 5,000 messages: median": ("ms", 34.0),
    "typing in a thread of 5,000 messages: p95": ("ms", 50.0),
    "typing while a reply is written: median": ("ms", 34.0),
    "typing while a reply is written: p95": ("ms", 50.0),
    "JS heap after 20 conversations and every screen": ("MB", 8.0),
    "JS heap: growth over 8 repeats": ("MB", 0.5),
    "DOM nodes: growth over 8 repeats": ("nodes", 500.0),
}
"""Unit and highest value of each figure that has a limit. Two frames are 33 ms.

The heap grows by the machine code that the browser compiles: 0.3 MB, and 2 KB of objects, measured by heap snapshots.
"""
WORSE = {"ms": 1.25, "MB": 1.1}
"""Highest ratio to the other side, by unit: more than what the same code differs by from run to run."""
WATCH_KEYS = """() => {
  const box = document.querySelector('#composer');
  const painted = new MessageChannel();
  let pressed = 0;
  window.typed = [];
  // The message comes after the frame that the callback belongs to.
  painted.port1.onmessage = ({ data }) => typed.push(performance.now() - data);
  box.addEventListener('keydown', event => { pressed = event.timeStamp; }, true);
  box.addEventListener('input', () => {
    const from = pressed;
    requestAnimationFrame(() => painted.port2.postMessage(from));
  });
}"""
VISIT = """path => new Promise(done => {
  // The screen is there when nothing has changed for a while.
  let timer = setTimeout(done, 2000);
  const seen = new MutationObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => { seen.disconnect(); done(); }, 60);
  });
  seen.observe(document.querySelector('.main'), { subtree: true, childList: true });
  location.hash = `#/${path}`;
})"""
Figures = dict[str, float]
Measure = Callable[[Side, Page], Awaitable[Figures]]


async def measure(report: Report, browser: Browser) -> None:
    """Typing and memory of this checkout."""
    async with started(HERE, browser) as ours:
        await _measure_sides(report, {"ours": ours})


async def compare(report: Report, browser: Browser, beside: Path) -> None:
    """Typing, memory and frame times of this checkout and of another one."""
    async with started(HERE, browser) as ours, started(beside, browser) as theirs:
        await _measure_sides(report, {"ours": ours, "theirs": theirs})


async def _measure_sides(report: Report, sides: Mapping[str, Side]) -> None:
    for side in sides.values():
        await side.fill(["a0"], MANY)
        await side.fill(ALL[1:], FEW)
    await _alternate(report, sides, [_type, _type_beside_a_reply], loads_all=True)
    if len(sides) > 1:
        await _alternate(report, sides, [_scroll], loads_all=True)
        await _alternate(report, sides, [_first_paint, _watch_streams])
    await _memory(report, sides)


async def _alternate(
    report: Report, sides: Mapping[str, Side], measures: list[Measure], *, loads_all: bool = False
) -> None:
    """Measure each side in turn and report the best of several rounds."""
    pages = {name: await side.open("a/a0") for name, side in sides.items()}
    for page in pages.values():
        if loads_all:
            await page.evaluate(panel_frames.ALL_OF_IT)
    for one in measures:
        best: dict[str, Figures] = {name: {} for name in sides}
        for _ in range(ROUNDS):
            for name, side in sides.items():
                await pages[name].bring_to_front()
                for metric, value in (await one(side, pages[name])).items():
                    best[name][metric] = min(value, best[name].get(metric, value))
        _report(report, best)
    for side in sides.values():
        await side.close_pages()


def _report(report: Report, figures: Mapping[str, Figures]) -> None:
    for metric, value in figures["ours"].items():
        unit, most = LIMITS.get(metric, ("ms", None))
        report.line(metric, value, unit, at_most=most)
        if "theirs" in figures:
            other = figures["theirs"][metric]
            report.line(f"{metric}, beside", other, unit)
            if other > 0 and "growth" not in metric:
                report.ratio(metric, value, other, at_most=WORSE[unit])


# Typing


async def _type(_: Side, page: Page) -> Figures:
    return _spread("typing in a thread of 5,000 messages", await _typed(page))


async def _type_beside_a_reply(side: Side, page: Page) -> Figures:
    await side.talk(["a0"], 6 * KEYS)
    await page.wait_for_selector('[data-testid="draft"]')
    took = await _typed(page)
    assert await page.locator('[data-testid="draft"]').count(), "the reply ended before the typing"
    await side.wait(["a0"])
    return _spread("typing while a reply is written", took)


async def _typed(page: Page) -> list[float]:
    """Milliseconds from each key to the frame with its character."""
    await page.locator("#composer").click()
    if not await page.evaluate("() => Boolean(window.typed)"):
        await page.evaluate(WATCH_KEYS)
    await page.evaluate("() => { typed.length = 0; }")
    await page.keyboard.type(("some words " * KEYS)[:KEYS], delay=KEY_MS)
    await page.wait_for_function("count => typed.length >= count", arg=KEYS)
    figures = list[float](await page.evaluate("() => typed"))[:KEYS]
    await page.keyboard.press("Control+a")
    await page.keyboard.press("Delete")
    return figures


def _spread(name: str, took: list[float]) -> Figures:
    return {f"{name}: median": percentile(took, 0.5), f"{name}: p95": percentile(took, 0.95)}


# Memory


async def _memory(report: Report, sides: Mapping[str, Side]) -> None:
    pages = {name: await side.open("a/a0") for name, side in sides.items()}
    sessions = {name: await page.context.new_cdp_session(page) for name, page in pages.items()}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for session in sessions.values():
        await session.send("Performance.enable")
    for _ in range(REPEATS):
        for name, page in pages.items():
            await page.bring_to_front()
            for path in SCREENS:
                await page.evaluate(VISIT, path)
            seen[name].append(await _used(sessions[name]))
    # The first two repeats fill caches that have a limit.
    _report(
        report,
        {
            name: {
                "JS heap after 20 conversations and every screen": repeats[0][0],
                "JS heap: growth over 8 repeats": repeats[-1][0] - repeats[1][0],
                "DOM nodes: growth over 8 repeats": repeats[-1][1] - repeats[1][1],
            }
            for name, repeats in seen.items()
        },
    )


async def _used(session: CDPSession) -> tuple[float, float]:
    """Megabytes of the JS heap and DOM nodes that are left after a garbage collection."""
    for _ in range(3):
        await session.send("HeapProfiler.collectGarbage")
    reported = await session.send("Performance.getMetrics")
    now = {one["name"]: float(one["value"]) for one in reported["metrics"]}
    return now["JSHeapUsedSize"] / MEGABYTE, now["Nodes"]


# Frame times


async def _scroll(_: Side, page: Page) -> Figures:
    frames = (await panel_frames.scrolled(page))["frames"]
    return {
        "scrolling 5,000 messages: mean frame": sum(frames) / len(frames),
        "scrolling 5,000 messages: p95 frame": percentile(frames, 0.95),
    }


async def _first_paint(side: Side, _: Page) -> Figures:
    context, url = await side.context()
    paint, usable, _shift = await panel_frames.opened(context, f"{url}/#/a/a1", slower=1)
    side.contexts.remove(context)
    return {"first paint": paint, "composer usable": usable}


async def _watch_streams(side: Side, page: Page) -> Figures:
    await side.talk(ALL, panel_frames.TOKENS * panel_frames.SECONDS)
    seen = await page.evaluate(panel_frames.FRAMES, panel_frames.SECONDS * 1000)
    await side.wait(ALL)
    return {
        "20 agents talk: mean frame": sum(seen["frames"]) / len(seen["frames"]),
        "20 agents talk: p95 frame": percentile(seen["frames"], 0.95),
        "20 agents talk: longest task": float(seen["longest"]),
    }
