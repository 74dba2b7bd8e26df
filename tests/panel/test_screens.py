"""The screens beside the thread, and overlays."""

from __future__ import annotations

import json
import re
from pathlib import Path

from playwright.async_api import Browser, Page, expect

from coterie.testing import Calls, ModelServer, Says, Status
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.harness import AGENTS, PHONE, Panel, eventually, fail_requests, open_panel, options_of
from tests.panel.test_conversation import PNG
from tests.panel.words import Words


async def test_open_questions_can_be_answered_in_the_inbox(panel: Panel) -> None:
    older, newer = (
        await panel.send_as_agent("Older?", "a", "b"),
        await panel.send_as_agent("Newer?", "c", "d", by="bob"),
    )
    await panel.send_as_agent("No question")
    page = await panel.open("#/inbox")
    cards = page.locator("article.card")
    await expect(cards).to_have_count(2)
    assert await cards.evaluate_all("all => all.map(c => c.dataset.messageId)") == [newer, older]
    await expect(page.get_by_role("heading", name="Waiting for you (2)")).to_be_visible()
    await expect(page.locator(".items .item")).to_have_count(3)
    await options_of(page, older).nth(1).click()
    await eventually(lambda: _said(panel, "b"))
    await expect(page.get_by_role("heading", name="Waiting for you (1)")).to_be_visible()
    await expect(options_of(page, older).nth(1)).to_be_focused()
    fresh = await panel.send_as_agent("Newest?", "e", by="seer")
    await expect(cards.first).to_have_attribute("data-message-id", fresh)


async def test_an_error_in_the_configuration_is_shown_until_it_is_mended(panel: Panel, words: Words) -> None:
    setup = await panel.open("#/setup", locale=words.locale)
    talk = await panel.open("#/a/ada", locale=words.locale)
    panel.allow("422")
    file = panel.stage.folder / "coterie.toml"
    before, reload = file.read_text(), setup.get_by_role("button", name=words("setupReload"))
    file.write_text(f"{before}\n[server\n")
    line = before.count("\n") + 2
    await reload.click()
    for page in (setup, talk):
        notice = page.get_by_test_id("banner-configuration")
        await expect(notice).to_contain_text(words("configRefused"))
        await expect(notice).to_contain_text(_unreadable(words.locale))
        await expect(notice).to_contain_text(f"Expected ']' at the end of a table declaration (at line {line}")
        await page.reload()
        await expect(notice).to_contain_text(f"at line {line}")
    await expect(setup.locator(".inline-error")).to_contain_text(f"at line {line}")
    link = talk.get_by_test_id("banner-configuration").get_by_role("link")
    await expect(link).to_have_text({"en-US": "Fix it", "zh-CN": "去修复"}[words.locale])

    file.write_text(f"{before}\n[limits]\ntool_seconds = 0\n")
    await reload.click()
    for page in (setup, talk):
        notice = page.get_by_test_id("banner-configuration")
        await expect(notice).to_contain_text(_at_least_one(words.locale))
    await expect(setup.get_by_test_id("wrong-settings")).to_contain_text("coterie.toml: limits.tool_seconds")
    await setup.reload()
    await expect(setup.get_by_test_id("wrong-settings").locator("li")).to_have_count(1)

    file.write_text(before)
    await reload.click()
    for page in (setup, talk):
        await expect(page.get_by_test_id("banner-configuration")).to_have_count(0)
    await expect(setup.get_by_test_id("wrong-settings")).to_have_count(0)


async def test_a_problem_of_a_service_is_shown_once(panel: Panel, words: Words) -> None:
    file = panel.stage.folder / "llmservices.json"
    document = json.loads(file.read_text())
    document["services"][0]["temprature"] = 1
    file.write_text(json.dumps(document))
    await panel.society.reload()
    page = await panel.open("#/setup", locale=words.locale)
    await expect(page.get_by_test_id("wrong-settings").locator("li")).to_contain_text("services[0].temprature")
    await expect(page.locator(".service")).to_be_visible()
    await expect(page.locator(".service .inline-error")).to_have_count(0)


