"""The event stream in the page: lost streams, streamed replies, many tabs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from coterie.testing import Says
from tests.panel import ui
from tests.panel.harness import Panel, eventually, eventually_in


@pytest.mark.check(20)
@pytest.mark.parametrize(("many", "cuts"), [(250, 5), pytest.param(1000, 20, marks=pytest.mark.full)])
async def test_a_stream_cut_many_times_loses_and_repeats_nothing(panel: Panel, many: int, cuts: int) -> None:
    page = await panel.open()
    panel.allow("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
    sent: list[str] = []
    done = 0
    for n in range(many):
        sent.append(await panel.send_as_agent(f"Message {n}"))
        if n % (many // cuts) == 25:
            # Cut while the stream is live, so that the page gets the events from the stream and not from the snapshot.
            await _wait_for_message(page, sent[-1])
            await eventually(lambda: _is_live(panel))
            done += panel.drop_streams()
    assert done == cuts
    await expect(ui.message(page, sent[-1])).to_be_visible(timeout=15_000)
    held: dict[str, Any] = await page.evaluate(
        """async () => { const { state } = await import('/static/state.js');
            return { ids: state.threads.get('ada').ids, texts: state.threads.get('ada').ids.map(
                id => state.messages.get(id).payload.text) }; }"""
    )
    assert held["ids"] == sent
    assert held["texts"] == [f"Message {n}" for n in range(many)]
    shown = await ui.messages(page).evaluate_all("all => all.map(a => a.dataset.messageId)")
    assert len(shown) == len(set(shown))
    assert shown == sent[-len(shown) :]


@pytest.mark.check(21)
async def test_a_reply_whose_stream_is_cut_ends_as_the_server_has_it(panel: Panel) -> None:
    page = await panel.open()
    panel.allow("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
    # Long enough that it still streams at the last cut on a slow machine.
    words = " ".join(f"слово{n} 字{n} 😀{n}" for n in range(240))
    panel.server.script(Says(words, token_delay=0.01, token_size=7))
    await ui.send(page, "Tell me")
    for part in ("слово3 ", "слово12 ", "слово25 "):
        await expect(page.locator(ui.DRAFT)).to_contain_text(part)
        panel.drop_streams()
        await eventually(lambda: _is_live(panel))
    await panel.stage.state("ada", "idle")
    await expect(page.locator(ui.DRAFT)).to_have_count(0)
    (text,) = await panel.texts(by="ada")
    assert text == words
    reply = (await panel.sent(by="ada"))[0]
    await expect(ui.message(page, reply.id).locator(".md")).to_have_text(words)


async def test_a_reply_written_again_after_a_restart_is_not_shown_as_cut_short(panel: Panel) -> None:
    page = await panel.open()
    await eventually(lambda: _is_live(panel))
    draft = page.locator(ui.DRAFT)
    panel.society.live.append("ada", "ada/1/1", "Once upon")
    await expect(draft).to_contain_text("Once upon")
    panel.society.live.finish("ada/1/1", "failed")
    await expect(draft.get_by_test_id("stopped")).to_be_visible()
    panel.society.live.append("ada", "ada/1/1", "A long time ago")  # a resumed turn uses the same id
    await expect(draft).to_contain_text("A long time ago")
    await expect(draft).not_to_contain_text("Once upon")
    await expect(draft.get_by_text("Replying")).to_be_visible()
    await expect(draft.get_by_test_id("stopped")).to_have_count(0)


@pytest.mark.check(21)
async def test_streamed_text_is_always_a_prefix_of_the_reply(panel: Panel) -> None:
    page = await panel.open()
    words = " ".join(f"w{n}" for n in range(150))
    panel.server.script(Says(words, token_delay=0.02))
    await page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
            const draft = document.querySelector('[data-testid="draft"] .bubble');
            if (draft) window.seen.push(draft.textContent); })
            .observe(document.body, {subtree: true, childList: true, characterData: true}); }"""
    )
    await ui.send(page, "Tell me")
    await expect(page.locator(ui.FEED)).to_contain_text("w149")
    seen = await page.evaluate("() => window.seen")
    assert len(set(seen)) > 3
    assert [text for text in seen if not words.startswith(text)] == []


