"""Quick replies: clicks, failures, concurrency, keyboard."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from coterie.testing import Calls, Says
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.harness import (
    PHONE,
    TIMEOUT_SECONDS,
    WIDE,
    Held,
    Panel,
    eventually,
    fail_requests,
    options_of,
    record_bodies,
    texts_of,
)
from tests.panel.words import Words

TEN = [f"Option {n}" for n in range(1, 11)]
LONG = "Sort the notes of yesterday by who has to do what, " * 4


async def disabled(page: Page, message_id: str) -> list[bool]:
    found = options_of(page, message_id)
    return list[bool](await found.evaluate_all("all => all.map(b => b.getAttribute('aria-disabled') === 'true')"))


async def is_open(page: Page, message_id: str) -> bool:
    states = await disabled(page, message_id)
    return bool(states) and not any(states)


async def is_closed(page: Page, message_id: str) -> bool:
    states = await disabled(page, message_id)
    return bool(states) and all(states)


async def pressed(page: Page, message_id: str) -> list[int]:
    found = options_of(page, message_id)
    marked = "all => all.flatMap((b, i) => b.getAttribute('aria-pressed') === 'true' ? [i] : [])"
    return list[int](await found.evaluate_all(marked))


@pytest.mark.check(1)
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
async def test_options_are_below_the_message_in_their_order(panel: Panel, viewport: Any) -> None:
    asked = {n: await panel.send_as_agent(f"Which of {n}?", *TEN[:n]) for n in (1, 3, 10)}
    page = await panel.open(viewport=viewport)
    for n, message_id in asked.items():
        await expect(options_of(page, message_id)).to_have_text(TEN[:n], use_inner_text=True)
        bubble = await ui.message(page, message_id).locator(".bubble").bounding_box()
        first = await options_of(page, message_id).first.bounding_box()
        assert bubble is not None
        assert first is not None
        assert first["y"] >= bubble["y"] + bubble["height"] - 1


INVALID: list[Any] = ["x", {}, [1], ["  "], ["\x85"], []]
RARER_INVALID = [pytest.param(one, marks=pytest.mark.full, id=repr(one)) for one in INVALID]


@pytest.mark.check(2)
@pytest.mark.parametrize(
    "options",
    [
        [*TEN, "Option 11"],
        ["a", ""],
        ["\ufeff"],
        None,
        *RARER_INVALID,
    ],
    ids=repr,
)
async def test_invalid_options_are_not_shown(panel: Panel, options: Any) -> None:
    """The server refuses such options; the page must not rely on that."""
    message_id = await panel.send_as_agent("Here are some options", "one")
    context = await panel.browser()

    async def spoilt(route: Route) -> None:
        answer = await route.fetch()
        thread = await answer.json()
        for item in thread["items"]:
            item["payload"]["quickReplies"] = options
        await route.fulfill(response=answer, json=thread)

    await context.route("**/api/v1/threads/ada/messages*", spoilt)
    page = await panel.open(context=context)
    await expect(ui.message(page, message_id)).to_contain_text("Here are some options")
    await expect(page.locator(".quick-reply-btn")).to_have_count(0)
    await expect(page.locator(ui.TOAST)).to_have_count(0)


@pytest.mark.check(3)
@pytest.mark.parametrize("option", [" leading space", "two\nlines", "🧭 emoji", "a\tb  c"], ids=repr)
async def test_a_click_sends_the_option_byte_for_byte(panel: Panel, option: str) -> None:
    other = await panel.send_as_agent("Another question", "one", "two")
    message_id = await panel.send_as_agent("Which?", "first", option)
    page = await panel.open()
    await expect(options_of(page, message_id)).to_have_count(2)
    sent = record_bodies(page)
    await page.evaluate(
        """async id => {
            const all = [...document.querySelectorAll(`.quick-replies[data-message-id="${id}"] .quick-reply-btn`)];
            all[1].click();
            const closed = () => all.every(b => b.getAttribute('aria-disabled') === 'true');
            while (!closed()) await new Promise(requestAnimationFrame);
        }""",
        message_id,
    )
    await eventually(lambda: _has(panel, 1))
    assert sent[0]["payload"] == {"text": option}
    assert (sent[0]["inReplyTo"], sent[0]["option"], sent[0]["to"]) == (message_id, 1, "ada")
    assert await panel.texts() == [option]
    assert await is_open(page, other)


@pytest.mark.check(4)
async def test_a_double_click_sends_one_message(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open()
    sent = record_bodies(page)
    await options_of(page, message_id).nth(1).dblclick()
    await expect(ui.state_line(page, message_id)).to_have_text("Your answer")
    assert await texts_of(options_of(page, message_id).locator("visible=true")) == ["two"]  # the others are folded away
    assert await panel.texts() == ["two"]
    assert len(sent) == 1


@pytest.mark.check(4)
async def test_a_held_key_sends_one_message(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open()
    await options_of(page, message_id).first.focus()
    for _ in range(20):
        await page.keyboard.down("Enter")
    await page.keyboard.up("Enter")
    await eventually(lambda: _has(panel, 1))
    assert await panel.texts() == ["one"]
    assert await pressed(page, message_id) == [0]


async def test_a_digit_after_an_answer_goes_to_the_composer(panel: Panel, words: Words) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open(locale=words.locale)
    await options_of(page, message_id).first.focus()
    await page.keyboard.press("3")  # there is no third option
    await expect(page.locator(ui.COMPOSER)).to_have_value("3")
    await options_of(page, message_id).first.focus()
    for _ in range(3):
        await page.keyboard.down("2")
    await page.keyboard.up("2")
    await expect(ui.state_line(page, message_id)).to_have_text(words("qrChosen", n=2))
    await expect(options_of(page, message_id).nth(1)).to_be_focused()
    await page.keyboard.type("10 of them")
    await expect(page.locator(ui.COMPOSER)).to_have_value("310 of them")
    assert await panel.texts() == ["two"]


@pytest.mark.check(4)
async def test_of_concurrent_choices_in_two_tabs_one_wins_in_both(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two", "three")
    context = await panel.browser()
    panel.allow("409")
    tabs = [await panel.open(context=context), await panel.open(context=context)]
    clicks = "([id, n]) => document.querySelectorAll(`[data-message-id='${id}'] .quick-reply-btn`)[n].click()"
    await asyncio.gather(*(tab.evaluate(clicks, [message_id, n]) for n, tab in enumerate(tabs)))
    await eventually(lambda: _has(panel, 1))
    (winner,) = await panel.sent()

    async def agree() -> bool:
        return [await pressed(tab, message_id) for tab in tabs] == [[winner.option]] * 2

    await eventually(agree)
    assert len(await panel.texts()) == 1


@pytest.mark.check(5)
@pytest.mark.parametrize("status", [503, None], ids=["503", "refused"])
async def test_an_option_whose_send_failed_can_be_chosen_again(panel: Panel, status: int | None) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open()
    panel.allow("Failed to load resource")
    await fail_requests(page, status)
    button = options_of(page, message_id).nth(1)
    await button.focus()
    await page.keyboard.press("Enter")
    toast = page.locator(ui.TOAST)
    await expect(toast).to_have_count(1)
    await expect(toast).to_contain_text("two")
    await expect(page.locator("[role=alert]:not(:empty)")).to_have_count(1)
    assert await is_open(page, message_id)
    assert await pressed(page, message_id) == []
    assert await button.evaluate("b => b === document.activeElement")

    await page.unroute("**/api/v1/messages")
    await toast.get_by_role("button", name="Retry").click()
    await eventually(lambda: _has(panel, 1))
    assert await panel.texts() == ["two"]
    await eventually(lambda: is_closed(page, message_id))


@pytest.mark.check(6)
async def test_a_typed_answer_closes_every_open_question_of_that_agent(panel: Panel) -> None:
    first, second = await panel.send_as_agent("First?", "one"), await panel.send_as_agent("Second?", "two")
    others = await panel.send_as_agent("Mine?", "three", by="bob")
    page = await panel.open()
    await ui.send(page, "Neither")
    await eventually(lambda: is_closed(page, first))
    await eventually(lambda: is_closed(page, second))
    await expect(ui.state_line(page, second)).to_contain_text("own words")
    await page.goto(f"{panel.url}/#/a/bob")
    await eventually(lambda: is_open(page, others))


@pytest.mark.check(6)
async def test_an_attachment_without_text_is_an_answer(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", "one")
    page = await panel.open()
    await page.set_input_files("input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"})
    await expect(page.locator(ui.CHIP)).to_contain_text("a.txt")
    await page.locator(ui.SEND).click()
    await eventually(lambda: is_closed(page, message_id))


@pytest.mark.check(6)
async def test_a_typed_answer_that_fails_reopens_the_question_and_restores_the_text(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", "one")
    page = await panel.open()
    panel.allow("Failed to load resource")
    await fail_requests(page, 503)
    await ui.send(page, "My own words")
    await expect(page.locator(ui.TOAST)).to_have_count(1)
    await expect(page.locator(ui.COMPOSER)).to_have_value("My own words")
    await eventually(lambda: is_open(page, message_id))
    assert await panel.texts() == []


@pytest.mark.check(7)
async def test_an_answer_is_shown_after_a_reload(panel: Panel, words: Words) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open(locale=words.locale)
    await options_of(page, message_id).nth(1).click()
    await eventually(lambda: _has(panel, 1))
    await page.reload()
    await eventually(lambda: is_closed(page, message_id))
    assert await pressed(page, message_id) == [1]
    assert await texts_of(options_of(page, message_id).locator("visible=true")) == ["two"]  # the others are folded away
    await expect(ui.state_line(page, message_id)).to_contain_text(words("qrChosen"))


@pytest.mark.check(7)
@pytest.mark.parametrize("arrives", [True, False], ids=["the server got it", "it never arrived"])
async def test_a_reload_during_a_send_ends_in_the_state_of_the_server(panel: Panel, arrives: bool) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open()
    panel.allow("Failed to load resource")
    held = Held()
    await page.route("**/api/v1/messages", held)
    await options_of(page, message_id).nth(1).click()
    await asyncio.wait_for(held.arrived.wait(), TIMEOUT_SECONDS)
    assert await is_closed(page, message_id)
    if arrives:
        body = held.bodies[0]
        await panel.society.bus.send(
            sender="user",
            to="ada",
            payload=body["payload"],
            client_id=body["clientId"],
            in_reply_to=message_id,
            option=1,
        )
    await page.reload()
    held.may_end.set()
    await eventually(lambda: (is_closed if arrives else is_open)(page, message_id))
    assert await pressed(page, message_id) == ([1] if arrives else [])


@pytest.mark.check(8)
async def test_options_stay_open_while_the_agent_works_and_reopen_after_a_withdrawal(panel: Panel) -> None:
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "Done")
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open()
    # An answer without a reference would answer the question.
    await panel.society.send(to="ada", text="Ring it", sender="bob")
    await asyncio.wait_for(Bell.rang.wait(), TIMEOUT_SECONDS)
    assert await is_open(page, message_id)
    await options_of(page, message_id).nth(1).click()
    waiting = page.locator(ui.WAITING).filter(has_text="two")
    await expect(waiting).to_be_visible()
    await waiting.get_by_role("button", name="Unsend").click()
    await eventually(lambda: is_open(page, message_id))
    await expect(waiting).to_have_count(0)
    await options_of(page, message_id).nth(1).click()
    await expect(waiting).to_be_visible()
    assert await panel.texts() == ["two"]
    Bell.may_end.set()
    await panel.stage.state("ada", "idle")


@pytest.mark.check(9)
@pytest.mark.parametrize("option", ["<img src=x onerror=pwned()>", "');window.pwned=1;//", '"&lt;"', "<b>bold</b>"])
async def test_an_option_is_shown_as_it_was_written(panel: Panel, option: str) -> None:
    message_id = await panel.send_as_agent("Which?", option)
    page = await panel.open()
    await expect(options_of(page, message_id)).to_have_text([option], use_inner_text=True)
    await options_of(page, message_id).click()
    await eventually(lambda: _has(panel, 1))
    assert await page.evaluate("() => typeof window.pwned") == "undefined"


@pytest.mark.check(10)
@pytest.mark.parametrize("width", [360, 320])
async def test_ten_options_fit_a_narrow_phone(panel: Panel, width: int) -> None:
    message_id = await panel.send_as_agent("Which?", *TEN[:9], LONG[:200])
    page = await panel.open(viewport={"width": width, "height": 740})
    assert await ui.sideways(page) == []
    boxes = await options_of(page, message_id).evaluate_all(
        "all => all.map(b => [b.offsetHeight, b.scrollWidth - b.clientWidth, b.scrollHeight - b.clientHeight])"
    )
    assert len(boxes) == 10
    assert [height for height, _, _ in boxes if height < 44] == []
    assert [box for box in boxes if box[1] > 1 or box[2] > 1] == []
    await ui.to_end(page)
    last, composer = options_of(page, message_id).last, page.locator(ui.COMPOSER)
    await eventually(lambda: _above(last, composer))


@pytest.mark.check(11)
async def test_quick_replies_can_be_chosen_by_keyboard(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", *TEN)
    page = await panel.open()
    await page.evaluate(
        """() => { window.lost = 0;
            setInterval(() => { if (document.activeElement === document.body) window.lost += 1; }, 10); }"""
    )
    await page.locator(ui.COMPOSER).focus()
    await page.evaluate("() => { window.lost = 0; }")
    focused = "() => document.activeElement.textContent.trim()"

    async def is_on(text: str) -> bool:
        return text in str(await page.evaluate(focused))

    await page.keyboard.press("Alt+q")
    assert await is_on("Option 1")
    for keys, text in (
        ("ArrowRight", "Option 2"),
        ("ArrowDown", "Option 3"),
        ("Home", "Option 1"),
        ("ArrowLeft", "Option 10"),
        ("ArrowRight", "Option 1"),
        ("End", "Option 10"),
    ):
        await page.keyboard.press(keys)
        assert await is_on(text), keys
    tab_stops = "all => all.filter(b => b.tabIndex === 0).length"
    assert await options_of(page, message_id).evaluate_all(tab_stops) == 1
    await page.keyboard.press("0")
    await eventually(lambda: _has(panel, 1))
    assert await panel.texts() == ["Option 10"]
    await page.keyboard.press("Escape")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    assert await options_of(page, message_id).evaluate_all(tab_stops) == 0
    assert await page.evaluate("() => window.lost") == 0


async def test_an_unconfirmed_answer_is_retried_with_the_same_client_id(panel: Panel) -> None:
    message_id = await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open()
    await page.clock.install()
    held = Held()
    await page.route("**/api/v1/messages", held)
    await options_of(page, message_id).nth(1).click()
    await asyncio.wait_for(held.arrived.wait(), TIMEOUT_SECONDS)
    await page.clock.run_for(10_100)
    await expect(ui.state_line(page, message_id)).to_have_text("Not confirmed yet. Trying again…")
    assert await is_closed(page, message_id)

    async def asked_twice() -> bool:
        return len(held.bodies) == 2

    await eventually(asked_twice)
    assert held.bodies[0]["clientId"] == held.bodies[1]["clientId"]
    held.may_end.set()
    panel.allow("net::ERR_FAILED")


async def _has(panel: Panel, count: int) -> bool:
    return len(await panel.texts()) >= count


async def _above(upper: Any, lower: Any) -> bool:
    one, other = await upper.bounding_box(), await lower.bounding_box()
    return one is not None and other is not None and one["y"] + one["height"] <= other["y"] + 1
