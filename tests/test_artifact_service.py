"""Artifacts: stored by content, typed by their bytes, durable before a message refers to them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.artifacts import MAX_FILENAME, detect_type, sanitize_filename
from coterie.errors import Refused
from coterie.society import Society
from coterie.testing import FakeClock
from tests.pruning import delete_unused

OFFICE = "application/vnd.openxmlformats-officedocument"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40


def files_in(society_folder: Path) -> list[Path]:
    return [path for path in (society_folder / "home/data/artifacts").rglob("*") if path.is_file()]


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_stored_artifact_is_read_back_whole_or_in_part(society: Society) -> None:
    artifact = await society.artifacts.put(pieces(PNG[:5], PNG[5:]), "chart.png")
    assert (artifact.type, artifact.mime_type, artifact.size) == ("image", "image/png", len(PNG))
    assert await society.artifacts.read(artifact.ref) == PNG
    part = b"".join([piece async for piece in society.artifacts.open(artifact.ref, 3, 1000)])
    assert part == PNG[3:1000]


async def test_the_same_bytes_twice_are_two_artifacts_and_one_file(society: Society, tmp_path: Path) -> None:
    first = await society.artifacts.put(PNG, "a.png")
    second = await society.artifacts.put(PNG, "b.png")
    assert first.ref != second.ref and (first.filename, second.filename) == ("a.png", "b.png")
    assert len(files_in(tmp_path)) == 1


async def test_a_put_with_the_same_key_returns_the_same_artifact(society: Society) -> None:
    first = await society.artifacts.put(b"one", "a.txt", key="call-1")
    again = await society.artifacts.put(b"one", "other.txt", key="call-1")
    assert again == first


async def test_a_file_over_the_limit_is_refused_during_the_upload_and_leaves_no_file(
    society: Society, tmp_path: Path
) -> None:
    asked = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield bytes(1_000_000)

    with pytest.raises(Refused) as refusal:
        await society.artifacts.put(endless(), "big.bin")
    assert (refusal.value.code, refusal.value.status) == ("artifact_too_large", 413)
    assert asked == 101 and files_in(tmp_path) == []


async def test_an_aborted_upload_leaves_no_file(society: Society, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await society.artifacts.put(broken(), "half.bin")
    assert files_in(tmp_path) == []


async def test_an_unknown_artifact_is_refused(society: Society) -> None:
    with pytest.raises(Refused, match="there is no artifact"):
        await society.artifacts.read("nothing")


async def test_files_without_a_reference_are_deleted_after_a_day_and_the_others_stay(
    society: Society, clock: FakeClock, tmp_path: Path
) -> None:
    kept = await society.artifacts.put(b"kept", "kept.txt")
    await society.artifacts.put(b"loose", "loose.txt")
    await society.send(to="ada", attachments=[kept.ref])
    await clock.jump(hours=25)
    await delete_unused(society)
    assert await society.artifacts.read(kept.ref) == b"kept"
    assert len(files_in(tmp_path)) == 1


async def test_stored_files_are_private_with_any_umask(tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    async def halfway() -> AsyncIterator[bytes]:
        yield PNG
        seen.update({path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "open/data").rglob("*")})
        yield PNG

    before = os.umask(0)
    try:
        async with Society.open(tmp_path / "open") as society:
            await society.send(to="assistant", text="hello")
            await society.artifacts.put(halfway(), "a.png")
    finally:
        os.umask(before)

    assert {"coterie.db", "coterie.db-wal", "lock", "incoming"} < set(seen) and len(seen) > 5
    assert {name: mode for name, mode in seen.items() if mode & 0o077} == {}
    assert (tmp_path / "open/data").stat().st_mode & 0o777 == 0o700


async def test_other_users_cannot_read_stored_files(society: Society, tmp_path: Path) -> None:
    await society.artifacts.put(PNG, "a.png")
    data = tmp_path / "home/data"
    assert data.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in data.rglob("*") if path.is_dir() or path.suffix == ".db"} == {0}
    assert {path.stat().st_mode & 0o777 for path in files_in(tmp_path)} == {0o600}


@pytest.mark.parametrize(
    ("head", "type_", "mime"),
    [
        (PNG, "image", "image/png"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "image", "image/jpeg"),
        (b"GIF89a....", "image", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image", "image/webp"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio", "audio/wav"),
        (b"ID3\x04\x00\x00", "audio", "audio/mpeg"),
        (b"fLaC\x00\x00", "audio", "audio/flac"),
        (b"OggS\x00\x02", "audio", "audio/ogg"),
        (b"%PDF-1.7\n", "file", "application/pdf"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "file", "application/zip"),
        (b"PK\x03\x04[Content_Types].xml word/document.xml", "file", f"{OFFICE}.wordprocessingml.document"),
        (b"PK\x03\x04[Content_Types].xml xl/workbook.xml", "file", f"{OFFICE}.spreadsheetml.sheet"),
        ("纯文本".encode(), "file", "text/plain"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>", "file", "text/plain"),
        (b"<html><script>1</script></html>", "file", "text/plain"),
        (b"", "file", "application/x-empty"),
        (b"\x00\x01\x02\x03" * 9, "file", "application/octet-stream"),
    ],
)
def test_the_type_of_a_file_is_detected_from_its_bytes(head: bytes, type_: str, mime: str) -> None:
    assert detect_type(head) == (type_, mime)


def test_text_cut_in_the_middle_of_a_character_is_still_text() -> None:
    assert detect_type("é".encode() * 5 + b"\xc3")[1] == "text/plain"


@given(st.binary(max_size=64))
def test_any_bytes_have_a_media_type(head: bytes) -> None:
    type_, mime = detect_type(head)
    assert type_ in ("image", "audio", "file") and "/" in mime


@given(st.text(st.characters(exclude_categories=())))
def test_a_filename_is_never_a_path_and_never_empty(name: str) -> None:
    shown = sanitize_filename(name)
    assert 1 <= len(shown) <= MAX_FILENAME
    assert "/" not in shown and "\\" not in shown and shown not in (".", "..")
    assert shown.isprintable()


@pytest.mark.parametrize(
    ("given_name", "shown"),
    [(".gitignore", ".gitignore"), ("src/.env", ".env"), ("..x", "..x"), ("..", "file"), (". .", "file"), ("a.", "a")],
)
def test_a_leading_dot_stays_and_a_name_of_dots_does_not(given_name: str, shown: str) -> None:
    assert sanitize_filename(given_name) == shown


def test_a_long_filename_keeps_its_ending() -> None:
    assert sanitize_filename("x" * 300 + ".png").endswith("x.png")
    assert sanitize_filename("../../etc/passwd") == "passwd"
    assert sanitize_filename("C:\\temp\\a.txt") == "a.txt"
    assert sanitize_filename(None) == sanitize_filename("  ") == "file"
