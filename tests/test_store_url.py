from __future__ import annotations

import tomllib

import pytest

from coterie.config import shown, with_store_url, without_password, written_in
from coterie.errors import StoreUnusable

NEW = "postgresql://me@there/it"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f'[store]\nurl = "{NEW}"\n'),
        ("[agents.ada]\n", f'[agents.ada]\n\n[store]\nurl = "{NEW}"\n'),
        ('[store]\nurl = "sqlite" # here\nkeep_days = 3\n', f'[store]\nurl = "{NEW}"\nkeep_days = 3\n'),
        ("[store]\nkeep_days = 3\n", f'[store]\nurl = "{NEW}"\nkeep_days = 3\n'),
        ('store.url = "sqlite"\n[agents.ada]\n', f'store.url = "{NEW}"\n[agents.ada]\n'),
        (
            '[mcp.files]\nurl = "http://x"\n[store]\n# url = "sqlite"\n',
            f'[mcp.files]\nurl = "http://x"\n[store]\nurl = "{NEW}"\n# url = "sqlite"\n',
        ),
    ],
)
def test_only_the_address_changes(before: str, after: str) -> None:
    assert with_store_url(before, NEW) == after
    assert written_in(after) == NEW


@pytest.mark.parametrize("text", ['store = { url = "sqlite" }', "[store", "store = 7"])
def test_what_cannot_be_changed_safely_is_left_to_its_owner(text: str) -> None:
    with pytest.raises(StoreUnusable, match=r"write store\.url on a line of its own"):
        with_store_url(text, NEW)


def test_an_address_with_strange_letters_stays_the_same_address() -> None:
    strange = 'postgresql://m%20e@h/"d\\b"?options=-c%20search_path%3Dx'
    assert tomllib.loads(with_store_url("", strange))["store"]["url"] == strange


@pytest.mark.parametrize(
    ("url", "bare", "seen"),
    [
        ("postgresql://me:secret@host:5433/db", "postgresql://me@host:5433/db", "postgresql://me@host:5433/db"),
        (
            "postgresql://me@host/db?password=secret&sslmode=require",
            "postgresql://me@host/db?sslmode=require",
            "postgresql://me@host/db",
        ),
        ("postgresql:///db?host=/run/pg", "postgresql:///db?host=/run/pg", "postgresql:///db"),
        ("postgresql://h/d?options=-c%20x%3Dy", "postgresql://h/d?options=-c%20x%3Dy", "postgresql://h/d"),
        ("postgresql://a:b@c:d@host/db", "postgresql://a@host/db", "postgresql://a@host/db"),
    ],
)
def test_a_password_is_neither_kept_nor_shown(url: str, bare: str, seen: str) -> None:
    assert without_password(url) == bare
    assert shown(url).startswith(seen) and "secret" not in shown(url) and "?" not in shown(url)


def test_a_file_that_cannot_be_read_names_the_engine_that_needs_nothing() -> None:
    assert [written_in(text) for text in ("[store", "store = 7", "", "[store]\nurl = 7")] == ["sqlite"] * 4
