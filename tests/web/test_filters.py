"""Values of filters never reach SQL as text."""

from __future__ import annotations

from itertools import product

import httpx
import pytest

from coterie.society import Society

BEFORE = [
    "",
    "x",
    "1",
    "'",
    '"',
    "')",
    "'))",
    "ada'",
    "%",
    "\\",
    "`",
    "]",
    "' || '",
    "\u02bc",
    "\N{FULLWIDTH APOSTROPHE}",
]
THEN = [
    " OR 1=1",
    " OR '1'='1",
    " UNION SELECT * FROM messages",
    "; DROP TABLE messages",
    "; ATTACH DATABASE '/tmp/x' AS x",
    " AND (SELECT count(*) FROM agents) > 0",
    " LIKE '%'",
    "; PRAGMA user_version = 7",
    ") OR (SELECT pg_sleep(9)) IS NULL",
    " ORDER BY 99",
]
AFTER = ["", " -- "]
STRINGS = ["".join(parts) for parts in product(BEFORE, THEN, AFTER)]
FILTERS = [
    ("/messages", "agent"),
    ("/messages", "before"),
    ("/delayed", "recipient"),
    ("/agents", "direction"),
    ("/agents", "after"),
    ("/runs", "agent"),
    ("/runs", "before"),
    ("/search", "q"),
    ("/threads/ada/messages", "before"),
    ("/threads/ada/messages", "after"),
    ("/threads/ada/messages", "around"),
    ("/artifacts", "before"),
    ("/dead-letters", "before"),
    ("/usage", "days"),
]


@pytest.mark.slow
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize(("path", "name"), FILTERS)
async def test_sql_in_a_filter_is_treated_as_a_value(
    society: Society, client: httpx.AsyncClient, path: str, name: str, step: int
) -> None:
    await society.send(to="ada", text="hello")
    await society.send(to="ada", text="later", delay_ms=60_000)
    assert len(STRINGS) >= 300
    for string in STRINGS[::step]:
        answer = await client.get(f"/api/v1{path}", params={name: string})
        assert answer.status_code in (200, 400, 404, 422), (string, answer.text)
        if answer.status_code == 200 and path not in ("/agents", "/usage"):
            assert answer.json()["items"] == [], string
    assert len((await client.get("/api/v1/messages")).json()["items"]) == 2
