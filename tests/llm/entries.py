"""Helpers that write and parse llmservices.json."""

from __future__ import annotations

import json
from typing import Any

from coterie.llm.config import ServiceRegistry, parse_services

KEY = "sk-canary-0123456789abcdef-WXYZ"


def no_key(name: str) -> None:
    return None


def entry(service_id: str = "main", **more: Any) -> dict[str, Any]:
    return {"id": service_id, "baseURL": "http://127.0.0.1:1234/v1", "model": "some-model"} | more


def read(*services: Any, **keys: str) -> ServiceRegistry:
    return ServiceRegistry(*parse_services(json.dumps({"services": list(services)}).encode(), keys.get))


def problems(services: ServiceRegistry) -> list[str]:
    return [str(problem) for problem in services.problems]
