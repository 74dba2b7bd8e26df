"""The live event stream."""

from __future__ import annotations

import asyncio
from typing import Annotated, cast

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.web.connections import HANG_UP
from coterie.web.endpoint import COMMON
from coterie.web.sse import Hub

router = APIRouter(tags=["events"], responses=COMMON)

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

        telling = asyncio.create_task(self._hub.serve(write, self._last_event_id), name="coterie-stream-client")
        leaving = asyncio.create_task(_left(receive), name="coterie-stream-leaving")
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            telling.cancel()
            leaving.cancel()
            outcome, _ = await asyncio.gather(telling, leaving, return_exceptions=True)
        if outcome is None:
            await send({"type": "http.response.body", "body": b""})
        elif not isinstance(outcome, asyncio.CancelledError):
            raise outcome
        elif hang_up := scope.get("extensions", {}).get(HANG_UP):
            # It takes nothing any more, so neither would it take a proper end.
            hang_up["now"]()
            await _left(receive)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/events",
    summary="Whatever happens, as it happens",
    response_class=Response,
    responses={200: {"description": "Server-sent events", "content": {"text/event-stream": {"schema": {}}}}},
)
async def events(
    request: Request,
    last_event_id: Annotated[str | None, Header(max_length=200)] = None,
    last: Annotated[str | None, Query(alias="lastEventId", max_length=200)] = None,
) -> Response:
    """Goes on behind `Last-Event-ID`, or `lastEventId` where a page cannot set headers."""
    return EventStream(cast(Hub, request.app.state.hub), last_event_id or last)