async def test_a_message_that_arrives_while_its_conversation_is_loaded_is_shown(panel: Panel) -> None:
    sent = [await panel.send_as_agent(f"Message {n}") for n in range(3)]
    page = await panel.open("#/a/bob")
    await eventually(lambda: _is_live(panel))
    has_page, may_go = asyncio.Event(), asyncio.Event()

    async def hold(route: Route) -> None:
        response = await route.fetch()
        has_page.set()
        await may_go.wait()
        await route.fulfill(response=response)

    await page.route("**/api/v1/threads/ada/messages*", hold)
    await ui.row(page, "ada").click()
    await has_page.wait()
    sent.append(await panel.send_as_agent("After the page"))
    await eventually_in(page, "async id => (await import('/static/state.js')).state.messages.has(id)", sent[-1])
    may_go.set()
    await expect(ui.message(page, sent[-1])).to_be_visible()
    shown = await ui.messages(page).evaluate_all("all => all.map(a => a.dataset.messageId)")
    assert shown == sent


@pytest.mark.check(22)
async def test_eight_tabs_share_one_stream(panel: Panel) -> None:
    context = await panel.browser()
    tabs: list[Page] = []
    for _ in range(8):
        tabs.append(await panel.open(context=context))
        await expect(tabs[-1].locator(ui.COMPOSER)).to_be_editable()
    await eventually(lambda: _is_live(panel))
    message_id = await panel.send_as_agent("To all of you")
    await asyncio.gather(*(_wait_for_message(tab, message_id) for tab in tabs))
    assert panel.streams <= 2

    await tabs[0].close()
    message_id = await panel.send_as_agent("To those who are left")
    await asyncio.gather(*(_wait_for_message(tab, message_id) for tab in tabs[1:]))
    assert panel.streams <= 2


async def test_tabs_leave_reconnecting_to_one_of_them(panel: Panel) -> None:
    leader, follower = await _leader_and_follower(panel)
    panel.allow("Failed to load resource|ERR_|net::")
    attempts = {leader: 0, follower: 0}

    async def refuse(route: Route) -> None:
        attempts[route.request.frame.page] += 1
        await route.abort("connectionrefused")

    await leader.context.route("**/api/v1/events?*", refuse)
    panel.drop_streams()
    for _ in range(3):
        # The page tells the other tab about each attempt before it begins the next one.
        wanted = attempts[leader] + 2

        async def has_tried(wanted: int = wanted) -> bool:
            return attempts[leader] >= wanted

        await eventually(has_tried)
        await follower.clock.fast_forward(20_000)
    assert attempts[follower] == 0
    await expect(follower.locator(ui.CONNECTION)).to_have_text("Reconnecting…")


async def test_a_hidden_leading_tab_tries_again_quickly_while_another_tab_is_visible(panel: Panel) -> None:
    context = await panel.browser()
    leader = await context.new_page()
    await leader.add_init_script("Object.defineProperty(document, 'hidden', {get: () => true})")
    await leader.goto(f"{panel.url}/#/a/ada")
    await leader.wait_for_selector("[data-ready]")
    await eventually(lambda: _is_live(panel))
    follower = await panel.open(context=context)
    panel.allow("Failed to load resource|ERR_|net::")
    attempts = 0

    async def refuse(route: Route) -> None:
        nonlocal attempts
        attempts += 1
        await route.abort("connectionrefused")

    await context.route("**/api/v1/events?*", refuse)
    panel.drop_streams()
    await expect(follower.locator(ui.CONNECTION)).to_have_text("Reconnecting…")
    wanted = attempts + 4
    async with asyncio.timeout(30):  # four attempts of a hidden tab alone take 45 s at least
        while attempts < wanted:
            await asyncio.sleep(0.05)
    await context.unroute("**/api/v1/events?*")
    await expect(follower.locator(ui.CONNECTION)).to_have_text("Back online")


async def test_a_tab_that_took_over_opens_no_second_stream_when_the_first_tab_closes(panel: Panel) -> None:
    leader, follower = await _leader_and_follower(panel)
    opened: list[str] = []
    follower.on("request", lambda request: opened.append(request.url) if "/v1/events?" in request.url else None)
    await follower.clock.fast_forward(60_000)
    await eventually(lambda: _are_live(panel, 2))
    await leader.close()
    await eventually_in(
        follower,
        """async () => { const { held, pending } = await navigator.locks.query();
            return held.length === 1 && pending.length === 0; }""",
    )
    await _wait_for_message(follower, await panel.send_as_agent("To the only tab"))
    assert len(opened) == 1