def _unreadable(locale: str) -> str:
    return {"en-US": "coterie.toml: cannot be read:", "zh-CN": "coterie.toml：无法读取："}[locale]


def _at_least_one(locale: str) -> str:
    return {
        "en-US": "coterie.toml: limits.tool_seconds: expected a whole number, 1 or more, got 0",
        "zh-CN": "coterie.toml: limits.tool_seconds：应为不小于 1 的整数，实际为 0",
    }[locale]


async def test_a_problem_in_the_configuration_is_shown_from_the_start(browser: Browser, tmp_path: Path) -> None:
    agents = AGENTS + '[agents.cat]\nname = "Cat"\nservice = "nowhere"\n'
    async with open_panel(tmp_path, browser, agents=agents) as panel:
        page = await panel.open()
        notice = page.get_by_test_id("banner-configuration")
        await expect(notice).to_contain_text("The configuration has a problem:")
        await expect(notice).to_contain_text("nowhere")
        file = panel.stage.folder / "coterie.toml"
        file.write_text(file.read_text().replace('service = "nowhere"\n', ""))
        await panel.society.reload()
        await expect(notice).to_have_count(0)
        assert await panel.errors() == []


async def test_a_key_for_a_program_is_made_shown_once_and_revoked(panel: Panel) -> None:
    page = await panel.open("#/setup")
    await page.get_by_test_id("add-key").click()
    await page.get_by_label("Program", exact=True).fill("webui")
    await page.get_by_label("A2A", exact=True).uncheck()
    await page.get_by_role("textbox", name="Agents").fill("ada")
    await page.get_by_test_id("make-key").click()
    made = page.get_by_test_id("key-made")
    await expect(made).to_contain_text("claude mcp add")
    token = (await page.get_by_test_id("key-token").inner_text()).strip()
    await expect(made).to_contain_text(f'api_key="{token}")  # model="ada"')
    (key,) = await panel.society.store.keys()
    assert (key.name, key.agents, key.doors) == ("webui", ("ada",), ("openai", "mcp"))

    await page.reload()
    row = page.get_by_role("row").filter(has_text="webui")
    await expect(row).to_contain_text("never")
    assert token not in await page.content()
    await page.get_by_role("button", name="Revoke webui").click()
    await page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
    await expect(row).to_contain_text("revoked")

    await panel.society.bus.send(sender="user", to="ada", payload={"text": "from a program"}, via="webui")
    await page.goto(page.url.partition("#")[0] + "#/a/ada")
    await expect(page.get_by_test_id("via")).to_have_text("Through the key webui")


async def test_the_timeline_shows_all_messages_and_can_be_filtered(panel: Panel, words: Words) -> None:
    panel.server.script(Says(calls=(Calls("look", {"name": "the bell"}),)), "Done")
    await panel.send_as_agent("Between agents", by="bob", to="ada")
    await panel.stage.state("ada", "idle")
    await panel.send_as_agent("From the seer", by="seer")
    page = await panel.open("#/timeline", locale=words.locale)
    rows = page.locator(".timeline .item")
    await expect(rows.filter(has_text="From the seer")).to_contain_text(f"Seer → {words('you')}")
    await expect(rows.filter(has_text="Between agents")).to_contain_text("Bob → Ada")
    await expect(page.locator(".timeline .run")).to_have_count(1)
    await page.get_by_label(words("timelineKind")).select_option("message")
    await expect(page.locator(".timeline .run")).to_have_count(0)
    await page.locator(".screen").get_by_label(words("timelineAgent"), exact=True).select_option("seer")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("From the seer")
    assert page.url.endswith("#/timeline?agent=seer&kind=message")
    await page.reload()
    await expect(rows).to_have_count(1)
    await panel.send_as_agent("Another one", by="seer")
    await expect(rows).to_have_count(2)


