"""The conversation says what happened: all words of an agent, in order, the right causes, in the page's language."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, Route, expect

from coterie.cli.server import greet
from coterie.testing import Calls, Says
from coterie.testing.model_server import Status
from coterie.tour import script
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import TOOLS, Bell
from tests.panel import ui
from tests.panel.harness import AGENTS, PHONE, WIDE, Held, Panel, eventually, open_panel, record_bodies
from tests.panel.words import Words

LANGUAGES = {"en-US": 0, "zh-CN": 1}
PAYMENT = """
@tool(approval=True)
async def pay(memo: str, recipient: str, amount: float) -> str:
    "Pay somebody."
    return await Bell.rung("pay")

@tool(approval=True)
async def order(note: str, options: dict, transfers: list) -> str:
    "Pay several people."
    return await Bell.rung("order")

@tool
async def draw(ctx) -> dict:
    "Draw a chart."
    made = await ctx.artifacts.put(b"# Result\\n\\nIt is **done**.", "result.md")
    return made.to_dict()
"""
MARKDOWN = """## Plan

It has **two parts** and `code`:

1. First
2. Second
   - with *detail*

```python
print("hello")
```

| Region | Orders |
|---|---|
| North | 128 |

> Quoted at last."""


async def order(page: Page, *parts: str) -> None:
    """Check that the parts appear in the conversation in this order."""
    shown = await page.locator(f"{ui.FEED} article").all_inner_texts()
    found = [next((n for n, text in enumerate(shown) if part in text), -1) for part in parts]
    assert -1 not in found, (parts, shown)
    assert found == sorted(found), shown


async def reopened(page: Page) -> None:
    await page.reload()
    await page.wait_for_selector("[data-ready]")


async def test_text_before_a_tool_call_stays_before_its_run(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    Bell.may_end.clear()
    panel.server.script(Says("Let me **look** first.", calls=(Calls("ring", {"name": "bell"}),)), "It rang.")
    await ui.send(page, "Ring it")
    said = page.get_by_test_id("said")
    await expect(said).to_contain_text("Let me look first.")
    await expect(said.locator("strong")).to_have_text("look")
    await expect(page.locator(ui.DRAFT)).to_have_count(0)
    Bell.may_end.set()
    await expect(ui.messages(page).filter(has_text="It rang.")).to_be_visible()
    for _ in ("live", "after a reload"):
        await expect(said).to_be_visible()
        await expect(page.get_by_test_id("runs")).to_contain_text(words("ranTool", name="ring"))
        await order(page, "Ring it", "Let me look first.", words("ranTool", name="ring"), "It rang.")
        await reopened(page)


async def test_text_before_a_tool_call_can_be_quoted_linked_and_found(panel: Panel, words: Words) -> None:
    panel.server.script(Says("First I **look**.", calls=(Calls("ring", {"name": "bell"}),)), "It rang.")
    await panel.stage.say("Ring it")
    await panel.stage.state("ada", "idle")
    for n in range(120):
        await panel.send_as_agent(f"Later {n}")
    context = await panel.browser(locale=words.locale, permissions=["clipboard-read", "clipboard-write"])
    page = await panel.open(context=context)
    await expect(ui.messages(page).filter(has_text="Later 119")).to_be_visible()
    await page.keyboard.press("Control+f")
    await page.keyboard.insert_text("LOOK")
    said = page.get_by_test_id("said")
    await expect(page.get_by_test_id("find-count")).to_have_text(words("findCount", n=1, m=1))
    await expect(said).to_be_in_viewport()
    await page.wait_for_function("() => CSS.highlights.get('find-current')?.size === 1")
    await page.get_by_test_id("find").press("Escape")

    more = said.get_by_test_id("message-menu")
    await more.click()
    shown = page.get_by_role("menu").get_by_role("menuitem")
    offered = [words(key) for key in ("copyText", "copyMarkdown", "copyLink", "quote")]
    await expect(shown).to_have_text(offered)
    await shown.nth(3).click()
    await expect(page.locator(ui.COMPOSER)).to_have_value("> First I **look**.\n\n")
    text = ""
    for item, copied in ((0, "First I look."), (1, "First I **look**."), (2, f"{panel.url}/#/a/ada?m=")):
        await more.click()
        await shown.nth(item).click()
        text = str(await page.evaluate("() => navigator.clipboard.readText()"))
        assert text.startswith(copied)
    other = await context.new_page()
    await other.goto(text)
    await expect(other.get_by_test_id("said")).to_be_in_viewport()


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
async def test_the_lines_of_a_reply_stay_as_they_are_when_its_writing_ends(
    panel: Panel, viewport: dict[str, int]
) -> None:
    page = await panel.open(viewport=viewport)
    held = HeldAnswer("A reply of some words. " * 20)
    panel.server.script(held)
    await ui.send(page, "Tell me")
    draft = page.locator(f"{ui.DRAFT} .md")
    await expect(draft).to_contain_text("A reply of some words.")
    if viewport == WIDE:
        await expect(page.get_by_test_id("inspector")).to_contain_text("Replying")
    before = await draft.bounding_box()
    held.may_end.set()
    reply = ui.messages(page).filter(has_text="A reply of some words.").locator(".md")
    await expect(reply).to_be_visible()
    after = await reply.bounding_box()
    assert before
    assert after
    assert (before["x"], before["width"]) == (after["x"], after["width"])


async def test_what_was_sent_while_a_reply_streamed_stands_after_that_reply(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    held = HeldAnswer("The first answer")
    panel.server.script(held, "The second answer")
    await ui.send(page, "First question")
    await expect(page.locator(ui.DRAFT)).to_contain_text("The first answer")
    await ui.send(page, "Second question")
    await expect(page.locator(ui.WAITING)).to_have_count(1)

    async def waits() -> bool:
        return len(await panel.society.store.waiting("ada")) == 1

    await eventually(waits)
    held.may_end.set()
    await expect(ui.messages(page).filter(has_text="The second answer")).to_be_visible()
    for _ in ("live", "after a reload"):
        await expect(ui.messages(page)).to_have_count(4)
        await order(page, "First question", "The first answer", "Second question", "The second answer")
        await reopened(page)


async def test_what_is_typed_goes_to_the_composer_of_the_agent_in_sight(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    composer = page.locator(ui.COMPOSER)
    await expect(composer).to_be_focused()
    await page.keyboard.type("for ada")
    await ui.row(page, "bob").click()
    await page.keyboard.type("bob, hello")
    await expect(composer).to_have_value("bob, hello")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Bob")
    await page.keyboard.press("Alt+ArrowDown")
    await expect(composer).to_have_value("for ada")
    await page.keyboard.type("!")
    await expect(composer).to_have_value("for ada!")
    await page.keyboard.press("Control+k")
    await expect(page.locator("dialog[open] input").first).to_be_focused()
    await page.keyboard.type("seer")
    await expect(page.locator("[role=option]").first).to_contain_text("Seer")
    await page.keyboard.press("Enter")
    await page.keyboard.type("to seer")
    await expect(composer).to_have_value("to seer")
    # With the focus on a row that no arrow key has reached, letters are text; after an arrow key they search.
    row = ui.row(page, "seer")
    await row.focus()
    await page.keyboard.type("bo")
    await expect(composer).to_have_value("to seerbo")
    await row.focus()
    await page.keyboard.press("ArrowUp")
    await page.keyboard.type("bo")
    await expect(ui.row(page, "bob")).to_be_focused()
    await expect(composer).to_have_value("to seerbo")
    assert await panel.texts("ada") == []


@pytest.mark.parametrize(
    ("place", "held", "field"),
    [("", "**/static/app.js*", "#early"), ("#/a/ada", "**/static/app.js*", "#early"), ("", "**/snapshot", ui.COMPOSER)],
)
async def test_text_typed_while_the_page_loads_is_kept(panel: Panel, place: str, held: str, field: str) -> None:
    context = await panel.browser()
    may_go = asyncio.Event()

    async def hold(route: Route) -> None:
        await may_go.wait()
        await route.continue_()

    await (await panel.open(context=context)).locator(ui.COMPOSER).fill("Kept before")
    await context.route(held, hold)
    page = await context.new_page()
    composer = page.locator(ui.COMPOSER)
    sent = record_bodies(page)
    await page.goto(f"{panel.url}/{place}", wait_until="commit")
    await page.locator(field).press_sequentially("Hello")
    await page.keyboard.press("Enter")
    may_go.set()
    await page.wait_for_selector("[data-ready]")
    await expect(page.locator('[data-testid="title"]')).to_have_text("Ada")
    await expect(composer).to_have_value(re.compile(r"Kept before\n+Hello"))
    await ui.row(page, "bob").click()
    await expect(composer).to_have_value("")
    await ui.row(page, "ada").click()
    await expect(composer).to_have_value(re.compile(r"Kept before\n+Hello"))
    assert sent == []


@pytest.mark.parametrize(("locale", "at"), LANGUAGES.items())
async def test_an_approval_shows_its_facts_wherever_it_can_be_answered(
    browser: Browser, tmp_path: Path, locale: str, at: int
) -> None:
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as panel:
        call = Calls("pay", {"memo": "Invoice 7", "recipient": "ACME", "amount": 1250.5})
        panel.server.script(Says(calls=(call,)), "Paid.")
        page = await panel.open(locale=locale)
        await ui.send(page, "Pay it")
        facts = page.get_by_test_id("approval")
        await expect(facts.locator("dt")).to_have_text(["amount", "recipient", "memo"])
        await expect(facts.locator("dd")).to_have_text(["1250.5", "ACME", "Invoice 7"])
        approve, deny = page.locator(".qr-approve"), page.locator(".qr-deny")
        await expect(approve).to_have_text(("Approve", "批准")[at])
        await expect(deny).to_have_text(("Deny", "拒绝")[at])
        looks = [await one.evaluate("el => getComputedStyle(el).backgroundColor") for one in (approve, deny)]
        assert looks[0] != looks[1]
        runs = page.get_by_test_id("runs")
        await expect(runs).to_contain_text(("is waiting for your approval", "等待你的批准")[at])
        await expect(runs).not_to_contain_text(("Ran", "执行了")[at])
        hint, undecided = page.locator(".composer-hint"), page.get_by_test_id("ask-back")
        await expect(hint).to_contain_text(("pay keeps waiting", "pay 继续等待")[at])
        await undecided.uncheck()
        await expect(hint).to_contain_text(("cancels pay", "取消 pay")[at])
        other = await panel.open("#/inbox", locale=locale)
        await expect(other.get_by_test_id("approval").locator("dd")).to_have_text(["1250.5", "ACME", "Invoice 7"])
        await other.locator(".qr-approve").click()
        await expect(ui.messages(page).filter(has_text="Paid.")).to_be_visible()
        await expect(runs).to_contain_text(("Ran pay", "执行了 pay")[at])
        assert Bell.rings == ["pay"]
        assert await panel.errors() == []


async def test_nested_facts_of_an_approval_are_ordered_and_laid_out(
    browser: Browser, tmp_path: Path, words: Words
) -> None:
    transfers = [
        {"memo": "Rent", "recipient": {"bank": "X", "iban": "DE1"}, "amount": 900},
        {"memo": "Food", "recipient": {"bank": "Y", "iban": "DE2"}, "amount": 50},
    ]
    given = {"note": "May", "options": {"urgent": True, "tags": ["a", "b"]}, "transfers": transfers}
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as panel:
        panel.server.script(Says("I pay the rent.", calls=(Calls("order", given),)), "Paid.")
        page = await panel.open(locale=words.locale, viewport=PHONE)
        await panel.stage.say("Pay them")
        facts = page.get_by_test_id("approval")
        await expect(page.get_by_test_id("said")).to_be_visible()
        await order(page, "Pay them", "I pay the rent.", words("approvalAsk", tool="order").replace("`", ""))
        await expect(facts.locator("> dl > dt")).to_have_text(["transfers", "note", "options"])
        each = facts.locator("> dl > dd").first.locator("> ol > li")
        await expect(each).to_have_count(2)
        await expect(each.first.locator("dt")).to_have_text(["amount", "recipient", "iban", "bank", "memo"])
        await expect(each.nth(1).locator("> dl > dd").first).to_have_text("50")
        await expect(facts.locator("> dl > dd").nth(2).locator("li")).to_have_text(["a", "b"])
        await expect(facts).not_to_contain_text("{")
        assert await ui.sideways(page) == []
        await panel.stage.say("No")
        assert await panel.errors() == []


@pytest.mark.parametrize(("locale", "at"), LANGUAGES.items())
async def test_asking_without_deciding_leaves_the_approval_open(
    browser: Browser, tmp_path: Path, locale: str, at: int
) -> None:
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as panel:
        panel.server.script(
            Says(calls=(Calls("pay", {"amount": 5, "recipient": "ACME", "memo": "rent"}),)), "It is the rent.", "Paid."
        )
        page = await panel.open(locale=locale)
        await ui.send(page, "Pay it")
        undecided = page.get_by_label(("Ask without deciding", "只提问，不作决定")[at])
        await expect(undecided).to_be_visible()  # before the question it is hidden, and checked
        await expect(undecided).to_be_checked()
        await ui.send(page, "What is it for?")
        await expect(ui.messages(page).filter(has_text="It is the rent.")).to_be_visible()
        approve = page.locator(".qr-approve")
        await expect(approve).not_to_have_attribute("aria-disabled", "true")
        assert Bell.rings == []
        await approve.click()
        await expect(ui.messages(page).filter(has_text="Paid.")).to_be_visible()
        assert Bell.rings == ["pay"]
        assert await panel.errors() == []


async def test_a_question_without_a_decision_stays_one_when_it_is_sent_again(
    browser: Browser, tmp_path: Path, words: Words
) -> None:
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as panel:
        call = Calls("pay", {"amount": 5, "recipient": "ACME", "memo": "rent"})
        panel.server.script(Says(calls=(call,)), "It is the rent.")
        page = await panel.open(locale=words.locale)
        panel.allow("Failed to load resource")
        await ui.send(page, "Pay it")
        await expect(page.get_by_test_id("ask-back")).to_be_visible()
        held, sent, composer = Held(), record_bodies(page), page.locator(ui.COMPOSER)
        await page.route("**/api/v1/messages", held)
        for text in ("What is it for?", "Who gets it?"):
            held.arrived.clear()
            await ui.send(page, text)
            await held.arrived.wait()
        await composer.fill("Newer text")  # the failed messages stay in the conversation
        held.may_end.set()
        failed = page.locator(f'{ui.FEED} [data-state="failed"]')
        await expect(failed).to_have_count(2)
        await page.unroute("**/api/v1/messages")
        await failed.first.get_by_role("button", name=words("retry")).click()
        await expect(ui.messages(page).filter(has_text="It is the rent.")).to_be_visible()
        assert sent[2] == sent[0]
        assert sent[2]["asksBack"] is True
        await expect(page.locator(".qr-approve")).not_to_have_attribute("aria-disabled", "true")
        await failed.get_by_role("button", name=words("edit")).click()
        await expect(composer).to_have_value("Newer text\n\nWho gets it?")
        await expect(failed).to_have_count(0)
        await expect(page.locator(".note-text")).to_have_count(0)
        assert Bell.rings == []


async def test_the_choice_of_asking_or_deciding_does_not_take_the_typed_text(
    browser: Browser, tmp_path: Path, words: Words
) -> None:
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as panel:
        call = Calls("pay", {"amount": 5, "recipient": "ACME", "memo": "rent"})
        panel.server.script(Says(calls=(call,)), "I left it.")
        page = await panel.open(locale=words.locale)
        composer, undecided = page.locator(ui.COMPOSER), page.get_by_test_id("ask-back")
        await ui.send(page, "Pay it")
        await undecided.click()
        await expect(composer).to_be_focused()
        await page.keyboard.type("No, ")
        await undecided.focus()
        await page.keyboard.type("leave it")
        await expect(composer).to_have_value("No, leave it")
        await undecided.focus()
        for is_checked in (True, False):
            await page.keyboard.press("Space")
            await expect(undecided).to_be_checked(checked=is_checked)
            await expect(composer).to_be_focused()
            await undecided.focus()
        await composer.press("Enter")
        await expect(ui.messages(page).filter(has_text="I left it.")).to_be_visible()
        await expect(undecided).to_be_checked()  # for the next question


@pytest.mark.parametrize(("locale", "at"), LANGUAGES.items())
async def test_an_ordinary_message_at_an_approval_cancels_its_call(
    browser: Browser, tmp_path: Path, locale: str, at: int
) -> None:
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as panel:
        panel.server.script(
            Says(calls=(Calls("pay", {"amount": 5, "recipient": "ACME", "memo": "rent"}),)), "I left it."
        )
        page = await panel.open(locale=locale)
        await ui.send(page, "Pay it")
        await page.get_by_test_id("ask-back").uncheck()
        await ui.send(page, "Leave it")
        await expect(ui.messages(page).filter(has_text="I left it.")).to_be_visible()
        await expect(page.get_by_test_id("ask-back")).to_be_hidden()
        await expect(page.get_by_text(("Cancelled: the tool did not run", "已取消：工具没有执行")[at])).to_be_visible()
        assert Bell.rings == []


@pytest.mark.parametrize(("locale", "at"), LANGUAGES.items())
async def test_a_problem_is_said_once_with_its_cause_in_the_language_of_the_page(
    panel: Panel, locale: str, at: int
) -> None:
    page = await panel.open(locale=locale)
    panel.server.script(Status(500, "boom"), Status(401, "wrong key"))
    await ui.send(page, "Hello?")
    card = page.get_by_test_id("problem")
    words = ("The model service rejected the key. (main, HTTP 401)", "模型服务拒绝了密钥。 (main, HTTP 401)")[at]
    await expect(card.locator(".problem-what")).to_have_text(words)
    await expect(card.get_by_role("link")).to_have_text(("Fix it", "去修复")[at])
    for _ in ("live", "after a reload"):
        await expect(page.locator(".problem-what")).to_have_text(words)
        await expect(page.locator(ui.FEED).get_by_text(words[:9])).to_have_count(1)
        await reopened(page)
    panel.server.default = "Here I am."
    await page.get_by_test_id("problem-retry").click()
    await expect(ui.messages(page).filter(has_text="Here I am.")).to_be_visible()
    await expect(card).to_have_count(0)
    await expect(page.locator(".msg-system")).to_contain_text(words)


async def test_an_error_of_the_model_service_is_not_called_unreachable(panel: Panel) -> None:
    page = await panel.open()
    panel.server.default = Status(500, "boom")
    await ui.send(page, "Hello?")
    await expect(page.locator(".problem-what")).to_have_text("The model service reported an error. (main, HTTP 500)")
    panel.server.default = "ok"


@pytest.mark.parametrize(("locale", "at"), LANGUAGES.items())
async def test_a_stop_before_the_first_word_leaves_a_mark(panel: Panel, locale: str, at: int) -> None:
    page = await panel.open(locale=locale)
    panel.server.script(HeldAnswer(""))
    await ui.send(page, "Hello?")
    await expect(page.locator('[data-testid="agent-state"]')).to_contain_text(("Thinking", "正在思考")[at])
    await page.locator(ui.STOP).click()
    for _ in ("live", "after a reload"):
        await expect(page.get_by_test_id("stopped")).to_have_text(
            ("Stopped before it answered", "在回答之前已停止")[at]
        )
        await reopened(page)


def markup(of: Locator) -> Any:
    """The elements of rendered Markdown, without the caret."""
    return of.evaluate(
        """el => { const copy = el.cloneNode(true); copy.querySelectorAll('.caret').forEach(one => one.remove());
                   copy.normalize(); return copy.innerHTML; }"""
    )


async def test_markdown_is_rendered_while_it_is_written_and_does_not_change_at_the_end(
    panel: Panel, words: Words
) -> None:
    page = await panel.open(locale=words.locale)
    held = HeldAnswer(MARKDOWN, "")
    panel.server.script(held)
    await ui.send(page, "A plan")
    draft = page.locator(f"{ui.DRAFT} .md")
    await expect(draft.locator("blockquote")).to_have_text("Quoted at last.")
    await expect(draft.locator("strong")).to_have_text("two parts")
    await expect(draft.locator("td")).to_have_text(["North", "128"])
    streamed, high = await markup(draft), await draft.evaluate("el => el.offsetHeight")
    held.may_end.set()
    stored = ui.messages(page).last.locator(".md")
    await expect(ui.messages(page).last).to_contain_text("Quoted at last.")
    assert await markup(stored) == streamed
    assert await stored.evaluate("el => el.offsetHeight") == high


async def test_unfinished_bold_text_is_bold_and_finished_blocks_stay_as_they_are(panel: Panel) -> None:
    page = await panel.open()
    held = HeldAnswer("First block.\n\nNow **bold text")
    panel.server.script(held)
    await ui.send(page, "Go")
    draft = page.locator(f"{ui.DRAFT} .md")
    await expect(draft.locator("strong")).to_have_text("bold text")
    await expect(draft.locator("p").first).to_have_text("First block.")
    held.may_end.set()


async def test_a_denied_call_is_called_denied_and_calls_that_did_not_run_are_not_counted(
    panel: Panel, words: Words
) -> None:
    panel.server.script(Says(calls=(Calls("dangerous", {"name": "bell"}),)), "As you wish")
    page = await panel.open(locale=words.locale)
    await ui.send(page, "Do it")
    await page.locator(".qr-deny").click()
    title = page.locator(".runs-title")
    await expect(title).to_have_text(f"dangerous · {words('run_denied')}")
    panel.server.script(Says(calls=(Calls("dangerous", {"name": "a"}), Calls("dangerous", {"name": "b"}))), "Done")
    await ui.send(page, "Do both")
    await expect(title.last).to_have_text(words("awaitsApproval", name="dangerous"))
    await page.get_by_test_id("ask-back").uncheck()
    await ui.send(page, "Leave it")
    await expect(title.last).to_have_text(f"dangerous · {words('run_withdrawn')}")


async def test_previews_are_plain_text_and_files_are_links_and_rendered(browser: Browser, tmp_path: Path) -> None:
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as panel:
        panel.server.script(Says(calls=(Calls("draw", {}),)), "## Done\n\nSee **result.md** and `more`.")
        page = await panel.open()
        await ui.send(page, "Draw")
        await expect(ui.messages(page).filter(has_text="See result.md")).to_be_visible()
        await expect(ui.row(page, "ada").locator(".row-sub")).to_have_text("Done See result.md and more.")
        inbox = await panel.open("#/inbox", context=page.context)
        await expect(inbox.locator(".item-text").first).to_have_text("Done See result.md and more.")
        await inbox.close()
        await page.locator(".runs-files a").click()
        formatted = page.get_by_test_id("formatted")
        await expect(formatted.locator("strong")).to_have_text("done")
        await expect(formatted).not_to_contain_text("**")
        assert await panel.errors() == []


async def test_previews_on_every_screen_are_plain_text_in_the_language_of_the_page(panel: Panel, words: Words) -> None:
    panel.server.script(Says("Let me **look**", calls=(Calls("dangerous", {"name": "bell"}),)))
    sent = await panel.stage.say("Do **it** now")
    await panel.stage.heard()
    await panel.society.send(to="ada", text="Wake **up**", delay_ms=3_600_000)
    asked = words("approvalAsk", tool="dangerous").replace("`", "")
    page = await panel.open("#/inbox", locale=words.locale)
    await expect(page.locator(".card .item-text")).to_have_text(asked)
    await page.goto(f"{panel.url}/#/timeline")
    await expect(page.locator(".timeline .item-text")).to_have_count(4)
    shown = await page.locator(".timeline .item-text").all_inner_texts()
    assert sorted(shown) == sorted([asked, "Let me look", "Do it now", "Wake up"])
    await expect(page.locator(".timeline-head a")).to_have_text("Do it now")
    await page.goto(f"{panel.url}/#/tasks/{sent}")
    await expect(page.locator(".item-text")).to_have_text(["Do it now", asked])
    await page.goto(f"{panel.url}/#/agents/ada")
    await expect(page.locator('[aria-labelledby="page-due"] .item-text')).to_have_text("Wake up")


PASTE = """
text => { const data = new DataTransfer(); data.setData('text/plain', text);
    const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
    const box = document.querySelector('#composer');
    if (box.dispatchEvent(event)) document.execCommand('insertText', false, text); }
