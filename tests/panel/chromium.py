"""The installed Chromium of the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The shell first: it has the same engine without Chromium's own user interface, and needs a third less time."""
FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
]
"""No requests of Chromium itself: the tests use loopback only."""


def executable() -> str | None:
    return os.environ.get("COTERIE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@asynccontextmanager
async def launch() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable(), chromium_sandbox=False, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()
