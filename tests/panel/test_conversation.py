"""The conversation: interjections, stopping, delays, files, what is unread."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import Page, expect

from coterie.testing import Calls, Says
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.room import Held, Room, bodies, eventually, options_of

PATIENCE = 30
"""Seconds that no machine is too slow for."""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360f8ffff3f0005fe02fe"
    "a7356d9d0000000049454e44ae426082"
)


async def at_work(panel: Room, *then: Any, calls: int = 1) -> None:
    """Ada has begun to ring a bell that goes on ringing; `calls`: so many she planned in one go."""
    Bell.may_end.clear()
    panel.server.script(Says(calls=tuple(Calls("ring", {"name": f"bell {n}"}) for n in range(calls))), *then)
    await panel.society.send(to="ada", text="Ring it", sender="bob")
    await asyncio.wait_for(Bell.rang.wait(), 5)


async def _waits(panel: Room, count: int) -> bool:
    return len(await panel.society.store.waiting("ada")) == count


async def waiting(page: Page) -> list[str]:
    return [re.sub(r"\s+", " ", text) for text in await page.locator(ui.WAITING).all_inner_texts()]


@pytest.mark.check(12)
async def test_what_is_said_to_an_agent_at_work_waits_in_the_strip_and_is_taken_together(panel: Room) -> None:
    page = await panel.open()
    await at_work(panel, "Both read", calls=3)
    await ui.send(page, "First")
    await expect(page.locator(ui.WAITING)).to_have_count(1)
    await ui.send(page, "Second")
    await expect(page.locator(ui.WAITING)).to_have_count(2)
    first, second = await waiting(page)
    assert "First" in first
    assert "Second" in second
    # The strip shows a message before the server has it; the agent takes together only what has arrived.
    await eventually(lambda: _waits(panel, 2), seconds=PATIENCE)
    Bell.may_end.set()
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    mine = page.locator(f"{ui.FEED} .msg-mine .bubble")
    await expect(mine).to_have_text(["First", "Second"])
    await expect(page.locator('[data-testid="break"]:visible')).to_contain_text("2 tool calls")
    await expect(page.locator(ui.FEED)).to_contain_text("Both read")
    await page.locator(ui.FEED).get_by_text("Ran 3 tools").click()
    await expect(page.locator(ui.FEED)).to_contain_text("not run: cancelled by an interjection")


async def test_a_wheel_turned_where_nothing_is_above_does_not_lose_the_end(panel: Room) -> None:
    await panel.tell("The only one")
    page = await panel.open()
    await ui.messages(page).hover()
    await page.mouse.wheel(0, -300)
    sent = [await panel.tell(f"Message {n}") for n in range(30)]
    await expect(ui.message(page, sent[-1])).to_be_in_viewport()


@pytest.mark.check(12)
async def test_what_is_said_to_an_agent_at_work_is_in_the_strip_before_the_server_has_it(panel: Room) -> None:
    page = await panel.open()
    panel.allow("Failed to load resource|ERR_|net::")
    await at_work(panel, "Read")
    await expect(page.locator('[data-testid="agent-state"]')).to_have_class(re.compile("is-active"))
    held = Held()
    await page.route("**/api/v1/messages", held)
    await ui.send(page, "Wait for me")
    await held.arrived.wait()
    await expect(page.locator(ui.WAITING)).to_contain_text("Wait for me")
    await expect(page.locator(ui.WAITING).get_by_role("button")).to_have_attribute("aria-disabled", "true")
    await expect(ui.messages(page).filter(has_text="Wait for me")).to_have_count(0)
    held.may_end.set()
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    await expect(page.locator(ui.COMPOSER)).to_have_value("Wait for me")
    Bell.may_end.set()


@pytest.mark.check(13)
async def test_waiting_words_survive_reload_switch_and_a_cut_stream(panel: Room) -> None:
    page = await panel.open()
    await at_work(panel, "Read")
    await ui.send(page, "Wait for me")
    await expect(page.locator(ui.WAITING)).to_have_count(1)
    await page.reload()
    await expect(page.locator(ui.WAITING)).to_contain_text("Wait for me")
    await ui.row(page, "bob").click()
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    await ui.row(page, "ada").click()
    await expect(page.locator(ui.WAITING)).to_contain_text("Wait for me")
    panel.allow("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
    panel.drop_streams()
    await eventually(lambda: _streams(panel, 1))
    await expect(page.locator(ui.WAITING)).to_contain_text("Wait for me")
    Bell.may_end.set()
    await expect(page.locator(ui.WAITING)).to_have_count(0)


@pytest.mark.check(13)
async def test_a_withdrawal_that_comes_too_late_says_so_and_changes_nothing(panel: Room) -> None:
    page = await panel.open()
    panel.allow("409")
    await at_work(panel, "Read")
    await ui.send(page, "Too late")
    await expect(page.locator(ui.WAITING)).to_have_count(1)
    sent = asyncio.Event()

    async def hold(route: Any) -> None:
        if route.request.method == "DELETE":
            Bell.may_end.set()
            await panel.stage.state("ada", "idle")
            sent.set()
        await route.continue_()

    await page.route("**/api/v1/messages/*", hold)
    await page.locator(ui.WAITING).get_by_role("button", name="Withdraw").click()
    await asyncio.wait_for(sent.wait(), 5)
    await expect(page.get_by_text("Already processed; it cannot be withdrawn").first).to_be_visible()
    assert "Too late" in await panel.texts()


@pytest.mark.check(14)
async def test_the_composer_takes_words_in_every_state_but_the_last(panel: Room) -> None:
    page = await panel.open()
    composer = page.locator(ui.COMPOSER)
    await at_work(panel, "Read")
    await expect(composer).to_be_enabled()
    await expect(composer).to_have_attribute("placeholder", re.compile("interjection"))
    await ui.send(page, "while at work")
    Bell.may_end.set()
    await panel.stage.state("ada", "idle")
    await panel.society.pause("ada")
    await expect(page.locator('[data-testid="agent-state"]')).to_contain_text("Paused")
    await expect(composer).to_be_enabled()
    await ui.send(page, "while paused")
    await eventually(lambda: _said(panel, "while paused"))
    await panel.society.resume("ada")
    await panel.society.terminate_agent("seer")
    await ui.row(page, "seer").click()
    await expect(composer).to_be_disabled()
    await expect(page.get_by_text("has been terminated").first).to_be_visible()


@pytest.mark.check(15)
async def test_enter_belongs_to_the_input_method_while_it_composes(panel: Room) -> None:
    page = await panel.open()
    composer = page.locator(ui.COMPOSER)
    await composer.focus()
    sent = bodies(page)
    cdp = await page.context.new_cdp_session(page)
    await cdp.send("Input.imeSetComposition", {"text": "ni", "selectionStart": 2, "selectionEnd": 2})
    for code in (229, 13):
        await composer.evaluate(
            """(el, code) => { const event = new KeyboardEvent('keydown',
                {key: 'Enter', code: 'Enter', keyCode: code, isComposing: true, bubbles: true, cancelable: true});
                el.dispatchEvent(event); }""",
            code,
        )
    await cdp.send("Input.insertText", {"text": "你好"})
    await expect(composer).to_have_value(re.compile("你好"))
    assert sent == []
    # Nobody's next key comes within the same moment; some browsers' own does.
    await page.evaluate("() => new Promise(done => setTimeout(done, 40))")
    await composer.press("Enter")
    await eventually(lambda: _said(panel, "你好"))
    assert len(sent) == 1


@pytest.mark.check(16)
async def test_stop_ends_the_turn_and_keeps_what_was_said_and_what_waits(panel: Room) -> None:
    page = await panel.open()
    words = " ".join(f"word{n}" for n in range(200))
    panel.server.script(Says(words, token_delay=0.05), "On to the next")
    await ui.send(page, "Tell me much")
    await expect(page.locator(ui.DRAFT)).to_contain_text("word5")
    await ui.send(page, "And this")
    await expect(page.locator(ui.WAITING)).to_have_count(1)
    await page.locator(ui.STOP).click()
    await expect(page.locator('[data-testid="stopped"]')).to_be_visible()
    await expect(page.locator(ui.FEED)).to_contain_text("word5")
    await expect(page.locator(ui.FEED)).to_contain_text("On to the next")
    assert await panel.texts() == ["Tell me much", "And this"]


@pytest.mark.check(17)
async def test_a_delayed_message_counts_down_and_arrives(panel: Room) -> None:
    # The browser's clock is an hour wrong: the countdown goes by the server's.
    context = await panel.browser()
    await context.add_init_script("const real = Date.now; Date.now = () => real() + 3_600_000;")
    page = await panel.open("#/delayed", context=context)
    first = await panel.society.send(to="user", text="One of two", sender="ada", delay_ms=4000)
    assert first.scheduled_delivery_time is not None
    row = page.locator(f'[data-message-id="{first.message_id}"]').first
    await expect(row).to_be_visible()
    seen: list[str] = await page.evaluate(
        """async id => { const el = document.querySelector(`[data-message-id="${id}"] .countdown`); const seen = [];
            const start = performance.now();
            while (el.isConnected && performance.now() - start < 3500) {
                if (seen.at(-1) !== el.textContent) seen.push(el.textContent);
                await new Promise(requestAnimationFrame); }
            return seen; }""",
        first.message_id,
    )
    assert seen[:3] == ["00:00:04", "00:00:03", "00:00:02"]
    await expect(row).to_have_count(0)
    await page.goto(f"{panel.url}/#/a/ada")
    await expect(ui.message(page, first.message_id)).to_contain_text("One of two")


@pytest.mark.check(17)
async def test_two_that_are_due_together_arrive_in_the_order_they_were_sent(panel: Room) -> None:
    page = await panel.open()
    ids = [
        (await panel.society.send(to="user", text=f"Number {n}", sender="ada", delay_ms=600)).message_id for n in (1, 2)
    ]
    await expect(ui.message(page, ids[1])).to_be_visible()
    shown = await ui.messages(page).evaluate_all("all => all.map(a => a.dataset.messageId)")
    assert [one for one in shown if one in ids] == ids


@pytest.mark.check(17)
async def test_cancelling_a_delayed_message_takes_it_away_in_every_tab(panel: Room) -> None:
    sent = await panel.society.send(to="user", text="Never mind", sender="ada", delay_ms=60_000)
    context = await panel.browser()
    tabs = [await panel.open("#/delayed", context=context), await panel.open("#/delayed", context=context)]
    for tab in tabs:
        await expect(_delayed(tab, sent.message_id)).to_have_count(1)
    await _delayed(tabs[0], sent.message_id).get_by_role("button").click()
    for tab in tabs:
        await expect(_delayed(tab, sent.message_id)).to_have_count(0)
    assert await panel.society.bus.delayed_count() == 0


@pytest.mark.check(18)
@pytest.mark.parametrize("way", ["button", "drop", "paste"])
async def test_a_file_becomes_a_chip_however_it_comes(panel: Room, way: str) -> None:
    page = await panel.open()
    if way == "button":
        await page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    else:
        await page.evaluate(
            """([way, bytes]) => {
                const carried = new DataTransfer();
                carried.items.add(new File([new Uint8Array(bytes)], 'a.png', {type: 'image/png'}));
                const target = document.querySelector('#composer');
                const event = way === 'drop'
                    ? new DragEvent('drop', {dataTransfer: carried, bubbles: true, cancelable: true})
                    : new ClipboardEvent('paste', {clipboardData: carried, bubbles: true, cancelable: true});
                target.dispatchEvent(event); }""",
            [way, list(PNG)],
        )
    chip = page.locator(ui.CHIP)
    await expect(chip).to_contain_text("a.png")
    await expect(chip).to_contain_text("as a description (Ada does not accept images)")
    await ui.send(page, "Look at this")
    await eventually(lambda: _said(panel, "Look at this"))
    (said,) = await panel.said()
    assert [one["filename"] for one in said.payload["attachments"]] == ["a.png"]


@pytest.mark.check(19)
async def test_unread_rises_for_hidden_agents_only_and_clears_everywhere(panel: Room) -> None:
    context = await panel.browser()
    here, there = await panel.open("#/a/ada", context=context), await panel.open("#/a/ada", context=context)
    await here.bring_to_front()
    await panel.tell("You see me")
    ids = [await panel.tell(f"You do not {n}", by="bob") for n in (1, 2)]
    for tab in (here, there):
        await expect(ui.row(tab, "bob").locator('[data-testid="unread"]')).to_have_text("2")
        await expect(tab).to_have_title(re.compile(r"^\(2\) "))
        await expect(ui.row(tab, "ada").locator('[data-testid="unread"]')).to_have_count(0)
    await ui.row(here, "bob").click()
    await expect(here.locator('[data-testid="new-line"]:visible')).to_contain_text("2 new messages")
    order = await ui.messages(here).evaluate_all(
        "all => all.map(a => [a.dataset.messageId, Boolean(a.querySelector('.news'))])"
    )
    assert [one for one, marked in order if marked] == [ids[0]]
    for tab in (here, there):
        await expect(ui.row(tab, "bob").locator('[data-testid="unread"]')).to_have_count(0)
        await expect(tab).not_to_have_title(re.compile(r"^\("))


async def test_a_question_to_another_agent_is_not_mine_to_answer(panel: Room) -> None:
    await panel.tell("Which, Bob?", "one", "two", to="bob")
    page = await panel.open("#/timeline")
    await expect(page.locator(".quick-chips li")).to_have_text(["one", "two"])
    await expect(page.locator(".quick-reply-btn")).to_have_count(0)


async def test_a_terminated_agents_options_say_why_they_are_closed(panel: Room) -> None:
    message_id = await panel.tell("Which?", "one", by="seer")
    page = await panel.open("#/a/seer")
    await expect(options_of(page, message_id)).to_have_count(1)
    await panel.society.terminate_agent("seer")
    await expect(ui.state_line(page, message_id)).to_contain_text("terminated")
    await expect(options_of(page, message_id)).to_have_attribute("aria-disabled", "true")


def _delayed(page: Page, message_id: str) -> Any:
    return page.locator(f'.screen .delayed-item[data-message-id="{message_id}"]')


async def _said(panel: Room, text: str) -> bool:
    return text in await panel.texts()


async def _streams(panel: Room, count: int) -> bool:
    return panel.streams == count


@pytest.mark.check(18)
async def test_how_a_file_reaches_somebody_is_told_again_when_the_recipient_changes(panel: Room) -> None:
    await panel.society.setup.put(
        "sees",
        {
            "baseURL": panel.server.base_url,
            "model": "m",
            "capabilities": {"input": ["text", "vision"], "output": ["text", "tool_calling"]},
        },
    )
    await panel.society.create_agent(id="eyes", name="Eyes", service="sees")
    page = await panel.open()
    await expect(ui.row(page, "eyes")).to_be_visible()
    await page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    chip = page.locator(ui.CHIP)
    await expect(chip.locator('[data-testid="how"]')).to_contain_text("Ada does not accept images")
    await chip.locator('[data-testid="send-instead"]').click()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Eyes")
    await expect(chip).to_contain_text("a.png")
    await expect(chip.locator('[data-testid="how"]')).to_contain_text("unchanged")


@pytest.mark.check(18)
async def test_a_file_that_is_still_on_its_way_goes_along_to_another_recipient(panel: Room) -> None:
    sees = {"input": ["text", "vision"], "output": ["text"]}
    await panel.society.setup.put("sees", {"baseURL": panel.server.base_url, "model": "m", "capabilities": sees})
    await panel.society.create_agent(id="eyes", name="Eyes", service="sees")
    page = await panel.open()
    await expect(ui.row(page, "eyes")).to_be_visible()
    may_go = asyncio.Event()

    async def held(route: Any) -> None:
        await may_go.wait()
        await route.continue_()

    await page.route("**/api/v1/artifacts", held)
    await page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    chip = page.locator(ui.CHIP)
    await chip.locator('[data-testid="send-instead"]').click()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Eyes")
    await expect(chip).to_contain_text("a.png")
    may_go.set()
    await expect(chip).to_contain_text("70 B")
    await ui.send(page, "Look at this")
    await expect(page.locator(ui.CHIP)).to_have_count(0)
    await expect(page.locator(f"{ui.FEED} .msg-mine")).to_contain_text("a.png")
