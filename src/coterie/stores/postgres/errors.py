"""What an error of the database means: for the batch that met it, and for whoever waits for an answer."""

from __future__ import annotations

import psycopg

from coterie.errors import StoreError, StoreUnavailable
from coterie.text import one_line

# Serialization, deadlock, lock not to be had, statement cancelled, server going down or coming up, too many
# connections, read-only after a failover, a transaction that was idle for too long; class 08 is the connection itself.
_PASSING = {"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "53300", "25006", "25P02", "25P03"}
UNDONE = {"40001", "40P01"}
"""Serialization failure and deadlock: the transaction lost against another one."""
_FULL = {"53100"}
_FULL_WORDS = ("No space left on device", "Disk quota exceeded")
"""Of the server's operating system: some of its errors carry no code for a full disk."""
_OWN = (psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError)


class Contended(psycopg.OperationalError):
    """Somebody else holds an agent's row: begin again, with these locked first."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"somebody else is changing {agent_id}")
        self.agent_id = agent_id


class PausedMeanwhile(psycopg.OperationalError):
    """The society was paused or resumed after this batch had looked: run the batch again."""


class Doubtful(psycopg.OperationalError):
    """One of several statements is wrong, and whose it is cannot be told: begin again, one at a time."""


def is_own(error: Exception) -> bool:
    """The fault of the one transition, and not of the engine."""
    return isinstance(error, _OWN) and not passes(error)


def error_code(error: Exception) -> str:
    """The SQLSTATE of an error; empty where it has none."""
    return getattr(error, "sqlstate", None) or ""


def passes(error: Exception) -> bool:
    """The same may succeed when it is tried again."""
    if not isinstance(error, psycopg.Error):
        return False
    code = error.sqlstate or ""
    return code in _PASSING or code.startswith("08") or (not code and isinstance(error, psycopg.OperationalError))


def meaning(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    words = one_line(str(error)) or type(error).__name__
    code = getattr(error, "sqlstate", None) or ""
    if code in _FULL or (isinstance(error, psycopg.Error) and any(each in words for each in _FULL_WORDS)):
        return StoreUnavailable("the database's disk is full: free some space; nothing was lost", full=True)
    if code.startswith("53") and code not in _PASSING:
        return StoreUnavailable(f"the database is short of resources ({words}): nothing was written")
    if passes(error):
        return StoreUnavailable(f"the database cannot be reached for the moment ({words}): it is tried again")
    return StoreError(f"the database refused ({words})")
