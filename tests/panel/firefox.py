"""The installed Firefox, driven by WebDriver BiDi.

Playwright needs its own build of Firefox, or BiDi commands that Debian's Firefox ESR does not have yet. The core
journeys need a few commands only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

NAMES = ("firefox-esr", "firefox")
START_SECONDS = 60
WAIT_MS = 15_000
PREFERENCES = {
    # Requests of Firefox itself end at a proxy that does not exist: the tests use loopback only.
    "network.proxy.type": 1,
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    "network.proxy.no_proxies_on": "127.0.0.1",
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "ui.prefersReducedMotion": 1,
}
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}
_PRESS = ("pointerDown", "pointerUp")
_POLL = """
((milliseconds, holds) => new Promise((resolve) => {
  const until = Date.now() + milliseconds;
  const look = () => {
    const value = holds();
    if (value || Date.now() > until) resolve(Boolean(value));
    else setTimeout(look, 30);
  };
  look();
}))(%d, %s)
"""


def executable() -> str | None:
    return os.environ.get("COTERIE_FIREFOX") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab of Firefox."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._context = ""
        self.errors: list[str] = []
        """Errors of the page: exceptions and what it wrote with `console.error`."""

    async def start(self) -> None:
        await self._command("session.new", capabilities={})
        tree = await self._command("browsingContext.getTree")
        self._context = tree["contexts"][0]["context"]
        await self._command("session.subscribe", events=["log.entryAdded"])
        await self._command(
            "browsingContext.setViewport", context=self._context, viewport={"width": 1280, "height": 800}
        )

    async def open(self, url: str) -> None:
        await self._command("browsingContext.navigate", context=self._context, url=url, wait="complete")

    async def reload(self) -> None:
        await self._command("browsingContext.reload", context=self._context, wait="complete")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression: a string, a number, a boolean or null."""
        answer = await self._command(
            "script.evaluate", expression=expression, target={"context": self._context}, awaitPromise=True
        )
        assert answer["type"] == "success", answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        found = await self.evaluate(_POLL % (WAIT_MS, f"() => ({expression})"))
        assert found, f"this did not become true: {expression}"

    async def until_text(self, selector: str, text: str) -> None:
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        await self.until(f"{elements}.some(el => el.innerText.includes({json.dumps(text)}))")

    async def click(self, selector: str) -> None:
        """Press the mouse on the middle of the first element that matches."""
        await self.until(f"document.querySelector({json.dumps(selector)})")
        place = await self.evaluate(
            f"(() => {{ const el = document.querySelector({json.dumps(selector)});"
            " el.scrollIntoView({block: 'nearest'}); const box = el.getBoundingClientRect();"
            " return `${Math.round(box.x + box.width / 2)} ${Math.round(box.y + box.height / 2)}`; })()"
        )
        x, y = map(int, place.split())
        moves = [{"type": "pointerMove", "x": x, "y": y}, *({"type": kind, "button": 0} for kind in _PRESS)]
        await self._act({"type": "pointer", "id": "mouse", "actions": moves})

    async def type(self, text: str) -> None:
        """Type text, or one of `KEYS`, where the focus is."""
        keys = [KEYS[text]] if text in KEYS else list(text)
        presses = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        await self._act({"type": "key", "id": "keyboard", "actions": presses})

    async def _act(self, *sources: dict[str, Any]) -> None:
        await self._command("input.performActions", context=self._context, actions=list(sources))

    async def _command(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(await asyncio.wait_for(self._socket.recv(), START_SECONDS))
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] == "error":
                self.errors.append(str(answer["params"]["text"]))
            if answer.get("id") == number:
                assert answer["type"] == "success", answer
                return answer["result"]


@asynccontextmanager
async def launch(language: str) -> AsyncIterator[Tab]:
    """Start Firefox with one tab. `language`: what pages are asked for, such as `zh-CN`."""
    program = executable()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        preferences = PREFERENCES | {"intl.accept_languages": language}
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in preferences.items()]
        Path(profile, "user.js").write_text("\n".join(lines))
        process = await asyncio.create_subprocess_exec(
            program, "--headless", "--no-remote", "--remote-debugging-port=0", "--profile", profile, "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            address = await asyncio.wait_for(_address(process), START_SECONDS)
            reading = asyncio.create_task(_discard(process))
            async with connect(f"{address}/session", max_size=None, proxy=None) as socket:
                tab = Tab(socket)
                await tab.start()
                yield tab
            reading.cancel()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(rb"WebDriver BiDi listening on (ws://\S+)", line):
            return found[1].decode()
    raise AssertionError("Firefox ended before it could be reached")


async def _discard(process: asyncio.subprocess.Process) -> None:
    """Read what Firefox writes, so that it never waits for us."""
    assert process.stderr is not None
    async for _ in process.stderr:
        pass
