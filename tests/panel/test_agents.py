"""Agents in the page: create, edit, duplicate, retire, undo; the page of one agent; undelivered messages."""

from __future__ import annotations

import asyncio
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Route, expect

from tests.agent.held_answer import HeldAnswer
from tests.panel import ui
from tests.panel.harness import PHONE, Panel, eventually_in, fail_requests, record_bodies
from tests.panel.words import Words

TITLE = '[data-testid="title"]'
WORDS = {
    "en-US": {
        "tools": "Only these",
        "asks": "asks first",
        "team": "Team of three",
        "lead": "Lead",
        "copy": "Ada (copy)",
    },
    "zh-CN": {"tools": "只用这些", "asks": "先询问", "team": "三人团队", "lead": "组长", "copy": "Ada（副本）"},
}


def agents_of(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "coterie.toml").read_text())["agents"])


@pytest.mark.parametrize("locale", WORDS)
async def test_an_agent_is_created_edited_and_talked_to_by_keyboard_alone(
    panel: Panel, tmp_path: Path, locale: str
) -> None:
    words = WORDS[locale]
    page = await panel.open(locale=locale)
    await page.get_by_test_id("new-agent").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_test_id("agent-name")).to_be_focused()
    for text in ("Zoë Ray", "Helper", "Helps with words.", "You help.\nBe brief."):
        await page.keyboard.insert_text(text)
        await page.keyboard.press("Tab")
    await expect(page.get_by_test_id("agent-service")).to_be_focused()
    await page.get_by_label(words["tools"]).focus()
    await page.keyboard.press("Space")
    dangerous = page.locator("label", has=page.get_by_test_id("tool-dangerous"))
    await expect(dangerous).to_contain_text("Do something that cannot be undone.")
    await expect(dangerous).to_contain_text(words["asks"])
    await page.get_by_test_id("tool-dangerous").focus()
    await page.keyboard.press("Space")
    await page.get_by_test_id("agent-name").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(TITLE)).to_have_text("Zoë Ray")
    assert agents_of(tmp_path)["zoe-ray"] == {
        "name": "Zoë Ray",
        "role": "Helper",
        "description": "Helps with words.",
        "prompt": "You help.\nBe brief.",
        "tools": ["ring", "look"],
    }
    await ui.send(page, "Hello")
    await expect(page.locator(f"{ui.FEED} .msg-theirs")).to_contain_text("ok")
    asked = panel.server.requests[-1].body
    assert "Be brief." in asked["messages"][0]["content"]
    assert "dangerous" not in [tool["function"]["name"] for tool in asked["tools"]]

    # Edit it: the next request uses the new text.
    await page.goto(f"{panel.url}/#/agents/zoe-ray/edit")
    await page.get_by_test_id("agent-prompt").fill("You sing.")
    await page.reload()
    await expect(page.get_by_test_id("form-restored")).to_be_visible()
    await expect(page.get_by_test_id("agent-prompt")).to_have_value("You sing.")
    await page.get_by_test_id("agent-save").press("Enter")
    await expect(page.locator(".agent-page")).to_contain_text("You sing.")
    assert panel.society.agents.profile("zoe-ray").prompt == "You sing."


@pytest.mark.parametrize("locale", WORDS)
async def test_a_team_a_copy_a_retirement_and_their_undo(panel: Panel, tmp_path: Path, locale: str) -> None:
    words = WORDS[locale]
    (tmp_path / "coterie.toml").write_text("# mine\n" + (tmp_path / "coterie.toml").read_text())
    page = await panel.open("#/agents", locale=locale)
    await page.get_by_test_id("template").filter(has_text=words["team"]).click()
    await expect(page.get_by_test_id("team-name")).to_have_count(3)
    await page.get_by_test_id("team-save").click()
    await expect(page.locator(TITLE)).to_have_text(words["lead"])
    made = {one["name"]: one for one in agents_of(tmp_path).values()}
    assert words["lead"] in made and len(made) == 6

    await page.goto(f"{panel.url}/#/agents/new?from=ada")
    await expect(page.get_by_test_id("agent-name")).to_have_value(words["copy"])
    await page.get_by_test_id("agent-save").click()
    await expect(page.locator(TITLE)).to_have_text(words["copy"])

    # A retired agent does not answer, and says so.
    await page.goto(f"{panel.url}/#/agents")
    await page.locator('[data-definition="ada"]').get_by_test_id("retire").click()
    await page.get_by_role("dialog").locator(".danger").click()
    await expect(page.locator('[data-definition="ada"]')).to_have_count(0)
    other = await panel.open("#/a/ada", locale=locale)
    await expect(other.locator(ui.COMPOSER)).to_be_disabled()
    assert "ada" not in agents_of(tmp_path)

    rows = page.locator("[data-change]")
    await expect(rows).to_have_count(3)
    await rows.first.get_by_test_id("undo").click()
    await expect(page.locator('[data-definition="ada"]')).to_be_visible()
    await expect(other.locator(ui.COMPOSER)).to_be_enabled()
    await expect(rows).to_have_count(4)
    await rows.filter(has_text=words["lead"]).get_by_test_id("undo").click()
    await expect(rows).to_have_count(5)
    assert set(agents_of(tmp_path)) == {"ada", "bob", "seer", "ada-copy" if locale == "en-US" else "ada-2"}
    assert (tmp_path / "coterie.toml").read_text().startswith("# mine\n")


