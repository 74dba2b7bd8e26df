"""The thread: waiting messages, stopping, delays, files, unread counts."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Error, Page, Route, expect

from coterie import store
from coterie.live import CallProgress
from coterie.testing import Calls, Says, model_faults
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.harness import (
    TIMEOUT_SECONDS,
    Held,
    Panel,
    eventually,
    eventually_in,
    open_panel,
    options_of,
    record_bodies,
)
from tests.panel.words import Words

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360f8ffff3f0005fe02fe"
    "a7356d9d0000000049454e44ae426082"
)


async def at_work(panel: Panel, *then: Any, calls: int = 1) -> None:
    """Start a turn of Ada with a long tool call; `calls`: number of calls in the plan."""
    Bell.may_end.clear()
    panel.server.script(Says(calls=tuple(Calls("ring", {"name": f"bell {n}"}) for n in range(calls))), *then)
    await panel.society.send(to="ada", text="Ring it", sender="bob")
    await asyncio.wait_for(Bell.rang.wait(), TIMEOUT_SECONDS)


async def _waits(panel: Panel, count: int) -> bool:
    return len(await panel.society.store.waiting("ada")) == count


async def waiting(page: Page) -> list[str]:
    return [re.sub(r"\s+", " ", text) for text in await page.locator(ui.WAITING).all_inner_texts()]


async def test_the_progress_of_a_tool_call_is_shown_while_it_runs(panel: Panel) -> None:
    page = await panel.open()
    await at_work(panel, "Rung")
    [call] = [one for run in await panel.society.store.runs(store.Page(limit=1), "ada") for one in run.calls]
    report = CallProgress(agent_id="ada", call_id=call.call_id, tool="ring", progress=2, total=5, message="the second")
    panel.society.live.report_progress(report)
    await expect(page.get_by_test_id("progress")).to_have_text("40%, the second")
    await expect(page.locator(".row-sub").filter(has_text="ring")).to_have_text("ring · 40%, the second")
    late = await panel.open()
    await expect(late.get_by_test_id("progress")).to_have_text("40%, the second")
    panel.society.live.report_progress(replace(report, progress=7, total=None, message=""))
    await expect(page.get_by_test_id("progress")).to_have_text("7")
    panel.society.live.end_progress("ada")
    Bell.may_end.set()
    await expect(page.get_by_test_id("progress")).to_have_text("")


@pytest.mark.check(12)
async def test_messages_to_a_working_agent_wait_in_the_strip_and_are_read_together(panel: Panel) -> None:
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
    await eventually(lambda: _waits(panel, 2))
    Bell.may_end.set()
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    mine = page.locator(f"{ui.FEED} .msg-mine .bubble")
    await expect(mine).to_have_text(["First", "Second"])
    await expect(page.locator('[data-testid="break"]:visible')).to_contain_text("2 tool calls")
    await expect(page.locator(ui.FEED)).to_contain_text("Both read")
    await page.locator(ui.FEED).get_by_text("Ran 1 of 3 tools").click()
    await expect(page.locator(ui.FEED)).to_contain_text("not run: cancelled by a new message")


async def test_scrolling_up_in_a_short_thread_keeps_following_the_end(panel: Panel) -> None:
    await panel.send_as_agent("The only one")
    page = await panel.open()
    await ui.messages(page).hover()
    await page.mouse.wheel(0, -300)
    sent = [await panel.send_as_agent(f"Message {n}") for n in range(30)]
    await expect(ui.message(page, sent[-1])).to_be_in_viewport()


@pytest.mark.check(12)
async def test_a_message_to_a_working_agent_is_in_the_strip_before_the_server_has_it(panel: Panel) -> None:
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
async def test_waiting_messages_survive_a_reload_a_switch_and_a_lost_stream(panel: Panel) -> None:
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
async def test_a_late_withdrawal_is_reported_and_changes_nothing(panel: Panel) -> None:
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
    await page.locator(ui.WAITING).get_by_role("button", name="Unsend").click()
    await asyncio.wait_for(sent.wait(), TIMEOUT_SECONDS)
    await expect(page.get_by_text("Already seen; it cannot be unsent").first).to_be_visible()
    assert "Too late" in await panel.texts()


@pytest.mark.check(13)
async def test_a_press_on_unsend_is_a_click_though_the_queue_changes_meanwhile(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    await at_work(panel, "Read")
    await ui.send(page, "Wait for me")
    unsend = page.locator(ui.WAITING).get_by_test_id("withdraw")
    await expect(unsend).to_have_text(words("withdraw"))
    await unsend.hover()
    await page.mouse.down()
    await panel.send_as_agent("Also for Ada", by="bob", to="ada")
    await eventually_in(page, "async () => (await import('/static/state.js')).state.queues.get('ada').length === 2")
    await page.mouse.up()
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    assert "Wait for me" not in await panel.texts()

    for text in ("First", "Second"):
        await ui.send(page, text)
    await expect(unsend).to_have_text([words("withdraw")] * 2)
    await unsend.last.hover()
    await page.mouse.down()
    [first] = [message for message in await panel.sent() if message.payload["text"] == "First"]
    await page.evaluate("id => fetch(`/api/v1/messages/${id}`, { method: 'DELETE' })", first.id)
    await expect(page.locator(ui.WAITING)).to_have_count(1)
    await page.mouse.up()
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    assert not {"First", "Second"} & set(await panel.texts())
    Bell.may_end.set()


@pytest.mark.check(14)
async def test_the_composer_accepts_text_in_every_state_but_terminated(panel: Panel) -> None:
    page = await panel.open()
    composer = page.locator(ui.COMPOSER)
    await at_work(panel, "Read")
    await expect(composer).to_be_enabled()
    await expect(composer).to_have_attribute("placeholder", re.compile("queued"))
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
    await expect(page.get_by_text("is retired").first).to_be_visible()


@pytest.mark.check(15)
async def test_enter_during_composition_does_not_send(panel: Panel) -> None:
    page = await panel.open()
    composer = page.locator(ui.COMPOSER)
    await composer.focus()
    sent = record_bodies(page)
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
    # Some browsers send the key event of the composition just after its end.
    await page.evaluate("() => new Promise(done => setTimeout(done, 40))")
    await composer.press("Enter")
    await eventually(lambda: _said(panel, "你好"))
    assert len(sent) == 1


@pytest.mark.check(16)
async def test_stop_ends_the_turn_and_keeps_the_text_and_the_waiting_messages(panel: Panel) -> None:
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


@pytest.mark.check(16)
async def test_the_turn_after_a_stopped_one_can_be_stopped_too(panel: Panel) -> None:
    page = await panel.open()
    await page.get_by_test_id("agent-filter").fill("bob")  # the row of Ada is hidden
    for turn in ("first", "second"):
        panel.server.script(Says(" ".join(f"{turn}{n}" for n in range(200)), token_delay=0.05))
    await ui.send(page, "Tell me much")
    await expect(page.locator(ui.DRAFT)).to_contain_text("first5")
    await ui.send(page, "And this")
    await eventually(lambda: _waits(panel, 1))
    await page.locator(ui.STOP).click()
    await expect(page.locator(ui.DRAFT)).to_contain_text("second5")
    await expect(page.locator(ui.SEND)).to_have_accessible_name("Stop Ada")
    await page.locator(ui.SEND).click()
    await expect(page.locator('[data-testid="stopped"]')).to_have_count(2)
    await panel.stage.state("ada", "idle")


@pytest.mark.check(17)
async def test_a_delayed_message_counts_down_and_arrives(panel: Panel) -> None:
    # The browser's clock is an hour wrong; the countdown uses the server's.
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
async def test_messages_due_together_arrive_in_the_order_of_sending(panel: Panel) -> None:
    page = await panel.open()
    ids = [
        (await panel.society.send(to="user", text=f"Number {n}", sender="ada", delay_ms=600)).message_id for n in (1, 2)
    ]
    await expect(ui.message(page, ids[1])).to_be_visible()
    shown = await ui.messages(page).evaluate_all("all => all.map(a => a.dataset.messageId)")
    assert [one for one in shown if one in ids] == ids


@pytest.mark.check(17)
async def test_cancelling_a_delayed_message_removes_it_in_every_tab(panel: Panel) -> None:
    sent = await panel.society.send(to="user", text="Never mind", sender="ada", delay_ms=60_000)
    context = await panel.browser()
    tabs = [await panel.open("#/delayed", context=context), await panel.open("#/delayed", context=context)]
    for tab in tabs:
        await expect(_delayed(tab, sent.message_id)).to_have_count(1)
    await _delayed(tabs[0], sent.message_id).get_by_role("button").first.click()
    for tab in tabs:
        await expect(_delayed(tab, sent.message_id)).to_have_count(0)
    assert await panel.society.bus.delayed_count() == 0


@pytest.mark.check(18)
@pytest.mark.parametrize("way", ["button", "drop", "paste"])
async def test_a_file_becomes_a_chip_by_picker_paste_and_drop(panel: Panel, way: str) -> None:
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
    await expect(chip).to_contain_text("as a description (Ada cannot read images)")
    await ui.send(page, "Look at this")
    await eventually(lambda: _said(panel, "Look at this"))
    (said,) = await panel.sent()
    assert [one["filename"] for one in said.payload["attachments"]] == ["a.png"]


@pytest.mark.check(19)
async def test_the_unread_count_rises_for_hidden_agents_only_and_clears_in_every_tab(panel: Panel) -> None:
    context = await panel.browser()
    here, there = await panel.open("#/a/ada", context=context), await panel.open("#/a/ada", context=context)
    await here.bring_to_front()
    await panel.send_as_agent("You see me")
    ids = [await panel.send_as_agent(f"You do not {n}", by="bob") for n in (1, 2)]
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


@pytest.mark.check(19)
async def test_the_new_messages_line_keeps_its_number_also_before_all_are_read(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    for n in range(30):
        await panel.send_as_agent(f"News {n}: " + "some words " * 40, by="bob")
    await expect(ui.row(page, "bob").get_by_test_id("unread")).to_have_text("30")
    await ui.row(page, "bob").click()
    line = page.locator('[data-testid="new-line"]:visible')
    await expect(line).to_have_text(words("newMessages", n=30))
    await panel.send_as_agent("And one more", by="bob")
    await expect(page.get_by_test_id("jump")).to_have_text(words("newMessage"))
    await expect(line).to_have_text(words("newMessages", n=30))


async def test_the_new_messages_line_does_not_count_the_talk_that_follows(panel: Panel, words: Words) -> None:
    page = await panel.open("#/a/ada", locale=words.locale)
    for n in (1, 2):
        await panel.send_as_agent(f"Missed {n}", by="bob")
    unread = ui.row(page, "bob").get_by_test_id("unread")
    await expect(unread).to_have_text("2")
    await ui.row(page, "bob").click()
    line = page.locator('[data-testid="new-line"]:visible')
    await expect(line).to_have_text(words("newMessages", n=2))
    await expect(unread).to_have_count(0)
    panel.server.script("Here I am")
    await ui.send(page, "Are you there?")
    await expect(ui.messages(page).last).to_contain_text("Here I am")
    await expect(unread).to_have_count(0)
    await expect(line).to_have_text(words("newMessages", n=2))


async def test_a_question_to_another_agent_has_no_buttons(panel: Panel) -> None:
    await panel.send_as_agent("Which, Bob?", "one", "two", to="bob")
    page = await panel.open("#/timeline")
    await expect(page.locator(".quick-chips li")).to_have_text(["one", "two"])
    await expect(page.locator(".quick-reply-btn")).to_have_count(0)


async def test_the_options_of_a_terminated_agent_show_why_they_are_closed(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", "one", by="seer")
    page = await panel.open("#/a/seer")
    await expect(options_of(page, message_id)).to_have_count(1)
    await panel.society.terminate_agent("seer")
    await expect(ui.state_line(page, message_id)).to_contain_text("retired")
    await expect(options_of(page, message_id)).to_have_attribute("aria-disabled", "true")


def _delayed(page: Page, message_id: str) -> Any:
    return page.locator(f'.screen .delayed-item[data-message-id="{message_id}"]')


async def _said(panel: Panel, text: str) -> bool:
    return text in await panel.texts()


async def _streams(panel: Panel, count: int) -> bool:
    return panel.streams == count


@pytest.mark.check(18)
async def test_the_delivery_hint_of_a_file_follows_the_recipient(panel: Panel) -> None:
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
    await expect(chip.locator('[data-testid="how"]')).to_contain_text("Ada cannot read images")
    await chip.locator('[data-testid="send-instead"]').click()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Eyes")
    await expect(chip).to_contain_text("a.png")
    await expect(chip.locator('[data-testid="how"]')).to_contain_text("sent as it is")


@pytest.mark.check(18)
async def test_a_file_that_is_still_uploading_moves_to_another_recipient(panel: Panel) -> None:
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


@pytest.mark.check(18)
@pytest.mark.parametrize("ends", ["meanwhile", "afterwards"])
async def test_a_file_that_is_still_uploading_stays_with_the_draft_of_its_conversation(
    panel: Panel, words: Words, ends: str
) -> None:
    page = await panel.open(locale=words.locale)
    may_go, chip, title = asyncio.Event(), page.locator(ui.CHIP), page.get_by_test_id("title")

    async def held(route: Any) -> None:
        await may_go.wait()
        await route.continue_()

    await page.route("**/api/v1/artifacts", held)
    files = [{"name": name, "mimeType": "image/png", "buffer": PNG} for name in ("a.png", "b.png")]
    await page.set_input_files("input[type=file]", files)  # type: ignore[arg-type]  # a list of dicts is one too
    await expect(chip).to_have_count(2)
    await ui.row(page, "bob").click()
    await expect(title).to_have_text("Bob")
    await expect(chip).to_have_count(0)
    if ends == "meanwhile":
        may_go.set()
        stored = "() => JSON.parse(localStorage.getItem('coterie.draft.ada'))?.files.length === 2"
        await page.wait_for_function(stored)
        await expect(chip).to_have_count(0)
    await ui.row(page, "ada").click()
    await expect(title).to_have_text("Ada")
    await expect(chip).to_contain_text(["a.png", "b.png"])
    may_go.set()
    await expect(chip).to_contain_text(["70 B", "70 B"])
    await page.reload()
    await expect(chip).to_contain_text(["70 B", "70 B"])
    await ui.send(page, "Look at these")
    await eventually(lambda: _said(panel, "Look at these"))
    (said,) = await panel.sent()
    assert sorted(one["filename"] for one in said.payload["attachments"]) == ["a.png", "b.png"]


async def test_a_file_chosen_before_its_conversation_is_left_is_there_on_return(panel: Panel) -> None:
    """Also if the script that uploads files arrives after the person has gone."""
    page = await panel.open()
    may_go, is_asked = asyncio.Event(), asyncio.Event()

    async def held(route: Any) -> None:
        is_asked.set()
        await may_go.wait()
        await route.continue_()

    await page.route("**/static/attachments.js", held)
    await page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    await is_asked.wait()
    await ui.row(page, "bob").click()
    await expect(page.get_by_test_id("title")).to_have_text("Bob")
    async with page.expect_response("**/api/v1/artifacts"):
        may_go.set()
    await expect(page.locator(ui.CHIP)).to_have_count(0)
    await ui.row(page, "ada").click()
    await expect(page.locator(ui.CHIP)).to_contain_text("a.png")


class HeldUpload:
    """Route handler of an upload that goes on when `may_go` is set."""

    def __init__(self, status: int | None = None) -> None:
        self.may_go, self._status = asyncio.Event(), status

    async def __call__(self, route: Route) -> None:
        await self.may_go.wait()
        if self._status is None:
            await route.continue_()
        else:
            await route.fulfill(status=self._status, body="")


async def _send_with_file(page: Page, words: Words, held: HeldUpload, *, later: bool = False) -> None:
    """Send a message whose file is still uploaded."""
    await page.route("**/api/v1/artifacts", held)
    await page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    await expect(page.locator(ui.CHIP)).to_contain_text("a.png")
    await page.locator(ui.COMPOSER).fill("Look at this")
    if later:
        await page.get_by_test_id("send-later").click()
        await expect(page.get_by_test_id("whenHour")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator(".composer-hint")).to_have_text(words("waitsForUploads"))


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("ends", ["meanwhile", "afterwards"])
async def test_a_message_that_waits_for_its_file_is_sent_although_its_conversation_was_left(
    panel: Panel, words: Words, ends: str, later: bool
) -> None:
    page, held = await panel.open(locale=words.locale), HeldUpload()
    sent = record_bodies(page)
    await _send_with_file(page, words, held, later=later)
    await ui.row(page, "bob").click()
    await expect(page.get_by_test_id("title")).to_have_text("Bob")
    if ends == "afterwards":
        await ui.row(page, "ada").click()
        await expect(page.locator(ui.COMPOSER)).to_have_value("Look at this")
        await expect(page.locator(".composer-hint")).to_have_text(words("waitsForUploads"))
    async with page.expect_response("**/api/v1/messages"):
        held.may_go.set()
    (body,) = sent
    assert (body["to"], body["payload"]["text"]) == ("ada", "Look at this")
    assert [one["filename"] for one in body["payload"]["attachments"]] == ["a.png"]
    assert ("delayMs" in body) is later
    await ui.row(page, "ada").click()
    await expect(page.get_by_test_id("title")).to_have_text("Ada")
    await expect(page.locator(ui.COMPOSER)).to_have_value("")
    await expect(page.locator(ui.CHIP)).to_have_count(0)


async def test_a_message_whose_file_fails_after_its_conversation_was_left_is_said_to_be_unsent(
    panel: Panel, words: Words
) -> None:
    page, held = await panel.open(locale=words.locale), HeldUpload(500)
    panel.allow("Failed to load resource")
    sent = record_bodies(page)
    await _send_with_file(page, words, held)
    await ui.row(page, "bob").click()
    await expect(page.get_by_test_id("title")).to_have_text("Bob")
    held.may_go.set()
    await expect(page.locator(ui.TOAST)).to_contain_text("Look at this")
    await ui.row(page, "ada").click()
    await expect(page.locator(ui.COMPOSER)).to_have_value("Look at this")
    await expect(page.locator(ui.CHIP)).to_contain_text(words("uploadFailed"))
    assert sent == []


async def test_a_message_that_waits_for_its_file_is_sent_to_the_agent_that_is_chosen_instead(
    panel: Panel, words: Words
) -> None:
    sees = {"input": ["text", "vision"], "output": ["text"]}
    await panel.society.setup.put("sees", {"baseURL": panel.server.base_url, "model": "m", "capabilities": sees})
    await panel.society.create_agent(id="eyes", name="Eyes", service="sees")
    page, held = await panel.open(locale=words.locale), HeldUpload()
    await expect(ui.row(page, "eyes")).to_be_visible()
    sent = record_bodies(page)
    await _send_with_file(page, words, held)
    await page.get_by_test_id("send-instead").click()
    await expect(page.get_by_test_id("title")).to_have_text("Eyes")
    async with page.expect_response("**/api/v1/messages"):
        held.may_go.set()
    assert [(body["to"], body["payload"]["text"]) for body in sent] == [("eyes", "Look at this")]
    await expect(page.locator(ui.COMPOSER)).to_have_value("")


async def send_during_upload(panel: Panel, page: Page, text: str) -> asyncio.Event:
    """Send a text with a file whose upload fails when the returned event is set."""
    may_end = asyncio.Event()
    panel.allow("Failed to load resource")

    async def fail(route: Any) -> None:
        await may_end.wait()
        with contextlib.suppress(Error):  # the page may have cancelled it
            await route.abort()

    await page.route("**/api/v1/artifacts", fail)
    await page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    await expect(page.locator(ui.CHIP)).to_be_visible()
    await ui.send(page, text)
    await expect(page.locator("#composer-hint")).to_contain_text("when the upload is complete")
    return may_end


@pytest.mark.check(18)
async def test_a_failed_upload_cancels_the_send_that_waits_for_it(panel: Panel) -> None:
    page = await panel.open()
    sent, composer = record_bodies(page), page.locator(ui.COMPOSER)
    may_end = await send_during_upload(panel, page, "Look at this")
    may_end.set()
    await expect(page.locator(ui.CHIP)).to_contain_text("Upload failed")
    await expect(composer).to_have_value("Look at this")
    await expect(page.locator("#composer-hint")).to_be_empty()
    await composer.fill("Look at")
    await panel.society.create_agent(id="new", name="New")  # paints the attachments again
    await expect(ui.row(page, "new")).to_be_visible()
    await expect(composer).to_have_value("Look at")
    await ui.send(page, "Without it")
    await eventually(lambda: _said(panel, "Without it"))
    assert [one["payload"]["text"] for one in sent] == ["Without it"]


@pytest.mark.check(18)
async def test_a_failed_upload_cancels_the_send_also_after_the_conversation_was_left(panel: Panel) -> None:
    page = await panel.open()
    sent, composer = record_bodies(page), page.locator(ui.COMPOSER)
    may_end = await send_during_upload(panel, page, "Look at this")
    await ui.row(page, "bob").click()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Bob")
    await ui.row(page, "ada").click()
    await expect(composer).to_have_value("Look at this")
    may_end.set()
    await expect(page.locator(ui.CHIP)).to_contain_text("Upload failed")
    await expect(page.locator("#composer-hint")).to_be_empty()
    assert sent == []


async def test_a_send_that_fails_after_its_conversation_was_reopened_restores_the_text(panel: Panel) -> None:
    page = await panel.open()
    panel.allow("Failed to load resource")
    posts = Held()
    await page.route("**/api/v1/messages", posts)
    await ui.send(page, "My own words")
    await asyncio.wait_for(posts.arrived.wait(), TIMEOUT_SECONDS)
    await ui.row(page, "bob").click()
    await ui.row(page, "ada").click()
    await expect(page.locator('[data-testid="title"]')).to_have_text("Ada")
    posts.may_end.set()
    await expect(page.locator(ui.TOAST)).to_contain_text("My own words")
    await expect(page.locator(ui.COMPOSER)).to_have_value("My own words")
    await page.reload()
    await expect(page.locator(ui.COMPOSER)).to_have_value("My own words")


async def test_a_send_that_fails_in_another_conversation_becomes_the_draft_of_its_own(panel: Panel) -> None:
    page = await panel.open()
    panel.allow("Failed to load resource")
    posts, composer = Held(), page.locator(ui.COMPOSER)
    await page.route("**/api/v1/messages", posts)
    await ui.send(page, "My own words")
    await asyncio.wait_for(posts.arrived.wait(), TIMEOUT_SECONDS)
    await ui.row(page, "bob").click()
    posts.may_end.set()
    await expect(page.locator(ui.TOAST)).to_contain_text("My own words")
    await expect(composer).to_have_value("")
    await ui.row(page, "ada").click()
    await expect(composer).to_have_value("My own words")


async def test_a_failed_send_stays_when_the_agent_has_taken_an_equal_message(panel: Panel) -> None:
    page = await panel.open()
    panel.allow("Failed to load resource")
    await at_work(panel, "Both rang")
    await ui.send(page, "Yes")
    await eventually(lambda: _waits(panel, 1))
    posts = Held()
    await page.route("**/api/v1/messages", posts)
    await ui.send(page, "Yes")
    await expect(page.locator(ui.WAITING)).to_have_count(2)
    await page.locator(ui.COMPOSER).fill("Something else")
    Bell.may_end.set()
    await expect(page.locator(ui.FEED)).to_contain_text("Both rang")
    posts.may_end.set()
    await expect(page.locator(ui.TOAST)).to_contain_text("Yes")
    await expect(page.locator(f'{ui.FEED} [data-state="failed"]')).to_contain_text("Yes")


@pytest.mark.parametrize("arrives", [False, True])
async def test_a_message_that_a_reload_interrupts_is_not_lost(panel: Panel, words: Words, arrives: bool) -> None:
    page = await panel.open(locale=words.locale)
    panel.allow("Failed to load resource")
    held, sent = Held(), record_bodies(page)
    await page.route("**/api/v1/messages", held)
    await ui.send(page, "My own words")
    await asyncio.wait_for(held.arrived.wait(), TIMEOUT_SECONDS)
    if arrives:
        given = held.bodies[0]
        await panel.society.bus.send(sender="user", to="ada", payload=given["payload"], client_id=given["clientId"])
        await panel.stage.state("ada", "idle")
    await page.reload()
    await page.wait_for_selector("[data-ready]")
    held.may_end.set()
    await page.unroute("**/api/v1/messages")
    failed = page.locator(f'{ui.FEED} [data-state="failed"]')
    if not arrives:
        await expect(failed).to_contain_text("My own words")
        await failed.get_by_role("button", name=words("retry")).click()
        await eventually(lambda: _said(panel, "My own words"))
        assert sent[0] == sent[1]
    await expect(page.locator(f"{ui.FEED} .msg-mine[data-message-id]")).to_have_count(1)
    await expect(failed).to_have_count(0)
    await page.reload()
    await expect(page.locator(f"{ui.FEED} .msg-mine")).to_have_count(1)
    assert await page.evaluate("() => Object.keys(localStorage).filter(key => key.startsWith('coterie.sent'))") == []
    assert await panel.texts() == ["My own words"]


async def test_a_message_that_a_reload_interrupts_is_not_taken_for_an_equal_one(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    panel.allow("Failed to load resource")
    held = Held()
    await page.route("**/api/v1/messages", held)
    await ui.send(page, "Yes")
    await asyncio.wait_for(held.arrived.wait(), TIMEOUT_SECONDS)
    await page.reload()
    failed = page.locator(f'{ui.FEED} [data-state="failed"]')
    await expect(failed).to_contain_text("Yes")
    held.may_end.set()
    await panel.society.send(to="ada", text="Yes")
    await expect(ui.messages(page).filter(has_text="Yes")).to_have_count(1)
    await page.reload()
    await expect(ui.messages(page).filter(has_text="Yes")).to_have_count(1)
    await expect(failed).to_contain_text("Yes")

    given = held.bodies[0]  # it arrives after all: the request was still on its way
    await panel.society.bus.send(sender="user", to="ada", payload=given["payload"], client_id=given["clientId"])
    await expect(ui.messages(page).filter(has_text="Yes")).to_have_count(2)
    await expect(failed).to_have_count(0)


async def test_a_message_that_another_tab_is_sending_is_not_offered_again(panel: Panel) -> None:
    context = await panel.browser()
    sender = await panel.open(context=context)
    # A request that the test holds would go to the server when its page is closed.
    await sender.evaluate(
        """() => { const real = fetch; window.fetch = (url, options) =>
            options.method === 'POST' && url.endsWith('/messages') ? new Promise(() => {}) : real(url, options); }"""
    )
    await ui.send(sender, "My own words")
    await expect(sender.locator(f'{ui.FEED} [data-state="sending"]')).to_be_visible()
    other, failed = await panel.open(context=context), f'{ui.FEED} [data-state="failed"]'
    await expect(other.get_by_test_id("empty-thread")).to_be_visible()
    await expect(other.locator(failed)).to_have_count(0)
    await sender.close()
    await expect(other.locator(failed)).to_contain_text("My own words")
    third = await panel.open(context=context)
    await third.locator(failed).get_by_role("button", name="Edit").click()
    await expect(third.locator(ui.COMPOSER)).to_have_value("My own words")
    for tab in (other, third):
        await expect(tab.locator(failed)).to_have_count(0)
    assert await panel.texts() == []


async def test_broken_and_old_kept_messages_are_left_out(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    await page.evaluate(
        """() => {
            for (const broken of ['{', 'null', '{"again":{"clientId":"x","agent":"ada","text":1}}', '[]'])
                localStorage.setItem(`coterie.sent.${broken.length}`, broken);
            for (let n = 0; n < 30; n += 1) {
                const again = { agent: 'ada', text: `Number ${n}`, files: [], clientId: `id${n}` };
                const createdAt = new Date(1_700_000_000_000 + n).toISOString();
                localStorage.setItem(`coterie.sent.id${n}`, JSON.stringify({ again, createdAt, status: 'failed' }));
            } }"""
    )
    await page.reload()
    failed = page.locator(f'{ui.FEED} [data-state="failed"]')
    await expect(failed).to_have_count(20)
    await expect(failed.first).to_contain_text("Number 10")
    stored = "() => Object.keys(localStorage).filter(key => key.startsWith('coterie.sent')).length"
    assert await page.evaluate(stored) == 20
    await failed.first.get_by_role("button", name=words("remove")).click()
    await expect(failed).to_have_count(19)
    assert await page.evaluate(stored) == 19


async def test_two_tabs_do_not_overwrite_the_draft_of_each_other(panel: Panel, words: Words) -> None:
    context = await panel.browser(locale=words.locale)
    first, second = await panel.open(context=context), await panel.open(context=context)
    boxes = [tab.locator(ui.COMPOSER) for tab in (first, second)]
    title = '[data-testid="title"]'

    async def visit_bob(tab: Page) -> None:
        await ui.row(tab, "bob").click()
        await expect(tab.locator(title)).to_have_text("Bob")
        await ui.row(tab, "ada").click()
        await expect(tab.locator(title)).to_have_text("Ada")

    await boxes[0].fill("From the first")
    await expect(boxes[1]).to_have_value("From the first")
    await first.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    await expect(second.locator(ui.CHIP)).to_contain_text("a.png")
    await visit_bob(second)
    await expect(boxes[1]).to_have_value("From the first")
    await boxes[1].fill("From the second")
    await expect(boxes[0]).to_have_value("From the first")  # it is being written
    await visit_bob(first)
    await expect(boxes[0]).to_have_value("From the second")
    await expect(first.locator(ui.CHIP)).to_contain_text("a.png")
    await boxes[1].press("Enter")
    await expect(boxes[0]).to_have_value("")
    await expect(first.locator(ui.CHIP)).to_have_count(0)
    await eventually(lambda: _said(panel, "From the second"))


async def hold_withdrawals(page: Page) -> asyncio.Event:
    """Hold requests that withdraw a message until the returned event is set."""
    may_go = asyncio.Event()

    async def hold(route: Any) -> None:
        await may_go.wait()
        await route.continue_()

    await page.route("**/api/v1/messages/*", hold)
    return may_go


async def test_text_typed_during_a_withdrawal_is_kept_with_the_withdrawn_text(panel: Panel) -> None:
    page = await panel.open()
    composer = page.locator(ui.COMPOSER)
    await at_work(panel)
    await ui.send(page, "Withdrawn")
    await expect(page.locator(ui.WAITING).get_by_test_id("withdraw")).to_have_text("Unsend")
    may_go = await hold_withdrawals(page)
    async with page.expect_request("**/api/v1/messages/*"):
        await composer.press("ArrowUp")
    await composer.fill("Typed")
    may_go.set()
    await expect(composer).to_have_value("Typed\n\nWithdrawn")
    await expect(page.locator(ui.WAITING)).to_have_count(0)
    Bell.may_end.set()


async def test_a_message_edited_again_returns_to_the_composer_of_its_own_agent(panel: Panel) -> None:
    await panel.society.pause_all()
    await panel.society.send(to="ada", text="For Ada")
    context = await panel.browser()

    async def starting(route: Any) -> None:  # as when all turns of the process are taken
        response = await route.fetch()
        seen = await response.json()
        for agent in seen["agents"]:
            agent |= {"state": "active", "phase": "starting"} if agent["id"] == "ada" else {}
        await route.fulfill(response=response, json=seen)

    await context.route("**/api/v1/snapshot", starting)
    page = await panel.open(context=context)
    composer = page.locator(ui.COMPOSER)
    may_go = await hold_withdrawals(page)
    await page.locator(f"{ui.FEED} .msg-mine").get_by_test_id("message-menu").focus()
    await page.keyboard.press("Enter")
    async with page.expect_request("**/api/v1/messages/*"):
        await page.get_by_role("menuitem", name="Edit and send again").press("Enter")
    await ui.row(page, "bob").click()
    async with page.expect_response("**/api/v1/messages/*"):
        may_go.set()
    await ui.row(page, "ada").click()
    await expect(composer).to_have_value("For Ada")
    await ui.row(page, "bob").click()
    await expect(composer).to_have_value("")


async def test_a_broken_off_reply_and_the_reason_of_the_retry_are_shown(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.agent.failures.FIRST_RETRY_DELAY", timedelta(seconds=60))
    monkeypatch.setattr("coterie.agent.runner.random.random", lambda: 1.0)
    async with open_panel(tmp_path, browser, timeout=400) as panel:
        panel.server.script(model_faults.stall())
        page = await panel.open()
        await ui.send(page, "Tell me much")
        await expect(page.locator(ui.DRAFT)).to_contain_text("Hello")
        card = page.locator('[data-testid="problem"]')
        await expect(card).to_contain_text("The model service took too long to answer.")
        await expect(card).to_contain_text("Retry in")
        await expect(page.locator(ui.DRAFT)).to_contain_text("Hello")
        await expect(page.locator('[data-testid="stopped"]')).to_have_text("This answer was cut short")
        await page.reload()
        await expect(card).to_contain_text("fell silent for 0.4 s")
        await expect(card).to_contain_text("Retry in")
        assert await panel.errors() == []


async def test_an_answer_at_the_length_limit_is_marked_and_can_be_continued(panel: Panel) -> None:
    panel.server.script(Says("Once upon a", finish="length"), "time.")
    page = await panel.open()
    await ui.send(page, "Tell me a story")
    await expect(page.locator('[data-testid="cut-off"]')).to_have_text("Cut off at the length limit")
    await page.reload()
    await expect(page.locator('[data-testid="cut-off"]')).to_be_visible()
    await page.locator('[data-testid="continue"]').click()
    await expect(page.locator(ui.FEED)).to_contain_text("time.")
    assert await panel.texts() == ["Tell me a story", "Continue."]
    await expect(page.locator('[data-testid="continue"]')).to_have_count(0)
    await expect(page.locator('[data-testid="cut-off"]')).to_be_visible()
    assert await panel.errors() == []


async def test_an_answer_that_a_content_filter_cut_off_is_marked(panel: Panel) -> None:
    panel.server.script(Says("Once upon a", finish="content_filter"))
    page = await panel.open()
    await ui.send(page, "Tell me a story")
    await expect(page.locator('[data-testid="cut-off"]')).to_have_text("Cut off by the content filter")


async def test_the_end_of_an_answer_in_the_list_of_agents_has_no_markdown(panel: Panel) -> None:
    held = HeldAnswer("The **bold** `code` and a [link](https://example.com/)")
    panel.server.script(held)
    page = await panel.open("#/a/bob")
    await panel.stage.say("Write")
    await expect(ui.row(page, "ada").locator(".row-sub")).to_have_text(re.compile(r"^….*code and a link$"))
    held.may_end.set()
