"""A society with its web server and browsers, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, BrowserContext, Error, Locator, Page, Route, expect
from starlette.applications import Starlette

from coterie.clock import SystemClock
from coterie.messages import Message
from coterie.testing import Calls, Says
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.server import WebServer, listen, port_of
from tests.agent.stage import Stage, stage
from tests.panel.page_errors import WATCH, PageErrors

AGENTS = """
[agents.ada]
name = "Ada"
[agents.bob]
name = "Bob"
[agents.seer]
name = "Seer"
parent = "ada"
"""
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
TIMEOUT_SECONDS = 60.0
"""Ends a test that hangs; generous for slow machines."""
expect.set_options(timeout=TIMEOUT_SECONDS * 1000)
_TOKEN = "a-token-of-the-tests-0123456789abcdef"


class Panel:
    """A running panel of one society, with the browser contexts that a test opens."""

    def __init__(self, there: Stage, app: Starlette, url: str, access: Access, browser: Browser) -> None:
        self.stage, self.app, self.url, self._access, self._browser = there, app, url, access, browser
        self.society, self.server = there.society, there.server
        self.contexts: list[tuple[BrowserContext, PageErrors]] = []

    # Browsers

    async def browser(self, **settings: Any) -> BrowserContext:
        """A logged-in browser context. `settings` are those of Playwright: viewport, locale, color_scheme …"""
        options: dict[str, Any] = {"viewport": WIDE, "locale": "en-US", "reduced_motion": "reduce"}
        options |= {"service_workers": "block"} | settings
        context = await self._browser.new_context(**options)
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        await context.add_init_script(WATCH)
        errors = PageErrors(context, self.url)
        errors.allow("Service Worker registration blocked by Playwright")
        self.contexts.append((context, errors))
        await context.request.get(self.login_url())
        return context

    def login_url(self) -> str:
        """An address that logs a browser in, once."""
        return f"{self.url}/?code={self._access.new_code()}"

    async def open(self, fragment: str = "#/a/ada", *, context: BrowserContext | None = None, **settings: Any) -> Page:
        """Open a tab at `fragment` and wait until it is ready; in a new context unless one is given."""
        context = context or await self.browser(**settings)
        page = await context.new_page()
        await page.goto(f"{self.url}/{fragment}")
        await page.wait_for_selector("[data-ready]")
        return page

    def allow(self, pattern: str) -> None:
        for _, errors in self.contexts:
            errors.allow(pattern)

    async def errors(self) -> list[str]:
        return [error for _, errors in self.contexts for error in await errors.all()]

    async def close(self) -> None:
        for context, _ in self.contexts:
            await context.close()

    # The society

    async def send_as_agent(self, text: str, *options: str, by: str = "ada", to: str = "user", **payload: Any) -> str:
        """Send a message of an agent, without a turn."""
        sent = await self.society.bus.send(
            sender=by, to=to, payload={"text": text, **payload}, quick_replies=list(options) or None
        )
        return sent.message_id

    async def spawn_child(self) -> None:
        """Let ada create the agent Pia."""
        role = {"name": "proof-reader", "prompt": "You read proofs."}
        made = {"role": "proof-reader", "name": "Pia", "id": "pia"}
        self.server.script(Says(calls=(Calls("create_role", role), Calls("spawn_agent", made))), "Done")
        await self.send_as_agent("Create an agent that reads proofs", by="bob", to="ada")
        await self.stage.state("ada", "idle")

    async def sent(self, agent: str = "ada", by: str = "user") -> list[Message]:
        """Messages of one side of a thread, without withdrawn ones."""
        thread = await self.society.store.thread(agent, limit=200)
        return [message for message in thread if message.sender == by and message.state != "withdrawn"]

    async def texts(self, agent: str = "ada", by: str = "user") -> list[str]:
        return [str(message.payload.get("text", "")) for message in await self.sent(agent, by)]

    def drop_streams(self) -> int:
        """Cut every event stream, as a restart of a proxy does."""
        clients = [client for client in self.app.state.hub.clients if client.is_live]
        for client in clients:
            client.drop()
        return len(clients)

    @property
    def streams(self) -> int:
        """Number of event streams that have received the backlog."""
        return sum(client.is_live for client in self.app.state.hub.clients)


class Held:
    """Route handler that holds POST requests until `may_end` is set, and then aborts them."""

    def __init__(self) -> None:
        self.arrived, self.may_end = asyncio.Event(), asyncio.Event()
        self.bodies: list[Any] = []

    async def __call__(self, route: Route) -> None:
        if route.request.method != "POST":
            await route.continue_()
            return
        self.bodies.append(route.request.post_data_json)
        self.arrived.set()
        await self.may_end.wait()
        with contextlib.suppress(Error):  # the page may be closed
            await route.abort()


async def fail_requests(
    page: Page, status: int | None, *, path: str = "**/api/v1/messages", method: str = "POST"
) -> None:
    """Answer matching requests with `status`; None: refuse the connection."""

    async def answer(route: Route) -> None:
        if route.request.method != method:
            await route.continue_()
        elif status is None:
            await route.abort("connectionrefused")
        else:
            problem = {
                "type": "about:blank",
                "title": "x",
                "status": status,
                "code": "store_unavailable",
                "detail": "x",
            }
            await route.fulfill(status=status, json=problem, content_type="application/problem+json")

    await page.route(path, answer)


def record_bodies(page: Page, *, path: str = "/api/v1/messages", method: str = "POST") -> list[Any]:
    """Return a list that collects the bodies of matching requests from now on."""
    sent: list[Any] = []

    def note(request: Any) -> None:
        if request.method == method and request.url.endswith(path):
            sent.append(request.post_data_json)

    page.on("request", note)
    return sent


def options_of(page: Page, message_id: str) -> Locator:
    return page.locator(f'.quick-replies[data-message-id="{message_id}"] .quick-reply-btn')


async def texts_of(found: Locator) -> Sequence[str]:
    return await found.all_inner_texts()


async def eventually(holds: Any) -> None:
    """Wait until the coroutine function returns true. It polls, because the state is in the browser."""
    loop = asyncio.get_running_loop()
    until = loop.time() + TIMEOUT_SECONDS
    while not await holds():
        assert loop.time() < until, "the condition did not become true"
        await asyncio.sleep(0.02)


async def eventually_in(page: Page, script: str, arg: Any = None) -> None:
    """Wait until an async function returns true in the page; `wait_for_function` takes its promise for true."""

    async def holds() -> bool:
        return bool(await page.evaluate(script, arg))

    await eventually(holds)


async def without_model(panel: Panel) -> None:
    """Remove all model services, so that the tour answers."""
    (panel.stage.folder / "llmservices.json").write_text('{"services": []}')
    await panel.society.reload()


@asynccontextmanager
async def open_panel(folder: Path, browser: Browser, **settings: Any) -> AsyncIterator[Panel]:
    """Start a society with its panel. `settings` are those of `stage`."""
    async with stage(folder, **({"agents": AGENTS} | settings)) as there:
        clock, sockets = SystemClock(), listen("127.0.0.1", 0)
        port = port_of(sockets)
        access = Access(_TOKEN, there.society.store.info.log_id, clock)
        app = build_app(there.society, access, where=addresses("127.0.0.1", port), clock=clock)
        server = WebServer(app, sockets)
        await server.start()
        opened = Panel(there, app, f"http://127.0.0.1:{port}", access, browser)
        try:
            yield opened
        finally:
            await opened.close()
            await app.state.hub.shut_down(0)
            await server.stop()
