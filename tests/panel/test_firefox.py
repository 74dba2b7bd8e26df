"""The core journeys in Firefox, the second engine. The other tests of the panel use Chromium."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from coterie.testing import Calls, Says
from tests.agent.stage import TOOLS, Bell
from tests.panel import firefox, ui
from tests.panel.conftest import SKIP_VARIABLE
from tests.panel.harness import AGENTS, Panel, eventually, open_panel
from tests.panel.test_truth import PAYMENT

pytestmark = pytest.mark.full
WORDS = {
    "en-US": {"withdraw": "Unsend", "approve": "Approve", "stopped": "Stopped", "tasks": "Tasks"},
    "zh-CN": {"withdraw": "撤回", "approve": "批准", "stopped": "已停止", "tasks": "任务"},
}
THEIRS, MINE = f"{ui.FEED} .msg-theirs", f"{ui.FEED} .msg-mine"


@pytest_asyncio.fixture(loop_scope="session")
async def panel(browser: Browser, tmp_path: Path) -> AsyncIterator[Panel]:
    if firefox.executable() is None:
        why = "no Firefox found: install firefox-esr, or set COTERIE_FIREFOX"
        if os.environ.get(SKIP_VARIABLE) == "1":
            pytest.skip(why)
        pytest.fail(why)
    async with open_panel(tmp_path, browser, agents=AGENTS, tools=TOOLS + PAYMENT) as opened:
        yield opened


async def enter(tab: firefox.Tab, panel: Panel) -> None:
    await tab.open(panel.login_url())
    await tab.open(f"{panel.url}/#/a/ada")
    await tab.until("document.querySelector('[data-ready]')")


async def say(tab: firefox.Tab, text: str) -> None:
    await tab.click(ui.COMPOSER)
    await tab.type(text)
    await tab.type("Enter")


@pytest.mark.parametrize("language", WORDS)
async def test_a_conversation_with_quick_replies_in_firefox(panel: Panel, language: str) -> None:
    panel.server.script("It is **done**.", "Tea then.")
    async with firefox.launch(language) as tab:
        await enter(tab, panel)
        await tab.until_text('[data-testid="link-tasks"]', WORDS[language]["tasks"])
        await say(tab, "Is it done?")
        await tab.until_text(f"{THEIRS} strong", "done")
        question = await panel.send_as_agent("Tea or coffee?", "Tea", "Coffee")
        options = f'.quick-replies[data-message-id="{question}"] .quick-reply-btn'
        await tab.click(f'{options}[data-index="0"]')
        await tab.until_text(THEIRS, "Tea then.")
        assert await panel.texts() == ["Is it done?", "Tea"]
        await tab.reload()
        await tab.until_text(THEIRS, "Tea then.")
        await tab.until(f"!document.querySelector('{options}:not([aria-disabled=true])')")
        assert tab.errors == []


@pytest.mark.parametrize("language", WORDS)
async def test_queueing_unsending_and_stopping_in_firefox(panel: Panel, language: str) -> None:
    Bell.may_end.clear()
    Bell.rang.clear()
    panel.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "The end")
    async with firefox.launch(language) as tab:
        await enter(tab, panel)
        await say(tab, "Ring")
        await asyncio.wait_for(Bell.rang.wait(), 20)
        await say(tab, "And wait")
        await tab.until_text(ui.WAITING, "And wait")
        await tab.until_text(f"{ui.WAITING} button", WORDS[language]["withdraw"])  # until then: "Sending"
        await tab.click(f"{ui.WAITING} button")
        await tab.until(f"!document.querySelector('{ui.WAITING}')")
        await tab.click(ui.SEND)  # without text, the button stops the agent
        await panel.stage.state("ada", "idle")
        assert await panel.texts() == ["Ring"]
        assert tab.errors == []
    Bell.may_end.set()


@pytest.mark.parametrize("language", WORDS)
async def test_asking_about_an_approval_and_approving_in_firefox(panel: Panel, language: str) -> None:
    Bell.may_end.set()
    payment = Calls("pay", {"amount": 5, "recipient": "ACME", "memo": "rent"})
    panel.server.script(Says(calls=(payment,)), "It is the rent.", "Paid.")
    async with firefox.launch(language) as tab:
        await enter(tab, panel)
        await say(tab, "Pay it")
        await tab.until_text(".qr-approve", WORDS[language]["approve"])
        await say(tab, "What is it for?")
        await tab.until_text(THEIRS, "It is the rent.")
        assert Bell.rings == []
        await tab.click(".qr-approve")
        await tab.until_text(THEIRS, "Paid.")
        assert Bell.rings == ["pay"]
        assert tab.errors == []


async def test_the_page_recovers_from_a_dropped_stream_in_firefox(panel: Panel) -> None:
    async with firefox.launch("en-US") as tab:
        await enter(tab, panel)

        async def is_connected() -> bool:
            return panel.streams == 1

        await eventually(is_connected)
        panel.drop_streams()
        await panel.send_as_agent("Sent while the stream was down")
        await tab.until_text(THEIRS, "Sent while the stream was down")
