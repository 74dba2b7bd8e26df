"""The first start: connect a model, say hello, create a team."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Route, ViewportSize, expect

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


def _preset(name: str, address: str, key: str | None) -> dict[str, object]:
    known = {"id": name, "name": name.title(), "provider": "openai", "baseURL": address, "apiKey": key}
    return known | {"models": [], "capabilities": None}


async def test_a_typed_key_is_sent_to_no_other_address(panel: Panel, words: Words) -> None:
    await without_model(panel)
    asked: list[Any] = []
    context = await panel.browser(locale=words.locale)

    async def offer(route: Route) -> None:
        found = await (await route.fetch()).json()
        presets = [_preset(one, f"http://{one}.test/v1", f"${{{one.upper()}_KEY}}") for one in ("first", "second")]
        offers = [_preset("there", "http://there.test/v1", "${THERE_KEY}")]
        await route.fulfill(json=found | {"offers": offers, "presets": presets})

    async def models(route: Route) -> None:
        asked.append(route.request.post_data_json)
        await route.fulfill(json={"code": "ok", "models": [f"of-{asked[-1]['name']}"], "detail": ""})

    await context.route("**/api/v1/services?probe=true", offer)
    await context.route("**/api/v1/services/*/models", models)
    page = await panel.open("#/start", context=context)
    preset, key = page.locator(".start-form select").first, page.get_by_test_id("start-key")
    status, url = page.get_by_test_id("models-status"), page.get_by_test_id("start-url")
    await expect(status).to_have_text(words("modelsFound", n=1))

    async def enter(text: str) -> None:
        await key.fill(text)
        await key.press("Tab")
        await expect(status).to_have_text(words("modelsFound", n=1))

    await preset.select_option("first")
    await expect(status).to_have_text("")
    await enter("sk-of-the-first")
    await expect(page.get_by_test_id("models")).to_have_count(1)
    await preset.select_option("second")
    await expect(key).to_have_value("")
    await expect(page.get_by_test_id("models")).to_have_count(0)
    await expect(page.get_by_test_id("model")).to_have_value("")
    await enter("sk-of-the-second")
    await preset.select_option("there")
    await expect(page.get_by_test_id("model")).to_have_value("of-There")
    assert [(one["name"], one.get("key"), one.get("apiKey")) for one in asked] == [
        ("There", None, "${THERE_KEY}"),
        ("First", "sk-of-the-first", None),
        ("Second", "sk-of-the-second", None),
        ("There", None, "${THERE_KEY}"),
    ]

    # An address without a preset.
    del asked[:]
    await preset.select_option("other")
    await key.fill("sk-before-the-address")
    await url.fill("http://a.test/v1")
    await url.press("Tab")
    await expect(status).to_have_text(words("modelsFound", n=1))
    await url.fill("http://a.test/v2")
    await url.press("Tab")
    await expect(key).to_have_value("sk-before-the-address")
    await url.fill("http://b.test/v2")
    await url.press("Tab")
    await expect(key).to_have_value("")
    await expect(page.locator(".start-form")).to_contain_text(words("keyAgain"))
    await expect(status).to_have_text(words("modelsFound", n=1))
    sent = {str(one["baseURL"]): one.get("key") for one in asked}
    assert sent == {
        "http://a.test/v1": "sk-before-the-address",
        "http://a.test/v2": "sk-before-the-address",
        "http://b.test/v2": None,
    }