"""


async def test_a_long_paste_becomes_a_file_and_does_not_freeze_the_page(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    lines = "\n".join(f"line {n} of a long text" for n in range(20_000))
    await page.locator(ui.COMPOSER).focus()
    await page.evaluate(PASTE, lines)
    await expect(page.locator(ui.CHIP)).to_contain_text(words("pastedName"))
    await expect(page.locator(ui.COMPOSER)).to_have_value("")
    # So many lines would freeze the page while they are laid out: they cannot be inserted.
    await expect(page.locator(ui.TOAST).get_by_role("button", name=words("pasteAsText"))).to_have_count(0)
    await page.locator(ui.CHIP).get_by_role("button", name=words("removeFile", name="")).click()
    await page.evaluate(PASTE, "word " * 5_000)
    await page.locator(ui.TOAST).last.get_by_role("button", name=words("pasteAsText")).click()
    await expect(page.locator(ui.COMPOSER)).to_have_value("word " * 5_000)
    await expect(page.locator(ui.CHIP)).to_have_count(0)
    await page.locator(ui.COMPOSER).fill("")
    await page.evaluate(PASTE, "a\n" * 5_000)
    await expect(page.locator(ui.CHIP)).to_contain_text(words("pastedName"))
    await expect(page.locator(ui.COMPOSER)).to_have_value("")


async def test_a_long_paste_is_not_offered_as_text_after_its_conversation_was_left(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    await page.locator(ui.COMPOSER).focus()
    await page.evaluate(PASTE, "word " * 5_000)
    as_text = page.locator(ui.TOAST).get_by_role("button", name=words("pasteAsText"))
    await as_text.hover()  # so that the notice stays
    await page.evaluate("location.hash = '#/a/bob'")
    await expect(page.get_by_test_id("title")).to_have_text("Bob")
    await expect(as_text).to_have_count(0)
    await expect(page.locator(ui.COMPOSER)).to_be_focused()
    await page.evaluate("location.hash = '#/a/ada'")
    await expect(page.locator(ui.CHIP)).to_contain_text(words("pastedName"))


@pytest.mark.parametrize(("locale", "at"), LANGUAGES.items())
async def test_a_link_clicked_twice_opens_the_page_or_says_how_to_sign_in(
    panel: Panel, browser: Browser, locale: str, at: int
) -> None:
    page = await panel.open()
    link = await page.evaluate("async () => (await (await fetch('/api/v1/links', {method: 'POST'})).json()).url")
    context = await browser.new_context(locale=locale)
    fresh = await context.new_page()
    for _ in ("first", "second"):
        await fresh.goto(link)
        await fresh.wait_for_selector("[data-ready]")
        await expect(fresh.locator(ui.COMPOSER)).to_be_visible()
    stranger = await (await browser.new_context(locale=locale)).new_page()
    await stranger.goto(link)
    locked = stranger.get_by_test_id("locked")
    await expect(locked.get_by_role("heading", level=2).first).to_have_text(("Sign in", "登录")[at])
    await expect(locked).to_contain_text(("This link was used already", "此链接已使用过")[at])
    assert "code=" not in stranger.url
    await context.close()
    await stranger.context.close()


async def test_the_tour_greets_in_the_language_of_the_browser(browser: Browser, tmp_path: Path) -> None:
    async with open_panel(tmp_path, browser, agents="") as panel:
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": []}))
        await panel.society.reload()
        await greet(panel.society, {"LANG": "en_US.UTF-8"})
        page = await panel.open("", locale="zh-CN")
        await expect(ui.messages(page).first).to_contain_text("你好！我是导览")
        await page.locator(".quick-reply-btn", has_text=script.TOOL.option.zh).click()
        await expect(ui.messages(page).filter(has_text=script.TOOL.then.zh[:10])).to_be_visible()
        english = await panel.open("", locale="en-US")
        await expect(ui.messages(english).first).to_contain_text("Hello! I am the guide")
        assert await panel.errors() == []


WATCH_CHIP = """() => { window.shown = []; const chip = document.querySelector('[data-testid=connection]');
    new MutationObserver(() => shown.push(chip.textContent)).observe(chip, {childList: true}); }"""


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
async def test_a_short_drop_shows_nothing_and_after_any_drop_the_page_is_right_again(
    panel: Panel, is_long: bool, words: Words
) -> None:
    """The clock of the page stands still: how long the drop lasts does not depend on the machine."""

    async def is_live() -> bool:
        return panel.streams == 1

    page = await panel.open(locale=words.locale)
    await eventually(is_live)  # before that there is no stream to drop
    panel.allow("Failed to load resource|ERR_|net::")
    await page.evaluate(WATCH_CHIP)
    await page.clock.install()
    await page.clock.pause_at(datetime.now(UTC) + timedelta(seconds=1))
    async with page.expect_event("requestfailed", lambda request: "/events" in request.url):
        await page.context.set_offline(True)
        panel.drop_streams()
    await page.clock.run_for(2_100 if is_long else 1_900)
    if is_long:
        await expect(page.locator(ui.CONNECTION)).to_have_text(words("offline"))
    sent = await panel.send_as_agent("Meanwhile")
    await page.context.set_offline(False)
    await expect(ui.message(page, sent)).to_be_visible()
    assert bool(await page.evaluate("shown")) == is_long


async def test_the_timeline_has_one_entry_per_message_grouped_by_task(panel: Panel, words: Words) -> None:
    message = {"to": "bob", "payload": {"text": "Can you help?"}}
    panel.server.default = "Done."
    panel.server.script(Says("I ask Bob.", calls=(Calls("send_message", message), Calls("look", {"name": "bell"}))))
    await panel.society.send(to="ada", text="Get help")
    await panel.stage.state("ada", "idle")
    await panel.stage.state("bob", "idle")
    page = await panel.open("#/timeline", locale=words.locale)
    group = page.get_by_test_id("timeline-group").filter(has_text="Get help")
    await expect(group).to_have_count(1)
    await expect(group.locator(".item-text", has_text="Can you help?")).to_have_count(1)
    await expect(group.locator(".run")).to_have_count(1)  # the sent message is an entry of its own
    await expect(group.locator(".run")).to_contain_text("look")
    await expect(group.locator(".timeline-head a")).to_have_text("Get help")


async def test_agents_have_initials_and_the_order_of_the_configuration(browser: Browser, tmp_path: Path) -> None:
    agents = '[agents.zed]\nname = "Zed Young"\n[agents.amy]\nname = "Amy"\ndescription = "Writes letters"\n'
    async with open_panel(tmp_path, browser, agents=agents) as panel:
        panel.server.default = "Fine"
        page = await panel.open("#/a/zed")
        await expect(page.locator(".tree .row-name")).to_have_text(["Zed Young", "Amy"])
        await expect(page.locator(".tree .avatar")).to_have_text(["ZY", "A"])
        await expect(ui.row(page, "amy").locator(".row-sub")).to_have_text("Writes letters")
        await panel.send_as_agent("Which?", "one", "two", by="amy")
        await page.locator('[data-testid="link-inbox"]').click()
        await expect(page.get_by_test_id("inspector")).to_be_hidden()
        await ui.row(page, "amy").click()
        await expect(page.get_by_test_id("inspector-about")).to_contain_text("Writes letters")
        await page.locator(".quick-reply-btn", has_text="two").click()
        await expect(page.locator(".quick-reply-btn:visible")).to_have_text(["two"])
        await expect(ui.messages(page).filter(has_text="Fine")).to_be_visible()
        await ui.send(page, "Thanks, **that** is it")
        await expect(ui.row(page, "amy").locator(".row-sub")).to_contain_text("Fine")
        assert await panel.errors() == []


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
async def test_nothing_moves_when_a_row_appears(panel: Panel, size: Any) -> None:
    page = await panel.open(viewport=size)
    places = [page.get_by_test_id("agents"), page.locator(ui.COMPOSER), page.locator(".thread")]

    async def boxes() -> list[tuple[float, float, float]]:
        found = [await place.bounding_box() for place in places]
        return [(box["x"], box["y"], box["height"]) for box in found if box]

    before = await boxes()
    await panel.send_as_agent("Which?", "one", by="bob")
    await expect(page.locator('[data-testid="link-inbox-asks"] .badge')).to_have_text("1")
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "Rung")
    await panel.society.send(to="ada", text="Ring it", sender="bob")
    await expect(page.locator(".composer-hint")).to_contain_text("is working")
    assert await boxes() == before
    Bell.may_end.set()
    await panel.stage.state("ada", "idle")
