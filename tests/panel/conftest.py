"""A browser for all tests of the panel, and for each a society of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.panel import chromium
from tests.panel.room import Room, room

HERE = Path(__file__).parent
Figure = Callable[[str], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are slow, and share the loop that the browser was started in."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if isinstance(item, pytest.Function) and item.get_closest_marker("asyncio"):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(autouse=True)
def noted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Which checks of the panel a test stands for, so that the report can name them."""
    for mark in request.node.iter_markers("check"):
        for number in mark.args:
            record_property("check", number)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """What a test measured, for the report."""
    return lambda text: record_property("figure", text)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    if chromium.found() is None:
        why = "there is no chromium: install chromium and fonts-noto-cjk, or name one in COTERIE_CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    async with chromium.launched() as launched:
        yield launched


@pytest_asyncio.fixture(loop_scope="session")
async def panel(browser: Browser, tmp_path: Path) -> AsyncIterator[Room]:
    """What a person can see of a society with Ada, Bob and Seer; no page of it ever complained."""
    async with room(tmp_path, browser) as opened:
        yield opened
        assert await opened.trouble() == []