async def test_a_change_by_hand_is_reported_and_the_text_is_kept(panel: Panel, tmp_path: Path) -> None:
    page = await panel.open("#/agents/bob/edit")
    panel.allow("409")
    await page.get_by_test_id("agent-role").fill("Builder")
    file = tmp_path / "coterie.toml"
    file.write_text(file.read_text() + '\n[agents.new]\nname = "By hand"\n')
    await page.get_by_test_id("agent-save").click()
    await expect(page.get_by_role("alert").filter(has_text="changed meanwhile")).to_be_visible()
    assert "role" not in agents_of(tmp_path)["bob"]
    await page.get_by_test_id("agent-save").click()
    await expect(page.locator(".agent-page")).to_contain_text("Builder")
    assert agents_of(tmp_path)["bob"]["role"] == "Builder" and agents_of(tmp_path)["new"]["name"] == "By hand"


async def test_a_restored_form_has_the_chosen_tools(panel: Panel, tmp_path: Path) -> None:
    await panel.society.definitions.change("ada", {"tools": ["ring"]})
    page = await panel.open("#/agents/ada/edit")
    await page.get_by_test_id("tool-look").check()
    await page.reload()
    await expect(page.get_by_test_id("form-restored")).to_be_visible()
    await expect(page.get_by_test_id("tool-look")).to_be_checked()
    await expect(page.get_by_test_id("tool-ring")).to_be_checked()
    await expect(page.get_by_test_id("tool-dangerous")).not_to_be_checked()
    await page.get_by_test_id("tool-ring").uncheck()
    await page.get_by_test_id("agent-save").click()
    await expect(page.locator(".agent-page")).to_be_visible()
    assert agents_of(tmp_path)["ada"]["tools"] == ["look"]


async def test_a_ticked_tool_keeps_the_patterns_of_others(panel: Panel, tmp_path: Path) -> None:
    page = await panel.open("#/agents")

    async def saved(before: list[str], tool: str, *, is_on: bool) -> object:
        await panel.society.definitions.change("ada", {"tools": before})
        await page.goto(f"{panel.url}/#/agents/ada/edit")
        await page.get_by_test_id(f"tool-{tool}").set_checked(is_on)
        await page.get_by_test_id("agent-save").click()
        await expect(page.locator(".agent-page")).to_be_visible()
        return agents_of(tmp_path)["ada"]["tools"]

    # `files` is an MCP server that does not run now.
    before = ["files__*", "r[a-j]*", "!old__*"]
    assert await saved(before, "look", is_on=True) == ["files__*", "r[a-j]*", "look", "!old__*"]
    assert await saved(before, "ring", is_on=False) == ["files__*", "!old__*"]
    assert await saved(["?oo*", "files__*"], "spawn_agent", is_on=False) == ["?oo*", "files__*", "!spawn_agent"]
    assert await saved(["*", "!dangerous"], "spawn_agent", is_on=False) == ["*", "!dangerous", "!spawn_agent"]
    assert await saved(["!dang*"], "spawn_agent", is_on=False) == ["*", "!dang*", "!spawn_agent"]
    assert await saved(["*", "!dangerous"], "ring", is_on=False) == ["look", "!dangerous"]
    assert await saved(["files__*", "!spawn_*"], "spawn_agent", is_on=True) == ["files__*"]


async def test_a_restored_form_says_that_the_agent_was_changed_meanwhile(panel: Panel, words: Words) -> None:
    page = await panel.open("#/agents/bob/edit", locale=words.locale)
    problem = page.get_by_role("alert").filter(has_text=words("definitionsChanged"))
    await page.get_by_test_id("agent-prompt").fill("You sing.")
    await panel.society.definitions.change("bob", {"role": "Builder"})
    await page.reload()
    await expect(page.get_by_test_id("form-restored")).to_be_visible()
    await expect(problem).to_be_hidden()  # another field
    await panel.society.definitions.change("bob", {"prompt": "You paint."})
    for _ in range(2):
        await page.reload()
        await expect(problem).to_be_visible()
        await expect(page.get_by_test_id("agent-prompt")).to_have_value("You sing.")
    await page.get_by_test_id("form-restored").get_by_role("button").click()
    await expect(page.get_by_test_id("agent-prompt")).to_have_value("You paint.")
    await expect(problem).to_be_hidden()


