"""The live link: streams that break, replies in the middle of it, many tabs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from playwright.async_api import Page, expect

from coterie.testing import Says
from tests.panel import ui
from tests.panel.room import Room, eventually

MANY, CUTS = 1000, 20


@pytest.mark.check(20)
async def test_a_stream_that_is_cut_twenty_times_loses_and_doubles_nothing(panel: Room) -> None:
    page = await panel.open()
    panel.allow("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
    sent: list[str] = []
    cuts = 0
    for n in range(MANY):
        sent.append(await panel.tell(f"Message {n}"))
        if n % (MANY // CUTS) == 25:
            # Cut while it listens: what the page knows may also come from the snapshot, or before it has caught up.
            await _told(page, sent[-1])
            await eventually(lambda: _listens(panel))
            cuts += panel.drop_streams()
    assert cuts == CUTS
    await expect(ui.message(page, sent[-1])).to_be_visible(timeout=15_000)
    held: dict[str, Any] = await page.evaluate(
        """async () => { const { state } = await import('/static/state.js');
            return { ids: state.threads.get('ada').ids, texts: state.threads.get('ada').ids.map(
                id => state.messages.get(id).payload.text) }; }"""
    )
    assert held["ids"] == sent
    assert held["texts"] == [f"Message {n}" for n in range(MANY)]
    shown = await ui.messages(page).evaluate_all("all => all.map(a => a.dataset.messageId)")
    assert len(shown) == len(set(shown))
    assert shown == sent[-len(shown) :]


@pytest.mark.check(21)
async def test_a_reply_that_is_cut_in_the_middle_ends_as_the_server_has_it(panel: Room) -> None:
    page = await panel.open()
    panel.allow("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
    # Long enough that it is still being said when a slow machine has seen the last place to cut it.
    words = " ".join(f"слово{n} 字{n} 😀{n}" for n in range(240))
    panel.server.script(Says(words, token_delay=0.01, token_size=7))
    await ui.send(page, "Tell me")
    for part in ("слово3 ", "слово12 ", "слово25 "):
        await expect(page.locator(ui.DRAFT)).to_contain_text(part)
        panel.drop_streams()
        await eventually(lambda: _listens(panel))
    await panel.stage.state("ada", "idle")
    await expect(page.locator(ui.DRAFT)).to_have_count(0)
    (told,) = await panel.texts(by="ada")
    assert told == words
    reply = (await panel.said(by="ada"))[0]
    await expect(ui.message(page, reply.id).locator(".md")).to_have_text(words)


@pytest.mark.check(21)
async def test_what_streams_is_what_was_said_at_every_moment(panel: Room) -> None:
    page = await panel.open()
    words = " ".join(f"w{n}" for n in range(150))
    panel.server.script(Says(words, token_delay=0.005))
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


@pytest.mark.check(22)
async def test_eight_tabs_share_one_stream(panel: Room) -> None:
    context = await panel.browser()
    tabs: list[Page] = []
    for _ in range(8):
        tabs.append(await panel.open(context=context))
        await expect(tabs[-1].locator(ui.COMPOSER)).to_be_editable()
    await eventually(lambda: _listens(panel))
    message_id = await panel.tell("To all of you")
    await asyncio.gather(*(_told(tab, message_id) for tab in tabs))
    assert panel.streams <= 2

    await tabs[0].close()
    message_id = await panel.tell("To those who are left")
    await asyncio.gather(*(_told(tab, message_id) for tab in tabs[1:]))
    assert panel.streams <= 2


async def test_a_lost_connection_is_told_and_so_is_its_return(panel: Room) -> None:
    page = await panel.open()
    panel.allow("Failed to load resource|ERR_|net::|dynamically imported")  # a late script may be cut off too
    await page.context.set_offline(True)
    panel.drop_streams()
    await expect(page.locator(ui.CONNECTION)).to_have_text("Offline, you can go on writing", timeout=6000)
    await expect(page.locator(ui.COMPOSER)).to_be_editable()
    message_id = await panel.tell("You missed this")
    await page.context.set_offline(False)
    await expect(ui.message(page, message_id)).to_be_visible()
    await expect(page.locator(ui.CONNECTION)).to_have_text("Connected again")


async def test_a_server_that_stops_says_goodbye(panel: Room) -> None:
    page = await panel.open()
    await eventually(lambda: _listens(panel))
    panel.allow("Failed to load resource|ERR_|net::")
    await panel.app.state.hub.shut_down(2)
    await expect(page.get_by_text("2 delayed messages were delivered early")).to_be_visible()


async def _told(tab: Page, message_id: str) -> None:
    await tab.wait_for_function(
        "id => import('/static/state.js').then(({ state }) => state.messages.has(id))", arg=message_id, polling=20
    )


async def _listens(panel: Room) -> bool:
    return panel.streams >= 1
