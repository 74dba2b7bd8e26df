"""Coterie runs a society of LLM agents that people talk to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.agent.tools import ToolContext, tool
    from coterie.answers import Answer, AnswerDelta
    from coterie.errors import CoterieError, NoAnswer, Refused
    from coterie.messages import Message, Receipt
    from coterie.society import Society
    from coterie.task_service import SentMessage
    from coterie.tasks import Task, TaskTree

__version__ = "0.1.0"

_MODULES = {
    "Answer": "coterie.answers",
    "AnswerDelta": "coterie.answers",
    "CoterieError": "coterie.errors",
    "Message": "coterie.messages",
    "NoAnswer": "coterie.errors",
    "Receipt": "coterie.messages",
    "Refused": "coterie.errors",
    "SentMessage": "coterie.task_service",
    "Society": "coterie.society",
    "Task": "coterie.tasks",
    "TaskTree": "coterie.tasks",
    "ToolContext": "coterie.agent.tools",
    "tool": "coterie.agent.tools",
}

__all__ = [
    "Answer",
    "AnswerDelta",
    "CoterieError",
    "Message",
    "NoAnswer",
    "Receipt",
    "Refused",
    "SentMessage",
    "Society",
    "Task",
    "TaskTree",
    "ToolContext",
    "__version__",
    "tool",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use; `import coterie` itself stays cheap."""
    if name not in _MODULES:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
