"""The numbers behind `/metrics`. Counted on a reader when somebody asks, so that no write pays for them."""

from __future__ import annotations

from coterie.statistics import Statistics
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import SHOWN_STATE


def statistics(db: Connection, after: int) -> Statistics:
    events = db.execute("SELECT kind, count(*), max(seq) FROM events WHERE seq > ? GROUP BY kind", (after,)).fetchall()
    turns, waiting, fullest, delayed = db.execute(
        "SELECT coalesce(sum(turn_no), 0), coalesce(sum(waiting), 0), coalesce(max(waiting), 0),"
        " coalesce(sum(delayed), 0) FROM agents WHERE kind = 'agent'"
    ).fetchone()
    (withdrawn,) = db.execute("SELECT count(*) FROM plans WHERE outcome = 'withdrawn'").fetchone()
    return Statistics(
        seq=max((seq for _, _, seq in events), default=after),
        events={kind: count for kind, count, _ in events},
        turns=int(turns),
        model_calls=dict(db.execute("SELECT outcome, count(*) FROM llm_calls GROUP BY outcome").fetchall()),
        tool_calls=dict(db.execute("SELECT state, count(*) FROM calls GROUP BY state").fetchall()),
        withdrawn_plans=withdrawn,
        waiting=int(waiting),
        fullest=fullest,
        delayed=int(delayed),
        agents=dict(
            db.execute(f"SELECT {SHOWN_STATE}, count(*) FROM agents WHERE kind = 'agent' GROUP BY 1").fetchall()
        ),
    )
