"""Frame times and first paint of a page of the panel, measured inside the page."""

from __future__ import annotations

import asyncio
from typing import Any

from playwright.async_api import BrowserContext, Page

TOKENS, SECONDS = 50, 12
"""Tokens per second of each streaming agent, and how long the page is watched."""
WHEEL = 100
"""Pixels per turn of the mouse wheel."""

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
ALL_OF_IT = """() => import('/static/state.js').then(state => state.loadAround('ada', 'all of it'))"""
TO_END = """() => { const box = document.querySelector('.thread'); box.scrollTop = box.scrollHeight; }"""
SEEN = """
  const box = document.querySelector('.thread');
  const feed = box.querySelector('[role=feed]');
  // Every point down the middle of the window lies on some article. Between two of them there may be a part of a pixel:
  // they stand at whole pixels and are not always as high.
  const blank = () => {
    const {top, bottom, left, width} = box.getBoundingClientRect();
    const shown = [...feed.querySelectorAll('article')].map(one => one.getBoundingClientRect());
    const at = y => shown.some(one => one.top - 1 <= y && one.bottom + 1 >= y);
    return ![.1, .5, .9].every(share => at(top + (bottom - top) * share));
  };
"""
SCROLLS = (
    "async ms => {"
    + SEEN
    + """
  const frames = []; let nodes = 0, articles = 0, blanks = 0, last = performance.now();
  const end = last + ms;
  while (performance.now() < end) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last); last = now;
    if (frames.length % 10) continue;
    nodes = Math.max(nodes, document.querySelectorAll('*').length);
    articles = Math.max(articles, feed.querySelectorAll('article').length);
    blanks += blank();
  }
  return {frames, nodes, articles, blanks, top: box.scrollTop};
}"""
)
EMPTY_SCROLLS = """async ms => {
  const frames = []; let last = performance.now();
  const end = last + ms;
  while (last < end) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last); last = now;
  }
  return {frames};
}"""
JUMPS = (
    "async count => {"
    + SEEN
    + """
  const frame = () => new Promise(requestAnimationFrame);
  const took = [];
  for (let n = 0; n < count; n += 1) {
    const start = performance.now();
    box.scrollTop = (n * 0.618 % 1) * (box.scrollHeight - box.clientHeight);
    do await frame(); while (blank() && performance.now() < start + 5000);
    await new Promise(done => setTimeout(done));
    took.push(performance.now() - start);
  }
  return took;
}"""
)
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


async def opened(context: BrowserContext, url: str, *, slower: int) -> list[float]:
    """Open a page on a processor that is `slower` times slower.

    Returns the milliseconds to the first paint and to the composer, and the layout shift.
    """
    await context.add_init_script(PAINTS)
    page = await context.new_page()
    cdp = await context.new_cdp_session(page)
    await cdp.send("Emulation.setCPUThrottlingRate", {"rate": slower})
    await page.goto(url, wait_until="commit")
    figures = list[float](await page.evaluate(FIRST))
    await context.close()
    return figures


async def scrolled(page: Page, script: str = SCROLLS) -> dict[str, Any]:
    """Scroll up with the mouse wheel for six seconds; return what the script saw."""
    await page.bring_to_front()
    await page.evaluate(TO_END)
    box = await page.locator(".thread").bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    seen = asyncio.ensure_future(page.evaluate(script, 6_000))
    while not seen.done():
        await page.mouse.wheel(0, -WHEEL)
    return dict(await seen)
