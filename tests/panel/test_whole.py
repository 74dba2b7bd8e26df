"""The page as a whole: size, first load, two languages, screen readers, zoom."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import rjsmin
from playwright.async_api import Browser, Page, expect
from pygments.lexers.javascript import JavascriptLexer
from pygments.token import Comment, String

import coterie
from coterie.testing import Calls, Says
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.conftest import Figure
from tests.panel.harness import PHONE, WIDE, Panel, open_panel

STATIC = Path(coterie.__file__).parent / "web" / "static"
INDEX = (STATIC / "index.html").read_text()
PLACES = ("a/ada", "inbox", "tasks", "tasks?view=usage", "timeline", "org", "delayed", "artifacts", "agents", "setup")


def screen_of(place: str) -> str:
    """Selector of the screen that an address shows."""
    return f'[data-testid="screen-{re.split("[/?]", place)[0]}"]'


@pytest.mark.check(28)
async def test_the_scripts_and_styles_stay_under_the_size_limit(panel: Panel, figure: Figure) -> None:
    """What the page needs first, each screen that it loads later, and all together, as the server sends them."""
    context = await panel.browser()

    async def sent(path: Path) -> int:
        answer = await context.request.get(f"{panel.url}/static/{path.relative_to(STATIC).as_posix()}")
        assert answer.headers["content-encoding"] == "gzip"
        return len(gzip.compress(await answer.body(), 9))

    page = {STATIC / name for name in re.findall(r'rel="stylesheet" href="/static/([^"]+)', INDEX)}
    first = _imported(STATIC / "app.js") | page
    later = {path for kind in ("js", "css") for path in STATIC.rglob(f"*.{kind}")} - first
    sizes = {path: await sent(path) for path in first | later}
    needed, styles = sum(sizes[path] for path in first), sum(sizes[path] for path in page)
    figure(f"{needed / 1000:.1f} KB first, {styles / 1000:.1f} of them styles; {sum(sizes.values()) / 1000:.1f} in all")
    assert needed <= 60_000
    assert styles <= 12_000
    assert max(sizes[path] for path in later) <= 20_000
    assert sum(sizes.values()) <= 160_000


def _imported(script: Path, found: set[Path] | None = None) -> set[Path]:
    """The script and all that it imports before it runs; `import()` loads later."""
    found = set() if found is None else found
    if script not in found:
        found.add(script)
        for name in re.findall(r"^(?:import|\}) .*?'(\.[^']+)';", script.read_text(), re.M):
            _imported((script.parent / name).resolve(), found)
    return found


def test_scripts_use_no_function_that_parses_html() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\('on"
    )
    found = [path.name for path in STATIC.rglob("*.js") if forbidden.search(path.read_text())]
    assert found == []


@pytest.mark.check(32)
def test_every_text_exists_in_both_languages_and_every_used_key_exists() -> None:
    english, chinese = (json.loads((STATIC / "words" / f"{code}.json").read_text()) for code in ("en", "zh"))
    # English has few reasons of refused requests, and nothing on settings and tools: it uses the server's sentences.
    of_server = [key for key in chinese if key.startswith(("refused_", "config_", "toolDoes_")) and key not in english]
    assert list(english) == [key for key in chinese if key not in of_server]
    assert len(english) > 200
    for key in english:
        assert english[key].strip(), key
        assert chinese[key].strip(), key
        holes = [sorted(re.findall(r"\{\w+\}", words[key])) for words in (english, chinese)]
        assert holes[0] == holes[1], key
    scripts = "".join(path.read_text() for path in STATIC.rglob("*.js"))
    assert set(re.findall(r"(?<![\w.])t\('(\w+)'", scripts)) - set(english) == set()
    made = tuple(re.findall(r"`(\w+_)\$\{", scripts))
    named = set(re.findall(r"\b(\w+)\b", scripts))
    assert [key for key in english if key not in named and not key.startswith(made)] == []


def test_every_icon_named_in_a_script_is_in_the_page() -> None:
    drawn = set(re.findall(r'<symbol id="i-(\w+)"', (STATIC / "index.html").read_text()))
    scripts = "".join(path.read_text() for path in STATIC.rglob("*.js"))
    named = set(re.findall(r"\b(?:icon|iconButton)\('(\w+)'", scripts))
    assert len(named) > 10
    assert named - drawn == set()


@pytest.mark.parametrize("script", sorted(STATIC.rglob("*.js")), ids=lambda path: path.name)
def test_a_minified_script_has_the_same_tokens(script: Path) -> None:
    """Compared with an independent lexer. Nested templates are what a minifier could get wrong."""

    def tokens(text: str) -> list[str]:
        found = JavascriptLexer().get_tokens(text)
        return [word for kind, word in found if kind in String or (kind not in Comment and word.strip())]

    written = script.read_text()
    assert tokens(rjsmin.jsmin(written)) == tokens(written)
    assert not re.search(r"^\s*(//|/\*)", rjsmin.jsmin(written), re.M)
    assert not re.search(r"`[^`]*\$\{[^}`]*`", written)


@pytest.mark.check(28)
async def test_the_page_is_ready_after_few_requests(panel: Panel) -> None:
    context = await panel.browser()
    asked: list[str] = []
    page = await context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(f"{panel.url}/#/a/ada")
    await expect(page.locator(ui.COMPOSER)).to_be_editable()
    await page.wait_for_selector("[data-ready]")
    usable = next(n for n, url in enumerate(asked, 1) if "/threads/ada/" in url)
    assert usable <= 25, asked


@pytest.mark.check(32)
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
async def test_every_screen_fits_and_is_translated_in_both_languages(
    panel: Panel, viewport: dict[str, int], locale: str
) -> None:
    await panel.send_as_agent("Which?", "one", "two", "three")
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=3_600_000)
    await panel.society.artifacts.put(b"hello", "a.txt")
    page = await panel.open(viewport=viewport, locale=locale)
    await expect(page.locator("html")).to_have_attribute("lang", locale[:2])
    for place in PLACES:
        await page.goto(f"{panel.url}/#/{place}")
        await page.wait_for_selector(screen_of(place))
        assert await ui.sideways(page) == [], place
        assert await untranslated(page) == [], place


async def untranslated(page: Page) -> list[str]:
    """Shown keys of the text table, and unfilled placeholders."""
    found: list[str] = await page.evaluate(
        """async () => { const words = await (await import('/static/i18n.js')).wordsOf('en');
            const keys = new Set(Object.keys(words).filter(key => /[A-Z_]/.test(key)));
            const texts = []; const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (walk.nextNode()) texts.push(walk.currentNode.data.trim());
            for (const el of document.querySelectorAll('[aria-label], [title], [placeholder]'))
                texts.push(el.ariaLabel ?? '', el.title ?? '', el.placeholder ?? '');
            return texts.filter(text => keys.has(text) || /\\{\\w+\\}/.test(text)); }"""
    )
    return found


@pytest.mark.check(32)
async def test_the_language_changes_without_a_reload(panel: Panel) -> None:
    page = await panel.open("#/setup")
    await expect(page.locator(".setup")).to_contain_text("Model services")
    await page.locator('[data-testid="language"]').click()
    await expect(page.locator(".setup")).to_contain_text("模型服务")
    assert await untranslated(page) == []


@pytest.mark.check(32)
async def test_a_first_start_without_keys_shows_the_tour(browser: Browser, tmp_path: Path) -> None:
    async with open_panel(tmp_path, browser, agents="") as panel:
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": []}))
        await panel.society.reload()
        page = await panel.open("#/a/assistant")
        await expect(page.get_by_test_id("start-card")).to_contain_text("The agents here follow a script")
        await ui.send(page, "Hello")
        await expect(page.locator(".quick-reply-btn").first).to_be_visible()
        await page.goto(f"{panel.url}/#/setup")
        await page.get_by_role("button", name="Add a service").click()
        form = page.locator(".service-form")
        await form.get_by_label("Short name").fill("mine")
        await form.get_by_label("Base URL").fill("http://127.0.0.1:9/v1")
        await form.get_by_label("Model").fill("m")
        await form.get_by_role("button", name="Test").click()
        await expect(form.locator(".outcome")).to_contain_text("No server responds at this address")
        assert await panel.errors() == []


async def test_an_unauthenticated_visitor_sees_how_to_log_in(panel: Panel, browser: Browser) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(panel.url)
    await expect(page.locator('[data-testid="locked"]')).to_contain_text("coterie open")
    await context.close()


@pytest.mark.check(24)
async def test_a_streamed_reply_is_announced_once_and_messages_between_agents_are_not(
    panel: Panel, figure: Figure
) -> None:
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=600_000)
    page = await panel.open()
    await expect(page.locator('[data-testid="inspector"] .countdown')).to_be_visible()
    words = " ".join(f"w{n}" for n in range(500))
    panel.server.default = Says(" ".join(f"b{n}" for n in range(5000)), token_delay=0.01)
    await panel.society.send(to="bob", text="Talk on")
    await expect(ui.row(page, "bob")).to_contain_text("b3")
    panel.server.script(Says(words, token_delay=0.002))
    await page.evaluate(
        """() => { window.announced = [];
            const record = all => all.forEach(change => {
                change.addedNodes.forEach(node => announced.push(node.textContent));
                if (change.type === 'characterData') announced.push(change.target.data); });
            for (const el of document.querySelectorAll('[role=log], [role=alert], [role=status], [aria-live]'))
                new MutationObserver(record).observe(el, {childList: true, characterData: true, subtree: true}); }"""
    )
    await ui.send(page, "Tell me")
    await expect(page.locator(ui.FEED)).to_contain_text("w499")
    await page.wait_for_function("() => window.announced.some(line => line.includes('Ada: w0'))")
    announced = await page.evaluate("() => window.announced")
    figure(f"{len(announced)} lines")
    assert len([line for line in announced if "w0" in line]) == 1
    assert len(announced) <= 2
    assert [line for line in announced if "b1" in line or "00:" in line] == []
    panel.society.stop_turn("bob")
    await panel.stage.state("bob", "idle")


@pytest.mark.check(27)
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
async def test_there_is_no_motion_with_reduced_motion_and_no_long_animation(panel: Panel, motion: Any) -> None:
    page = await panel.open(reduced_motion=motion)
    await page.evaluate(
        """() => { window.moved = []; const look = () => {
            for (const one of document.getAnimations())
                moved.push([one.animationName ?? one.transitionProperty, one.effect.getComputedTiming().endTime]);
            requestAnimationFrame(look); }; look(); }"""
    )
    await panel.send_as_agent("Which?", "one")
    await expect(page.locator(".quick-reply-btn")).to_be_visible()
    await page.locator(".quick-reply-btn").hover()
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "a bell"}),)), "Done")
    await panel.society.send(to="ada", text="Ring it", sender="bob")
    await expect(page.locator('[data-testid="agent-state"].is-active')).to_be_visible()
    await page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    await page.locator('[data-testid="menu"]').click()
    await expect(page.locator('[data-testid="agent-filter"]')).to_be_focused()
    Bell.may_end.set()
    await panel.stage.state("ada", "idle")
    moved: list[tuple[str, float]] = await page.evaluate("() => window.moved")
    if motion == "reduce":
        assert moved == []
    else:
        assert moved
        assert [one for one in moved if one[1] > 150] == []


SPACED = """spaced => { const sheet = new CSSStyleSheet();
    sheet.replaceSync('* { line-height: 1.5 !important; letter-spacing: .12em !important;' +
        ' word-spacing: .16em !important; } p { margin-bottom: 2em !important; }');
    document.adoptedStyleSheets = spaced ? [sheet] : []; }"""
SMALL = """() => [...document.querySelectorAll('button, a[href], input, select, textarea, summary, [role=treeitem]')]
    .filter(el => el.checkVisibility({visibilityProperty: true}) && el.offsetWidth > 1)
    .filter(el => !el.closest('[inert], .md p'))
    // A box with its words is one target.
    .map(el => [el.outerHTML.slice(0, 100), (el.closest('label') ?? el).getBoundingClientRect()])
    .filter(([, box]) => box.width < 24 || box.height < 24).map(([html]) => html)"""
CUT = """() => [...document.querySelectorAll('#app *, dialog *')]
    .filter(el => el.checkVisibility({visibilityProperty: true}) && !el.closest('[inert], .vh, svg'))
    .filter(el => [...el.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
    .filter(el => { const style = getComputedStyle(el);
        return /hidden|clip/.test(style.overflowY) && el.scrollHeight > el.clientHeight + 1
            && !(Number(style.webkitLineClamp) > 0); })
    .map(el => `${el.className} ${el.scrollHeight} > ${el.clientHeight}: ${el.textContent.slice(0, 40)}`)"""


@pytest.mark.check(26)
@pytest.mark.parametrize("size", [(320, 640, 1), (640, 400, 2)], ids=["320 px", "200 %"])
async def test_large_and_spaced_text_is_not_cut_and_targets_are_large_enough(
    panel: Panel, size: tuple[int, int, int]
) -> None:
    """A zoom of 200 % equals a window of half the width with twice the pixel ratio."""
    width, height, scale = size
    await panel.send_as_agent("Which one do you want, and why?", "one", "two")
    await panel.send_as_agent("From Bob to Ada, with some words", by="bob", to="ada")
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=3_600_000)
    await panel.society.artifacts.put(b"hello", "a.txt")
    viewport = {"width": width, "height": height}
    page = await panel.open(viewport=viewport, device_scale_factor=scale)
    for place in PLACES:
        await page.goto(f"{panel.url}/#/{place}")
        await page.wait_for_selector(f"{screen_of(place)} > *")
        for spaced in (False, True):
            await page.evaluate(SPACED, spaced)
            for slide in (None, "side"):
                if slide and width <= 720:
                    await page.locator('[data-testid="menu"]').click()
                    await expect(page.locator('[data-testid="agent-filter"]')).to_be_focused()
                assert await ui.sideways(page) == [], (place, spaced, slide)
                assert await page.evaluate(SMALL) == [], (place, spaced, slide)
                assert await page.evaluate(CUT) == [], (place, spaced, slide)
            await page.keyboard.press("Escape")
