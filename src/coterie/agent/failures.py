"""What follows a failed model request: a retry, a blocked agent, or the end of the turn."""

from __future__ import annotations

from datetime import timedelta

from coterie.llm.service import (
    CircuitOpen,
    ContextTooLong,
    MalformedResponse,
    PermanentError,
    ServiceError,
    TransientError,
    UnknownService,
)
from coterie.turn import ModelFailed

MAX_RETRIES = 10
MAX_MALFORMED_RETRIES = 2
FIRST_RETRY_DELAY = timedelta(seconds=1)
MAX_RETRY_DELAY = timedelta(seconds=60)


def classify_failure(error: ServiceError, retries: int, jitter: float) -> ModelFailed:
    """Decide whether to retry, block or give up. `retries`: failures in a row before; `jitter`: random, 0 to 1."""
    match error:
        case TransientError() | CircuitOpen() if retries < MAX_RETRIES:
            wait = error.retry_after if error.retry_after is not None else _backoff(retries, jitter)
            return ModelFailed(message=str(error), recovery="retry", delay=wait, category=_category(error))
        case MalformedResponse() if retries < MAX_MALFORMED_RETRIES:
            return ModelFailed(message=str(error), recovery="retry", delay=_backoff(retries, jitter), category="server")
        case PermanentError(category="content"):
            return ModelFailed(message=str(error), recovery="give_up")
        case ContextTooLong():
            return ModelFailed(
                message=f"{error}. Clear the conversation, or use a model with a larger window.",
                recovery="block",
                category="context_length",
            )
    return ModelFailed(message=f"{error}. Fix it, then write to me again.", recovery="block", category=_category(error))


def may_have_cost(error: ServiceError | None, *, has_text: bool) -> bool:
    """True if the service may have charged for a request without an answer. `error` None: it was stopped."""
    match error:
        case None | MalformedResponse() | TransientError(reason="timeout" | "truncated"):
            return True
    return has_text  # without text it was rejected, or never reached the service


def _category(error: ServiceError) -> str:
    """Return the error category of the event stream."""
    match error:
        case PermanentError(category="auth"):
            return "auth"
        case PermanentError(category="quota"):
            return "rate_limit"
        case TransientError(retry_after=after, reason="busy") if after is not None:
            return "rate_limit"
        case TransientError(reason="unreachable"):
            return "network"
        case TransientError(reason="timeout"):
            return "timeout"
    return "server"


def missing_service_failure(error: UnknownService, *, is_fixed: bool) -> ModelFailed:
    """`is_fixed`: the agent has a service now; the configuration changed during the request."""
    if is_fixed:
        return ModelFailed(message=str(error), recovery="retry", delay=timedelta(0))
    return ModelFailed(message=f"{error}. Fix it, then write to me again.", recovery="block")


def _backoff(retries: int, jitter: float) -> timedelta:
    """Full jitter below a limit that doubles with every failure; at least 50 ms."""
    limit = min(MAX_RETRY_DELAY, FIRST_RETRY_DELAY * (1 << retries))
    return max(timedelta(milliseconds=50), limit * jitter)
