"""A scripted answer of a model that stays unfinished until the test or the client ends it."""

from __future__ import annotations

import asyncio

from coterie.testing.model_server import CustomReply, ReceivedRequest, Reply, ServerConnection, chunk


class HeldAnswer:
    """Streams `said`, then waits for `may_end` or for the client to close the connection."""

    def __init__(self, said: str = "The answer begins", rest: str = " and ends.") -> None:
        self.said, self._rest = said, rest
        self.may_end, self.closed = asyncio.Event(), asyncio.Event()

    def __call__(self, request: ReceivedRequest) -> Reply:
        return CustomReply(self.stream)

    async def stream(self, wire: ServerConnection) -> None:
        await wire.begin()
        if self.said:
            await wire.event(chunk({"role": "assistant", "content": self.said}))
        closing, ending = asyncio.create_task(wire.wait_for_close()), asyncio.create_task(self.may_end.wait())
        await asyncio.wait({closing, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if closing.done():
            self.closed.set()
            return
        closing.cancel()
        await wire.event(chunk({"content": self._rest}, "stop"))
        await wire.event("[DONE]")