@pytest.mark.parametrize("place", ["agents/new", "agents/new?template=team"], ids=["agent", "team"])
async def test_what_was_created_is_not_created_again_if_the_page_cannot_be_read_anew(
    panel: Panel, tmp_path: Path, place: str
) -> None:
    page = await panel.open(f"#/{place}")
    before = len(agents_of(tmp_path))
    panel.allow("503")
    await fail_requests(page, 503, path="**/api/v1/snapshot*", method="GET")
    posts = record_bodies(page, path="/api/v1/definitions")
    if place == "agents/new":
        await page.get_by_test_id("agent-name").fill("Zoë")
    await page.locator("[data-testid=agent-save], [data-testid=team-save]").click()
    await expect(page.locator(TITLE)).to_have_text("Zoë" if place == "agents/new" else WORDS["en-US"]["lead"])
    assert len(posts) == 1
    assert len(agents_of(tmp_path)) == before + len(posts[0]["agents"])


@pytest.mark.parametrize("locale", WORDS)
async def test_the_page_of_an_agent_tells_what_it_is_has_and_remembers(panel: Panel, locale: str) -> None:
    await panel.society.definitions.change("ada", {"role": "Analyst", "prompt": "You count."})
    await panel.society.artifacts.put(b"x", "made.txt", maker="ada")
    await panel.society.send(to="ada", text="Later, Ada", delay_ms=60_000)
    await panel.stage.say("One, two")
    await panel.stage.heard()
    page = await panel.open("#/agents/ada", locale=locale)
    body = page.locator(".agent-page")
    for text in ("Analyst", "main · m", "dangerous", "made.txt", "Later, Ada", "You count."):
        await expect(body).to_contain_text(text)
    await page.get_by_test_id("memory").locator("summary").click()
    await expect(page.get_by_test_id("memory")).to_contain_text("One, two")
    await expect(page.get_by_test_id("memory")).to_contain_text("You are Ada")


async def test_an_undelivered_message_is_marked_at_once_on_every_screen(panel: Panel, words: Words) -> None:
    talk = await panel.open("#/a/bob", locale=words.locale)
    timeline = await panel.open("#/timeline", locale=words.locale)
    dead = await panel.open("#/dead", locale=words.locale)
    await expect(dead.locator("main")).to_contain_text(words("deadNone"))
    await panel.society.pause("bob")
    await ui.send(talk, "Read me")
    await expect(talk.locator(ui.WAITING)).to_contain_text("Read me")
    await expect(timeline.locator(".item", has_text="Read me")).to_contain_text(words("state_pending"))

    await panel.society.terminate_agent("bob")
    for page in (talk, timeline):
        row = page.locator("main").locator("article, .item").filter(has_text="Read me")
        await expect(row).to_contain_text(words("state_dead"))
    await expect(dead.locator(".item", has_text="Read me")).to_contain_text(words("dead_recipient_terminated"))
    await talk.reload()
    await expect(ui.messages(talk)).to_contain_text("Read me")
    await expect(talk.get_by_test_id("undelivered")).to_have_text(words("state_dead"))


async def test_an_event_of_an_undelivered_message_keeps_the_older_pages_and_the_order(panel: Panel) -> None:
    for agent in ("bob", "seer"):
        await panel.society.pause(agent)
    for number in range(60):
        await panel.society.send(to="seer" if number == 30 else "bob", text=f"Number {number}")
        sent = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 == sent:  # the page orders messages of one millisecond as they come
            await asyncio.sleep(0)
    await panel.society.terminate_agent("bob")
    page = await panel.open("#/dead")
    rows = page.locator(".screen .item")
    await expect(rows).to_have_count(50)
    await page.get_by_role("button", name="Show older").click()
    await expect(rows).to_have_count(59)
    await panel.society.terminate_agent("seer")
    texts = page.locator(".screen .item-text")
    await expect(texts).to_have_text([f"Number {number}" for number in reversed(range(60))])
    await rows.filter(has_text="Number 30").get_by_test_id("dead-delete").click()
    await page.get_by_role("dialog").locator(".danger").click()
    await expect(rows).to_have_count(59)


