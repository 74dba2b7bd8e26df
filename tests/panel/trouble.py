"""Whatever a page must never do, noted while a test looks at something else."""

from __future__ import annotations

import re

from playwright.async_api import BrowserContext, ConsoleMessage, Dialog, Page, Request, WebError

WATCH = """
window.__violations = [];
addEventListener('securitypolicyviolation', e =>
  __violations.push(`${e.effectiveDirective} ${e.blockedURI} ${e.sample}`));
"""
_LOUD = ("error", "warning")


class Trouble:
    """Console errors, uncaught exceptions, dialogs, requests to anybody else, reports of the page's own policy."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.found: list[str] = []
        self._origin, self._allowed = origin, list[re.Pattern[str]]()
        self._context = context
        context.on("console", self._said)
        context.on("weberror", self._threw)
        context.on("request", self._asked)
        context.on("dialog", self._dialog)
        context.on("page", self._opened)

    def allow(self, pattern: str) -> None:
        """For tests that break something: a browser tells of every failed request in its console."""
        self._allowed.append(re.compile(pattern))

    async def all(self) -> list[str]:
        for page in self._context.pages:
            for violation in await page.evaluate("() => window.__violations || []"):
                self._note(f"policy: {violation}")
        return self.found

    def _note(self, what: str) -> None:
        if not any(pattern.search(what) for pattern in self._allowed):
            self.found.append(what)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in _LOUD:
            self._note(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _threw(self, error: WebError) -> None:
        self._note(f"uncaught: {error.error}")

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self._origin, "blob:", "data:", "about:")):
            self._note(f"request to {request.url}")

    async def _dialog(self, dialog: Dialog) -> None:
        self._note(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _opened(self, page: Page) -> None:
        page.on("crash", lambda _: self._note("the page crashed"))
