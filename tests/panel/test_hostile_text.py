"""Injection payloads in every text of others that the page shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from playwright.async_api import BrowserContext, Page, expect

from coterie.testing import Calls, Says
from coterie.text import to_storable
from tests.panel import ui
from tests.panel.harness import Panel, eventually, options_of
from tests.panel.payloads import corpus, handlers

TRAP = "window.ran = 0; window.pwned = () => { window.ran += 1; };"


async def careful(panel: Panel, *, policy: bool = True) -> BrowserContext:
    """A browser that counts payloads that run. Without the content policy only the page itself protects."""
    context = await panel.browser(bypass_csp=not policy)
    await context.add_init_script(TRAP)
    return context


async def nothing_ran(panel: Panel, page: Page) -> None:
    assert page.url.startswith(panel.url)
    assert await page.evaluate("() => window.ran") == 0
    # The fixture checks for foreign requests, dialogs and policy violations after every test.


async def walked(page: Page, wanted: int) -> set[str]:
    """Scroll through the thread, so that each message is in the document for at least two frames."""
    await expect(ui.messages(page).last).to_be_visible()
    seen: list[str] = await page.evaluate(
        """async wanted => {
            const feed = document.querySelector('[role=feed]');
            let box = feed;
            while (!['auto', 'scroll'].includes(getComputedStyle(box).overflowY)) box = box.parentElement;
            const seen = new Set();
            const look = () => feed.querySelectorAll('article[data-message-id]').forEach(
                a => seen.add(a.dataset.messageId));
            const frame = () => new Promise(requestAnimationFrame);
            let still = 0;
            box.scrollTop = box.scrollHeight;
            await frame();
            await frame();
            while (seen.size < wanted && still < 300) {
                const before = seen.size;
                look();
                for (const one of feed.querySelectorAll('details:not([open]) > summary')) one.click();
                box.scrollTop -= box.clientHeight;
                box.dispatchEvent(new WheelEvent('wheel', {deltaY: -100}));
                await frame();
                await frame();
                look();
                still = seen.size === before ? still + 1 : 0;
            }
            return [...seen];
        }""",
        wanted,
    )
    return set(seen)


def by(size: int, many: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(many), size):
        yield many[at : at + size]


def test_the_corpus_is_large_enough() -> None:
    assert len(corpus()) >= 300
    assert len(handlers()) >= 50


@pytest.mark.parametrize("policy", [True, False], ids=["policy", "no policy"])
async def test_hostile_messages_are_shown_as_text(panel: Panel, policy: bool) -> None:
    sent = {await panel.send_as_agent(payload) for payload in corpus()}
    page = await panel.open(context=await careful(panel, policy=policy))
    assert sent - await walked(page, len(sent)) == set()
    await nothing_ran(panel, page)
    await page.goto(f"{panel.url}/#/timeline")
    await expect(page.locator(".timeline > li").first).to_be_visible()
    await page.goto(f"{panel.url}/#/inbox")
    await expect(page.locator(".item").first).to_be_visible()
    await page.goto(f"{panel.url}/#/tasks")
    await expect(page.get_by_test_id("task")).to_have_count(50)
    await nothing_ran(panel, page)


async def test_hostile_budget_questions_and_tasks_are_shown_as_text(panel: Panel) -> None:
    sent = ""
    for some in by(10, corpus()):
        facts = {"task": some[0], "reason": "turns", "limit": 1, "about": some[0], "agents": some, "used": {"turns": 1}}
        sent = await panel.send_as_agent("May it go on?", "Continue", "Stop", budget=facts)
    page = await panel.open("#/inbox", context=await careful(panel))
    await expect(page.get_by_test_id("budget")).not_to_have_count(0)
    await nothing_ran(panel, page)
    for view in ("talk", "time", "agents"):
        await page.goto(f"{panel.url}/#/tasks/{sent}?as={view}")
        await expect(page.get_by_test_id(f"task-{view}")).to_have_attribute("aria-pressed", "true")
    await nothing_ran(panel, page)


@pytest.mark.parametrize("policy", [True, False], ids=["policy", "no policy"])
async def test_hostile_quick_replies_are_shown_as_text(panel: Panel, policy: bool) -> None:
    options = [one for one in [*handlers(), *corpus()] if one.strip("\x00 \n")]
    sets = list(by(10, options))
    sent = {await panel.send_as_agent("Which?", *some): some for some in sets}
    page = await panel.open(context=await careful(panel, policy=policy))
    assert set(sent) - await walked(page, len(sent)) == set()
    await nothing_ran(panel, page)
    last = list(sent)[-1]
    await ui.to_end(page)
    await options_of(page, last).first.click()
    await eventually(lambda: _answered(panel))
    await page.goto(f"{panel.url}/#/inbox?only=questions")
    await expect(page.locator(".quick-reply-btn").first).to_be_visible()
    for at in range(0, 50, 7):
        await page.locator('.quick-reply-btn:not([aria-disabled="true"])').nth(at).click()
    await nothing_ran(panel, page)


async def test_hostile_names_are_shown_as_text(panel: Panel) -> None:
    for n, payload in enumerate(corpus()):
        await panel.society.create_agent(id=f"n{n}", name=payload[:200])
    page = await panel.open("#/a/n0", context=await careful(panel))
    await expect(page.locator("[data-testid^=agent-n]")).to_have_count(len(corpus()))
    for place in ("org", "timeline", "setup"):
        await page.goto(f"{panel.url}/#/{place}")
        await page.wait_for_selector(f'[data-testid="screen-{place}"]')
    await page.goto(f"{panel.url}/#/org")
    await page.get_by_role("button", name="Graph").click()
    await expect(page.locator(".node").first).to_be_visible()
    for n in range(0, 100, 9):
        await panel.send_as_agent("Hello", "one", by=f"n{n}")
    await page.keyboard.press("Control+k")
    await page.keyboard.type("script")
    await expect(page.get_by_role("option").first).to_be_visible()
    await nothing_ran(panel, page)


async def test_hostile_tool_runs_are_shown_as_text(panel: Panel) -> None:
    plans = list(by(40, corpus()))
    for plan in plans:
        panel.server.script(Says(calls=tuple(Calls("look", {"name": one}) for one in plan)))
    panel.server.script("That was all")
    page = await panel.open(context=await careful(panel))
    await ui.send(page, "Look at all of it")
    await expect(page.locator(ui.FEED)).to_contain_text("That was all")
    await expect(page.locator('[data-testid="run"]').first).to_be_attached()
    await walked(page, 2)
    await nothing_ran(panel, page)
    await page.goto(f"{panel.url}/#/timeline?kind=tool")
    await expect(page.locator(".timeline .run")).to_have_count(len(corpus()))
    shown = await page.locator(".timeline .run details:last-of-type pre").all_text_contents()
    assert {f"{to_storable(one)} rang" for one in corpus()} - set(shown) == set()
    await page.locator(".timeline .run details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    await nothing_ran(panel, page)


async def test_hostile_errors_are_shown_as_text(panel: Panel) -> None:
    page = await panel.open(context=await careful(panel))
    problems: list[dict[str, Any]] = [
        {"id": "ada", "state": "blocked", "why": one, "problem": {"category": "server"}} for one in corpus()
    ]
    shown = await page.evaluate(
        """async problems => {
            const { apply } = await import('/static/events.js');
            const { toast } = await import('/static/notices.js');
            const shown = [];
            for (const problem of problems) {
                apply('agent.state', problem);
                toast({kind: 'error', text: problem.why});
                await new Promise(requestAnimationFrame);
                shown.push(['.problem-why', '.toast-text'].map(place => document.querySelector(place)?.textContent));
                document.querySelectorAll('.toast button').forEach(one => one.click());
                document.querySelectorAll('details').forEach(one => { one.open = true; });
            }
            return shown; }""",
        problems,
    )
    assert shown == [[one, one] for one in corpus()]
    await nothing_ran(panel, page)


async def test_hostile_filenames_are_shown_as_text(panel: Panel) -> None:
    put = panel.society.artifacts.put
    refs = [(await put(f"file {n}".encode(), one, maker="ada")).ref for n, one in enumerate(corpus())]
    for some in by(20, refs):
        await panel.send_as_agent("Files", attachments=[{"artifactRef": ref} for ref in some])
    page = await panel.open(context=await careful(panel))
    count = -(-len(refs) // 20)
    assert len(await walked(page, count)) == count
    await nothing_ran(panel, page)
    await page.goto(f"{panel.url}/#/artifacts")
    await expect(page.locator(".file-link")).to_have_count(50)
    for ref in refs[:20]:
        await page.goto(f"{panel.url}/#/artifacts/{ref}")
        await expect(page.locator(".file-text, .viewer .meta").first).to_be_visible()
    await nothing_ran(panel, page)


async def test_files_that_a_browser_could_run_are_shown_as_text_or_not_at_all(panel: Panel) -> None:
    html = b"<!doctype html><script>parent.pwned()</script><img src=x onerror=pwned()>"
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" onload="pwned()"><script>pwned()</script></svg>'
    pdf = b"%PDF-1.4\n1 0 obj<</OpenAction<</S/JavaScript/JS(app.alert(1))>>>>endobj\n%%EOF"
    page = await panel.open(context=await careful(panel))
    for name, content in (("a.html", html), ("a.svg", svg), ("a.pdf", pdf)):
        ref = (await panel.society.artifacts.put(content, name)).ref
        await page.goto(f"{panel.url}/#/artifacts/{ref}")
        await expect(page.get_by_role("heading", name=name)).to_be_visible()
        await expect(page.get_by_role("link", name="Download", exact=True)).to_have_attribute("download", name)
        assert await page.locator(".viewer :is(iframe, object, embed, svg, img)").count() == 0
    await nothing_ran(panel, page)


async def _answered(panel: Panel) -> bool:
    return bool(await panel.texts())
