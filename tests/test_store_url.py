from __future__ import annotations

import tomllib

import pytest

from coterie.errors import StoreUnusable
from coterie.store_url import read_store_url, redact_url, replace_store_url, without_password

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
    assert replace_store_url(before, NEW) == after
    assert read_store_url(after) == NEW


@pytest.mark.parametrize("text", ['store = { url = "sqlite" }', "[store", "store = 7"])
def test_a_file_that_cannot_be_changed_safely_is_refused(text: str) -> None:
    with pytest.raises(StoreUnusable, match=r"write store\.url on a line of its own"):
        replace_store_url(text, NEW)


def test_special_characters_in_a_url_survive() -> None:
    strange = 'postgresql://m%20e@h/"d\\b"?options=-c%20search_path%3Dx'
    assert tomllib.loads(replace_store_url("", strange))["store"]["url"] == strange


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
    assert redact_url(url).startswith(seen) and "secret" not in redact_url(url) and "?" not in redact_url(url)


def test_an_unreadable_file_means_sqlite() -> None:
    assert [read_store_url(text) for text in ("[store", "store = 7", "", "[store]\nurl = 7")] == ["sqlite"] * 4
