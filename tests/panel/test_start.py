"""The first start: connect a model, say hello, create a team."""

from __future__ import annotations

import pytest
from playwright.async_api import ViewportSize, expect

from coterie.testing import ModelServer
from tests.panel import newcomer, ui
from tests.panel.harness import PHONE, WIDE, Panel, without_model
from tests.panel.words import Words


async def test_a_newcomer_connects_a_model_says_hello_and_creates_a_team(panel: Panel, words: Words) -> None:
    key, team = "sk-newcomer-0123456789", newcomer.WORDS[words.locale]
    await without_model(panel)
    async with ModelServer(models={"small", "large"}, api_key=key) as model:
        page = await panel.open(locale=words.locale)
        await page.get_by_test_id("start-card").get_by_role("link").click()
        form = page.locator(".start-form")
        await form.locator("select").first.select_option("other")
        await page.get_by_test_id("start-url").fill(model.base_url)
        await page.get_by_test_id("start-key").fill("sk-wrong")
        await page.get_by_test_id("start-key").press("Tab")
        await expect(page.get_by_test_id("models-status")).to_contain_text(words("test_auth"))
        await page.get_by_test_id("start-key").fill(key)
        await page.get_by_test_id("start-key").press("Tab")
        await expect(page.get_by_test_id("models-status")).to_have_text(words("modelsFound", n=2))
        await page.get_by_test_id("models").select_option("small")
        await page.get_by_test_id("start-save").click()
        await expect(page.get_by_test_id("start-connected")).to_be_visible()
        await expect(page.get_by_test_id("start-card")).to_have_count(0)
        await expect(page.get_by_test_id("banner-tour")).to_have_count(0)
        entry = next(iter(panel.society.services))
        assert (entry.model, entry.api_key and entry.api_key.reveal()) == ("small", key)
        assert key not in await page.content()

        await page.get_by_test_id("start-hello").click()
        await expect(page.locator(f"{ui.FEED} .msg-theirs")).to_contain_text("ok")
        await page.goto(f"{panel.url}/#/setup")
        await expect(page.locator('[data-service="main"] .outcome .ok')).to_be_visible()

        await page.goto(f"{panel.url}/#/start")
        await page.get_by_test_id("template").filter(has_text=str(team["team"])).click()
        await page.get_by_test_id("team-save").click()
        await expect(page.locator('[data-testid="title"]')).to_have_text(str(team["lead"]))
        assert model.refused == []


@pytest.mark.parametrize("locale", newcomer.WORDS)
async def test_the_path_from_the_first_start_to_a_stopped_task_needs_nothing_twice(panel: Panel, locale: str) -> None:
    path = newcomer.Newcomer(panel, locale)
    await path.walk()
    assert len(path.typed) == len(set(path.typed)) == 3


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("locale", newcomer.WORDS)
async def test_one_hint_to_connect_a_model_is_shown(panel: Panel, locale: str, size: ViewportSize) -> None:
    await without_model(panel)
    page = await panel.open(locale=locale, viewport=size)
    card, banner = page.get_by_test_id("start-card"), page.get_by_test_id("banner-tour")
    await expect(card).to_be_visible()
    await expect(banner).to_be_hidden()
    words = await card.get_by_role("link").inner_text()
    await expect(page.get_by_text(words, exact=True).filter(visible=True)).to_have_count(1)
    await card.get_by_role("button").click()
    await expect(banner).to_be_visible()
    await expect(page.get_by_text(words, exact=True).filter(visible=True)).to_have_count(1)


async def test_the_card_stays_when_there_is_nothing_to_tell_of_the_time_away(panel: Panel) -> None:
    await without_model(panel)
    page = await panel.open()
    await expect(page.get_by_test_id("start-card")).to_be_visible()
    # Whichever of the two modules is loaded last.
    await page.evaluate("() => import('/static/screens/away.js').then(away => away.start())")
    await expect(page.get_by_test_id("start-card")).to_be_visible(timeout=1)


async def test_a_service_that_answered_real_requests_is_not_called_untested(panel: Panel, words: Words) -> None:
    await panel.stage.say("Hello")
    await panel.stage.heard()
    page = await panel.open("#/setup", locale=words.locale)
    await expect(page.locator('[data-service="main"] .outcome')).to_contain_text(
        words("serviceAnswers", n=words("n_one_requests", n=1))
    )
