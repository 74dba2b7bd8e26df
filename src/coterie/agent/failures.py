"""What becomes of a turn whose model gave no answer."""

from __future__ import annotations

from datetime import timedelta

from coterie.agent.turn import ModelFailed
from coterie.llm.service import Local, Malformed, ServiceError, Terminal, TooLong, Transient, UnknownService

TRIES = 10
MALFORMED_TRIES = 2
FIRST_WAIT = timedelta(seconds=1)
LONGEST_WAIT = timedelta(seconds=60)


def told(error: ServiceError, retries: int, luck: float) -> ModelFailed:
    """`retries`: how often in a row it failed before; `luck`: 0 to 1, so that many agents do not come back together."""
    match error:
        case Transient() | Local() if retries < TRIES:
            wait = error.retry_after if error.retry_after is not None else _backoff(retries, luck)
            return ModelFailed(words=str(error), then="retry", after=wait, category=_category(error))
        case Malformed() if retries < MALFORMED_TRIES:
            return ModelFailed(words=str(error), then="retry", after=_backoff(retries, luck), category="server")
        case Terminal(category="content"):
            return ModelFailed(words=str(error), then="give_up")
        case TooLong():
            return ModelFailed(
                words=f"{error}. Clear the conversation, or use a model with a larger window.",
                then="block",
                category="context_length",
            )
    return ModelFailed(words=f"{error}. Mend it, then write to me again.", then="block", category=_category(error))


def _category(error: ServiceError) -> str:
    """The kind of trouble, in the words of the event stream."""
    match error:
        case Terminal(category="auth"):
            return "auth"
        case Terminal(category="quota") | Local():
            return "rate_limit"
        case Transient(retry_after=after, why="busy") if after is not None:
            return "rate_limit"
        case Transient():
            return "network"
    return "server"


def without_service(error: UnknownService, *, mended: bool) -> ModelFailed:
    """`mended`: the agent has a service by now, so it was only looking while the configuration changed."""
    if mended:
        return ModelFailed(words=str(error), then="retry", after=timedelta(0))
    return ModelFailed(words=f"{error}. Mend it, then write to me again.", then="block")


def _backoff(retries: int, luck: float) -> timedelta:
    """Full jitter: anywhere up to a limit that doubles with every failure, but never nothing at all."""
    limit = min(LONGEST_WAIT, FIRST_WAIT * (1 << retries))
    return max(timedelta(milliseconds=50), limit * luck)
