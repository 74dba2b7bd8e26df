"""The page as a whole: its weight, its first minute, its two languages, what a screen reader hears."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import rjsmin
from playwright.async_api import Browser, Page, expect
from pygments.lexers.javascript import JavascriptLexer
from pygments.token import Comment, String

import coterie
from coterie.testing import Says
from tests.panel import ui
from tests.panel.conftest import Figure
from tests.panel.room import PHONE, WIDE, Room, options_of, room

STATIC = Path(coterie.__file__).parent / "web" / "static"
PLACES = ("a/ada", "inbox", "timeline", "org", "delayed", "artifacts", "setup")


@pytest.mark.check(28)
async def test_the_scripts_and_styles_are_light(panel: Room, figure: Figure) -> None:
    """All of them as the server sends them, whether a page comes to need them or not."""
    context = await panel.browser()

    async def sent(path: Path) -> int:
        answer = await context.request.get(f"{panel.url}/static/{path.relative_to(STATIC).as_posix()}")
        assert answer.headers["content-encoding"] == "gzip"
        return len(gzip.compress(await answer.body(), 9))

    scripts = sum([await sent(path) for path in STATIC.rglob("*.*js")])
    styles = sum([await sent(path) for path in STATIC.rglob("*.css")])
    figure(f"scripts {scripts / 1000:.1f} KB, styles {styles / 1000:.1f} KB")
    assert scripts <= 60_000
    assert styles <= 12_000


def test_text_enters_the_page_in_one_way_only() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\('on"
    )
    found = [path.name for path in STATIC.rglob("*.js") if forbidden.search(path.read_text())]
    assert found == []


@pytest.mark.check(32)
def test_every_word_exists_in_both_languages_and_every_key_that_is_used_exists() -> None:
    english, chinese = (json.loads((STATIC / "words" / f"{code}.json").read_text()) for code in ("en", "zh"))
    assert list(english) == list(chinese)
    assert len(english) > 200
    for key in english:
        assert english[key].strip(), key
        assert chinese[key].strip(), key
        holes = [sorted(re.findall(r"\{\w+\}", words[key])) for words in (english, chinese)]
        assert holes[0] == holes[1], key
    scripts = "".join(path.read_text() for path in STATIC.rglob("*.js"))
    assert set(re.findall(r"(?<![\w.])t\('(\w+)'", scripts)) - set(english) == set()
    made = tuple(re.findall(r"`(\w+_|starter)\$\{", scripts))
    named = set(re.findall(r"\b(\w+)\b", scripts))
    assert [key for key in english if key not in named and not key.startswith(made)] == []


def test_every_drawing_that_a_script_names_is_in_the_page() -> None:
    drawn = set(re.findall(r'<symbol id="i-(\w+)"', (STATIC / "index.html").read_text()))
    scripts = "".join(path.read_text() for path in STATIC.rglob("*.js"))
    named = set(re.findall(r"\b(?:icon|iconButton)\('(\w+)'", scripts))
    assert len(named) > 10
    assert named - drawn == set()


@pytest.mark.parametrize("script", sorted(STATIC.rglob("*.js")), ids=lambda path: path.name)
def test_a_script_is_sent_without_comments_and_says_the_same(script: Path) -> None:
    """Read by a lexer that knows nothing of the minifier. A template inside a template is what it would get wrong."""

    def tokens(text: str) -> list[str]:
        found = JavascriptLexer().get_tokens(text)
        return [word for kind, word in found if kind in String or (kind not in Comment and word.strip())]

    written = script.read_text()
    assert tokens(rjsmin.jsmin(written)) == tokens(written)
    assert not re.search(r"^\s*(//|/\*)", rjsmin.jsmin(written), re.M)
    assert not re.search(r"`[^`]*\$\{[^}`]*`", written)


@pytest.mark.check(28)
async def test_the_page_is_there_after_few_requests(panel: Room) -> None:
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
async def test_every_screen_fits_in_both_languages_and_leaves_no_word_untranslated(
    panel: Room, viewport: dict[str, int], locale: str
) -> None:
    await panel.tell("Which?", "one", "two", "three")
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=60_000)
    await panel.society.artifacts.put(b"hello", "a.txt")
    page = await panel.open(viewport=viewport, locale=locale)
    await expect(page.locator("html")).to_have_attribute("lang", locale[:2])
    for place in PLACES:
        await page.goto(f"{panel.url}/#/{place}")
        await page.wait_for_selector(f'[data-testid="screen-{place.split("/")[0]}"]')
        assert await ui.sideways(page) == [], place
        assert await untranslated(page) == [], place


async def untranslated(page: Page) -> list[str]:
    """Keys of the table that are shown as they are, and holes that nobody filled."""
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
async def test_the_language_is_switched_without_a_reload(panel: Room) -> None:
    page = await panel.open("#/setup")
    await expect(page.locator(".setup")).to_contain_text("Model services")
    await page.locator('[data-testid="language"]').click()
    await expect(page.locator(".setup")).to_contain_text("模型服务")
    assert await untranslated(page) == []


@pytest.mark.check(32)
async def test_a_first_start_without_any_key_talks_at_once(browser: Browser, tmp_path: Path) -> None:
    async with room(tmp_path, browser, agents="") as panel:
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": []}))
        await panel.society.reload()
        page = await panel.open("#/a/assistant")
        await expect(page.locator('[data-testid="banner-tour"]')).to_be_visible()
        await ui.send(page, "Hello")
        await expect(page.locator(".quick-reply-btn").first).to_be_visible(timeout=4000)
        await page.goto(f"{panel.url}/#/setup")
        await page.get_by_role("button", name="Add a service").click()
        form = page.locator(".service-form")
        await form.get_by_label("Short name").fill("mine")
        await form.get_by_label("Base URL").fill("http://127.0.0.1:9/v1")
        await form.get_by_label("Model").fill("m")
        await form.get_by_role("button", name="Test").click()
        await expect(form.locator(".outcome")).to_contain_text("Nobody answers at this address")
        assert await panel.trouble() == []


async def test_a_stranger_is_told_how_to_come_in(panel: Room, browser: Browser) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(panel.url)
    await expect(page.locator('[data-testid="locked"]')).to_contain_text("coterie open")
    await context.close()


@pytest.mark.check(24)
async def test_a_reply_that_streams_is_announced_once(panel: Room) -> None:
    page = await panel.open()
    words = " ".join(f"w{n}" for n in range(500))
    panel.server.script(Says(words, token_delay=0.002))
    await page.evaluate(
        """() => { window.heard = [];
            const hear = all => all.forEach(one => one.addedNodes.forEach(node => heard.push(node.textContent)));
            for (const el of document.querySelectorAll('[role=log], [role=alert], [aria-live]'))
                new MutationObserver(hear).observe(el, {childList: true, subtree: true}); }"""
    )
    await ui.send(page, "Tell me")
    await expect(page.locator(ui.FEED)).to_contain_text("w499")
    await page.wait_for_function("() => window.heard.some(line => line.includes('Ada: w0'))")
    heard = await page.evaluate("() => window.heard")
    assert len([line for line in heard if "w0" in line]) == 1
    assert len(heard) <= 2


@pytest.mark.check(27)
async def test_nothing_moves_for_those_who_asked_for_it(panel: Room) -> None:
    page = await panel.open(reduced_motion="reduce")
    await panel.tell("Which?", "one")
    await expect(page.locator(".quick-reply-btn")).to_be_visible()
    assert await page.evaluate("() => document.getAnimations().filter(one => one.playState === 'running').length") == 0


@pytest.mark.check(26)
async def test_text_can_be_spaced_and_targets_can_be_hit_on_a_narrow_screen(panel: Room) -> None:
    message_id = await panel.tell("Which one do you want, and why?", "one", "two")
    page = await panel.open(viewport={"width": 320, "height": 640})
    await expect(options_of(page, message_id).first).to_be_visible()
    await page.evaluate(
        """() => { const sheet = new CSSStyleSheet();
            sheet.replaceSync('* { line-height: 1.5 !important; letter-spacing: .12em !important;' +
                ' word-spacing: .16em !important; }');
            document.adoptedStyleSheets = [sheet]; }"""
    )
    assert await ui.sideways(page) == []
    small = await page.evaluate(
        """() => [...document.querySelectorAll('button, a[href], input, select, textarea, [role=treeitem]')]
            .filter(el => el.checkVisibility({visibilityProperty: true}) && el.offsetWidth > 1)
            .filter(el => !el.closest('[inert], p'))
            .map(el => [el.outerHTML.slice(0, 100), el.getBoundingClientRect()])
            .filter(([, box]) => box.width < 24 || box.height < 24).map(([html]) => html)"""
    )
    assert small == []
