"""The live event stream."""

from __future__ import annotations

import asyncio
from typing import Annotated, cast

from fastapi import Header, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.web.connections import HANG_UP
from coterie.web.routing import COMMON_PROBLEMS, Router
from coterie.web.sse import Hub

router = Router(tags=["events"], responses=COMMON_PROBLEMS)

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, hub: Hub, last_event_id: str | None) -> None:
        self._hub, self._last_event_id = hub, last_event_id
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        serving = asyncio.create_task(self._hub.serve(write, self._last_event_id), name="coterie-stream-client")
        disconnected = asyncio.create_task(_disconnected(receive), name="coterie-stream-disconnect")
        try:
            await asyncio.wait({serving, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            disconnected.cancel()
            result, _ = await asyncio.gather(serving, disconnected, return_exceptions=True)
        if result is None:
            await send({"type": "http.response.body", "body": b""})
        elif not isinstance(result, asyncio.CancelledError):
            raise result
        elif hang_up := scope.get("extensions", {}).get(HANG_UP):
            # The client reads nothing any more, so it would not read a proper end either.
            hang_up["now"]()
            await _disconnected(receive)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/events",
    summary="Stream events as they happen",
    responses={
        200: {"description": "Server-sent events", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    },
)
async def stream_events(
    request: Request,
    last_event_id: Annotated[str | None, Header(max_length=200)] = None,
    last: Annotated[str | None, Query(alias="lastEventId", max_length=200)] = None,
) -> Response:
    """Continues after `Last-Event-ID`, or after `lastEventId` for pages that cannot set headers."""
    return EventStream(cast(Hub, request.app.state.hub), last_event_id or last)
