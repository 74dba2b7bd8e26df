"""One side of a comparison of two panels: a society of a checkout with its web server, in a process of its own.

As a program it is that process: it reads commands as JSON lines and prints one JSON line for each. It imports the
checkout that it runs in, so `tests` and `coterie` may be of another commit than this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from playwright.async_api import Browser, BrowserContext, Page
from tests.panel.harness import WIDE, Panel, open_panel

from coterie.testing import Says

HERE = Path(__file__).resolve().parents[1]
AGENTS = 20
BATCH = 100
"""Messages that are stored together."""
TOKENS = 50
"""Per second and agent."""


# The process


async def serve() -> None:
    agents = "".join(f'[agents.a{n}]\nname = "Agent {n}"\n' for n in range(AGENTS))
    with tempfile.TemporaryDirectory() as folder:
        async with open_panel(Path(folder), cast("Browser", None), agents=agents) as panel:
            loop = asyncio.get_running_loop()
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                print(json.dumps(await _obey(panel, **json.loads(line))), flush=True)


async def _obey(panel: Panel, *, do: str, agents: list[str], count: int) -> str | None:
    match do:
        case "login":
            return panel.login_url()
        case "fill":
            texts = [(agent, f"Message {n}: " + "some words " * (n % 40)) for agent in agents for n in range(count)]
            for start in range(0, len(texts), BATCH):
                some = texts[start : start + BATCH]
                await asyncio.gather(*(panel.send_as_agent(text, by=agent) for agent, text in some))
        case "talk":
            panel.server.default = Says(" ".join(f"word{n}" for n in range(count)), token_delay=1 / TOKENS)
            for agent in agents:
                await panel.society.send(to=agent, text="Talk")
        case "wait":
            for agent in agents:
                await panel.stage.state(agent, "idle")
    return None


# The benchmark's end


class Side:
    """The panel of one checkout, in the browser of the benchmark."""

    def __init__(self, process: asyncio.subprocess.Process, browser: Browser) -> None:
        self._process, self._browser = process, browser
        self.contexts: list[BrowserContext] = []

    async def _ask(self, do: str, agents: list[str], count: int = 0) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, "agents": agents, "count": count}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            sys.exit("bench: the server of one side ended; its error is above")
        return json.loads(line)

    async def fill(self, agents: list[str], count: int) -> None:
        """Store `count` messages from each agent to the person."""
        await self._ask("fill", agents, count)

    async def talk(self, agents: list[str], words: int) -> None:
        """Let each agent write a reply of so many words, 50 per second."""
        await self._ask("talk", agents, words)

    async def wait(self, agents: list[str]) -> None:
        """Wait until all are idle."""
        await self._ask("wait", agents)

    async def context(self) -> tuple[BrowserContext, str]:
        """A logged-in browser context, and the address of the panel."""
        context = await self._browser.new_context(
            viewport=cast("Any", WIDE), locale="en-US", reduced_motion="reduce", service_workers="block"
        )
        self.contexts.append(context)
        login = str(await self._ask("login", []))
        await context.request.get(login)
        return context, login.split("/?")[0]

    async def open(self, fragment: str) -> Page:
        context, url = await self.context()
        page = await context.new_page()
        await page.goto(f"{url}/#/{fragment}")
        await page.wait_for_selector("[data-ready]")
        return page

    async def close_pages(self) -> None:
        while self.contexts:
            await self.contexts.pop().close()


@asynccontextmanager
async def started(checkout: Path, browser: Browser) -> AsyncIterator[Side]:
    """Start the server of a checkout, with its own environment if it has one."""
    own = checkout / ".venv" / "bin" / "python"
    python = str(own) if checkout != HERE and own.exists() else sys.executable
    path = os.pathsep.join((str(checkout), str(checkout / "src")))
    process = await asyncio.create_subprocess_exec(
        # -P: the folder of this file has modules with names of the standard library.
        python, "-P", __file__, cwd=checkout, env=os.environ | {"PYTHONPATH": path},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    side = Side(process, browser)
    try:
        yield side
    finally:
        await side.close_pages()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(serve())
