"""Collects errors of a page during a test."""

from __future__ import annotations

import re

from playwright.async_api import BrowserContext, ConsoleMessage, Dialog, Page, Request, WebError

WATCH = """
window.__violations = [];
addEventListener('securitypolicyviolation', e =>
  __violations.push(`${e.effectiveDirective} ${e.blockedURI} ${e.sample}`));
"""
_LEVELS = ("error", "warning")


class PageErrors:
    """Console errors, uncaught exceptions, dialogs, requests to other origins, policy violations."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.found: list[str] = []
        self._origin, self._allowed = origin, list[re.Pattern[str]]()
        self._context = context
        context.on("console", self._on_console)
        context.on("weberror", self._on_exception)
        context.on("request", self._on_request)
        context.on("dialog", self._on_dialog)
        context.on("page", self._on_page)

    def allow(self, pattern: str) -> None:
        """Ignore errors that match. A browser logs every failed request to its console."""
        self._allowed.append(re.compile(pattern))

    async def all(self) -> list[str]:
        for page in self._context.pages:
            for violation in await page.evaluate("() => window.__violations || []"):
                self._note(f"policy: {violation}")
        return self.found

    def _note(self, what: str) -> None:
        if not any(pattern.search(what) for pattern in self._allowed):
            self.found.append(what)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in _LEVELS:
            self._note(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _on_exception(self, error: WebError) -> None:
        self._note(f"uncaught: {error.error}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self._origin, "blob:", "data:", "about:")):
            self._note(f"request to {request.url}")

    async def _on_dialog(self, dialog: Dialog) -> None:
        self._note(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _on_page(self, page: Page) -> None:
        page.on("crash", lambda _: self._note("the page crashed"))
