"""SQL that both engines share, as PostgreSQL runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.stores.postgres.connection import owner_connection
from coterie.stores.sql.rows import json_keys
from coterie.testing import FakeClock
from tests.engines import Engine, Postgres


def test_parameters_are_translated_outside_of_literals_and_casts(shared: Postgres, tmp_path: Path) -> None:
    with owner_connection(shared.url(tmp_path)) as db:
        row = db.execute(
            "SELECT :text::varchar(3), ':text it''s 100% ?', 7 % :number, ARRAY[:number::bigint]::text",
            {"text": "abcdef", "number": 4},
        ).fetchone()
        assert row == ("abc", ":text it's 100% ?", 3, "{4}")
        assert db.execute("SELECT ?, '%', ?", ("a:b", "50%")).fetchone() == ("a:b", "%", "50%")


def test_only_postgres_runs_a_comment_with_a_plus(shared: Postgres, tmp_path: Path) -> None:
    with owner_connection(shared.url(tmp_path)) as db:
        assert db.execute("SELECT 1 /*+ + :two */", {"two": 2}).fetchone() == (3,)


@pytest.mark.parametrize("ids", [["ada"], ["ada", "bob", "ada"], ["o'clock", 'say "hi"', "{}", "\\", "名"]])
async def test_a_list_of_ids_is_one_parameter(engine: Engine, tmp_path: Path, clock: FakeClock, ids: list[str]) -> None:
    store = await engine.open(tmp_path, clock)
    try:
        with engine.behind(tmp_path) as db:
            rows = db.execute("SELECT key FROM json_each(:ids)", {"ids": json_keys(ids)}).fetchall()
        assert [key for (key,) in rows] == [*dict.fromkeys(ids)]
    finally:
        await store.close()
