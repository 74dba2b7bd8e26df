"""The addresses of A2A: passes requests to the routes of the SDK, which are built with the first request.

The SDK is an extra, and slow to import. Without it the addresses say how to install it.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from coterie.society import Society
from coterie.task_following import TaskFollowing
from coterie.web.a2a.push import PushSender
from coterie.web.auth import caller_of
from coterie.web.caller_scope import CallerScope
from coterie.web.errors import RequestRejected

if TYPE_CHECKING:
    from a2a.server.context import ServerCallContext

    from coterie.web.a2a.handler import SocietyRequestHandler

CARD = "/.well-known/agent-card.json"
PATHS = {"/a2a/{path:path}": ("GET", "POST", "DELETE"), CARD: ("GET",)}
"""The addresses of the door, with their methods."""
AGENT = "/a2a/{agent}"


class A2aDoor:
    """An ASGI application behind the security middleware, which checks host, token, origin and limits."""

    def __init__(self, society: Society, following: TaskFollowing, url: str) -> None:
        """`url`: the address of the server that other programs use."""
        self._society, self._following, self._url = society, following, url
        self._handler: SocietyRequestHandler | None = None
        self._router: Router | None = None
        self.push = PushSender(society, following.clock, self._render_task)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            handler = await self._load_handler()
        except ImportError as error:
            detail = "A2A needs a package that is not installed: pip install 'coterie[a2a]'"
            raise RequestRejected(501, "not_installed", detail) from error
        if self._router is None:
            self._router = self._make_router(handler)
        # The body is read here: the SDK would report one that is too large as an internal error.
        body = await Request(scope, receive).body()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        # Without the parameters of the outer route: the SDK's router matches the whole path again.
        await self._router({**scope, "path_params": {}}, receive_again, send)

    async def _load_handler(self) -> SocietyRequestHandler:
        if self._handler is None:
            # In a thread: the import takes half a second, in which other requests must be answered.
            module = await asyncio.to_thread(importlib.import_module, "coterie.web.a2a.handler")
            cards = module.Cards(self._society, self._url)
            self._handler = module.SocietyRequestHandler(self._society, self._following, cards, self.push.notify)
        return self._handler

    async def _render_task(self, task_id: str) -> dict[str, Any] | None:
        return await (await self._load_handler()).render_notification(task_id)

    def _make_router(self, handler: SocietyRequestHandler) -> Router:
        from a2a.server.routes.common import DefaultServerCallContextBuilder
        from a2a.server.routes.jsonrpc_routes import create_jsonrpc_routes
        from a2a.server.routes.rest_routes import create_rest_routes

        society = self._society

        class ContextBuilder(DefaultServerCallContextBuilder):
            def build(self, request: Any) -> ServerCallContext:
                context = super().build(request)
                context.state["scope"] = CallerScope(society, caller_of(request))
                context.state["agent"] = request.path_params["agent"]
                return context

        cards = handler.cards
        routes: list[BaseRoute] = [
            Route(CARD, _card(cards.of_society, society)),
            Route(f"{AGENT}{CARD}", _card(cards.of_agent, society)),
            *create_jsonrpc_routes(handler, AGENT, context_builder=ContextBuilder()),
        ]
        rest = create_rest_routes(handler, context_builder=ContextBuilder(), path_prefix=AGENT)
        # The SDK also adds them below a tenant, which a society does not have.
        routes += [route for route in rest if isinstance(route, Route)]
        return Router(routes)


def _card(make: Any, society: Society) -> Any:
    async def respond(request: Request) -> Any:
        from a2a.server.request_handlers.response_helpers import agent_card_to_dict
        from starlette.responses import JSONResponse

        scope = CallerScope(society, caller_of(request))
        return JSONResponse(agent_card_to_dict(await make(scope, request.path_params.get("agent"))))

    return respond
