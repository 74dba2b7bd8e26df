"""A worker that waits for agents: whoever gets mail is claimed for it in the transaction of that mail.

So a message to an agent at rest costs one flush until its turn is under way, and not two.
"""

from __future__ import annotations

import logging

from coterie.failpoints import FailpointHit
from coterie.stores.sql import turns
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.post import Post
from coterie.turns import Claim, Taker

log = logging.getLogger(__name__)


class RunAgain(Exception):
    """Raised by a job: what it did shall be undone, and it be run once more."""


class Attendance:
    """What one transition finds for the worker."""

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._claims: list[Claim] = []
        self._reserved = 0
        self._look = False
        self._failed = False

    def serve(self, db: Connection, post: Post) -> None:
        """Claim those that a turn can begin for; the others are left to the scheduler. Before `post` is closed."""
        woken = post.woken()
        ready = [] if self._failed else [one for one, state in woken if state == "ready" and self._reserve(one, post)]
        self._look = self._look or post.frees or len(ready) < len(woken)
        if not ready:
            return
        try:
            self._claims = [turns.claim_ready(db, post, agent_id, self._taker) for agent_id in ready]
        except (db.OperationalError, FailpointHit):
            raise  # the engine's trouble: the whole batch is undone
        except Exception as error:
            # What goes wrong with somebody's turn must not undo the message that began it.
            log.exception("agents could not be claimed with their mail; the scheduler tries again")
            self._failed, self._look = True, True
            raise RunAgain from error

    def settle(self, written: bool) -> None:
        claims = self._claims if written and not self._failed else []
        self._taker.give_back(self._reserved - len(claims))
        if claims:
            self._taker.take(claims)
        if self._look and written:
            self._taker.look()

    def _reserve(self, agent_id: str, post: Post) -> bool:
        reserved = self._taker.reserve(agent_id, post.mailbox(agent_id).person == 1)
        self._reserved += reserved
        return reserved
