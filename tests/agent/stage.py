"""A society with a fake model server, and tools that start and end under the control of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from coterie import Message, Society
from coterie.clock import Clock
from coterie.testing import ModelServer
from coterie.testing.model_server import ReceivedRequest, Reply
from coterie.turn_store import HistoryRow

TOOLS = """
from coterie import tool
from tests.agent.stage import Bell

@tool
async def ring(name: str) -> str:
    "Ring a bell."
    return await Bell.rung(name)

@tool(effect="pure")
async def look(name: str = "x") -> str:
    "Look at a bell."
    return await Bell.rung(name)

@tool(approval=True)
async def dangerous(name: str) -> str:
    "Do something that cannot be undone."
    return await Bell.rung(name)
"""


class Signal(asyncio.Event):
    """An event of the loop of the test. Tools on another loop can set it and wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._home = asyncio.get_running_loop()

    async def set_and_wait_for(self, other: asyncio.Event) -> None:
        """Set this event and wait for the other one, from any loop."""

        async def here() -> None:
            self.set()
            await other.wait()

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(here(), self._home))


class Bell:
    """Records the calls of the tools, and holds them until `may_end` is set."""

    rings: list[str]
    rang: Signal
    may_end: Signal

    @classmethod
    def reset(cls) -> None:
        cls.rings, cls.rang, cls.may_end = [], Signal(), Signal()
        cls.may_end.set()

    @classmethod
    async def rung(cls, name: str) -> str:
        cls.rings.append(name)
        await cls.rang.set_and_wait_for(cls.may_end)
        return f"{name} rang"


class Stage:
    def __init__(self, society: Society, server: ModelServer, folder: Path = Path()) -> None:
        self.society, self.server, self.folder = society, server, folder

    async def say(self, text: str, to: str = "ada", **more: Any) -> str:
        return (await self.society.send(to=to, text=text, **more)).message_id

    async def heard(self, count: int = 1) -> list[Message]:
        """Wait for the first `count` messages to the person."""
        messages: list[Message] = []
        async with contextlib.aclosing(self.society.inbox(mark_read=False)) as inbox:
            async for message in inbox:
                messages.append(message)
                if len(messages) == count:
                    break
        return messages

    async def texts(self, count: int = 1) -> list[str]:
        return [message.payload["text"] for message in await self.heard(count)]

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until `holds()` is true; checked after every event."""
        async with self.society.bus.watch() as watcher:
            while not await holds():
                await anext(watcher)

    async def state(self, agent: str, *states: str) -> None:
        async def is_there() -> bool:
            found = await self.society.store.agent(agent)
            return found is not None and found.state in states

        await self.until(is_there)

    async def ended(self, task: str) -> None:
        """Wait until the task does not work."""

        async def is_there() -> bool:
            return (await self.society.task(task)).task.state != "working"

        await self.until(is_there)

    async def history(self, agent: str = "ada") -> list[tuple[str, str]]:
        return [(row.role, spoken(row)) for row in await self.society.store.history(agent)]

    def roles_asked(self, index: int) -> list[str]:
        """Return the roles of the messages in request `index`, without the system message."""
        return [message["role"] for message in self.server.requests[index].body["messages"][1:]]


def each(**replies: list[Reply]) -> Callable[[ReceivedRequest], Reply]:
    """Script the replies per agent, because agents ask in any order."""
    remaining = {agent: iter(script) for agent, script in replies.items()}

    def answer(request: ReceivedRequest) -> Reply:
        asking = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
        assert asking is not None
        return next(remaining[asking[1]])

    return answer


def spoken(row: HistoryRow) -> str:
    if row.message is not None:
        return str(row.message.payload.get("text", ""))
    return " ".join([row.text, *(call.name for call in row.calls)]).strip()


@contextlib.asynccontextmanager
async def stage(
    folder: Path,
    *,
    agents: str = "[agents.ada]\n[agents.bob]\n",
    clock: Clock | None = None,
    window: int | None = None,
    unknown_keys: Set[str] = frozenset(),
    tools: str = TOOLS,
    services: Sequence[Mapping[str, Any]] = (),
    **entry: Any,
) -> AsyncIterator[Stage]:
    """Run a society. Afterwards check that the server refused nothing and that no invariant is violated.

    `window`: context window of the model, in tokens. `entry`: more keys of its entry in llmservices.json.
    `unknown_keys`: keys of a request that the service refuses. `tools`: the content of tools.py. `services`: more
    entries, on the same server.
    """
    Bell.reset()
    async with ModelServer(context_tokens=window, unknown_keys=unknown_keys) as server:
        entries = [{"baseURL": server.base_url, **one} for one in ({"id": "main", "model": "m"} | entry, *services)]
        (folder / "coterie.toml").write_text(agents)
        (folder / "llmservices.json").write_text(json.dumps({"services": entries}))
        (folder / "tools.py").write_text(tools)
        async with Society.open(folder, clock=clock) as society:
            yield Stage(society, server, folder)
            assert server.refused == []
            Bell.may_end.set()
        async with Society.open(folder, clock=clock, work=False) as society:
            assert [violation async for violation in society.store.violations()] == []
