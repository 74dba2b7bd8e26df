"""Checks read a bounded number of rows on PostgreSQL, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coterie.messages import make_envelope
from coterie.store import Limits
from coterie.stores.sql.inbox import MAX_EXAMINED, SELECT_FROM_PERSON, SELECT_NEXT_HEADERS
from coterie.stores.sql.invariants import INVARIANTS
from coterie.testing import FakeClock
from tests.conftest import PEOPLE
from tests.engines import Postgres

WAITING = 3_000


@pytest.mark.parametrize(
    ("sql", "index"), [(SELECT_FROM_PERSON, "messages_mailbox"), (SELECT_NEXT_HEADERS, "messages_mailbox")]
)
async def test_postgres_reads_the_first_messages_by_an_index(
    shared: Postgres, tmp_path: Path, clock: FakeClock, sql: str, index: str
) -> None:
    store = await shared.open(tmp_path / "data", clock, Limits(mailbox=2 * WAITING))
    await store.add_agents(PEOPLE)
    envelopes = [make_envelope(sender="bob", to="ada", payload={"text": "y"}) for _ in range(WAITING)]
    envelopes += [make_envelope(sender="user", to="ada", payload={"text": "y"}) for _ in range(WAITING)]
    await store._transact(lambda _, uow: uow.accept_all(envelopes), touches=["ada"], messages=len(envelopes))
    bounds = {
        "recipient": "ada",
        "after": WAITING if sql is SELECT_FROM_PERSON else 0,
        "upto": 2 * WAITING,
        "limit": MAX_EXAMINED,
    }
    with shared.behind(tmp_path / "data") as db:
        db.execute("ANALYZE messages")
        plan = "\n".join(line for (line,) in db.execute(f"EXPLAIN (ANALYZE, TIMING OFF) {sql}", bounds).fetchall())
        assert "Limit" in plan and f"using {index} on messages" in plan, plan
        assert "Sort" not in plan
        rows = [int(float(count)) for count in re.findall(r"actual rows=([\d.]+)", plan)]
        assert max(rows) <= MAX_EXAMINED, plan
    await store.close()


async def test_verify_joins_the_text_index_once(shared: Postgres, tmp_path: Path, clock: FakeClock) -> None:
    """A subquery that PostgreSQL cannot join is read again for every message if it does not fit into memory."""
    store = await shared.open(tmp_path / "data", clock)
    with shared.behind(tmp_path / "data") as db:
        plan = "\n".join(line for (line,) in db.execute(f"EXPLAIN {INVARIANTS['messages are indexed'][1]}").fetchall())
    assert "Anti Join" in plan and "SubPlan" not in plan, plan
    await store.close()