async def test_the_timeline_pages_back_without_a_gap(panel: Panel) -> None:
    sent = [await panel.send_as_agent(f"Number {n}") for n in range(120)]
    page = await panel.open("#/timeline?kind=message")
    rows = page.locator(".timeline .item")
    await expect(rows).to_have_count(50)
    for count in (100, 120):
        await page.get_by_role("button", name="Show older").click()
        await expect(rows).to_have_count(count)
    assert await rows.evaluate_all("all => all.map(r => r.dataset.messageId)") == sent[::-1]


async def test_the_organisation_tree_can_be_used_by_keyboard(panel: Panel) -> None:
    page = await panel.open("#/org")
    tree = page.locator(".org-tree")
    await expect(tree.locator("[role=treeitem]")).to_have_count(3)
    await expect(tree.locator('[data-agent="seer"]')).to_have_attribute("aria-level", "2")
    await tree.locator('[tabindex="0"]').focus()

    async def current() -> str:
        return str(await page.evaluate("() => document.activeElement.dataset.agent"))

    for key, agent in (
        ("Home", "ada"),
        ("ArrowDown", "seer"),
        ("ArrowLeft", "ada"),
        ("ArrowLeft", "ada"),
        ("ArrowDown", "bob"),
        ("a", "ada"),
        ("ArrowRight", "ada"),
        ("ArrowRight", "seer"),
        ("End", "bob"),
    ):
        await page.keyboard.press(key)
        assert await current() == agent, key
    await page.keyboard.press("Enter")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Bob")


async def test_the_organisation_graph_links_to_the_agents(panel: Panel, words: Words) -> None:
    page = await panel.open("#/org", locale=words.locale)
    await page.get_by_role("button", name=words("org_graph"), exact=True).click()
    await expect(page.locator(".node")).to_have_count(3)
    await expect(page.locator(".edge")).to_have_count(1)
    await page.locator(".node").filter(has_text="Seer").click()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Seer")


