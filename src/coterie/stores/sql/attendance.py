"""A worker that waits for agents: whoever gets mail is claimed for it in the transaction of that mail.

So a message to an agent at rest costs one flush until its turn is under way, and not two.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from coterie.failpoints import FailpointHit
from coterie.stores.sql import turns
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.post import Post
from coterie.turns import Claim, Taker

log = logging.getLogger(__name__)


class RunAgain(Exception):
    """Raised by a job: what it did shall be undone, and it be run once more."""


@dataclass(frozen=True, slots=True)
class Attended:
    """What one run of a transaction body found for the worker. It counts only if that run was committed."""

    claims: Sequence[Claim] = ()
    look: bool = False
    """Agents were left unclaimed: the worker must look for them."""


class Attendance:
    """Claims agents for a worker, in the transaction of the mail that wakes them.

    One object serves all runs of one job and keeps no result of any run. `serve` returns what its run found, and
    `settle` gets it back from the run that was committed.
    """

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._reserved: set[str] = set()
        """Agents that a slot is held for. A run that is undone leaves its slots to the next run."""
        self._gave_up = False
        """A claim failed: further runs store the mail and claim nobody."""

    def serve(self, db: Connection, post: Post) -> Attended:
        """Claim those that a turn can begin for; the others are left to the scheduler. Before `post` is closed."""
        woken = post.woken()
        ready = [agent_id for agent_id, state in woken if state == "ready"]
        if ready and (self._gave_up or post.society_paused):
            ready = []
        ready = [agent_id for agent_id in ready if self._reserve(agent_id, post)]
        look = post.frees or len(ready) < len(woken)
        try:
            return Attended([turns.claim_ready(db, post, agent_id, self._taker) for agent_id in ready], look)
        except (db.OperationalError, FailpointHit):
            raise  # the engine's trouble: the whole batch is undone
        except Exception as error:
            # What goes wrong with somebody's turn must not undo the message that began it.
            log.exception("agents could not be claimed with their mail; the scheduler tries again")
            self._gave_up = True
            raise RunAgain from error

    def settle(self, attended: Attended | None) -> None:
        """`attended`: of the run that was committed. None: nothing was written. Called once, on the event loop."""
        if attended is None and self._reserved:
            # The error may have come after the commit: then agents are claimed that nobody works on.
            self._taker.check_claims()
        attended = attended or Attended()
        self._taker.give_back(len(self._reserved) - len(attended.claims))
        if attended.claims:
            self._taker.take(attended.claims)
        if attended.look:
            self._taker.look()

    def _reserve(self, agent_id: str, post: Post) -> bool:
        if agent_id in self._reserved:
            return True
        if not self._taker.reserve(agent_id, post.mailbox(agent_id).person == 1):
            return False
        self._reserved.add(agent_id)
        return True
