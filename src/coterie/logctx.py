"""Which agent, message and turn a line of the log is about. Set once around the work, carried along by its tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

KEYS = ("agent", "message", "turn")
_current: ContextVar[Mapping[str, str]] = ContextVar("coterie_log_context", default={})  # noqa: B039 - never written to


@contextmanager
def turn_context(*, agent: str | None = None, message: str | None = None, turn: int | None = None) -> Iterator[None]:
    """Whatever is logged inside carries these; what an outer one said and this one does not stays."""
    said = {"agent": agent, "message": message, "turn": None if turn is None else str(turn)}
    token = _current.set({**_current.get(), **{key: value for key, value in said.items() if value is not None}})
    try:
        yield
    finally:
        _current.reset(token)


class Context(logging.Filter):
    """Writes the context into every record, where and when it is made: a handler may look at it elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.context = _current.get()
        return True


def context_of(record: logging.LogRecord) -> Mapping[str, str]:
    found = getattr(record, "context", None)
    return found if isinstance(found, Mapping) else {}
