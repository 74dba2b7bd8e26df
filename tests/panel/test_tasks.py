"""Tasks in the panel: the line under a message, the screen, one task as a tree and over time, stop and budget."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, Route, expect

from coterie.cli.tasks import format_tree
from coterie.testing import Calls, Says
from coterie.testing.model_server import ReceivedRequest, Reply, count_tokens
from tests.agent.stage import Bell, each
from tests.panel import ui
from tests.panel.harness import AGENTS, Panel, eventually, open_panel, options_of
from tests.panel.words import Words

PRICE = {"input": 100.0, "output": 200.0, "currency": "USD"}
"""Per million tokens: high, so that a short test costs something."""
LINE = '[data-testid="task-line"]'
DIALOG = "dialog[open]"


def line(page: Page, message_id: str) -> Locator:
    return ui.message(page, message_id).locator(LINE)


def ask_bob(text: str = "Count the bells") -> Says:
    return Says(calls=(Calls("send_message", {"to": "bob", "payload": {"text": text}}),))


async def started(page: Page, panel: Panel, text: str) -> str:
    """Send a message in the page; return its id."""
    await ui.send(page, text)
    await eventually(lambda: _is_stored(panel, text))
    return next(message.id for message in await panel.sent() if message.payload.get("text") == text)


async def _is_stored(panel: Panel, text: str) -> bool:
    return text in await panel.texts()


def two_at_work() -> Callable[[ReceivedRequest], Reply]:
    """Ada asks Bob and goes on; both ring until `Bell.may_end`."""
    ring = Says(calls=(Calls("ring", {"name": "bell"}),))
    return each(ada=[ask_bob(), ring, "I asked Bob", "Bob counted two"], bob=[ring, "Two bells"])


@asynccontextmanager
async def priced_panel(folder: Path, browser: Browser, limits: str = "", **entry: Any) -> AsyncIterator[Panel]:
    async with open_panel(folder, browser, agents=AGENTS + limits, price=PRICE, **entry) as panel:
        yield panel
        assert await panel.errors() == []


async def test_the_line_tells_who_is_at_work_and_then_how_long_it_took_and_what_it_cost(
    browser: Browser, tmp_path: Path, words: Words
) -> None:
    async with priced_panel(tmp_path, browser) as panel:
        page = await panel.open(locale=words.locale)
        Bell.may_end.clear()
        panel.server.default = two_at_work()
        sent = await started(page, panel, "How many bells?")
        await expect(line(page, sent)).to_contain_text(
            re.compile(
                rf"^{words('agentsAtWork', n=2)} · {words('n_many_messages', n='[0-9]')} · \$\d+\.\d\d{words('stop')}$"
            )
        )
        await expect(page.get_by_test_id("link-tasks").locator(".badge")).to_have_text("1")
        Bell.may_end.set()
        await expect(line(page, sent)).to_have_text(
            re.compile(
                rf"^{words('taskDoneIn', time=words('lasted_s', n='[0-9.]+'))} · {words('n_many_agents', n=2)}"
                rf" · \$\d+\.\d\d({words('stop')})?$"
            )
        )
        await expect(line(page, sent).get_by_test_id("task-stop")).to_be_hidden()
        await expect(page.get_by_test_id("link-tasks").locator(".badge")).to_have_count(0)


async def test_the_line_says_that_only_a_scheduled_message_is_left(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    later = {"to": "user", "payload": {"text": "Take a break"}, "delayMs": 50_000}
    panel.server.script(Says(calls=(Calls("send_message", later),)), "I remind you soon.")
    sent = await started(page, panel, "Remind me in a moment")
    waits = f"{words('taskScheduled')} · {words('n_many_messages', n=3)}"
    await expect(line(page, sent).get_by_test_id("task-link")).to_have_text(waits)
    await page.reload()
    await expect(line(page, sent).get_by_test_id("task-link")).to_have_text(waits)


async def test_the_line_says_that_a_message_is_queued_beside_a_scheduled_one(panel: Panel, words: Words) -> None:
    page = await panel.open(locale=words.locale)
    later = {"to": "user", "payload": {"text": "Take a break"}, "delayMs": 50_000}
    await panel.society.pause("bob")
    panel.server.script(Says(calls=(Calls("send_message", later), *ask_bob().calls)), "I asked Bob.")
    sent = await started(page, panel, "Remind me, and ask Bob")
    waits = f"{words('taskQueued')} · {words('n_many_messages', n=4)}"
    await expect(line(page, sent).get_by_test_id("task-link")).to_have_text(waits)
    await panel.society.resume("bob")
    await panel.stage.state("bob", "idle")
    await expect(line(page, sent).get_by_test_id("task-link")).not_to_contain_text(words("taskQueued"))


async def test_an_unknown_cost_is_left_out_of_the_line_and_called_unknown_in_the_task(panel: Panel) -> None:
    page = await panel.open()
    panel.server.script("Good morning")
    sent = await started(page, panel, "Hello")
    await expect(line(page, sent)).to_have_text(re.compile(r"^done in \d+(\.\d)? s(Stop)?$"))
    await line(page, sent).get_by_test_id("task-link").click()
    await expect(page).to_have_url(re.compile(f"#/tasks/{sent}$"))
    await expect(page.get_by_test_id("task-figures")).to_contain_text("cost unknown")
    assert "$" not in await page.get_by_test_id("screen-tasks").inner_text()


async def test_a_sum_without_some_prices_is_called_a_lower_bound(browser: Browser, tmp_path: Path) -> None:
    async with priced_panel(tmp_path, browser) as panel:
        services = json.loads((tmp_path / "llmservices.json").read_text())["services"]
        unpriced = {key: value for key, value in services[0].items() if key != "price"} | {"id": "free"}
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": [*services, unpriced]}))
        (tmp_path / "coterie.toml").write_text(AGENTS.replace('name = "Bob"', 'name = "Bob"\nservice = "free"'))
        await panel.society.reload()
        panel.server.default = each(ada=[ask_bob(), "I asked Bob", "Bob counted two"], bob=["Two bells"])
        page = await panel.open()
        sent = await started(page, panel, "How many bells?")
        await expect(line(page, sent)).to_contain_text(re.compile(r"done in .* · at least \$\d+\.\d\d"))
        await page.goto(f"{panel.url}/#/tasks/{sent}?as=agents")
        cells = page.locator('[data-of="Cost"]')
        await expect(cells).to_have_text([re.compile(r"^\$\d+\.\d\d$"), "unknown"])


async def test_the_lines_of_ended_tasks_are_there_after_a_reload_and_further_back(panel: Panel) -> None:
    panel.server.default = "ok"
    sent = []
    for number in range(3):
        sent.append(await panel.stage.say(f"Number {number}"))
        await panel.stage.heard(number + 1)
    context = await panel.browser()
    panel.allow("ERR_FAILED")
    await context.route("**/api/v1/events*", lambda route: route.abort())  # they tell of tasks that changed just now
    page = await panel.open(context=context)
    for one in sent:
        await expect(line(page, one)).to_contain_text("done in")


async def test_the_line_follows_the_person_to_an_answer_of_the_same_task(panel: Panel) -> None:
    question = {"to": "user", "payload": {"text": "Which bell?"}, "quickReplies": ["The big one", "The small one"]}
    panel.server.script(Says(calls=(Calls("send_message", question),)), "", "It rang")
    page = await panel.open()
    sent = await started(page, panel, "Ring a bell")
    await expect(line(page, sent)).to_contain_text("waiting for you · 2 messages")
    await page.get_by_role("button", name="The big one").click()
    await eventually(lambda: _is_stored(panel, "The big one"))
    answer = (await panel.sent())[-1].id
    await expect(line(page, answer)).to_contain_text("done in")
    await expect(page.locator(LINE)).to_have_count(1)
    await page.reload()
    await expect(line(page, answer)).to_contain_text("done in")
    await line(page, answer).get_by_test_id("task-link").click()
    await expect(page).to_have_url(re.compile(f"#/tasks/{sent}$"))


async def test_stop_asks_first_and_then_ends_everything_of_the_task(panel: Panel) -> None:
    page = await panel.open()
    Bell.may_end.clear()
    panel.server.default = two_at_work()
    sent = await started(page, panel, "How many bells?")
    await expect(line(page, sent)).to_contain_text("2 agents working")
    stop = line(page, sent).get_by_test_id("task-stop")
    await stop.click()
    await expect(page.locator(DIALOG)).to_contain_text("How many bells?")
    await page.locator(DIALOG).get_by_role("button", name="Cancel").click()
    await expect(line(page, sent)).to_contain_text("2 agents working")
    await stop.click()
    await page.locator(DIALOG).get_by_role("button", name="Stop", exact=True).click()
    await expect(line(page, sent)).to_contain_text("stopped after")
    await expect(page.locator(ui.TOAST)).to_contain_text("Turns: 2")
    Bell.may_end.set()
    for agent in ("ada", "bob"):
        await panel.stage.state(agent, "idle")
    assert len(panel.server.requests) == 3, "nothing of it runs after the stop"


async def test_the_task_is_a_tree_of_messages_and_turns_in_order(panel: Panel) -> None:
    panel.server.default = each(ada=[ask_bob(), "I asked Bob", "Bob counted two"], bob=["Two bells"])
    sent = await panel.stage.say("How many bells?")
    await panel.stage.heard(2)
    await panel.stage.until(lambda: _has_state(panel, sent, "done"))
    page = await panel.open(f"#/tasks/{sent}")
    rows = page.get_by_test_id("task-message")
    await expect(rows).to_have_count(5)
    heads = [text.split("\n")[0] for text in await rows.all_inner_texts()]
    assert heads[0].startswith("You → Ada")
    levels = dict(zip(await _texts(rows), await rows.evaluate_all("all => all.map(r => r.ariaLevel)"), strict=True))
    assert list(levels.items()) == [
        ("How many bells?", "1"),
        ("Count the bells", "2"),
        ("Two bells", "3"),
        ("I asked Bob", "2"),
        ("Bob counted two", "2"),
    ]
    await expect(page.get_by_test_id("task-turn")).to_have_count(3)
    await expect(page.get_by_test_id("task-turn").first).to_contain_text(re.compile(r"^Ada worked .* 2 model requests"))
    await expect(page.get_by_test_id("task-turn").first).to_contain_text("send_message ok")
    await page.get_by_test_id("task-agents").click()
    table = page.locator('[aria-labelledby="task-agents"] tbody tr')
    await expect(table).to_have_count(2)
    tree = await panel.society.store.task_tree(sent)
    assert tree is not None
    digits = [re.sub(r"\D", "", cell) for cell in await table.locator("td:nth-of-type(4)").all_inner_texts()]
    assert sum(map(int, digits)) == tree.task.input_tokens


RING = ("ada", "bob", "seer", "dan", "eve")
STEPS = 40


def around() -> Callable[[ReceivedRequest], Reply]:
    """Each of five agents passes the message on to the next one; the last message is for the person."""

    def answer(request: ReceivedRequest) -> Reply:
        last = request.body["messages"][-1]
        if last["role"] == "tool":
            return ""
        step = int(re.findall(r"Step (\d+)", str(last["content"]))[-1]) + 1
        to = "user" if step == STEPS else RING[(step - 1) % len(RING)]
        return Says(calls=(Calls("send_message", {"to": to, "payload": {"text": f"Step {step}"}}),))

    return answer


async def test_a_task_of_five_agents_with_forty_messages_is_complete_and_its_tokens_add_up(
    browser: Browser, tmp_path: Path
) -> None:
    agents = AGENTS + '[agents.dan]\nname = "Dan"\n[agents.eve]\nname = "Eve"\n[limits]\nmax_hops = 64\n'
    async with open_panel(tmp_path, browser, agents=agents) as panel:
        panel.server.default = around()
        sent = await panel.stage.say("Step 1")
        await panel.stage.heard()
        await panel.stage.until(lambda: _has_state(panel, sent, "done"))
        page = await panel.open(f"#/tasks/{sent}")
        rows = page.get_by_test_id("task-message")
        await expect(rows).to_have_count(STEPS)
        steps = [f"Step {step}" for step in range(1, STEPS + 1)]
        assert await _texts(rows) == steps
        tree = await page.evaluate("id => fetch(`/api/v1/tasks/${id}`).then(response => response.json())", sent)
        assert [node["text"] for node in tree["nodes"] if node["kind"] == "message"] == steps
        assert [
            line.split(": ")[-1].removesuffix(" (pending)") for line in format_tree(tree) if ": Step" in line
        ] == steps
        await expect(page.get_by_test_id("task-turn")).to_have_count(STEPS - 1)
        await page.get_by_test_id("task-agents").click()
        table = page.locator('[aria-labelledby="task-agents"] tbody tr')
        await expect(table).to_have_count(5)
        shown = [int(re.sub(r"\D", "", cell)) for cell in await table.locator("td:nth-of-type(4)").all_inner_texts()]
        assert sum(shown) == sum(count_tokens(request.raw) for request in panel.server.requests)
        assert await panel.errors() == []


async def _texts(rows: Locator) -> list[str]:
    return [str(text) for text in await rows.locator(".item-text").all_inner_texts()]


async def _has_state(panel: Panel, task_id: str, state: str) -> bool:
    found = await panel.society.store.tasks_by_id([task_id])
    return task_id in found and found[task_id].state == state


async def test_the_task_over_time_has_bars_for_model_tool_and_waiting_and_the_same_as_a_table(panel: Panel) -> None:
    panel.server.default = two_at_work()
    sent = await panel.stage.say("How many bells?")
    await panel.stage.until(lambda: _has_state(panel, sent, "done"))
    page = await panel.open(f"#/tasks/{sent}")
    await page.get_by_test_id("task-time").click()
    picture = page.get_by_test_id("waterfall").locator("svg")
    await expect(picture).to_be_visible()
    assert await picture.locator("rect.bar-model").count() == len(panel.server.requests)
    assert await picture.locator("rect.bar-tool").count() == 3
    assert await picture.locator("rect.bar-wait").count() >= 3
    lanes = await picture.locator('text[fill="var(--ink)"]').all_text_contents()
    assert [re.sub(r"[\d,]+ tokens$", "", lane) for lane in lanes] == ["Ada", "Bob"]
    boxes = await picture.locator("rect").evaluate_all(
        "all => all.map(one => [one.x.baseVal.value, one.x.baseVal.value + one.width.baseVal.value])"
    )
    width = float(await picture.get_attribute("width") or 0)
    assert all(0 <= left < right <= width for left, right in boxes), boxes
    await page.get_by_text("Show as a table").click()
    rows = page.locator("details[open] tbody tr")
    await expect(rows).to_have_count(await picture.locator("rect").count())
    await expect(rows.filter(has_text="ring")).to_have_count(2)
    await page.reload()
    await expect(picture).to_be_visible()


async def test_the_bar_of_an_interrupted_answer_says_so_and_that_of_a_used_one_nothing(
    panel: Panel, words: Words
) -> None:
    panel.server.default = "ok"
    sent = await panel.stage.say("Hello")
    await panel.stage.until(lambda: _has_state(panel, sent, "done"))
    page = await panel.open(f"#/tasks/{sent}?as=time", locale=words.locale)
    title = page.locator("rect.bar-model title")
    await expect(title).to_have_text(re.compile(r"· [\d,]+ tokens?$"))

    async def withdrawn(route: Route) -> None:
        answer = await route.fetch()
        task = await answer.json()
        for turn in task["nodes"]:
            for request in turn.get("requests", ()):
                request["outcome"] = "withdrawn"
        await route.fulfill(response=answer, json=task)

    await page.route(f"**/api/v1/tasks/{sent}", withdrawn)
    await page.reload()
    await expect(title).to_have_text(re.compile(f"· {words('answerWithdrawn')}$"))


async def test_an_open_task_is_drawn_live(panel: Panel) -> None:
    Bell.may_end.clear()
    panel.server.default = two_at_work()
    sent = await panel.stage.say("How many bells?")
    page = await panel.open(f"#/tasks/{sent}?as=time")
    await expect(page.get_by_test_id("task-words")).to_contain_text("2 agents working")
    await expect(page.locator("rect.bar-tool")).not_to_have_count(0)
    await page.get_by_text("Show as a table").click()
    Bell.may_end.set()
    await expect(page.get_by_test_id("task-words")).to_contain_text("done in")
    await expect(page.locator("details[open] tbody")).to_contain_text("ring · ok")
    bars = page.get_by_test_id("waterfall").locator("rect.bar-model")
    await expect(bars).to_have_count(len(panel.server.requests))


async def test_the_screen_groups_tasks_filters_them_in_its_address_and_pages_back(panel: Panel) -> None:
    panel.server.default = "ok"
    for number in range(60):
        await panel.stage.say(f"Number {number}", to="bob" if number % 2 else "seer")
        await panel.stage.heard(number + 1)
    await panel.send_as_agent("Which?", "one", "two")
    page = await panel.open("#/tasks")
    rows = page.get_by_test_id("task")
    await expect(rows).to_have_count(50)
    await expect(page.get_by_role("heading", name="Waiting for you (1)")).to_be_visible()
    await page.get_by_role("button", name="Show older").click()
    await expect(rows).to_have_count(61)
    await expect(rows.first.locator(".item-head")).to_contain_text("Ada → You")
    await expect(page.get_by_role("heading", name="Finished (60)")).to_be_visible()
    await page.get_by_label("Agent", exact=True).select_option("ada")
    await expect(rows).to_have_count(1)
    await page.get_by_label("Agent", exact=True).select_option("bob")
    await expect(rows).to_have_count(30)
    await page.get_by_label("State").select_option("done")
    assert page.url.endswith("#/tasks?state=done&agent=bob")
    await page.reload()
    await expect(rows).to_have_count(30)
    assert "Number 59" in await rows.first.inner_text()
    await page.get_by_label("State").select_option("failed")
    await expect(page.get_by_text("Nothing matches these filters.")).to_be_visible()


async def test_a_task_moves_between_the_groups_while_the_screen_is_open(panel: Panel) -> None:
    page = await panel.open("#/tasks")
    await expect(page.get_by_text("No tasks yet")).to_be_visible()
    Bell.may_end.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "Done")
    await panel.stage.say("Ring it")
    await expect(page.get_by_role("heading", name="Working (1)")).to_be_visible()
    await expect(page.get_by_test_id("task")).to_contain_text("Ada is working")
    Bell.may_end.set()
    await expect(page.get_by_role("heading", name="Finished (1)")).to_be_visible()
    await expect(page.get_by_role("heading", name="Working (1)")).to_have_count(0)


async def test_tasks_can_be_reached_by_a_shortcut_and_the_palette(panel: Panel) -> None:
    page = await panel.open()
    await page.keyboard.press("Alt+t")
    await expect(page.get_by_test_id("screen-tasks")).to_be_visible()
    await page.goto(f"{panel.url}/#/a/ada")
    await expect(page.locator(ui.COMPOSER)).to_be_focused()  # a change of the address closes the palette
    await page.keyboard.press("Control+k")
    await page.keyboard.type("Tasks")
    await expect(page.get_by_role("option", name="Tasks")).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(page.get_by_test_id("screen-tasks")).to_be_visible()


async def test_an_unknown_task_is_called_so(panel: Panel) -> None:
    page = await panel.browser()
    panel.allow("404")
    shown = await panel.open("#/tasks/nothing-of-the-kind", context=page)
    await expect(shown.get_by_text("This task does not exist.")).to_be_visible()


# Usage


async def test_cost_and_tokens_are_plotted_by_day_and_are_in_tables(
    browser: Browser, tmp_path: Path, words: Words
) -> None:
    async with priced_panel(tmp_path, browser) as panel:
        panel.server.default = each(ada=[ask_bob(), "I asked Bob", "Two"], bob=["Two bells"])
        sent = await panel.stage.say("How many bells?")
        await panel.stage.until(lambda: _has_state(panel, sent, "done"))
        (task,) = (await panel.society.store.tasks_by_id([sent])).values()
        page = await panel.open("#/tasks?view=usage", locale=words.locale)
        await expect(page.locator("rect.usage-bar")).to_have_count(2)
        sums = page.locator('[aria-labelledby="usage-sums"] tbody tr')
        await expect(sums).to_have_count(3)
        cells = await sums.last.locator("td").all_inner_texts()
        assert [int(re.sub(r"\D", "", cell)) for cell in cells[:4]] == [
            task.requests,
            task.input_tokens,
            task.cached_tokens,
            task.output_tokens,
        ]
        assert cells[4] == f"${task.cost / 1e9:.2f}"
        await page.get_by_label(words("usageBy"), exact=True).select_option("service")
        await expect(page.locator("rect.usage-bar")).to_have_count(1)
        await page.get_by_label(words("usageMeasure"), exact=True).select_option("cost")
        await expect(page.get_by_role("img", name=words("usageLabel", what=words("usage_cost"), n=30))).to_be_visible()
        await page.get_by_text(words("asTable")).click()
        await expect(page.locator("details[open] tbody td").last).to_have_text(f"${task.cost / 1e9:.2f}")


async def test_without_prices_the_plot_of_costs_says_why_there_is_none(panel: Panel) -> None:
    await panel.stage.say("Hello")
    await panel.stage.heard()
    page = await panel.open("#/tasks?view=usage&measure=cost")
    await expect(page.get_by_test_id("usage-unknown")).to_contain_text("price")
    await expect(page.get_by_test_id("usage-plot")).to_have_count(0)
    await expect(page.locator('[aria-labelledby="usage-sums"] tbody tr').last.locator("td").last).to_have_text(
        "unknown"
    )


# Budget

LIMITS = "[limits.task]\nturns = 4\n"


def endless() -> Callable[[ReceivedRequest], Reply]:
    """Ada and Bob answer every message by a message to each other."""

    def answer(request: ReceivedRequest) -> Reply:
        if request.body["messages"][-1]["role"] == "tool":
            return ""
        other = "bob" if "(id: ada)" in request.body["messages"][0]["content"] else "ada"
        return Says(calls=(Calls("send_message", {"to": other, "payload": {"text": "And you?"}}),))

    return answer


@pytest.mark.parametrize("chinese", [False, pytest.param(True, marks=pytest.mark.full)], ids=["english", "chinese"])
async def test_the_budget_question_tells_what_it_is_about_and_continues_the_task(
    browser: Browser, tmp_path: Path, chinese: bool
) -> None:
    words = BUDGET_WORDS[chinese]
    async with priced_panel(tmp_path, browser, LIMITS) as panel:
        panel.server.default = endless()
        page = await panel.open(locale="zh-CN" if chinese else "en-US")
        sent = await started(page, panel, "Go")
        question = await _budget_question(panel, sent)
        await page.goto(f"{panel.url}/#/inbox")
        card = page.locator(f'article.card[data-message-id="{question}"]')
        for text in (words["asks"], words["limit"], "Ada、Bob" if chinese else "Ada, Bob", "$"):
            await expect(card).to_contain_text(text)
        assert await options_of(page, question).all_inner_texts() == words["options"]
        await options_of(page, question).first.click()
        await eventually(lambda: _budgets(panel, sent, 2))
        second = await _budget_question(panel, sent)
        assert second != question
        await page.goto(f"{panel.url}/#/tasks/{sent}")
        await expect(page.get_by_test_id("task-message").filter(has_text=words["asks"])).not_to_have_count(0)
        (stored,) = (await panel.society.store.messages_by_id([second])).values()
        await page.goto(f"{panel.url}/#/a/{stored.sender}")
        shown = ui.message(page, second)
        await expect(shown.get_by_test_id("budget")).to_contain_text("Ada、Bob" if chinese else "Ada, Bob")
        await expect(shown).to_contain_text(words["limit"].replace("4", "8"))
        await options_of(page, second).last.click()
        await eventually(lambda: _has_state(panel, sent, "stopped"))
        await expect(page.locator(".quick-reply-btn:not([aria-disabled=true])")).to_have_count(0)


BUDGET_WORDS: dict[bool, dict[str, Any]] = {
    False: {"asks": "Continue the task “Go”?", "limit": "budget of 4 turns", "options": ["Continue", "Stop"]},
    True: {"asks": "任务“Go”要继续吗？", "limit": "4 个回合的预算", "options": ["继续", "停止"]},
}


async def _budget_question(panel: Panel, task_id: str) -> str:
    found: list[str] = []

    async def is_open() -> bool:
        tasks = await panel.society.store.tasks_by_id([task_id])
        found[:] = [task.budget_question for task in tasks.values() if task.budget_question]
        return bool(found)

    await eventually(is_open)
    return found[0]


async def _budgets(panel: Panel, task_id: str, count: int) -> bool:
    return (await panel.society.store.tasks_by_id([task_id]))[task_id].budgets == count


async def test_the_task_view_continues_and_stops_a_task_that_has_used_its_budget(
    browser: Browser, tmp_path: Path
) -> None:
    async with priced_panel(tmp_path, browser, LIMITS) as panel:
        panel.server.default = endless()
        sent = await panel.stage.say("Go")
        await _budget_question(panel, sent)
        page = await panel.open(f"#/tasks/{sent}")
        await expect(page.get_by_test_id("task-state")).to_contain_text("waiting for you")
        await expect(page.get_by_test_id("task-budget")).to_be_visible()
        await page.get_by_test_id("task-continue").click()
        await eventually(lambda: _budgets(panel, sent, 2))
        question = await _budget_question(panel, sent)
        await expect(page.get_by_test_id("task-figures")).to_contain_text("8 turns")
        await expect(page.get_by_test_id("task-answer")).to_have_attribute("href", re.compile(f"m={question}$"))
        await page.get_by_test_id("task-stop").click()
        await expect(page.locator(DIALOG)).to_be_visible()  # the dialog's code may still be loading
        await page.evaluate("async () => (await import('/static/state.js')).touch('agents')")  # draws it again
        await page.keyboard.press("Escape")
        await expect(page.get_by_test_id("task-stop")).to_be_focused()
        await page.get_by_test_id("task-stop").click()
        await page.locator(DIALOG).get_by_role("button", name="Stop", exact=True).click()
        await expect(page.get_by_test_id("task-state")).to_contain_text("stopped")
        await expect(page.get_by_test_id("task-continue")).to_be_hidden()
        await expect(page.get_by_test_id("task-answer")).to_have_count(0)
        await expect(page.get_by_test_id("task-tree")).to_contain_text("closed")
        assert await page.evaluate("() => document.activeElement !== document.body")


@pytest.mark.parametrize("budget", ["x", 7, {}, {"task": "t", "reason": "__proto__", "limit": 1, "used": {}}])
async def test_a_payload_that_only_resembles_a_budget_question_is_shown_as_written(panel: Panel, budget: Any) -> None:
    sent = await panel.send_as_agent("May I?", "Yes", "No", budget=budget)
    page = await panel.open()
    await expect(ui.message(page, sent)).to_contain_text("May I?")
    assert await options_of(page, sent).all_inner_texts() == ["Yes", "No"]


# While you were away


async def test_who_comes_back_after_ten_minutes_sees_what_happened_until_it_is_closed_in_any_tab(panel: Panel) -> None:
    panel.server.script("All done")
    sent = await panel.stage.say("Do it")
    await panel.stage.heard()
    await panel.send_as_agent("Which?", "one", "two", by="bob")
    context = await panel.browser()
    await _was_away(context, 12)
    page = await panel.open("#/a/seer", context=context)
    card = page.get_by_test_id("away")
    await expect(card).to_contain_text("1 waiting for you · 1 finished · 2 messages")
    await card.get_by_role("link", name="Do it").click()
    await expect(page).to_have_url(re.compile(f"#/tasks/{sent}$"))
    other = await panel.open("#/inbox", context=context)
    await expect(other.get_by_test_id("away")).to_be_visible()
    await other.get_by_test_id("away-close").click()
    for tab in (page, other):
        await expect(tab.get_by_test_id("away")).to_have_count(0)
    await page.reload()
    await page.wait_for_selector("[data-ready]")
    await expect(page.get_by_test_id("away")).to_have_count(0)


@pytest.mark.parametrize("minutes", [None, 8], ids=["first visit", "8 minutes"])
async def test_a_short_absence_and_a_first_visit_show_no_card(panel: Panel, minutes: int | None) -> None:
    await panel.send_as_agent("Which?", "one", "two")
    context = await panel.browser()
    if minutes:
        await _was_away(context, minutes)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = await panel.open(context=context)
    await page.wait_for_function("() => Date.now() - Date.parse(localStorage.getItem('coterie.seenAt')) < 60000")
    assert [url for url in asked if "/api/v1/away" in url] == []
    await expect(page.get_by_test_id("away")).to_have_count(0)


async def test_a_page_that_was_hidden_for_long_shows_the_card_when_it_is_seen_again(panel: Panel) -> None:
    context = await panel.browser()
    page = await panel.open(context=context)
    await page.wait_for_function("() => localStorage.getItem('coterie.seenAt')")
    await panel.send_as_agent("News")
    await page.evaluate(
        """() => { const hidden = value => {
                Object.defineProperty(document, 'hidden', {get: () => value, configurable: true});
                document.dispatchEvent(new Event('visibilitychange')); };
            hidden(true);
            localStorage.setItem('coterie.seenAt', new Date(Date.now() - 11 * 60000).toISOString());
            hidden(false); }"""
    )
    await expect(page.get_by_test_id("away")).to_contain_text("1 message")


async def _was_away(context: Any, minutes: int) -> None:
    """Let the first page of this browser find that it was last seen some minutes ago."""
    await context.add_init_script(
        f"""if (location.protocol !== 'about:' && !localStorage.getItem('coterie.seenAt'))
            localStorage.setItem('coterie.seenAt', new Date(Date.now() - {minutes} * 60000).toISOString());"""
    )