async def test_files_are_listed_and_text_is_shown(panel: Panel) -> None:
    page = await panel.open("#/artifacts")
    await expect(page.get_by_text("No files yet")).to_be_visible()
    await panel.society.artifacts.put(b"a,b\n1,2\n", "table.csv")
    picture = await panel.society.artifacts.put(PNG, "dot.png", maker="ada")
    await panel.send_as_agent("Two files for you", attachments=[{"artifactRef": picture.ref}])
    await expect(page.locator(".file-link")).to_have_count(2)
    await page.locator(".file-link").filter(has_text="table.csv").click()
    await expect(page.locator(".file-text")).to_have_text("a,b\n1,2\n")
    await page.goto(f"{panel.url}/#/artifacts/{picture.ref}")
    await page.get_by_role("button", name="Enlarge dot.png").click()
    await expect(page.get_by_role("dialog", name="dot.png").get_by_role("img")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await expect(page.get_by_role("button", name="Enlarge dot.png")).to_be_focused()


async def test_an_attached_markdown_file_opens_in_the_viewer_and_others_are_downloads(
    panel: Panel, words: Words
) -> None:
    notes = await panel.society.artifacts.put(b"**Bold** words", "notes.md", maker="ada")
    data = await panel.society.artifacts.put(b"a,b", "data.csv", maker="ada")
    files = [{"artifactRef": one.ref} for one in (notes, data)]
    await panel.send_as_agent("Two files for you", attachments=files)
    page = await panel.open(locale=words.locale)
    csv = page.get_by_role("link", name=words("download", name="data.csv"))
    await expect(csv).to_have_attribute("download", "data.csv")
    await page.locator(ui.FEED).get_by_role("link", name="notes.md", exact=True).click()
    await expect(page.get_by_test_id("formatted").locator("strong")).to_have_text("Bold")


async def test_a_file_that_cannot_be_read_is_not_replaced_by_the_error(panel: Panel, words: Words) -> None:
    stored = await panel.society.artifacts.put(b"The text", "a.txt")
    page = await panel.open(locale=words.locale)
    panel.allow("503")
    path = f"**/api/v1/artifacts/{stored.ref}"
    await fail_requests(page, 503, path=path, method="GET")
    await page.goto(f"{panel.url}/#/artifacts/{stored.ref}")
    await expect(page.locator(".viewer")).to_contain_text(words("notLoaded"))
    await expect(page.locator(".viewer")).not_to_contain_text("store_unavailable")
    await page.unroute(path)
    await page.locator(".viewer").get_by_role("button", name=words("retry")).click()
    await expect(page.locator(".file-text")).to_have_text("The text")


async def test_a_health_check_of_a_service_shows_its_result(panel: Panel) -> None:
    page = await panel.open("#/setup")
    card = page.locator('[data-service="main"]')
    await expect(card.locator(".outcome")).to_contain_text("not tested")
    await card.get_by_role("button", name="Test").click()
    await expect(card.locator(".outcome")).to_contain_text("It answered in")
    panel.server.script(Status(401, "Incorrect API key provided: nope.", code="invalid_api_key"))
    await card.get_by_role("button", name="Test").click()
    await expect(card.locator(".outcome")).to_contain_text("The key was rejected")
    assert "Traceback" not in await page.content()
    stored = page.get_by_role("region", name="Stored data")
    await expect(stored).to_contain_text("Database")
    await expect(stored).to_contain_text("for ever")


async def test_a_saved_key_is_never_shown(panel: Panel) -> None:
    page = await panel.open("#/setup")
    await page.get_by_role("button", name="Add a service").click()
    form = page.locator(".service-form")
    await form.get_by_label("Provider").select_option("ollama")
    await expect(form.get_by_label("Base URL")).to_have_value("http://127.0.0.1:11434/v1")
    await form.get_by_label("Short name").fill("second")
    await form.get_by_label("Base URL").fill(panel.server.base_url)
    await form.get_by_label("Model").fill("m2")
    await form.get_by_label("Key").fill("sk-canary-0123456789")
    await form.get_by_role("button", name="Test").click()
    await expect(form.locator(".outcome")).to_contain_text("It answered in")
    assert panel.server.requests[-1].headers["authorization"] == "Bearer sk-canary-0123456789"
    await form.get_by_role("button", name="Save").click()
    card = page.locator('[data-service="second"]')
    await expect(card).to_contain_text("6789")
    await expect(card.locator(".outcome")).to_contain_text("It answered in")
    assert "canary" not in await page.content()
    stored = await page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "canary" not in stored
    await card.get_by_role("button", name="Edit").click()
    await expect(page.locator(".service-form").get_by_label("Key")).to_have_value("")
    await card.get_by_role("button", name="Delete").click()
    await page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    await expect(card).to_have_count(0)


async def test_a_second_service_of_one_provider_leaves_the_first(panel: Panel, words: Words) -> None:
    page = await panel.open("#/setup", locale=words.locale)
    form = page.locator(".service-form")

    async def add(key: str, service_id: str | None = None) -> None:
        await page.get_by_role("button", name=words("setupAdd"), exact=True).click()
        await form.get_by_label(words("preset")).select_option("ollama")
        if service_id:
            await form.get_by_label(words("serviceId")).fill(service_id)
        await form.get_by_label(words("baseURL")).fill(panel.server.base_url)
        await form.get_by_test_id("model").fill("m2")
        await form.get_by_test_id("service-key").fill(key)
        await form.get_by_role("button", name=words("save")).click()

    def saved() -> dict[str, str | None]:
        known = [one for one in panel.society.services if one.id != "main"]
        return {one.id: one.api_key.reveal() if one.api_key else None for one in known}

    await add("sk-of-the-first")
    await expect(form).to_have_count(0)
    first = panel.society.setup.view("ollama").entry
    await add("sk-of-the-third", "ollama")
    await expect(form.get_by_role("alert")).to_have_text(words("serviceIdTaken", id="ollama"))
    assert saved() == {"ollama": "sk-of-the-first"}
    await form.get_by_label(words("serviceId")).fill("third")
    await expect(form.get_by_role("alert")).to_be_hidden()
    await form.get_by_role("button", name=words("save")).click()
    await expect(form).to_have_count(0)
    await add("sk-of-the-second")
    await expect(form).to_have_count(0)
    assert saved() == {"ollama": "sk-of-the-first", "third": "sk-of-the-third", "ollama-2": "sk-of-the-second"}
    assert panel.society.setup.view("ollama").entry == first


async def test_another_preset_of_a_service_clears_the_typed_key(panel: Panel) -> None:
    page = await panel.open("#/setup")
    await page.get_by_role("button", name="Add a service").click()
    form = page.locator(".service-form")
    await form.get_by_label("Provider").select_option("openai")
    await form.get_by_label("Key").fill("sk-canary-0123456789")
    await form.get_by_label("Provider").select_option("ollama")
    await expect(form.get_by_label("Key")).to_have_value("")


async def test_a_changed_address_requires_the_key_again(panel: Panel) -> None:
    async with ModelServer(models={"m2"}) as elsewhere:
        await panel.society.setup.put(
            "second", {"baseURL": panel.server.base_url, "model": "m2"}, "sk-canary-0123456789"
        )
        page = await panel.open("#/setup")
        await page.locator('[data-service="second"]').get_by_role("button", name="Edit").click()
        form = page.locator(".service-form")
        await expect(form).to_contain_text("Leave this empty to keep it")
        await form.get_by_label("Base URL").fill(elsewhere.base_url)
        await expect(form).to_contain_text("Enter the key again")
        await form.get_by_role("button", name="Test").click()
        await expect(form.locator(".outcome")).to_contain_text("It answered in")
        assert "authorization" not in elsewhere.requests[-1].headers
        await form.get_by_label("Key").fill("sk-of-the-new-address")
        await form.get_by_role("button", name="Save").click()
        await expect(form).to_have_count(0)
        entry = panel.society.setup.view("second").entry
        assert entry.api_key is not None and entry.api_key.reveal() == "sk-of-the-new-address"
        assert entry.base_url == elsewhere.base_url


async def test_the_guide_of_the_tour_appears_and_disappears(panel: Panel) -> None:
    page = await panel.open("#/setup")
    await page.get_by_label("Show the tour guide").check()
    await expect(ui.row(page, "guide")).to_be_visible()
    await page.get_by_label("Show the tour guide").uncheck()
    await expect(ui.row(page, "guide")).to_contain_text("Retired")
    await page.get_by_label("Show the tour guide").check()
    await expect(ui.row(page, "guide-2")).to_be_visible()


async def test_the_palette_finds_agents_actions_and_messages(panel: Panel) -> None:
    message_id = await panel.send_as_agent("The quarterly figures are here", by="bob")
    page = await panel.open()
    await page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name=re.compile("Search or run"))
    await expect(field).to_be_focused()
    await field.fill("quarterly")
    await expect(page.get_by_role("option")).to_have_count(1)
    await page.keyboard.press("Enter")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Bob")
    await expect(ui.message(page, message_id)).to_be_visible()
    await page.keyboard.press("Control+k")
    await field.fill("seer")
    await page.keyboard.press("Enter")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Seer")
    await page.keyboard.press("Control+k")
    await field.fill("nothing of the kind")
    await expect(page.get_by_text("No results")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_the_shortcut_sheet_opens_and_returns_the_focus(panel: Panel) -> None:
    page = await panel.open()
    await page.locator(ui.COMPOSER).focus()
    await page.keyboard.type("?")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await page.keyboard.press("Control+/")
    await expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()


async def test_shortcuts_lead_to_regions_agents_and_inbox(panel: Panel) -> None:
    await panel.send_as_agent("Which?", "one")
    page = await panel.open()
    await page.locator(ui.COMPOSER).focus()
    await page.keyboard.press("Alt+ArrowDown")
    await expect(page.locator('[data-testid="title"]')).not_to_have_text("Ada")
    await page.keyboard.press("Alt+ArrowUp")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Ada")
    seen = []
    for _ in range(5):
        await page.keyboard.press("F6")
        seen.append(await _region(page))
    assert {"nav", "main"} <= set(seen), seen
    await page.keyboard.press("Alt+i")
    await expect(page.locator("article.card")).to_have_count(1)


async def test_the_inspector_lists_and_cancels_delayed_messages(panel: Panel) -> None:
    sent = await panel.society.send(to="user", text="Later", sender="ada", delay_ms=60_000)
    page = await panel.open()
    inspector = page.locator('[data-testid="inspector"]')
    await expect(inspector).to_contain_text("Later")
    await inspector.get_by_role("button", name=re.compile("Cancel")).click()
    await expect(inspector.locator(f'[data-message-id="{sent.message_id}"]')).to_have_count(0)
    assert await panel.society.bus.delayed_count() == 0


async def test_the_list_of_delayed_messages_is_not_limited_to_the_snapshot(panel: Panel) -> None:
    for n in range(510):
        await panel.society.send(to="user", text=f"Later {n}", sender="ada", delay_ms=3_600_000)
    page = await panel.open("#/delayed")
    await expect(page.locator(".screen .delayed-item")).to_have_count(510)

    # A new snapshot, as after a lost connection, has the first ones only.
    await page.evaluate("async () => { await (await import('/static/state.js')).resync(); }")
    await panel.society.send(to="user", text="Later 510", sender="ada", delay_ms=3_600_000)
    await expect(page.locator(".screen .delayed-item")).to_have_count(511)


async def test_on_a_phone_the_drawer_leads_to_every_screen(panel: Panel) -> None:
    page = await panel.open(viewport=PHONE)
    for place in ("delayed", "artifacts", "org"):
        await page.locator('[data-testid="menu"]').click()
        await page.locator(f'[data-testid="link-{place}"]').click()
        await expect(page.locator(f'[data-testid="screen-{place}"]')).to_be_visible()
        assert await ui.sideways(page) == []


async def test_a_hidden_page_shows_a_browser_notification(panel: Panel, words: Words) -> None:
    context = await panel.browser(permissions=["notifications"], locale=words.locale)
    await context.add_init_script(
        """window.notified = [];
        window.Notification = class { constructor(title, {body}) { notified.push(`${title}: ${body}`); }
            static permission = 'granted'; static requestPermission = async () => 'granted'; };
        Object.defineProperty(document, 'hidden', {get: () => true});"""
    )
    page = await panel.open("#/setup", context=context)
    await panel.send_as_agent("Not yet")
    await expect(ui.row(page, "ada").locator('[data-testid="unread"]')).to_have_text("1")
    await page.get_by_label(words("notifyOn")).check()
    await panel.send_as_agent("Now")
    await page.wait_for_function("() => window.notified.length > 0")
    assert await page.evaluate("() => window.notified") == ["Ada: Now"]
    await panel.society.send(to="user", text="Take a break", sender="ada", delay_ms=100)
    await page.wait_for_function("() => window.notified.length > 1")
    assert await page.evaluate("() => window.notified") == ["Ada: Now", "Ada: Take a break"]


async def test_a_hidden_tab_does_not_notify_while_another_tab_is_visible(panel: Panel) -> None:
    context = await panel.browser(permissions=["notifications"])
    await context.add_init_script(
        """if (location.protocol === 'http:') localStorage.setItem('coterie.notify', '1');
        window.notified = [];
        window.Notification = class { constructor(title, {body}) { notified.push(body); }
            static permission = 'granted'; };
        Object.defineProperty(document, 'hidden', {get: () => location.hash !== '#/inbox'});"""
    )
    hidden = await panel.open(context=context)
    visible = await panel.open("#/inbox", context=context)
    for page in (hidden, visible):
        await page.evaluate("import('/static/screens/settings.js').then(() => {})")
    await panel.send_as_agent("While one is visible")
    await expect(visible.locator(".items .item-text")).to_have_text("While one is visible")
    await expect(ui.messages(hidden)).to_have_text(re.compile("While one is visible"))
    await visible.close()
    await panel.send_as_agent("While none is")
    await hidden.wait_for_function("() => window.notified.length > 0")
    assert await hidden.evaluate("() => window.notified") == ["While none is"]


async def _region(page: Page) -> str:
    return str(await page.evaluate("() => document.activeElement.closest('nav, main, aside, header')?.localName ?? ''"))


async def _said(panel: Panel, text: str) -> bool:
    return text in await panel.texts()


async def test_the_inbox_shows_the_end_of_a_streaming_reply(panel: Panel) -> None:
    words = " ".join(f"w{n}" for n in range(600))
    panel.server.script(Says(words, token_delay=0.01))
    page = await panel.open("#/inbox")
    saying = page.locator(".saying")
    await expect(saying).to_be_hidden()
    await panel.society.send(to="ada", text="Talk")
    # The visible part depends on timing; it does not include the beginning.
    await expect(saying.locator(".bubble")).to_have_text(re.compile(r"^….*w\d{2,3}$"))
    assert len(await saying.locator(".bubble").inner_text()) <= 281
    await panel.stage.state("ada", "idle")
    await expect(saying).to_be_hidden()
    await expect(page.locator(".items .item")).to_contain_text("w0 w1")


async def test_a_preview_of_a_message_contains_no_markdown_markup(panel: Panel) -> None:
    await panel.send_as_agent(
        "# Plan\n\n- [x] **call** `run_js`\n- [ ] see [this](https://example.com)\n\n|a|b|\n|---|---|\n|1|2|"
    )
    page = await panel.open("#/inbox")
    said = "Plan call run_js see this a b 1 2"
    await expect(page.locator(".items .item-text")).to_have_text(said)
    await expect(ui.row(page, "ada").locator(".row-sub")).to_have_text(said)


async def test_an_empty_thread_shows_the_agent_and_its_capabilities(panel: Panel) -> None:
    await panel.spawn_child()

    page = await panel.open("#/a/pia")

    about = page.locator('[data-testid="empty-thread"]')
    await expect(about).to_contain_text("Pia")
    await expect(about).to_contain_text("proof-reader")
    await expect(about.locator(".cap")).to_have_text(["text"])
    await about.get_by_role("button", name="What can you do?").click()
    await expect(page.locator(ui.COMPOSER)).to_have_value("What can you do?")
    await page.locator('[data-testid="agent-filter"]').fill("proof")
    await expect(page.locator(".tree [role=treeitem]")).to_have_count(1)


async def test_the_description_of_an_agent_is_shown_in_the_list_the_header_and_the_organisation(panel: Panel) -> None:
    await panel.society.create_agent(id="zoe", name="Zoe", description="Knows <b>zoos</b>.")
    page = await panel.open("#/org")
    await expect(page.locator(".org-tree [data-agent=zoe] [data-testid=about]")).to_have_text("Knows <b>zoos</b>.")
    await expect(page.get_by_test_id("agent-zoe")).to_have_attribute("title", "Knows <b>zoos</b>.")
    await page.get_by_test_id("agent-zoe").click()
    await expect(page.locator(".top-about")).to_have_text("Knows <b>zoos</b>.")


async def test_a_recurring_message_is_shown_with_its_recurrence_and_can_be_paused_skipped_and_ended(
    panel: Panel, words: Words
) -> None:
    sent = await panel.society.send(to="ada", text="Stand up", every="weekdays 08:00", time_zone="Europe/Berlin")
    page = await panel.open("#/delayed", locale=words.locale)
    screen = page.locator(".screen")
    item = screen.locator(".delayed-item")
    await expect(item.get_by_test_id("every")).to_have_text(
        words("recurs", every=words("every_weekdays", time="08:00") + " (Europe/Berlin)")
    )
    await item.get_by_role("button", name=words("recurSkipThis", text="")).click()
    await expect(screen.locator(f'[data-message-id="{sent.message_id}"]')).to_have_count(0)
    await expect(item).to_have_count(1)
    await item.get_by_test_id("schedule-pause").click()
    await expect(screen.get_by_test_id("paused-schedule")).to_contain_text(words("paused"))
    await page.reload()
    await screen.get_by_test_id("schedule-resume").click()
    await expect(item.get_by_test_id("schedule-pause")).to_be_visible()
    await item.get_by_test_id("schedule-end").click()
    await expect(item).to_have_count(0)
    assert await panel.society.store.schedules() == []


async def test_the_inbox_and_the_timeline_have_what_happened_before_a_new_snapshot(panel: Panel) -> None:
    for screen in ("inbox", "timeline"):
        page = await panel.open(f"#/{screen}")
        await _lose_stream(panel, page)
        for text in ("First", "Second", "Third"):
            await panel.send_as_agent(f"{text} for the {screen}", by="bob")
        await _read_snapshot(page)
        for text in ("First", "Second", "Third"):
            await expect(page.locator(".items").get_by_text(f"{text} for the {screen}")).to_be_visible()
        await page.context.close()


async def test_a_task_that_ended_before_a_new_snapshot_is_listed_as_ended(panel: Panel) -> None:
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "Done")
    task = await panel.stage.say("Ring it")
    page = await panel.open("#/tasks")
    await expect(page.get_by_role("heading", name="Working (1)")).to_be_visible()
    await _lose_stream(panel, page)
    Bell.may_end.set()
    await panel.stage.ended(task)
    await _read_snapshot(page)
    await expect(page.get_by_role("heading", name="Finished (1)")).to_be_visible()
    await expect(page.get_by_role("heading", name="Working (1)")).to_have_count(0)


