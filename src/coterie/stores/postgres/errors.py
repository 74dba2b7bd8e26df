"""Classify and translate database errors."""

from __future__ import annotations

import psycopg

from coterie.errors import StoreError, StoreUnavailable
from coterie.text import one_line

# Serialization failure, deadlock, lock not available, statement canceled, server shutdown or start, too many
# connections, read-only after a failover, failed transaction, idle-in-transaction timeout. Class 08: connection errors.
_TRANSIENT_CODES = {"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "53300", "25006", "25P02", "25P03"}
CONFLICT_CODES = {"40001", "40P01"}
"""Serialization failure and deadlock: the transaction lost against another one."""
_DISK_FULL_CODES = {"53100"}
_DISK_FULL_PHRASES = ("No space left on device", "Disk quota exceeded")
"""Some server errors carry no code for a full disk, only the operating system's message."""
_JOB_ERRORS = (psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError)


class AgentLocked(psycopg.OperationalError):
    """Another transaction holds the agent's row. Retry the batch and lock this agent first."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"another transaction is changing {agent_id}")
        self.agent_id = agent_id


class PauseChanged(psycopg.OperationalError):
    """The society was paused or resumed after the batch had read that state. Retry the batch."""


class PipelineFailed(psycopg.OperationalError):
    """One of several pipelined statements failed, and it is unknown which. Retry the batch without pipelining."""


def is_job_error(error: Exception) -> bool:
    """True if the job's own statement is wrong, as opposed to a failure of the database or the connection."""
    return isinstance(error, _JOB_ERRORS) and not is_transient(error)


def error_code(error: Exception) -> str:
    """SQLSTATE of the error; empty if it has none."""
    return getattr(error, "sqlstate", None) or ""


def is_transient(error: Exception) -> bool:
    """True if a retry may succeed."""
    if not isinstance(error, psycopg.Error):
        return False
    code = error_code(error)
    return (
        code in _TRANSIENT_CODES or code.startswith("08") or (not code and isinstance(error, psycopg.OperationalError))
    )


def to_store_error(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    message, code = one_line(str(error)) or type(error).__name__, error_code(error)
    has_phrase = any(phrase in message for phrase in _DISK_FULL_PHRASES)
    if code in _DISK_FULL_CODES or (isinstance(error, psycopg.Error) and has_phrase):
        return StoreUnavailable("the database's disk is full: free some space; nothing was lost", full=True)
    if code.startswith("53") and code not in _TRANSIENT_CODES:
        return StoreUnavailable(f"the database is short of resources ({message}): nothing was written; try again")
    if is_transient(error):
        return StoreUnavailable(f"the database is not reachable now ({message}): it is retried")
    return StoreError(f"the database reported an error ({message}): run coterie verify")
