"""The installed page: manifest, offline page, unread count in title and icon, notifications that open their message."""

from __future__ import annotations

from playwright.async_api import expect

from tests.panel import ui
from tests.panel.harness import Panel, eventually
from tests.panel.words import Words


async def test_the_page_can_be_installed_and_tells_that_the_server_is_gone(panel: Panel, words: Words) -> None:
    context = await panel.browser(service_workers="allow", locale=words.locale)
    manifest = await (await context.request.get(f"{panel.url}/static/app.webmanifest")).json()
    assert (manifest["start_url"], manifest["display"]) == ("/", "standalone")
    for icon in manifest["icons"]:
        answer = await context.request.get(panel.url + icon["src"])
        assert answer.ok and answer.headers["content-type"] == icon["type"]
    page = await panel.open(context=context)
    panel.allow("ERR_INTERNET_DISCONNECTED|Failed to load resource|Failed to fetch|net::ERR")
    await page.wait_for_function("() => navigator.serviceWorker.controller !== null")
    await context.set_offline(True)
    await page.reload()
    offline = page.get_by_test_id("offline")
    await expect(offline).to_contain_text("The server does not answer")
    await expect(offline).to_contain_text("服务器没有响应")
    await context.set_offline(False)
    # It tries again by itself.
    await expect(page.locator(ui.COMPOSER)).to_be_visible()


async def test_unread_messages_are_counted_in_the_title_and_the_icon(panel: Panel, words: Words) -> None:
    page = await panel.open("#/inbox", locale=words.locale)
    icon = page.locator('link[rel="icon"]')
    await expect(icon).to_have_attribute("href", "/static/icon.svg")
    message = await panel.send_as_agent("Hello")
    await page.wait_for_function("() => document.title.startsWith('(1) ')")
    await page.wait_for_function(
        "() => decodeURIComponent(document.querySelector('link[rel=icon]').href).includes('>1<')"
    )
    await panel.society.store.mark_read("ada", message)
    panel.society.bus.notify()
    await expect(icon).to_have_attribute("href", "/static/icon.svg")
    assert "(" not in await page.title()


async def test_a_notification_opens_its_message(panel: Panel, words: Words) -> None:
    context = await panel.browser(locale=words.locale)
    await context.add_init_script(
        """window.notes = [];
        window.Notification = class { constructor(title, told) { this.told = told; notes.push(this); } close() {}
            static permission = 'granted'; static requestPermission = async () => 'granted'; };
        Object.defineProperty(document, 'hidden', {get: () => true});
        if (location.protocol === 'http:') localStorage.setItem('coterie.notify', '1');"""
    )
    page = await panel.open("#/inbox", context=context)
    for n in range(60):
        await panel.send_as_agent(f"Filler {n}", by="bob")

    async def is_heard() -> bool:
        await panel.send_as_agent("One more", by="bob")
        return bool(await page.evaluate("() => notes.length"))

    await eventually(is_heard)  # the script that shows notifications is loaded after the page
    wanted = await panel.send_as_agent("Look at this", by="ada")
    await page.wait_for_function("id => notes.some((note) => note.told.tag === id)", arg=wanted)
    await page.evaluate("id => notes.find((note) => note.told.tag === id).onclick()", wanted)
    await expect(ui.message(page, wanted)).to_be_in_viewport()
    assert page.url.endswith(f"#/a/ada?m={wanted}")
