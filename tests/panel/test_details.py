"""Details of the panel: shortcut names, overflow, countdowns, kept state."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from string import Formatter

import pytest
from playwright.async_api import Browser, Page, Route, expect

from coterie.agent.mcp import McpServer
from coterie.clock import SystemClock
from coterie.config import McpEntry, read_config
from coterie.configuration import difference_problem
from coterie.errors import HTTP_STATUS, ConfigError
from coterie.problem_texts import SENTENCES
from coterie.testing import Status
from coterie.web import errors as web_errors
from coterie.web.app import openapi_document
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.harness import PHONE, Panel, fail_requests, open_panel
from tests.panel.test_conversation import at_work
from tests.panel.test_whole import STATIC
from tests.panel.words import Words
from tests.test_setup import able

MAC = "Object.defineProperty(Navigator.prototype, 'platform', {get: () => 'MacIntel'})"
LONG_NAME = "Somebody with a rather long name and a title besides"
FOR_PROGRAMS = {"key_not_allowed", "door_closed", "code_invalid", "range_invalid"}
"""Errors that the page never shows: of requests with a key, through a door, at /session, and for a part of a file."""
NARROW = {"width": 360, "height": 740}
ENGLISH = re.compile(r"\b(an?|or|and|is|in|not|nothing|list|table|only|line|expecting)\b", re.IGNORECASE)
CLOCKS = """async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const apart = [];
  for (const start = performance.now(); performance.now() - start < 3_000;) {
    for (const place of ['#/inbox', '#/a/ada']) {
      location.hash = place;
      while (!document.querySelector(`[data-testid="screen-${place.split('/')[1]}"] > *`)) await frame();
    }
    const shown = [...document.querySelectorAll('.countdown')].map((el) => el.textContent);
    if (new Set(shown).size > 1) apart.push(shown.join(' '));
  }
  return [document.querySelectorAll('.countdown').length, apart]; }"""


@pytest.mark.parametrize(
    ("mac", "name", "key", "other"), [(True, "⌘", "Meta", "Control"), (False, "Ctrl", "Control", "Meta")]
)
async def test_the_shown_shortcut_is_that_of_the_platform_and_works(
    panel: Panel, mac: bool, name: str, key: str, other: str
) -> None:
    context = await panel.browser()
    await context.add_init_script(MAC if mac else "")
    page = await panel.open(context=context)
    await expect(page.locator('[data-testid="search"] kbd')).to_have_text(f"{name} K")
    # On a Mac the other key deletes to the end of the line.
    await page.locator(ui.COMPOSER).focus()
    await page.keyboard.press(f"{other}+k")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    await page.keyboard.press(f"{key}+k")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press(f"{key}+/")
    sheet = page.get_by_role("dialog")
    await expect(sheet).to_contain_text(f"{name}+K")
    await expect(sheet).to_contain_text("⌥+Q" if mac else "Alt+Q")
    assert (await sheet.get_by_text("Ctrl").count() == 0) is mac


async def test_a_delete_button_keeps_its_danger_colour_on_hover(panel: Panel) -> None:
    page = await panel.open("#/setup")
    delete = page.get_by_role("button", name="Delete main")
    danger = await _colour(page, "var(--danger)")
    await expect(delete).to_have_css("color", danger)
    await delete.click()
    sure = page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True)
    await expect(sure).to_have_css("color", danger)
    await sure.hover()
    await expect(sure).to_have_css("color", danger)


@pytest.mark.parametrize("width", [360, 768])
async def test_the_capabilities_of_a_service_fit_without_horizontal_scrolling(panel: Panel, width: int) -> None:
    page = await panel.open("#/setup", viewport={"width": width, "height": 900})
    table = page.locator(".table-frame")
    await expect(table).to_contain_text("in + out")
    await expect(table).to_contain_text("text")
    assert await table.evaluate("el => el.scrollWidth <= el.clientWidth")


async def test_an_empty_thread_suggests_messages_that_fit_the_role(panel: Panel) -> None:
    await panel.spawn_child()
    page = await panel.open("#/a/pia", viewport=PHONE)
    lines = page.locator(".starter")
    await expect(lines).to_have_text(
        ["What can you do?", "As proof-reader, what do you need from me to start?", "What has Ada asked you to do?"]
    )
    await lines.nth(2).click()
    await expect(page.locator(ui.COMPOSER)).to_have_value("What has Ada asked you to do?")


SECOND_LIST = """async () => { const root = document.createElement('div'); document.querySelector('.main').append(root);
    (await import('/static/screens/delayed.js')).render(root, {query: new URLSearchParams(), compact: true}); }"""


async def test_two_countdowns_to_one_due_time_never_differ(panel: Panel) -> None:
    await panel.society.send(to="user", text="Later", sender="ada", delay_ms=60_000)
    page = await panel.open("#/a/ada", viewport={"width": 1440, "height": 900})
    await expect(page.locator(".countdown")).to_have_count(1)
    await page.evaluate(SECOND_LIST)
    await expect(page.locator(".countdown")).to_have_count(2)
    there, apart = await page.evaluate(CLOCKS)
    assert there == 2
    assert apart == []


@pytest.mark.parametrize(("locale", "said"), [("en-US", "The server does not respond"), ("zh-CN", "服务器没有响应")])
async def test_an_unreachable_server_is_reported_in_the_language_of_the_page(
    panel: Panel, locale: str, said: str
) -> None:
    sent = await panel.society.send(to="user", text="Later", sender="ada", delay_ms=60_000)
    page = await panel.open("#/delayed", viewport=PHONE, locale=locale)
    await fail_requests(page, None, path="**/api/v1/messages/*", method="DELETE")
    panel.allow("net::ERR_CONNECTION_REFUSED")
    await page.locator(f'[data-message-id="{sent.message_id}"]').get_by_role("button").first.click()
    await expect(page.locator(ui.TOAST)).to_contain_text(said)
    await expect(page.locator(ui.TOAST)).not_to_contain_text("fetch")


@pytest.mark.parametrize(
    ("locale", "reason"),
    [("en-US", "every cannot be read"), ("zh-CN", "无法识别这条重复规则。可以写 15m、2 hours")],
    ids=["en-US", "zh-CN"],
)
async def test_a_refused_request_is_reported_in_the_language_of_the_page(
    panel: Panel, locale: str, reason: str
) -> None:
    page = await panel.open(locale=locale)
    panel.allow("422")
    await page.locator(ui.COMPOSER).fill("Water the plants")
    await page.get_by_test_id("send-later").click()
    await page.get_by_test_id("when-repeat").select_option("custom")
    await page.get_by_test_id("when-custom").fill("whenever")
    await page.get_by_test_id("when-save").click()
    await expect(page.locator(ui.TOAST)).to_contain_text(reason)


@pytest.mark.parametrize(("locale", "said"), [("en-US", "HTTP 502"), ("zh-CN", "代理返回了错误（HTTP 502）")])
async def test_an_answer_of_a_proxy_is_reported_in_the_language_of_the_page(
    panel: Panel, locale: str, said: str
) -> None:
    sent = await panel.society.send(to="user", text="Later", sender="ada", delay_ms=60_000)
    page = await panel.open("#/delayed", locale=locale)
    panel.allow("502")
    await page.route("**/api/v1/messages/*", lambda route: route.fulfill(status=502, body="<h1>Bad Gateway</h1>"))
    await page.route("**/api/v1/artifacts", lambda route: route.fulfill(status=502, body="<h1>Bad Gateway</h1>"))
    await page.locator(f'[data-message-id="{sent.message_id}"]').get_by_role("button").first.click()
    await expect(page.locator(ui.TOAST)).to_contain_text(said)
    await page.goto(f"{panel.url}/#/a/ada")
    await page.set_input_files("input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"})
    await expect(page.locator(ui.CHIP)).to_have_attribute("title", re.compile(re.escape(said)))


@pytest.mark.parametrize(
    ("locale", "said", "listed"),
    [
        ("en-US", "temperature: expected a number, 0 to 2, got 9", 'unknown key, did you mean "role"?'),
        ("zh-CN", "模型服务的设置无效：temperature：应为 0 到 2 之间的数字，实际为 9", "没有这个设置。是不是“role”？"),
    ],
    ids=["en-US", "zh-CN"],
)
async def test_wrong_settings_are_reported_in_the_language_of_the_page(
    panel: Panel, locale: str, said: str, listed: str
) -> None:
    """Those of a file in the list of problems, and those of a refused change in the notice about it."""
    file = panel.stage.folder / "coterie.toml"
    file.write_text(f"{file.read_text()}\nrloe = 'Reader'\n")
    await panel.society.reload()
    page = await panel.open("#/setup", locale=locale)
    panel.allow("422")
    await expect(page.get_by_test_id("wrong-settings")).to_contain_text(listed)

    async def add_temperature(route: Route) -> None:
        await route.continue_(post_data=json.dumps({**(route.request.post_data_json or {}), "temperature": 9}))

    await page.route("**/api/v1/services/main", add_temperature)
    await page.locator('[data-service="main"]').get_by_role("button").nth(1).click()
    await page.locator(".service-form button[type=submit]").click()
    await expect(page.locator(ui.TOAST)).to_contain_text(said)


@pytest.mark.parametrize(
    ("services", "said"),
    [
        ({"services": {}}, "应为数组，实际为 对象"),
        ({"services": [{"id": "main", "baseURL": "http://[::1]:9/v1", "model": "m", "fallback": [[]]}]}, "实际为 数组"),
        ({"services": [None]}, "应为对象，实际为 空"),
        ('{"services": [1,}', "第 1 行第 17 列：不是有效的 JSON：缺少值"),
        ('{"services": NaN}', "包含无法读取的数字：NaN 不是有效的 JSON"),
    ],
)
async def test_wrong_services_are_named_without_english_words(panel: Panel, services: object, said: str) -> None:
    file = panel.stage.folder / "llmservices.json"
    before = file.read_text()
    file.write_text(services if isinstance(services, str) else json.dumps(services))
    with suppress(ConfigError):
        await panel.society.reload()
    page = await panel.open("#/setup", locale="zh-CN")
    problems = page.get_by_test_id("wrong-settings")
    await expect(problems).to_contain_text(said)
    assert not ENGLISH.search(await problems.inner_text())
    file.write_text(before)


async def test_differences_and_failed_servers_are_named_without_english_words(panel: Panel, tmp_path: Path) -> None:
    stored = {"agents": {name: {} for name in "uvwxyz"} | {"eve": {"prompt": "p" * 99}}, "limits": {"mailbox": 7}}
    differ = difference_problem(3, stored, {"agents": {"ada": {}, "eve": {"prompt": "q" * 99}}})
    few = difference_problem(3, {"limits": {"hops": 1}}, {"limits": {"hops": 2}})
    wrong = "[limits]\nmax_hops = {}\n[interruption]\ninterrupt = []\n[agents.ada]\ncolour = 3\n"
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "coterie.toml").write_text(wrong)
    with pytest.raises(ConfigError) as caught:
        read_config(folder)
    read = caught.value.problems
    entry = McpEntry(id="notes", command="nowhere", env={"KEY": "${UNSET}"})
    broken = McpServer(
        entry,
        SystemClock(),
        lambda _, __: [],
        find_key=lambda _: None,
        start_timeout=timedelta(1),
        max_wait=timedelta(1),
    )
    failed, again = await broken.try_connect(), await broken.try_connect()
    assert failed and again and len(read) >= 2
    page = await panel.open("#/setup", locale="zh-CN")
    script = "async problems => problems.map((await import('/static/i18n.js')).settingProblem)"
    said = await page.evaluate(script, [one.to_dict() for one in (differ, few, failed, again, *read)])
    for sentence in said:
        assert not ENGLISH.search(sentence.replace("coterie apply --dry-run", "")), sentence
    assert "agents.u：只在数据库中" in said[0] and "另有 4 处" in said[0]
    assert "limits.hops：数据库中为 1，文件中为 2" in said[1]
    assert "env.KEY 引用的 UNSET 在环境变量" in said[2]
    assert "秒后重试" in said[3]


async def test_code_and_tables_have_names_in_the_language_of_the_page(panel: Panel) -> None:
    await panel.send_as_agent("```\nprint(1)\n```\n\n| |\n|---|\n| 1 |")
    page = await panel.open("#/a/ada", locale="zh-CN")
    await expect(page.locator(".md-code pre")).to_have_attribute("aria-label", "代码")
    await expect(page.locator(".md-table")).to_have_attribute("aria-label", "表格")


def test_every_problem_of_a_setting_has_a_sentence_in_chinese() -> None:
    chinese = json.loads((STATIC / "words" / "zh.json").read_text())
    sentences = {key.removeprefix("config_"): text for key, text in chinese.items() if key.startswith("config_")}
    assert set(sentences) - set(SENTENCES) == {"got", "meant", "quoted"}
    assert set(SENTENCES) - set(sentences) == set()
    for code, sentence in SENTENCES.items():
        holes = {name for _, name, _, _ in Formatter().parse(sentence) if name}
        assert set(re.findall(r"(?<!\$)\{(\w+)\}", sentences[code])) == holes, code


def test_every_error_of_the_api_has_a_sentence_in_each_language() -> None:
    english, chinese = (json.loads((STATIC / "words" / f"{code}.json").read_text()) for code in ("en", "zh"))
    codes = _error_codes() - FOR_PROGRAMS
    assert len(codes) > 60
    assert {code for code in codes if f"refused_{code}" not in chinese} == set()
    assert {key.removeprefix("refused_") for key in chinese if key.startswith("refused_")} - codes == {"error"}
    # English ones replace the server's own sentences. An answer of a proxy has none.
    assert "refused_error" in english
    assert {key for key in english if key.startswith("refused_")} - set(chinese) == set()


def _error_codes() -> set[str]:
    """The codes of all errors below /api: those of `Refused`, those that routes describe, those in the source."""
    described = [
        response["description"]
        for path, operations in openapi_document()["paths"].items()
        if path.startswith("/api/")
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if status >= "400"
    ]
    web = Path(web_errors.__file__).parent
    scripts = [*web.glob("*.py"), *(web / "api").glob("*.py")]  # the other folders are doors for programs
    raised = [
        match
        for script in scripts
        for match in re.findall(r'(?:RequestRejected|error_response|problem)\([^"()]*"([a-z_]+)",', script.read_text())
    ]
    return {
        *HTTP_STATUS,
        *raised,
        *re.findall("`([A-Za-z_]+)`", " ".join(described)),
        "not_found",
        "method_not_allowed",
    }


def wide_family(count: int) -> str:
    """An agent with many children, the last with a long name."""
    made = "".join(f'[agents.a{n}]\nname = "Agent {n}"\nparent = "root"\n' for n in range(count))
    return f'[agents.root]\nname = "Root"\n{made}[agents.z]\nname = "{LONG_NAME}"\nparent = "root"\n'


IN_FRAME = """() => { const frame = document.querySelector('.graph-frame').getBoundingClientRect();
    return [...document.querySelectorAll('.node rect')].map(el => el.getBoundingClientRect()).filter(box =>
        box.left >= frame.left && box.right <= frame.right && box.top >= frame.top
        && box.bottom <= frame.bottom).length; }"""
OVERLAPS = """() => { const boxes = [...document.querySelectorAll('.node rect')].map(el => el.getBoundingClientRect());
    return boxes.filter((a, n) => boxes.some((b, m) => m > n && a.left < b.right && b.left < a.right
        && a.top < b.bottom && b.top < a.bottom)).length; }"""
WIDTH = "() => document.querySelector('.node rect').getBoundingClientRect().width"


@pytest.mark.parametrize("count", [10, 100])
async def test_the_organisation_graph_fits_and_can_be_zoomed_and_moved(
    browser: Browser, tmp_path: Path, count: int, words: Words
) -> None:
    async with open_panel(tmp_path, browser, agents=wide_family(count - 2)) as panel:
        page = await panel.open("#/org", locale=words.locale)
        await page.get_by_role("button", name=words("org_graph"), exact=True).click()
        await expect(page.locator(".node")).to_have_count(count)
        assert await page.evaluate(IN_FRAME) == count
        assert await page.evaluate(OVERLAPS) == 0
        wide = await page.evaluate(WIDTH)
        await page.get_by_test_id("zoom-in").click()
        await page.get_by_test_id("zoom-in").click()
        assert await page.evaluate(WIDTH) > wide * 1.5
        frame = page.locator(".graph-frame")
        seen = await page.locator(".graph").get_attribute("viewBox")
        await frame.focus()
        await page.keyboard.press("ArrowRight")
        assert await page.locator(".graph").get_attribute("viewBox") != seen
        moved = await page.locator(".graph").get_attribute("viewBox")
        await panel.society.pause("a3")
        await expect(page.locator(".node", has_text=words("paused"))).to_have_count(1)
        assert await page.locator(".graph").get_attribute("viewBox") == moved  # a repaint keeps what is seen
        await page.get_by_test_id("zoom-fit").click()
        assert await page.evaluate(IN_FRAME) == count
        assert await panel.errors() == []


async def test_a_screen_that_is_opened_first_has_its_styles(panel: Panel) -> None:
    context = await panel.browser(viewport=PHONE)
    for place in ("inbox", "timeline", "org", "delayed", "artifacts", "setup"):
        page = await panel.open(f"#/{place}", context=context)
        await expect(page.locator(f'[data-testid="screen-{place}"] > *').first).to_be_attached()
        await expect(page.locator(".screen")).to_have_css("padding", "16px")
        await page.close()


async def test_long_names_do_not_overflow(browser: Browser, tmp_path: Path) -> None:
    async with open_panel(tmp_path, browser, agents=wide_family(40)) as panel:
        page = await panel.open("#/org", viewport=NARROW)
        row = page.locator('.org-row[data-agent="z"]')
        dot, name = await row.locator(".avatar").bounding_box(), await row.locator(".org-name").bounding_box()
        assert dot
        assert name
        assert name["x"] > dot["x"] + dot["width"]
        await page.goto(f"{panel.url}/#/a/z")
        composer = page.locator(ui.COMPOSER)
        await expect(composer).to_have_attribute("placeholder", f"Message {LONG_NAME}")
        assert await composer.evaluate("el => el.offsetHeight") == 44
        await page.goto(f"{panel.url}/#/setup")
        used = page.locator(".service .clamp")
        await expect(used).to_contain_text("Used by")
        assert await used.evaluate("el => el.clientHeight < 4 * 13 * 1.4")
        assert await panel.errors() == []


async def test_an_error_is_shown_after_a_reload_too(panel: Panel, words: Words) -> None:
    panel.server.script(Status(401, "Incorrect API key provided: nope.", code="invalid_api_key"))
    page = await panel.open(viewport=PHONE, locale=words.locale)
    await ui.send(page, "Hello")
    card = page.locator('[data-testid="problem"] .problem-what')
    await expect(card).to_contain_text(words("problem_auth"))
    await expect(card).to_contain_text("main, HTTP 401")
    said = await card.inner_text()
    await page.reload()
    await expect(card).to_have_text(said)


async def test_an_opened_detail_stays_open_while_others_update(panel: Panel) -> None:
    page = await panel.open("#/timeline")
    thread = await panel.open(context=page.context)
    await at_work(panel, "Look around")
    await thread.locator(".runs > summary").click()
    for one in (page, thread):
        await one.locator(".run-more summary").first.click()
        await expect(one.locator(".run-more[open]")).to_have_count(1)
    Bell.may_end.set()
    await panel.send_as_agent("Something else", by="bob")
    await panel.stage.state("ada", "idle")
    await expect(page.locator(".timeline")).to_contain_text("Something else")
    await expect(thread.locator(".run-started")).to_have_count(0)
    for one in (page, thread):
        await expect(one.locator(".run-more[open]")).to_have_count(1)


async def test_the_result_of_a_health_check_survives_an_update_of_the_page(panel: Panel) -> None:
    page = await panel.open("#/setup")
    card = page.locator('[data-service="main"]')
    await card.get_by_role("button", name="Test").click()
    await expect(card.locator(".outcome")).to_contain_text("It answered in")
    await page.evaluate("async () => { await (await import('/static/state.js')).resync(); }")
    await expect(card.locator(".outcome")).to_contain_text("It answered in")


async def test_the_key_that_opens_the_palette_closes_it(panel: Panel) -> None:
    page = await panel.open()
    await page.keyboard.press("Control+k")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Control+k")
    await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_the_selected_agent_is_visible_in_a_long_list(browser: Browser, tmp_path: Path) -> None:
    async with open_panel(tmp_path, browser, agents=wide_family(40)) as panel:
        page = await panel.open("#/a/z")
        await expect(ui.row(page, "z")).to_be_in_viewport(ratio=1)
        await page.keyboard.press("Alt+ArrowDown")
        await expect(ui.row(page, "root")).to_be_in_viewport(ratio=1)
        await page.keyboard.press("Alt+ArrowUp")
        await expect(ui.row(page, "z")).to_be_in_viewport(ratio=1)
        assert await panel.errors() == []


async def test_the_first_service_removes_the_tour_notice(browser: Browser, tmp_path: Path) -> None:
    async with open_panel(tmp_path, browser, agents="") as panel:
        (tmp_path / "llmservices.json").write_text('{"services": []}')
        await panel.society.reload()
        page = await panel.open("#/setup")
        card = page.get_by_test_id("start-card")
        await expect(card).to_be_visible()
        await page.get_by_role("button", name="Add a service").click()
        form = page.locator(".service-form")
        for label, words in (("Short name", "first"), ("Base URL", panel.server.base_url), ("Model", "m")):
            await form.get_by_label(label).fill(words)
        await form.get_by_role("button", name="Save").click()
        await expect(page.locator('[data-service="first"]')).to_be_visible()
        await expect(card).to_have_count(0)
        await expect(page.get_by_test_id("banner-tour")).to_have_count(0)
        assert await panel.errors() == []


async def test_the_title_of_a_screen_is_not_truncated_when_it_fits(panel: Panel) -> None:
    page = await panel.open("#/inbox", viewport={"width": 320, "height": 640})
    title = page.locator('[data-testid="title"]')
    await expect(title).to_have_text("Inbox")
    assert await title.evaluate("el => el.scrollWidth <= el.clientWidth")


async def test_a_preview_contains_no_markup_of_rules_and_tables(panel: Panel) -> None:
    await panel.send_as_agent("One - two\n\n---\n\n| a | b | c |\n|-|:-:|--:|\n| 1 | 2 | 3 |\n\nd | e\n---|---\n4 | 5")
    page = await panel.open("#/inbox")
    await expect(page.locator(".items .item-text")).to_have_text("One - two a b c 1 2 3 d e 4 5")


async def _colour(page: Page, name: str) -> str:
    found: str = await page.evaluate(
        """name => { const el = document.createElement('i'); el.style.color = name; document.body.append(el);
            const colour = getComputedStyle(el).color; el.remove(); return colour; }""",
        name,
    )
    return found


async def test_the_form_of_a_local_service_saves_the_capabilities_that_its_test_found(
    browser: Browser, tmp_path: Path
) -> None:
    async with open_panel(tmp_path, browser) as panel:
        panel.server.default = able
        page = await panel.open("#/setup")
        await page.get_by_role("button", name="Add a service").click()
        form = page.locator(".service-form")
        await form.get_by_label("Short name").fill("local")
        await form.get_by_label("Base URL").fill(panel.server.base_url)
        await form.get_by_label("Model", exact=True).fill("m")
        await form.get_by_role("button", name="Test").click()
        await expect(form.locator(".outcome")).to_contain_text("It calls tools. It reads pictures.")
        await expect(form.get_by_label("tools")).to_be_checked()
        await form.get_by_role("button", name="Save").click()
        await expect(form).to_have_count(0)
        entry = panel.society.services.get("local")
        assert entry.capabilities.has("tool_calling", "output") and entry.capabilities.has("vision", "input")
