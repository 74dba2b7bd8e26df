"""Every error Coterie raises.

CoterieError
├── Refused              the request was rejected and nothing changed; `code` gives the reason
├── ConfigError          the society's files have problems; each problem names its file and key
├── Lagged               a watcher fell behind and must catch up from the event log
├── ServerUnusable       the society runs, but the command cannot use its server
│   └── ServerStopping       the server is stopping
├── NoAnswer             no answer to the message will come
└── StoreError           the store operation failed; nothing was written
    ├── StoreUnavailable     temporary: locked, full or closing; retry later
    ├── StoreOwned           another process runs this society
    ├── StoreUnusable        the files are damaged, too new or not writable
    └── StoreBroken          permanent: the process must stop; the next start recovers
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.problem_texts import ProblemText

HTTP_STATUS = {
    "unknown_recipient": 404,
    "unknown_message": 404,
    "unknown_agent": 404,
    "unknown_artifact": 404,
    "unknown_role": 404,
    "unknown_schedule": 404,
    "unknown_key": 404,
    "unknown_service": 404,
    "unknown_task": 404,
    "unknown_change": 404,
    "recipient_terminated": 410,
    "recipient_paused": 409,
    "payload_too_large": 413,
    "artifact_too_large": 413,
    "mailbox_full": 429,
    "too_many_messages": 429,
    "already_taken": 409,
    "already_delivered": 409,
    "already_answered": 409,
    "already_sent": 409,
    "already_ended": 409,
    "task_stopped": 409,
    "agent_busy": 409,
    "prune_running": 409,
    "too_many_children": 409,
    "id_taken": 409,
    "definitions_changed": 409,
    "change_superseded": 409,
    "last_agent": 409,
    "config_changed": 409,
    "service_in_use": 409,
    "role_taken": 409,
    "not_yours": 403,
    "service_not_allowed": 403,
    "quickReplies_too_many": 422,
    "quickReplies_invalid_type": 422,
    "quickReplies_empty_string": 422,
    "delayMs_invalid": 422,
    "every_invalid": 422,
    "payload_invalid": 422,
    "attachment_unknown": 422,
    "hop_limit": 422,
    "inReplyTo_unknown": 422,
    "option_invalid": 422,
    "asksBack_invalid": 422,
    "unlessAnswered_invalid": 422,
    "unlessAnswered_unknown": 422,
    "service_invalid": 422,
    "key_invalid": 422,
    "agent_invalid": 422,
}
"""HTTP status of each `Refused.code`."""


class CoterieError(Exception):
    """Base class of all errors that Coterie raises on purpose."""


class Refused(CoterieError):
    """The request was rejected. Nothing was written."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        self.code, self.message, self.status = code, message, HTTP_STATUS[code]
        self.details = details
        """Additional keys of the JSON error object."""
        super().__init__(message)

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.code, "message": self.message} | self.details

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in one of the owner's files."""

    location: str
    """File and key: `coterie.toml: server.port`."""
    message: str
    fatal: bool = False
    """True: the society does not start. False: only the named entry is skipped."""

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"

    @property
    def code(self) -> str:
        """What is wrong, for programs; empty if there is only a sentence."""
        return self.message.code if isinstance(self.message, ProblemText) else ""

    def to_dict(self, location: str | None = None) -> dict[str, Any]:
        """The JSON object. `location`: instead of its own."""
        text = self.message
        said = text.to_dict() if isinstance(text, ProblemText) else {"message": text}
        return {"place": self.location if location is None else location} | said


class ConfigError(CoterieError):
    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


class Lagged(CoterieError):
    """The watcher's queue overflowed. Read the event log from `seq` on."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        super().__init__(f"the watcher fell behind: read the event log on from {seq}")


class ServerUnusable(CoterieError):
    """The running server cannot be used; the message says what to do."""


class ServerStopping(ServerUnusable):
    """The running server rejects requests because it is stopping."""


class NoAnswer(CoterieError):
    """The message was accepted, but no answer came. The error message gives the known reason."""


class StoreError(CoterieError):
    """The store operation failed. Nothing was written."""


class StoreUnavailable(StoreError):
    """The store cannot write at the moment. Retry later."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        """`full`: the disk or quota is full."""
        self.full = full
        super().__init__(message)


class StoreOwned(StoreError):
    """Another process runs this society."""

    def __init__(self, folder: object, pid: int | None, remedy: str = "stop it first, or name another folder") -> None:
        self.pid = pid
        owner = f"process {pid}" if pid else "another process"
        super().__init__(f"{folder} is in use by {owner}; {remedy}")


class StoreUnusable(StoreError):
    """The stored files cannot be used; the message says what to do."""


class StoreBroken(StoreError):
    """Written data may not be on disk. The process must stop; the next start recovers."""
