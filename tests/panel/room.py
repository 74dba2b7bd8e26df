"""A society behind its door, and browsers that look at it: everything in one loop, so a test holds all the strings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from playwright.async_api import Browser, BrowserContext, Error, Locator, Page, Route

from coterie.clock import SystemClock
from coterie.messages import Message
from coterie.testing import Calls, Says
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.server import WebServer, listen, port_of
from tests.agent.stage import Stage, stage
from tests.panel.trouble import WATCH, Trouble

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
_TOKEN = "a-token-of-the-tests-0123456789abcdef"


class Room:
    """One person, at one browser, who may open many tabs."""

    def __init__(self, there: Stage, app: FastAPI, url: str, door: Access, browser: Browser) -> None:
        self.stage, self.app, self.url, self._door, self._browser = there, app, url, door, browser
        self.society, self.server = there.society, there.server
        self.watched: list[tuple[BrowserContext, Trouble]] = []

    # Browsers

    async def browser(self, **settings: Any) -> BrowserContext:
        """A browser that was let in; `settings` as Playwright's: viewport, locale, color_scheme …"""
        options: dict[str, Any] = {"viewport": WIDE, "locale": "en-US", "reduced_motion": "reduce"} | settings
        context = await self._browser.new_context(**options)
        context.set_default_timeout(8_000)
        await context.add_init_script(WATCH)
        self.watched.append((context, Trouble(context, self.url)))
        await context.request.get(f"{self.url}/?code={self._door.new_code()}")
        return context

    async def open(self, place: str = "#/a/ada", *, context: BrowserContext | None = None, **settings: Any) -> Page:
        """A tab that shows `place`, ready to be used; in a new browser unless one is given."""
        context = context or await self.browser(**settings)
        page = await context.new_page()
        await page.goto(f"{self.url}/{place}")
        await page.wait_for_selector("[data-ready]")
        return page

    def allow(self, pattern: str) -> None:
        for _, trouble in self.watched:
            trouble.allow(pattern)

    async def trouble(self) -> list[str]:
        return [one for _, trouble in self.watched for one in await trouble.all()]

    async def close(self) -> None:
        for context, _ in self.watched:
            await context.close()

    # The society

    async def tell(self, text: str, *options: str, by: str = "ada", to: str = "user", **payload: Any) -> str:
        """A message of an agent's, without a turn of its model."""
        sent = await self.society.bus.send(
            sender=by, to=to, payload={"text": text, **payload}, quick_replies=list(options) or None
        )
        return sent.message_id

    async def hire(self) -> None:
        """Ada makes somebody new: Pia, who reads proofs."""
        role = {"name": "proof-reader", "prompt": "You read proofs."}
        made = {"role": "proof-reader", "name": "Pia", "id": "pia"}
        self.server.script(Says(calls=(Calls("create_role", role), Calls("spawn_agent", made))), "Done")
        await self.tell("Find somebody who reads proofs", by="bob", to="ada")
        await self.stage.state("ada", "idle")

    async def said(self, agent: str = "ada", by: str = "user") -> list[Message]:
        """What one side said in a conversation, withdrawn words left out."""
        thread = await self.society.store.thread(agent, limit=200)
        return [one for one in thread if one.sender == by and one.state != "withdrawn"]

    async def texts(self, agent: str = "ada", by: str = "user") -> list[str]:
        return [str(one.payload.get("text", "")) for one in await self.said(agent, by)]

    def drop_streams(self) -> int:
        """Every event stream is cut, as by a proxy that restarts."""
        clients = [client for client in self.app.state.hub.clients if client.is_live]
        for client in clients:
            client.drop()
        return len(clients)

    @property
    def streams(self) -> int:
        """Those that have caught up."""
        return sum(client.is_live for client in self.app.state.hub.clients)


class Held:
    """Requests that never reach the server, and get no answer until a test says so."""

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
        with contextlib.suppress(Error):  # the page that asked may be gone
            await route.abort()


async def fails(page: Page, status: int | None, *, path: str = "**/api/v1/messages", method: str = "POST") -> None:
    """Such requests are answered with that status; None: the connection is refused."""

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


def bodies(page: Page, *, path: str = "/api/v1/messages", method: str = "POST") -> list[Any]:
    """What the page sends there, from now on."""
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


async def eventually(holds: Any, *, seconds: float = 5.0) -> None:
    """Until the coroutine function says so. Polled: what it looks at lies in another process."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not await holds():
        assert loop.time() < until, "it never came to that"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def room(folder: Path, browser: Browser, **settings: Any) -> AsyncIterator[Room]:
    """`settings` as those of `stage`."""
    async with stage(folder, **({"agents": AGENTS} | settings)) as there:
        clock, sockets = SystemClock(), listen("127.0.0.1", 0)
        port = port_of(sockets)
        door = Access(_TOKEN, there.society.store.info.log_id, clock)
        app = build_app(there.society, door, where=addresses("127.0.0.1", port), clock=clock)
        server = WebServer(app, sockets)
        await server.start()
        opened = Room(there, app, f"http://127.0.0.1:{port}", door, browser)
        try:
            yield opened
        finally:
            await opened.close()
            await app.state.hub.shut_down(0)
            await server.stop()