async def test_the_timeline_follows_a_tool_call_to_its_end(panel: Panel) -> None:
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "Done")
    page = await panel.open("#/timeline")
    await panel.stage.say("Ring it")
    await expect(page.locator(".run-state")).to_have_text("running")
    Bell.may_end.set()
    await expect(page.locator(".run-state")).to_have_text("ok")


async def test_a_conversation_cleared_before_a_new_snapshot_is_empty_and_has_no_unread_messages(panel: Panel) -> None:
    for agent in ("ada", "bob"):
        await panel.send_as_agent(f"From {agent}", by=agent)
    page = await panel.open()
    await expect(ui.messages(page)).to_have_count(1)
    await expect(ui.row(page, "bob").get_by_test_id("unread")).to_have_text("1")
    await _lose_stream(panel, page)
    for agent in ("ada", "bob"):
        await panel.society.store.clear_thread(agent)
    await _read_snapshot(page)
    await expect(page.get_by_test_id("empty-thread")).to_be_visible()
    await expect(ui.messages(page)).to_have_count(0)
    await expect(ui.row(page, "bob").get_by_test_id("unread")).to_have_count(0)


async def _lose_stream(panel: Panel, page: Page) -> None:
    async def is_live() -> bool:
        return panel.streams >= 1

    await eventually(is_live)
    panel.allow("Failed to load resource|ERR_|net::")
    await page.route("**/api/v1/events?*", lambda route: route.abort())
    panel.drop_streams()