async def test_the_task_of_an_undelivered_message_is_not_called_done(panel: Panel, words: Words) -> None:
    talk = await panel.open("#/a/bob", locale=words.locale)
    await panel.society.pause("bob")
    await ui.send(talk, "Read me")
    await expect(talk.locator(ui.WAITING)).to_contain_text("Read me")
    await panel.society.terminate_agent("bob")
    line = talk.get_by_test_id("task-line")
    await expect(line.get_by_role("link")).to_have_text(words("taskUndelivered"))
    await talk.reload()
    await expect(line.get_by_role("link")).to_have_text(words("taskUndelivered"))
    await expect(line).to_have_attribute("data-state", "failed")
    await line.get_by_role("link").click()
    await expect(talk.get_by_test_id("task-words")).to_have_text(words("taskUnread"))


async def test_undelivered_messages_are_sent_again_or_deleted(panel: Panel, words: Words) -> None:
    await panel.society.pause("bob")
    for text in ("Keep me", "Drop me"):
        await panel.society.send(to="bob", text=text)
    await panel.society.terminate_agent("bob")
    page = await panel.open("#/dead", locale=words.locale)
    panel.allow("410")
    await expect(page.locator(".screen .item")).to_have_count(2)
    await expect(page.locator(".screen .item").first).to_contain_text(words("dead_recipient_terminated"))
    await page.locator(".item", has_text="Keep me").get_by_test_id("dead-resend").click()
    await expect(page.locator(ui.TOAST)).to_contain_text({"en-US": "terminated", "zh-CN": "已停用"}[words.locale])
    await page.locator(".item", has_text="Drop me").get_by_test_id("dead-delete").click()
    await page.get_by_role("dialog").locator(".danger").click()
    await expect(page.locator(".screen .item")).to_have_count(1)


async def test_the_form_fits_a_phone(panel: Panel) -> None:
    for place in ("agents", "agents/new", "agents/ada", "agents/ada/edit", "agents/new?template=team", "dead", "start"):
        page = await panel.open(f"#/{place}", viewport=PHONE)
        await expect(page.locator(".screen > *").first).to_be_visible()
        assert await ui.sideways(page) == [], place
        await page.close()


async def test_an_agent_beyond_the_first_page_opens_from_its_address(panel: Panel) -> None:
    await _create_many(panel)
    page = await panel.open("#/a/zed")
    await expect(page.get_by_test_id("empty-thread")).to_contain_text("Zed")
    await expect(page.locator(ui.COMPOSER)).to_be_editable()
    panel.allow("404")
    await page.goto(f"{panel.url}/#/a/nobody")
    await expect(page.get_by_text("There is no agent “nobody”")).to_be_visible()
    await expect(page.locator(ui.COMPOSER)).to_be_hidden()


async def test_a_status_that_arrives_before_its_agent_is_loaded_is_kept(panel: Panel) -> None:
    await _create_many(panel)
    answer = HeldAnswer()
    panel.server.script(answer)
    is_read, may_arrive = asyncio.Event(), asyncio.Event()

    async def answer_late(route: Route) -> None:
        page = await route.fetch()
        if "after=" in route.request.url:
            is_read.set()
            await may_arrive.wait()
        await route.fulfill(response=page)

    context = await panel.browser()
    await context.route("**/api/v1/agents?*", answer_late)
    page = await panel.open(context=context)
    await is_read.wait()
    await panel.stage.say("Go on", to="zed")
    await eventually_in(
        page,
        "async () => [...(await import('/static/state.js')).state.drafts.values()].some(one => one.agent === 'zed')",
    )
    may_arrive.set()
    await expect(ui.row(page, "zed").locator(".row-name")).to_have_text("Zed")
    await expect(ui.row(page, "zed")).to_have_class(re.compile("is-active"))
    answer.may_end.set()


async def _create_many(panel: Panel) -> None:
    """More agents than a snapshot has; Zed is the last of them."""
    for n in range(200):
        await panel.society.create_agent(id=f"n{n:03}", name=f"N {n}")
    await panel.society.create_agent(id="zed", name="Zed")


async def test_built_in_tools_are_described_in_the_language_of_the_page(panel: Panel, words: Words) -> None:
    page = await panel.open("#/agents/ada", locale=words.locale)
    shown = page.locator(".tool-list li")
    tools = (await (await page.request.get(f"{panel.url}/api/v1/tools")).json())["items"]
    built_in = [one for one in tools if one["builtIn"]]
    assert len(built_in) > 8
    for one in built_in:
        does = shown.filter(has=page.locator("code", has_text=re.compile(f"^{one['name']}$"))).locator(".meta")
        if words.locale == "en-US":
            await expect(does).to_have_text(one["description"].split("\n")[0])
        else:
            await expect(does).to_have_text(re.compile("^[\u4e00-\u9fff][^a-zA-Z]*(base64[^a-zA-Z]*)?$"))
