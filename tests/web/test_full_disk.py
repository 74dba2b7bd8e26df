"""Uploads and other writes on a full disk get 507."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from coterie.errors import StoreError, StoreUnavailable
from coterie.society import Society
from coterie.stores.postgres.connection import to_store_error
from coterie.stores.sqlite import connection
from coterie.stores.sqlite.engine import SqliteStore

ARTIFACTS = "/api/v1/artifacts"
OPEN = os.open


def open_full(path: Any, flags: int, *more: Any, **options: Any) -> int:
    """`os.open` whose new files are /dev/full: the kernel's own ENOSPC at write, flush and close."""
    if "incoming" in str(path) and flags & os.O_CREAT:
        os.close(OPEN(path, flags, *more, **options))
        return OPEN("/dev/full", os.O_WRONLY)
    return OPEN(path, flags, *more, **options)


def open_failing(code: int) -> Callable[..., int]:
    def failing(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if "incoming" in str(path) and flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return OPEN(path, flags, *more, **options)

    return failing


@pytest.mark.parametrize("size", [1, 4_000, 100_000, 3_000_000])
async def test_an_upload_of_any_size_on_a_full_disk_gets_507_and_leaves_nothing(
    size: int, client: httpx.AsyncClient, society: Society, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_full)
        answer = await client.post(ARTIFACTS, files={"file": ("a.txt", b"x" * size)})

    assert (answer.status_code, answer.json()["code"]) == (507, "store_full")
    assert [path for path in (tmp_path / "home/data/artifacts").rglob("*") if path.is_file()] == []
    assert (await client.post(ARTIFACTS, files={"file": ("a.txt", b"x" * size)})).status_code == 201


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_an_upload_whose_file_cannot_be_created_gets_507(
    code: int, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", open_failing(code))
    answer = await client.post(ARTIFACTS, files={"file": ("a.txt", b"x")})
    assert (answer.status_code, answer.json()["code"]) == (507, "store_full")


async def test_an_upload_whose_row_does_not_fit_gets_507(
    client: httpx.AsyncClient, society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise StoreUnavailable("the disk is full", full=True)

    monkeypatch.setattr(type(society.store), "add_artifact", full)
    assert (await client.post(ARTIFACTS, files={"file": ("a.txt", b"x")})).status_code == 507


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE])
async def test_a_write_refused_by_a_quota_counts_as_a_full_disk_and_not_as_a_broken_store(
    code: int, client: httpx.AsyncClient, society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        raise error

    assert isinstance(society.store, SqliteStore)
    message = {"to": "ada", "payload": {"text": "hello"}}
    with monkeypatch.context() as patch:
        patch.setattr(connection, "has_free_space", lambda _: False)
        patch.setattr("coterie.stores.sql.commands.send", fail, raising=False)
        patch.setattr("coterie.stores.sql.unit_of_work.UnitOfWork.flush", fail)
        answer = await client.post("/api/v1/messages", json=message)
    assert answer.status_code == 507, answer.text
    assert not society.broken.done()
    assert (await client.post("/api/v1/messages", json=message)).status_code in (201, 202)


class PgError(psycopg.OperationalError):
    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.sqlstate = code


@pytest.mark.parametrize(
    ("code", "words", "full"),
    [
        ("53100", "could not extend file: No space left on device", True),
        ("XX000", "could not write to file: Disk quota exceeded", True),
        ("58030", "could not write to file: No space left on device", True),
        ("53200", "out of memory", False),
        ("53400", "configuration limit exceeded", False),
        ("53000", "insufficient resources", False),
    ],
)
def test_a_full_disk_of_postgresql_is_told_apart_from_other_shortages(code: str, words: str, full: bool) -> None:
    found: StoreError = to_store_error(PgError(code, words))
    assert isinstance(found, StoreUnavailable)
    assert found.full == full
