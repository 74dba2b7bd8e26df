"""OpenAI's API under /v1: each agent is a model. Chat completions, responses and the list of models."""

from __future__ import annotations

from coterie.web.openai import chat, responses
from coterie.web.routing import Router

ROUTERS: list[Router] = [chat.router, responses.router]