async def test_a_new_tab_gets_what_happened_while_it_was_loading(panel: Panel) -> None:
    context = await panel.browser()
    leader = await panel.open("#/a/bob", context=context)
    await eventually(lambda: _is_live(panel))
    may_load = asyncio.Event()

    async def load_late(route: Route) -> None:
        await may_load.wait()
        await route.continue_()

    page = await context.new_page()
    await page.route("**/static/stream.js", load_late)
    await page.goto(f"{panel.url}/#/a/ada")
    await eventually_in(page, "async () => (await import('/static/state.js')).state.threads.get('ada')?.loaded")
    message_id = await panel.send_as_agent("Meanwhile")
    await _wait_for_message(leader, message_id)
    may_load.set()
    await expect(ui.message(page, message_id)).to_be_visible()


async def _leader_and_follower(panel: Panel) -> tuple[Page, Page]:
    """Two tabs: the first one reads the stream; the second one has a clock that the test can advance."""
    context = await panel.browser()
    leader = await panel.open(context=context)
    await eventually(lambda: _is_live(panel))
    follower = await context.new_page()
    await follower.clock.install()
    await follower.goto(f"{panel.url}/#/a/ada")
    await follower.wait_for_selector("[data-ready]")
    return leader, follower


async def test_a_lost_and_a_restored_connection_are_shown(panel: Panel) -> None:
    page = await panel.open()
    await eventually(lambda: _is_live(panel))
    panel.allow("Failed to load resource|ERR_|net::|dynamically imported")  # a late script may fail to load, too
    await page.context.set_offline(True)
    panel.drop_streams()
    await expect(page.locator(ui.CONNECTION)).to_have_text("Offline. You can keep writing.")
    await expect(page.locator(ui.COMPOSER)).to_be_editable()
    message_id = await panel.send_as_agent("You missed this")
    await page.context.set_offline(False)
    await expect(ui.message(page, message_id)).to_be_visible()
    await expect(page.locator(ui.CONNECTION)).to_have_text("Back online")


async def test_a_stop_of_the_server_is_shown(panel: Panel) -> None:
    page = await panel.open()
    await eventually(lambda: _is_live(panel))
    panel.allow("Failed to load resource|ERR_|net::")
    await panel.app.state.hub.shut_down(2)
    await expect(page.get_by_text("2 scheduled messages were delivered early")).to_be_visible()


async def test_events_that_arrive_while_a_snapshot_is_read_are_kept(panel: Panel) -> None:
    await panel.send_as_agent("Before the snapshot", by="bob")
    page = await panel.open()
    await eventually(lambda: _is_live(panel))
    is_read, may_arrive = asyncio.Event(), asyncio.Event()

    async def answer_late(route: Route) -> None:
        answer = await route.fetch()
        is_read.set()
        await may_arrive.wait()
        await route.fulfill(response=answer)

    await page.route("**/api/v1/snapshot", answer_late)
    await page.evaluate(
        """async () => { window.received = new Set(); window.other = new BroadcastChannel('panel-stream');
            other.onmessage = ({ data }) => data.events?.forEach(event => received.add(event.data.id));
            const { resync } = await import('/static/state.js'); resync(); }"""
    )
    await is_read.wait()
    message_id = await panel.send_as_agent("After the snapshot", by="bob")
    await page.wait_for_function("id => received.has(id)", arg=message_id)
    may_arrive.set()
    await expect(ui.row(page, "bob").get_by_test_id("unread")).to_have_text("2")
    await expect(ui.row(page, "bob")).to_contain_text("After the snapshot")


async def test_a_sent_message_that_a_snapshot_has_first_is_shown_once(panel: Panel) -> None:
    page = await panel.open()
    await eventually(lambda: _is_live(panel))
    panel.allow("Failed to load resource|ERR_|net::")
    panel.server.script("Fine.")
    await page.route("**/api/v1/events?*", lambda route: route.abort())
    panel.drop_streams()
    async with page.expect_response("**/api/v1/messages"):
        await ui.send(page, "Only once")
    await panel.stage.heard()
    await page.evaluate("() => import('/static/state.js').then(({ resync }) => resync())")
    await expect(ui.messages(page).filter(has_text="Fine.")).to_be_visible()
    await expect(page.locator(f"{ui.FEED} article").filter(has_text="Only once")).to_have_count(1)


async def _wait_for_message(tab: Page, message_id: str) -> None:
    await eventually_in(tab, "async id => (await import('/static/state.js')).state.messages.has(id)", message_id)


async def _is_live(panel: Panel) -> bool:
    return panel.streams >= 1


async def _are_live(panel: Panel, count: int) -> bool:
    return panel.streams == count
