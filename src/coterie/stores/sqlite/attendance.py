"""A worker that waits for agents: whoever gets mail is claimed for it in the transaction of that mail.

So a message to an agent at rest costs one flush until its turn is under way, and not two.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence

from coterie.failpoints import FailpointHit
from coterie.stores.sqlite import turns
from coterie.stores.sqlite.post import Post
from coterie.turns import Claim, Taker

log = logging.getLogger(__name__)


class Attendance:
    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._claims: list[Claim] = []
        self._reserved = 0
        self._look = False

    def serve(self, db: sqlite3.Connection, woken: Sequence[tuple[str, str]], open_post: Callable[[], Post]) -> None:
        """Claim those of `woken`, with their states, that a turn can begin for; the others are left to the scheduler."""
        ready = [agent_id for agent_id, state in woken if state == "ready" and self._reserve()]
        self._look = len(ready) < len(woken)
        if not ready:
            return
        # What goes wrong with somebody's turn must not undo the message that began it.
        db.execute("SAVEPOINT claims")
        try:
            post = open_post()
            self._claims = [turns.claim_ready(db, post, agent_id, self._taker) for agent_id in ready]
            post.close()
            self._look |= bool(post.woken)
        except (sqlite3.OperationalError, FailpointHit):
            raise  # the engine's trouble: the whole batch is undone
        except Exception:
            log.exception("agents could not be claimed with their mail; the scheduler tries again")
            db.execute("ROLLBACK TO claims")
            self._claims, self._look = [], True
        db.execute("RELEASE claims")

    def settle(self, written: bool) -> None:
        claims = self._claims if written else []
        self._taker.give_back(self._reserved - len(claims))
        if claims:
            self._taker.take(claims)
        if self._look and written:
            self._taker.look()

    def _reserve(self) -> bool:
        reserved = self._taker.reserve()
        self._reserved += reserved
        return reserved
