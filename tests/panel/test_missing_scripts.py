"""Scripts are loaded when needed; a failed load is reported and the page keeps working."""

from __future__ import annotations

from playwright.async_api import Page, Route, expect

from tests.panel import ui
from tests.panel.harness import Panel

INBOX = "**/static/screens/inbox.js"
WORDS = "did not load"
OF_ANOTHER_VERSION = "import { nobody } from '../dom.js'; export const render = nobody;"


async def _refused(route: Route) -> None:
    await route.abort("connectionrefused")


async def _opened(panel: Panel) -> Page:
    await panel.send_as_agent("Good morning")
    page = await panel.open()
    panel.allow("Failed to (load resource|fetch)|ERR_CONNECTION_REFUSED|does not provide an export")
    await page.evaluate("() => { window.same = true; }")
    return page


async def _is_same(page: Page) -> bool:
    return bool(await page.evaluate("() => window.same === true"))


async def test_a_screen_whose_script_fails_to_load_shows_an_error_and_the_rest_works(panel: Panel) -> None:
    page = await _opened(panel)
    await page.route(INBOX, _refused)

    await page.get_by_test_id("link-inbox").click()

    await expect(page.get_by_test_id("screen-inbox")).to_contain_text(WORDS)
    await page.locator('[role=treeitem][data-agent="ada"]').click()
    await ui.send(page, "Are you there?")
    await expect(page.locator("article", has_text="Are you there?")).to_be_visible()
    assert await _is_same(page)


async def test_retry_loads_the_screen_once_the_server_is_back(panel: Panel) -> None:
    page = await _opened(panel)
    await page.route("**/*", _refused)
    await page.get_by_test_id("link-inbox").click()
    again = page.get_by_test_id("screen-inbox").get_by_role("button", name="Retry")
    await again.evaluate("button => { button.dataset.pressed = ''; }")
    await again.click()
    # A new button shows that this attempt has ended. If the server came back during it, the screen would load at once.
    await expect(page.get_by_test_id("screen-inbox").locator("button:not([data-pressed])")).to_be_visible()
    await expect(page.get_by_test_id("screen-inbox")).to_contain_text(WORDS)
    assert await _is_same(page), "a page without a server is not thrown away"

    await page.unroute_all()
    await again.click()

    await expect(page.locator(".items .item", has_text="Good morning")).to_be_visible()


async def test_a_page_older_than_the_server_is_reloaded(panel: Panel) -> None:
    page = await _opened(panel)
    await page.route(INBOX, lambda route: route.fulfill(body=OF_ANOTHER_VERSION, content_type="text/javascript"))
    await page.get_by_test_id("link-inbox").click()
    await expect(page.get_by_test_id("screen-inbox")).to_contain_text(WORDS)
    await page.unroute_all()

    await page.get_by_test_id("screen-inbox").get_by_role("button", name="Retry").click()

    await expect(page.locator(".items .item", has_text="Good morning")).to_be_visible()
    assert not await _is_same(page)


async def test_a_list_of_the_inspector_whose_script_fails_to_load_can_be_retried(panel: Panel) -> None:
    context = await panel.browser()
    panel.allow("Failed to (load resource|fetch)|ERR_CONNECTION_REFUSED|import")
    await context.route("**/static/screens/delayed.js", _refused)
    page = await panel.open(context=context)
    await expect(page.get_by_test_id("inspector")).to_contain_text(WORDS)
    await context.unroute_all()

    await page.get_by_test_id("inspector").get_by_role("button", name="Retry").click()

    await page.wait_for_selector("[data-ready]")
    await expect(page.get_by_test_id("inspector")).to_contain_text("No scheduled messages")


async def test_a_failed_load_of_the_upload_script_is_reported(panel: Panel) -> None:
    page = await _opened(panel)
    panel.allow("uncaught: .*(import|module)")
    await page.route("**/static/attachments.js", _refused)

    await page.set_input_files(
        '[data-testid="file-input"]', {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"}
    )

    await expect(page.get_by_test_id("toast")).to_contain_text(WORDS)
    await expect(page.get_by_test_id("toast-retry")).to_be_visible()
