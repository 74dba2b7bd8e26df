"""A society with a stand-in model server, and tools whose beginning and end a test holds in its hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Set
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
    """An event of the test's loop that tools, which run on another loop, can set and wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._home = asyncio.get_running_loop()

    async def set_and_wait_for(self, other: asyncio.Event) -> None:
        """Set this one and wait for the other, from any loop."""

        async def here() -> None:
            self.set()
            await other.wait()

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(here(), self._home))


class Bell:
    """Which tools ran, and whether they may end."""

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
    def __init__(self, society: Society, server: ModelServer) -> None:
        self.society, self.server = society, server

    async def say(self, text: str, to: str = "ada", **more: Any) -> str:
        return (await self.society.send(to=to, text=text, **more)).message_id

    async def heard(self, count: int = 1) -> list[Message]:
        """The first `count` messages to the person."""
        messages: list[Message] = []
        async with contextlib.aclosing(self.society.inbox()) as inbox:
            async for message in inbox:
                messages.append(message)
                if len(messages) == count:
                    break
        return messages

    async def texts(self, count: int = 1) -> list[str]:
        return [message.payload["text"] for message in await self.heard(count)]

    async def until(self, holds: Callable[[], Any]) -> None:
        """Until the coroutine that `holds` makes says so; looked at after every event."""
        async with self.society.bus.watch() as watcher:
            while not await holds():
                await anext(watcher)

    async def state(self, agent: str, *states: str) -> None:
        async def is_there() -> bool:
            found = await self.society.store.agent(agent)
            return found is not None and found.state in states

        await self.until(is_there)

    async def history(self, agent: str = "ada") -> list[tuple[str, str]]:
        return [(row.role, spoken(row)) for row in await self.society.store.history(agent)]

    def roles_asked(self, index: int) -> list[str]:
        """The roles that the server saw in its `index`-th request, without the system's."""
        return [message["role"] for message in self.server.requests[index].body["messages"][1:]]


def each(**replies: list[Reply]) -> Callable[[ReceivedRequest], Reply]:
    """What each agent's model says, in order: agents work side by side, so nobody knows who asks first."""
    left = {agent: iter(said) for agent, said in replies.items()}

    def answer(request: ReceivedRequest) -> Reply:
        asking = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
        assert asking is not None
        return next(left[asking[1]])

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
    **entry: Any,
) -> AsyncIterator[Stage]:
    """`window`: how many tokens the model takes; `entry`: more of its entry in llmservices.json.

    `unknown_keys`: of a request, those that the service refuses. Without `stream_options` it reports no usage.
    """
    Bell.reset()
    async with ModelServer(context_tokens=window, unknown_keys=unknown_keys) as server:
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"} | entry]
        (folder / "coterie.toml").write_text(agents)
        (folder / "llmservices.json").write_text(json.dumps({"services": services}))
        (folder / "tools.py").write_text(TOOLS)
        async with Society.open(folder, clock=clock) as society:
            yield Stage(society, server)
            assert server.refused == []
            Bell.may_end.set()
        async with Society.open(folder, clock=clock, work=False) as society:
            assert [violation async for violation in society.store.violations()] == []
