"""One browser for all tests of the panel; each test has its own society."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.panel import chromium
from tests.panel.harness import Panel, open_panel
from tests.panel.words import LOCALES, Words

HERE = Path(__file__).parent
SKIP_VARIABLE = "COTERIE_SKIP_PANEL_TESTS"
"""1: skip the tests of the panel if there is no browser. Otherwise a missing browser is a failure."""
BOTH_LANGUAGES = ("test_whole.py", "test_details.py")
"""Files whose Chinese runs belong to every change: they show every screen, and translated errors."""
Figure = Callable[[str], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests as slow, and most runs in Chinese as full; run them in the event loop of the browser."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if LOCALES[1] in params.values() and item.path.name not in BOTH_LANGUAGES:
                item.add_marker(pytest.mark.full)
            if isinstance(item, pytest.Function) and item.get_closest_marker("asyncio"):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(autouse=True)
def recorded_checks(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record the acceptance checks that a test covers, for the report."""
    for mark in request.node.iter_markers("check"):
        for number in mark.args:
            record_property("check", number)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Records a measured figure for the report."""
    return lambda text: record_property("figure", text)


@pytest.fixture(params=LOCALES)
def words(request: pytest.FixtureRequest) -> Words:
    """The texts of the page. A test that uses them runs in each language (in Chinese in the long runs only;
    `test_whole.py` shows every screen in both); it opens its pages with `words.locale`."""
    return Words(request.param)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    if chromium.executable() is None:
        why = "no browser found: install chromium and fonts-noto-cjk, or set COTERIE_CHROMIUM"
        if os.environ.get(SKIP_VARIABLE) == "1":
            pytest.skip(f"{why}; {SKIP_VARIABLE}=1")
        pytest.fail(f"{why}; to leave out the tests of the panel, set {SKIP_VARIABLE}=1")
    async with chromium.launch() as launched:
        yield launched


@pytest_asyncio.fixture(loop_scope="session")
async def panel(browser: Browser, tmp_path: Path) -> AsyncIterator[Panel]:
    """The panel of a society with Ada, Bob and Seer. Fails if a page had errors."""
    async with open_panel(tmp_path, browser) as opened:
        yield opened
        assert await opened.errors() == []
