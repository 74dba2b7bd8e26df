"""What a person does with messages and conversations: stop, pause, copy, quote, resend, find, send later."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta

import pytest
from playwright.async_api import Locator, Page, Route, expect

from coterie.messages import Message
from coterie.testing import Calls, Says
from tests.agent.stage import Bell
from tests.panel import ui
from tests.panel.harness import TIMEOUT_SECONDS, Panel, eventually, fail_requests, record_bodies
from tests.panel.words import Words

WORDS = {
    "en-US": {
        "stop": "Stop Ada",
        "send": "Send",
        "paused": "All agents are paused",
        "pause": "Pause all agents",
        "resume": "Resume all agents",
        "later": "Send later",
        "scheduled": "Scheduled for",
        "unread": "Mark as unread",
        "again": "Try again",
        "edit": "Edit and send again",
        "quote": "Quote",
        "markdown": "Copy as Markdown",
        "text": "Copy text",
        "link": "Copy link",
        "count": "2 of 2",
        "clear": "Clear conversation",
        "export": "Export as Markdown",
        "stopAll": "Stop everything",
    },
    "zh-CN": {
        "stop": "停止 Ada",
        "send": "发送",
        "paused": "全部智能体已暂停",
        "pause": "暂停全部智能体",
        "resume": "恢复全部智能体",
        "later": "稍后发送",
        "scheduled": "已定于",
        "unread": "标为未读",
        "again": "重试",
        "edit": "编辑并重新发送",
        "quote": "引用",
        "markdown": "复制为 Markdown",
        "text": "复制文字",
        "link": "复制链接",
        "count": "2 / 2",
        "clear": "清空对话",
        "export": "导出为 Markdown",
        "stopAll": "全部停止",
    },
}
BOTH = pytest.mark.parametrize("locale", WORDS)


async def menu(page: Page, anchor: Locator, item: str) -> Locator:
    """Open a menu by keyboard and return one of its items."""
    await anchor.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("menu")).to_be_visible()
    return page.get_by_role("menuitem", name=item, exact=True)


@BOTH
async def test_send_becomes_stop_while_the_agent_works_and_the_box_is_empty(panel: Panel, locale: str) -> None:
    words = WORDS[locale]
    page = await panel.open(locale=locale)
    button = page.locator(ui.SEND)
    await expect(button).to_have_accessible_name(words["send"])
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("look", {"name": "a"}),)), "Done")
    await ui.send(page, "Look")
    await asyncio.wait_for(Bell.rang.wait(), TIMEOUT_SECONDS)
    await expect(button).to_have_accessible_name(re.compile(words["stop"].split()[0]))
    await page.locator(ui.COMPOSER).fill("And then")
    await expect(button).to_have_accessible_name(words["send"])
    await page.locator(ui.COMPOSER).fill("")
    await page.locator(ui.COMPOSER).press("Enter")  # an empty box never stops
    await button.focus()
    await page.keyboard.press("Enter")
    await panel.stage.state("ada", "idle")
    await expect(button).to_have_accessible_name(words["send"])
    await expect(button).to_be_focused()
    Bell.may_end.set()


async def test_a_double_click_or_a_held_key_on_send_does_not_stop_the_agent(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    stops = record_bodies(page, path="/api/v1/agents/ada/stop")
    button, composer = page.locator(ui.SEND), page.locator(ui.COMPOSER)
    is_stop = re.compile("is-stop")
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("look", {"name": "a"}),)), "Done")
    await composer.fill("Look")
    await button.hover()
    await page.mouse.down()
    await page.mouse.up()
    await expect(button).to_have_class(is_stop)
    await page.mouse.down(click_count=2)
    await page.mouse.up(click_count=2)
    await composer.fill("And then")
    await button.focus()
    await page.keyboard.down("Enter")
    await expect(button).to_have_class(is_stop)
    await button.focus()
    await page.keyboard.down("Enter")  # repeated, because it is still held
    await page.keyboard.up("Enter")
    await expect(page.locator(ui.WAITING)).to_have_count(1)
    assert stops == []
    await button.click(delay=1)
    await expect(button).not_to_have_class(is_stop)
    assert len(stops) == 1
    Bell.may_end.set()


@BOTH
async def test_everything_can_be_paused_resumed_and_stopped(panel: Panel, locale: str) -> None:
    words = WORDS[locale]
    page = await panel.open(locale=locale)
    more = page.get_by_test_id("conversation-menu")
    await (await menu(page, more, words["pause"])).press("Enter")
    await expect(page.get_by_test_id("banner-paused")).to_contain_text(words["paused"])
    await expect(more).to_be_focused()
    await ui.send(page, "Hello")
    assert panel.server.requests == []
    await (await menu(page, more, words["resume"])).press("Enter")
    await expect(page.get_by_test_id("banner-paused")).to_have_count(0)
    await expect(page.locator(f"{ui.FEED} .msg-theirs")).to_contain_text("ok")
    Bell.may_end.clear()
    panel.server.default = Says(calls=(Calls("look", {"name": "a"}),))
    await panel.society.send(to="bob", text="Look")
    await ui.send(page, "Look too")
    await expect(page.locator(ui.SEND)).to_have_class(re.compile("is-stop"))
    await (await menu(page, more, words["stopAll"])).press("Enter")
    await page.get_by_role("dialog").locator(".danger").click()
    for agent in ("ada", "bob"):
        await panel.stage.state(agent, "idle")
    Bell.may_end.set()


async def test_stop_everything_stops_tasks_that_the_page_does_not_know_and_names_those_that_remain(
    panel: Panel, words: Words
) -> None:
    await panel.society.pause("bob")
    for number in range(55):
        await panel.stage.say(f"Number {number}", to="bob")
    page = await panel.open(locale=words.locale)
    panel.allow("Failed to load resource")
    kept = await panel.stage.say("**Not** this one", to="bob")
    await fail_requests(page, 503, path=f"**/api/v1/tasks/{kept}/stop")
    item = await menu(page, page.get_by_test_id("conversation-menu"), words("stopAll"))
    await item.press("Enter")
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text(words("stopAllSure"))
    late = await panel.stage.say("After the question", to="bob")
    await dialog.locator(".danger").click()
    await expect(page.locator(ui.TOAST)).to_contain_text(words("stopAllLeft", n=1, names="Not this one"))
    assert [task.id for task in await panel.society.tasks(state="working", limit=100)] == [kept]
    assert late in [task.id for task in await panel.society.tasks(state="stopped", limit=100)]


@BOTH
async def test_the_menu_of_a_message_copies_quotes_retries_and_marks_unread(panel: Panel, locale: str) -> None:
    words = WORDS[locale]
    context = await panel.browser(locale=locale, permissions=["clipboard-read", "clipboard-write"])
    panel.server.script("**One** and two\nlines")
    page = await panel.open(context=context)
    await ui.send(page, "Tell me")
    theirs = page.locator(f"{ui.FEED} .msg-theirs[data-message-id]").first
    await expect(theirs).to_contain_text("One and two")
    more = theirs.get_by_test_id("message-menu")

    async def clipboard() -> str:
        return str(await page.evaluate("() => navigator.clipboard.readText()"))

    for item, copied in (("text", "One and two"), ("markdown", "**One** and two\nlines")):
        await (await menu(page, more, words[item])).press("Enter")
        await eventually(lambda copied=copied: _is(clipboard, copied))
    await (await menu(page, more, words["link"])).press("Enter")
    sent = (await panel.sent(by="ada"))[0].id
    await eventually(lambda: _is(clipboard, f"{panel.url}/#/a/ada?m={sent}"))

    await (await menu(page, more, words["quote"])).press("Enter")
    await expect(page.locator(ui.COMPOSER)).to_have_value("> **One** and two\n> lines\n\n")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    await page.locator(ui.COMPOSER).fill("")

    mine = page.locator(f"{ui.FEED} .msg-mine[data-message-id]").first
    await (await menu(page, mine.get_by_test_id("message-menu"), words["edit"])).press("Enter")
    await expect(page.locator(ui.COMPOSER)).to_have_value("Tell me")
    await page.locator(ui.COMPOSER).fill("Tell me more")
    await page.locator(ui.COMPOSER).press("Enter")
    await eventually(lambda: _count(panel, 2))
    await (await menu(page, more, words["again"])).press("Enter")
    await eventually(lambda: _count(panel, 3))
    assert await panel.texts() == ["Tell me", "Tell me more", "Tell me"]
    await panel.stage.state("ada", "idle")

    await expect(ui.row(page, "ada").get_by_test_id("unread")).to_have_count(0)
    await (await menu(page, more, words["unread"])).press("Enter")
    await expect(ui.row(page, "ada").get_by_test_id("unread")).to_have_text("3")
    other = await panel.open("#/a/bob", context=context)
    await expect(ui.row(other, "ada").get_by_test_id("unread")).to_have_text("3")
    await ui.row(other, "ada").click()
    await expect(ui.row(other, "ada").get_by_test_id("unread")).to_have_count(0)
    await expect(ui.row(page, "ada").get_by_test_id("unread")).to_have_count(0)


@BOTH
async def test_a_copied_text_has_no_language_and_no_button_of_its_code(panel: Panel, locale: str) -> None:
    await panel.send_as_agent("Before\n\n```python\nprint(1)\n```\n\nAfter")
    context = await panel.browser(locale=locale, permissions=["clipboard-read", "clipboard-write"])
    page = await panel.open(context=context)
    await expect(page.locator(".md-code-head")).to_contain_text("python")
    await (await menu(page, page.get_by_test_id("message-menu"), WORDS[locale]["text"])).press("Enter")
    await expect(page.locator(ui.TOAST)).to_have_text(Words(locale)("copied"))
    copied = str(await page.evaluate("() => navigator.clipboard.readText()"))
    assert copied.split() == ["Before", "print(1)", "After"]
    await expect(page.locator(".md-code-head")).to_be_visible()


async def test_find_shows_messages_while_plans_are_still_searched_and_goes_on_to_the_last_plan(panel: Panel) -> None:
    await panel.send_as_agent("A needle")
    page = await panel.open()
    go_on, asked, given_up = asyncio.Event(), list[str](), list[str]()
    page.on("requestfailed", lambda request: given_up.append(request.url))

    async def search(route: Route) -> None:
        if "q=" not in route.request.url:
            await route.continue_()
            return
        asked.append(route.request.url)
        await go_on.wait()
        await route.fulfill(json={"items": [], "next": None if "before=7" in route.request.url else "7"})

    await page.route("**/api/v1/runs?*", search)
    await page.locator(ui.COMPOSER).focus()
    await page.keyboard.press("Control+f")
    await page.keyboard.insert_text("needle")
    await expect(page.get_by_test_id("find-count")).to_have_text("1 of 1")
    assert len(asked) == 1 and given_up == []
    async with page.expect_response(lambda response: "before=7" in response.url):
        go_on.set()
    await expect(page.get_by_test_id("find-count")).to_have_text("1 of 1")


@BOTH
async def test_find_goes_through_all_hits_also_those_not_loaded(panel: Panel, locale: str) -> None:
    words = WORDS[locale]
    first = await panel.send_as_agent("The quarterly needle")
    for n in range(120):
        await panel.send_as_agent(f"Hay {n}")
    last = await panel.send_as_agent("Another needle")
    await panel.send_as_agent("A needle of Bob", by="bob")
    page = await panel.open(locale=locale)
    await expect(ui.message(page, last)).to_be_visible()
    await page.locator(ui.COMPOSER).focus()
    await page.keyboard.press("Control+f")
    await expect(page.get_by_test_id("find")).to_be_focused()
    await page.keyboard.insert_text("needle")
    await expect(page.get_by_test_id("find-count")).to_have_text(words["count"])
    await page.wait_for_function("() => CSS.highlights.get('find-current')?.size === 1")
    await page.keyboard.press("Enter")
    await expect(ui.message(page, first)).to_be_in_viewport()
    await page.wait_for_function(
        "id => [...CSS.highlights.get('find-current') ?? []].some("
        "range => range.startContainer.parentElement.closest('article')?.dataset.messageId === id)",
        arg=first,
    )
    await page.get_by_test_id("find-next").click()
    await expect(ui.message(page, last)).to_be_in_viewport()
    await page.get_by_test_id("find").press("Escape")
    await expect(page.get_by_test_id("find")).to_have_count(0)
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    assert await page.evaluate("() => CSS.highlights.size") == 0


@BOTH
async def test_a_conversation_is_exported_and_cleared(panel: Panel, locale: str) -> None:
    words = WORDS[locale]
    await panel.send_as_agent("Remember this")
    page = await panel.open(locale=locale)
    more = page.get_by_test_id("conversation-menu")
    async with page.expect_download() as download:
        await (await menu(page, more, words["export"])).press("Enter")
    assert "Remember this" in (await (await download.value).path()).read_text()
    await (await menu(page, more, words["clear"])).press("Enter")
    await page.get_by_role("dialog").locator(".danger").click()
    await expect(page.get_by_test_id("empty-thread")).to_be_visible()
    assert await panel.sent(by="ada") == []


@BOTH
async def test_a_message_is_sent_later_moved_and_edited(panel: Panel, locale: str) -> None:
    words = WORDS[locale]
    page = await panel.open(locale=locale)
    sent = record_bodies(page)
    await page.locator(ui.COMPOSER).fill("Good morning")
    await page.get_by_test_id("send-later").click()
    dialog = page.get_by_role("dialog", name=words["later"])
    await expect(dialog.get_by_test_id("whenHour")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator(ui.TOAST)).to_contain_text(words["scheduled"])
    assert 3_500_000 < sent[0]["delayMs"] <= 3_660_000
    await expect(page.locator(ui.COMPOSER)).to_have_value("")

    await page.goto(f"{panel.url}/#/delayed")
    row = page.locator(".screen .delayed-item")
    await row.get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-text").fill("Good evening")
    await page.get_by_test_id("when-save").click()
    await expect(row).to_contain_text("Good evening")
    await expect(row).to_have_count(1)
    due = datetime.now(UTC) + timedelta(days=3)
    await row.get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-at").fill(due.strftime("%Y-%m-%dT09:30"))
    await page.get_by_test_id("when-save").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    (delayed,) = await panel.society.store.delayed(None, limit=5)
    assert delayed.payload["text"] == "Good evening" and delayed.deliver_at is not None
    assert abs(delayed.deliver_at - due) < timedelta(days=2)

    # And every day from then on.
    await row.get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-repeat").select_option("daily 09:30")
    await page.get_by_test_id("when-save").click()
    await expect(row).to_contain_text(Words(locale)("every_daily", time="09:30"))
    await expect(page.get_by_role("dialog")).to_have_count(0)
    (schedule,) = await panel.society.store.schedules()
    assert schedule.every.startswith("daily 09:30") and await panel.society.bus.delayed_count() == 1


async def test_a_scheduled_message_that_has_only_a_file_is_moved(panel: Panel, words: Words) -> None:
    made = await panel.society.artifacts.put(b"hello", "a.txt")
    files = [{"artifactRef": made.ref, "filename": "a.txt"}]
    await panel.society.bus.send(sender="user", to="ada", payload={"attachments": files}, delay_ms=3_600_000)
    page = await panel.open("#/delayed", locale=words.locale)
    await page.locator(".screen .delayed-item").get_by_test_id("delayed-edit").click()
    due = datetime.now(UTC) + timedelta(days=3)
    await page.get_by_test_id("when-at").fill(due.strftime("%Y-%m-%dT09:30"))
    await page.get_by_test_id("when-save").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    (delayed,) = await panel.society.store.delayed(None, limit=5)
    assert delayed.deliver_at is not None and abs(delayed.deliver_at - due) < timedelta(days=2)
    assert "text" not in delayed.payload
    await page.locator(".screen .delayed-item").get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-repeat").select_option("daily 09:30")  # sent again, with its file
    await page.get_by_test_id("when-save").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    (schedule,) = await panel.society.store.schedules()
    assert schedule.every.startswith("daily 09:30")
    assert [one["filename"] for one in schedule.payload["attachments"]] == ["a.txt"]


async def test_a_new_text_of_a_recurring_message_keeps_its_time_zone(panel: Panel) -> None:
    every = "daily 09:30 Asia/Tokyo"
    await panel.society.send(to="ada", text="Good morning", every=every)
    page = await panel.open("#/delayed", timezone_id="Europe/Berlin")
    row, dialog = page.locator(".screen .delayed-item"), page.get_by_role("dialog")
    await row.get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-text").fill("Good day")
    await page.get_by_test_id("when-save").click()
    await expect(dialog).to_have_count(0)
    await expect(row).to_contain_text("Good day")
    assert [schedule.every for schedule in await panel.society.store.schedules()] == [every]
    await row.get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-text").fill("Good evening")
    await page.get_by_test_id("when-custom").fill("daily 20:15")
    await page.get_by_test_id("when-save").click()
    await expect(dialog).to_have_count(0)
    await expect(row).to_contain_text("Good evening")
    changed = [schedule.every for schedule in await panel.society.store.schedules()]
    assert changed == ["daily 20:15 Europe/Berlin"]


async def _edit_scheduled(
    panel: Panel, *, when: str | None = None, every: str | None = None, text: str | None = None, zone: str = "UTC"
) -> Message:
    """Edit the only scheduled message in the page; return the scheduled message after it."""
    page = await panel.open("#/delayed", timezone_id=zone)
    await page.locator(".screen .delayed-item").get_by_test_id("delayed-edit").click()
    if when:
        await page.get_by_test_id("when-at").fill(when)
    if every:
        await page.get_by_test_id("when-repeat").select_option("custom")
        await page.get_by_test_id("when-custom").fill(every)
    if text:
        await page.get_by_test_id("when-text").fill(text)
    await page.get_by_test_id("when-save").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    (message,) = await panel.society.store.delayed(None, limit=5)
    await page.close()
    return message


def _is_due(message: Message, due: datetime) -> bool:
    """True if the message is due then. The delay is counted by the page, so a request may add some milliseconds."""
    assert message.deliver_at is not None
    return abs(message.deliver_at - due) < timedelta(seconds=5)


def _days_from_now(days: int, hour: int, minute: int = 0) -> datetime:
    return (datetime.now(UTC) + timedelta(days=days)).replace(hour=hour, minute=minute, second=0, microsecond=0)


def _typed(due: datetime) -> str:
    return due.strftime("%Y-%m-%dT%H:%M")


async def test_one_occurrence_of_a_recurring_message_is_moved_to_the_chosen_time(panel: Panel) -> None:
    sent = await panel.society.send(to="ada", text="Stand up", every="daily 08:00 Asia/Tokyo")
    (before,) = await panel.society.store.delayed(None, limit=5)
    same = await _edit_scheduled(panel)
    assert (same.id, same.deliver_at) == (sent.message_id, before.deliver_at)
    due = _days_from_now(3, 10)
    moved = await _edit_scheduled(panel, when=_typed(due))
    assert (moved.id, moved.every) == (sent.message_id, "daily 08:00 Asia/Tokyo") and _is_due(moved, due)
    again = await _edit_scheduled(panel)
    assert again.deliver_at == moved.deliver_at


async def test_an_interval_keeps_its_time_however_often_it_is_edited(panel: Panel) -> None:
    due = _days_from_now(2, 10)
    await panel.society.send(to="ada", text="Stretch", delay_ms=3_600_000)
    message = await _edit_scheduled(panel, when=_typed(due), every="2 hours")
    assert message.every == "2 hours" and _is_due(message, due)
    for text in ("Walk", "Rest", "Stand"):
        message = await _edit_scheduled(panel, text=text)
        assert message.payload["text"] == text and _is_due(message, due)
    message = await _edit_scheduled(panel, every="3 hours")
    assert message.every == "3 hours" and _is_due(message, due)


async def test_a_changed_recurrence_starts_on_the_chosen_day(panel: Panel) -> None:
    sent = await panel.society.send(to="ada", text="Stand up", every="daily 08:00 UTC")
    due = _days_from_now(5, 10, 30)
    message = await _edit_scheduled(panel, when=_typed(due))  # the same kind at the new time
    assert (message.id, message.every, message.deliver_at) == (sent.message_id, "daily 10:30 UTC", due)
    message = await _edit_scheduled(panel, text="Sit down")
    assert (message.every, message.deliver_at) == ("daily 10:30 UTC", due)
    # A date that was not chosen is no start.
    message = await _edit_scheduled(panel, every="daily 09:45")
    assert message.deliver_at is not None and message.deliver_at - datetime.now(UTC) < timedelta(days=1)
    assert (message.deliver_at.hour, message.deliver_at.minute) == (9, 45)


@pytest.mark.parametrize(
    ("start", "every"),
    [
        ("2031-01-15T09:30", "monthly 15 09:30"),
        ("2031-01-29T09:30", "monthly 29 09:30"),
        ("2031-01-30T09:30", "monthly 30 09:30"),
        ("2031-01-31T09:30", "monthly last 09:30"),
        ("2031-02-28T09:30", "monthly 28 09:30"),
        ("2031-04-30T09:30", "monthly last 09:30"),
    ],
)
async def test_a_monthly_message_starts_on_the_chosen_day(panel: Panel, words: Words, start: str, every: str) -> None:
    page = await panel.open(timezone_id="UTC", locale=words.locale)
    await page.locator(ui.COMPOSER).fill("Pay the rent")
    await page.get_by_test_id("send-later").click()
    await page.get_by_test_id("when-at").fill(start)
    label = words("repeatMonthlyLast" if "last" in every else "repeatMonthly")
    await page.get_by_test_id("when-repeat").select_option(label=label)
    await page.get_by_test_id("when-save").click()
    await expect(page.locator(ui.TOAST)).to_be_visible()
    (message,) = await panel.society.store.delayed(None, limit=5)
    assert (message.every, message.deliver_at) == (f"{every} UTC", datetime.fromisoformat(f"{start}:00+00:00"))


async def test_a_refused_edit_of_a_scheduled_message_keeps_it(panel: Panel) -> None:
    await panel.society.send(to="ada", text="Good morning", delay_ms=3_600_000)
    page = await panel.open("#/delayed")
    panel.allow("Failed to load resource")
    row, dialog = page.locator(".screen .delayed-item"), page.get_by_role("dialog")
    await row.get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-repeat").select_option("custom")
    await page.get_by_test_id("when-custom").fill("every blue moon")
    await page.get_by_test_id("when-save").click()
    await expect(dialog.get_by_role("alert")).to_be_visible()
    assert await panel.society.bus.delayed_count() == 1
    await page.get_by_test_id("when-custom").fill("daily 09:30")
    await page.get_by_test_id("when-save").click()
    await expect(dialog).to_have_count(0)
    await expect(row).to_have_count(1)
    await expect(row).to_contain_text("every day at 09:30")
    assert await panel.society.bus.delayed_count() == 1


async def test_an_edit_of_a_message_that_was_delivered_meanwhile_sends_nothing(panel: Panel) -> None:
    sent = await panel.society.send(to="ada", text="Good morning", delay_ms=3_600_000)
    page = await panel.open("#/delayed")
    panel.allow("Failed to load resource")
    await page.locator(".screen .delayed-item").get_by_test_id("delayed-edit").click()
    await page.get_by_test_id("when-text").fill("Good evening")
    await panel.society.bus.reschedule(sent.message_id, 0)
    await panel.stage.heard()
    await page.get_by_test_id("when-save").click()
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("too late")
    assert await panel.society.bus.delayed_count() == 0
    assert await panel.texts() == ["Good morning"]


async def test_a_reminder_of_an_agent_is_moved_but_not_made_recurring(panel: Panel) -> None:
    await panel.society.send(to="user", text="Take a break", sender="ada", delay_ms=3_600_000)
    page = await panel.open("#/delayed")
    await page.locator(".screen .delayed-item").get_by_test_id("delayed-edit").click()
    await expect(page.get_by_test_id("when-at")).to_be_visible()
    await expect(page.get_by_test_id("when-repeat")).to_be_hidden()
    due = datetime.now(UTC) + timedelta(days=3)
    await page.get_by_test_id("when-at").fill(due.strftime("%Y-%m-%dT09:30"))
    await page.get_by_test_id("when-save").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    (delayed,) = await panel.society.store.delayed(None, limit=5)
    assert delayed.sender == "ada" and delayed.deliver_at is not None
    assert abs(delayed.deliver_at - due) < timedelta(days=2)


async def _is(read: object, wanted: str) -> bool:
    return (await read()).startswith(wanted)  # type: ignore[operator, no-any-return]


async def _count(panel: Panel, count: int) -> bool:
    return len(await panel.sent()) == count