async def _read_snapshot(page: Page) -> None:
    await page.evaluate("async () => { await (await import('/static/state.js')).resync(); }")


async def test_the_notice_of_an_undelivered_message_is_read_in_the_inbox_and_leads_to_it(
    panel: Panel, words: Words
) -> None:
    page = await panel.open(locale=words.locale)
    await panel.society.pause("bob")
    await panel.society.send(to="bob", text="Keep me")
    await panel.society.terminate_agent("bob")
    await expect(page).to_have_title(re.compile(r"^\(1\)"))
    await page.get_by_test_id("link-inbox").click()
    notice = page.locator(".screen .items .item-link", has_text="Bob")
    said = words("deadNotice", n=words("n_one_messages", n=1), names="Bob", why=words("dead_recipient_terminated"))
    await expect(notice).to_contain_text(said)
    await expect(page).not_to_have_title(re.compile(r"^\("))
    await notice.click()
    await expect(page.locator(".screen .item")).to_contain_text("Keep me")


async def test_a_message_that_a_page_has_before_its_event_counts_as_unread(panel: Panel) -> None:
    page = await panel.open()
    await _lose_stream(panel, page)
    await panel.send_as_agent("Meanwhile", by="bob")
    await page.get_by_test_id("link-inbox").click()
    await expect(page.locator(".screen .items")).to_contain_text("Meanwhile")
    await page.unroute("**/api/v1/events?*")
    await expect(ui.row(page, "bob").get_by_test_id("unread")).to_have_text("1")
