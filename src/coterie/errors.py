"""Every error Coterie raises.

CoterieError
├── Refused              a request was not accepted and nothing changed; `code` says why
├── ConfigError          the society's files have problems; each names its file and place
├── Lagged               a watcher fell behind and must catch up from the event log
├── ServerUnusable       a society runs, but a command cannot talk to its server
│   └── ServerStopping       because it is stopping
├── NoAnswer             an agent was asked, and said nothing that could be waited for
└── StoreError           the store could not do its work; nothing was written
    ├── StoreUnavailable     for now: locked, full or closing; the same call may pass later
    ├── StoreOwned           another process runs this society
    ├── StoreUnusable        the files cannot be used as they are: damaged, too new, unwritable
    └── StoreBroken          for good: the process must stop and recover by starting again
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STATUS = {
    "unknown_recipient": 404,
    "unknown_message": 404,
    "unknown_agent": 404,
    "unknown_artifact": 404,
    "unknown_service": 404,
    "recipient_terminated": 410,
    "payload_too_large": 413,
    "artifact_too_large": 413,
    "mailbox_full": 429,
    "too_many_messages": 429,
    "already_taken": 409,
    "already_delivered": 409,
    "already_answered": 409,
    "agent_busy": 409,
    "id_taken": 409,
    "service_in_use": 409,
    "role_taken": 409,
    "not_yours": 403,
    "service_not_allowed": 403,
    "quickReplies_too_many": 422,
    "quickReplies_invalid_type": 422,
    "quickReplies_empty_string": 422,
    "delayMs_invalid": 422,
    "payload_invalid": 422,
    "attachment_unknown": 422,
    "hop_limit": 422,
    "inReplyTo_unknown": 422,
    "option_invalid": 422,
    "service_invalid": 422,
}
"""Every code a `Refused` may carry, with the HTTP status it answers as."""


class CoterieError(Exception):
    """The root: catch it to catch everything Coterie raises on purpose."""


class Refused(CoterieError):
    """A request that was not accepted. Nothing was written."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        self.code, self.message, self.status = code, message, STATUS[code]
        self.details = details
        """More that the caller can act on, under the names it has on the wire."""
        super().__init__(message)

    def to_wire(self) -> dict[str, Any]:
        return {"error": self.code, "message": self.message} | self.details

    def to_json(self) -> str:
        """What a model is told."""
        return json.dumps(self.to_wire(), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in one of the owner's files."""

    place: str
    """File and position in it: `coterie.toml: server.port`."""
    message: str
    fatal: bool = False
    """The society does not start while it stands; otherwise only the entry it names is left out."""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(CoterieError):
    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


class Lagged(CoterieError):
    """A watcher did not keep up; everything is still in the event log after `seq`."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        super().__init__(f"the watcher fell behind: read the event log on from {seq}")


class ServerUnusable(CoterieError):
    """The running server cannot be talked to; the message says what to do."""


class ServerStopping(ServerUnusable):
    """The running server takes no more requests, because its society stops."""


class NoAnswer(CoterieError):
    """A message was accepted, and no answer to it came; the message says why, as far as that is known."""


class StoreError(CoterieError):
    """The store could not do what was asked. Nothing was written."""


class StoreUnavailable(StoreError):
    """The store cannot write for the moment; the same call may pass later."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        self.full = full
        super().__init__(message)


class StoreOwned(StoreError):
    """Another process runs this society."""

    def __init__(self, folder: object, pid: int | None) -> None:
        self.pid = pid
        owner = f"process {pid}" if pid else "another process"
        super().__init__(f"{folder} is in use by {owner}; stop it first, or choose another folder with --dir")


class StoreUnusable(StoreError):
    """The stored files cannot be used as they are; the message says what to do."""


class StoreBroken(StoreError):
    """What was written may not be on the disk: stop now, the next start recovers what is."""
