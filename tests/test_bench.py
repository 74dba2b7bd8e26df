"""The reference of a benchmark does the same work as Coterie."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from bench import rows
from bench.send import open_bus, send_from

from coterie.stores.sqlite.engine import DATABASE

OF_THE_MOMENT = {"id", "created_at", "delivered_at", "deliver_at"}


@pytest.mark.parametrize("delay_ms", [None, 60_000])
async def test_the_plain_sql_side_of_the_send_benchmarks_writes_the_same_rows_as_a_send(
    delay_ms: int | None, tmp_path: Path
) -> None:
    async with open_bus(tmp_path / "ours", agents=2) as (_, bus):
        await send_from(bus, callers=1, count=3, agents=2, delay_ms=delay_ms)
    plain = rows.open_plain(tmp_path / "plain" / DATABASE, agents=2)
    ready = rows.message_rows(3, rows.agent_names(2), delay_ms=delay_ms)
    rows.write(plain, ready, 3, rows.row_by_row)
    plain.close()

    assert _messages(tmp_path / "plain") == _messages(tmp_path / "ours")


def _messages(folder: Path) -> list[dict[str, object]]:
    (path,) = folder.rglob(DATABASE)
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    try:
        found = [dict(row) for row in db.execute("SELECT * FROM messages ORDER BY seq")]
    finally:
        db.close()
    return [{key: value is None if key in OF_THE_MOMENT else value for key, value in row.items()} for row in found]
