"""Decides what follows a failed model request: a retry, a blocked agent, or the end of the turn."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from coterie.llm.service import (
    CircuitOpen,
    ContextTooLong,
    MalformedResponse,
    PermanentError,
    ServiceError,
    TransientError,
    UnknownService,
    UnsupportedCapability,
)
from coterie.turn import ModelFailed

MAX_RETRIES = 10
MAX_MALFORMED_RETRIES = 2
FIRST_RETRY_DELAY = timedelta(seconds=1)
MAX_RETRY_DELAY = timedelta(seconds=60)

SILENT = ModelFailed(
    message="the model reached its length limit before it said anything: raise maxTokens of its service in"
    " llmservices.json, or ask for less at once",
    recovery="give_up",
    category="silent",
)


def classify_failure(error: ServiceError, retries: int, jitter: float) -> ModelFailed:
    """Decide whether to retry, block or give up. `retries`: failures in a row before; `jitter`: random, 0 to 1."""
    category, facts = _category(error), _facts(error)
    match error:
        case TransientError() | CircuitOpen() if retries < MAX_RETRIES:
            wait = error.retry_after if error.retry_after is not None else _backoff(retries, jitter)
            return ModelFailed(message=str(error), recovery="retry", delay=wait, category=category, facts=facts)
        case MalformedResponse() if retries < MAX_MALFORMED_RETRIES:
            wait = _backoff(retries, jitter)
            return ModelFailed(message=str(error), recovery="retry", delay=wait, category=category, facts=facts)
        case PermanentError(category="content"):
            return ModelFailed(message=str(error), recovery="give_up", category=category, facts=facts)
        case ContextTooLong():
            advice = "Clear the conversation, or use a model with a larger window."
            return ModelFailed(message=f"{error}. {advice}", recovery="block", category=category, facts=facts)
    message = f"{error}. Fix it, then write to me again."
    return ModelFailed(message=message, recovery="block", category=category, facts=facts)


def _facts(error: ServiceError) -> dict[str, Any]:
    service = {"service": error.service} if error.service else {}
    return service | ({"status": error.status} if error.status is not None else {})


def may_have_cost(error: ServiceError | None, *, has_text: bool) -> bool:
    """True if the service may have charged for a request without an answer. `error` None: it was stopped."""
    match error:
        case None | MalformedResponse() | TransientError(reason="timeout" | "truncated"):
            return True
    return has_text  # without text it was rejected, or never reached the service


def _category(error: ServiceError) -> str:
    """Return the kind of the failure. Clients translate it into their own language."""
    match error:
        case PermanentError(category=category):  # auth, quota, daily_limit, model, content, request
            return category
        case ContextTooLong():
            return "context_length"
        case MalformedResponse() | TransientError(reason="truncated"):
            return "malformed"
        case TransientError(status=429):
            return "rate_limit"
        case TransientError(reason="unreachable"):
            return "network"
        case TransientError(reason="timeout"):
            return "timeout"
        case UnsupportedCapability():
            return "request"
    return "server"


def missing_service_failure(error: UnknownService, *, is_fixed: bool) -> ModelFailed:
    """`is_fixed`: the agent has a service now; the configuration changed during the request."""
    if is_fixed:
        return ModelFailed(message=str(error), recovery="retry", delay=timedelta(0), category="no_service")
    message = f"{error}. Fix it, then write to me again."
    return ModelFailed(message=message, recovery="block", category="no_service")


def _backoff(retries: int, jitter: float) -> timedelta:
    """Return a random delay below a limit that doubles with every failure; at least 50 ms."""
    limit = min(MAX_RETRY_DELAY, FIRST_RETRY_DELAY * (1 << retries))
    return max(timedelta(milliseconds=50), limit * jitter)
