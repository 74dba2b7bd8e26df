"""Which agent, message and turn a line of the log is about. Set once around the work, carried along by its tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar, Token

KEYS = ("agent", "message", "turn")
_current: ContextVar[Mapping[str, str]] = ContextVar("coterie_log_context", default={})  # noqa: B039 - never written to


class turn_context:  # noqa: N801 - read as a verb: with turn_context(...). Entered at every step, so it is no generator
    """Whatever is logged inside carries these; what an outer one said and this one does not stays."""

    __slots__ = ("_said", "_token")
    _token: Token[Mapping[str, str]]

    def __init__(self, *, agent: str | None = None, message: str | None = None, turn: int | None = None) -> None:
        self._said = {**_current.get()}
        for key, value in (("agent", agent), ("message", message), ("turn", turn)):
            if value is not None:
                self._said[key] = str(value)

    def __enter__(self) -> None:
        self._token = _current.set(self._said)

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._token)


class Context(logging.Filter):
    """Writes the context into every record, where and when it is made: a handler may look at it elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.context = _current.get()
        return True


def context_of(record: logging.LogRecord) -> Mapping[str, str]:
    found = getattr(record, "context", None)
    return found if isinstance(found, Mapping) else {}
