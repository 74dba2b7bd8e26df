from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from urllib.parse import unquote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from coterie.society import Society

from .conftest import TOKEN

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SCRIPT = b"<script>alert(1)</script>"
ARTIFACTS = "/api/v1/artifacts"


async def put(client: httpx.AsyncClient, data: bytes, filename: str = "a.txt") -> str:
    answer = await client.post(ARTIFACTS, files={"file": (filename, data)})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["artifactRef"])


async def test_a_downloaded_file_equals_the_uploaded_one(client: httpx.AsyncClient) -> None:
    answer = await client.post(ARTIFACTS, files={"file": ("图 1.png", PNG, "text/html")})
    assert answer.status_code == 201
    described = answer.json()
    ref = described.pop("artifactRef")
    assert described.pop("createdAt") == (await client.get(f"{ARTIFACTS}/{ref}/meta")).json()["createdAt"]
    assert described == {"type": "image", "filename": "图 1.png", "mimeType": "image/png", "size": len(PNG)}

    got = await client.get(f"{ARTIFACTS}/{ref}")
    assert (got.status_code, got.content, got.headers["content-type"]) == (200, PNG, "image/png")
    assert got.headers["content-disposition"].startswith("inline;")
    assert got.headers["etag"] == f'"{hashlib.sha256(PNG).hexdigest()}"'
    assert (await client.get(f"{ARTIFACTS}/{ref}/meta")).json()["filename"] == "图 1.png"


async def test_any_bytes_pass_through_a_multipart_upload_unchanged(client: httpx.AsyncClient) -> None:
    for data in (b"", b"\r\n", b"\r\n--", b"--\r\n--boundary\r\n" * 1_000, bytes(range(256)) * 2_000):
        ref = await put(client, data)
        assert (await client.get(f"{ARTIFACTS}/{ref}")).content == data


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=-99", 206, b"0123456789"),
        ("bytes=5-99", 206, b"56789"),
        ("bytes=0-0", 206, b"0"),
        ("bytes=0-1,4-5", 200, b"0123456789"),
        ("bytes=5-2", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
        ("bytes=-", 200, b"0123456789"),
    ],
)
async def test_a_range_request_gets_the_bytes_of_the_range(
    client: httpx.AsyncClient, asked: str, status: int, expected: bytes
) -> None:
    ref = await put(client, b"0123456789")
    answer = await client.get(f"{ARTIFACTS}/{ref}", headers={"Range": asked})
    assert (answer.status_code, answer.content) == (status, expected)
    assert answer.headers["content-length"] == str(len(expected))
    if status == 206:
        assert answer.headers["content-range"].endswith("/10")


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=99-100", "bytes=-0"])
async def test_a_range_outside_the_file_gets_416(client: httpx.AsyncClient, asked: str) -> None:
    ref = await put(client, b"0123456789")
    answer = await client.get(f"{ARTIFACTS}/{ref}", headers={"Range": asked})
    assert (answer.status_code, answer.json()["code"]) == (416, "range_invalid")
    assert answer.headers["content-range"] == "bytes */10"


async def test_conditional_requests_use_the_etag(client: httpx.AsyncClient) -> None:
    ref = await put(client, b"0123456789")
    etag = (await client.get(f"{ARTIFACTS}/{ref}")).headers["etag"]
    assert (await client.get(f"{ARTIFACTS}/{ref}", headers={"If-None-Match": f'"x", W/{etag}'})).status_code == 304
    assert (await client.get(f"{ARTIFACTS}/{ref}", headers={"If-None-Match": '"x"'})).status_code == 200
    old = {"Range": "bytes=0-3", "If-Range": '"x"'}
    assert (await client.get(f"{ARTIFACTS}/{ref}", headers=old)).status_code == 200
    assert (await client.get(f"{ARTIFACTS}/{ref}", headers=old | {"If-Range": etag})).status_code == 206


HEADS = [
    b"", b"<!doctype html>", b"<html>", b"<svg xmlns='http://www.w3.org/2000/svg'>", b"<?xml version='1.0'?>",
    b"%PDF-1.7\n", b"%!PS\n", b"PK\x03\x04", b"\x1f\x8b", b"BM", b"II*\x00", b"MM\x00*", b"\x00\x00\x01\x00",
    b"RIFF\x00\x00\x00\x00WAVE", b"RIFF\x00\x00\x00\x00AVI ", b"ID3", b"OggS", b"fLaC", b"\x00\x00\x00\x20ftypavif",
    b"\x00\x00\x00\x18ftypmp42", b"\xef\xbb\xbf<html>", b"\xff\xfe<\x00h\x00", b"GIF8", b"\x89PNG",
    b"RIFF", b"\xff\xd8", b"MZ", b"\x7fELF", b"#!/bin/sh\n", b"{\\rtf1", b"<?php ", b"Content-Type: text/html\r\n\r\n",
]  # fmt: skip
NAMES = ["a.html", "a.svg", "a.png", "a.xhtml", "a.pdf", "a.png.html"]


async def test_content_that_a_browser_could_run_is_sent_as_a_download(client: httpx.AsyncClient) -> None:
    assert len(HEADS) >= 30
    for number, head in enumerate(HEADS):
        ref = await put(client, head + SCRIPT, NAMES[number % len(NAMES)])
        answer = await client.get(f"{ARTIFACTS}/{ref}")
        assert answer.headers["content-disposition"].startswith("attachment;"), head
        assert answer.headers["content-type"] == "application/octet-stream", head
        assert "sandbox" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


OF_A_KIND = {
    "image/png": [PNG],
    "image/jpeg": [b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"],
    "image/gif": [b"GIF87a\x01\x00\x01\x00", b"GIF89a\x01\x00\x01\x00"],
    "image/webp": [b"RIFF\x1a\x00\x00\x00WEBPVP8L"],
    "audio/wav": [b"RIFF\x24\x00\x00\x00WAVEfmt "],
    "audio/mpeg": [b"ID3\x04\x00\x00", b"\xff\xfb\x90\x00"],
    "audio/flac": [b"fLaC\x00\x00\x00\x22"],
    "application/pdf": [b"%PDF-1.7\n"],
    "application/zip": [b"PK\x03\x04\x14\x00"],
    "text/plain": [b"just words", b"<svg onload='x()'>", b"GIF8, as a text may begin"],
}
MISNAMED = ["a.exe", "a.png.html", "a", "a.docx"]


async def test_the_media_type_comes_from_the_bytes_and_not_from_the_name_or_the_client(
    client: httpx.AsyncClient,
) -> None:
    kinds = [(mime, data, name) for mime, heads in OF_A_KIND.items() for data in heads for name in MISNAMED]
    assert len(kinds) >= 40
    for mime, data, name in kinds:
        claimed = {"file": (name, data, "image/png" if mime != "image/png" else "text/html")}
        kept = (await client.post(ARTIFACTS, files=claimed)).json()
        family = mime.partition("/")[0]
        kind = family if family in ("image", "audio") else "file"
        assert (kept["type"], kept["mimeType"], kept["filename"]) == (kind, mime, name), data


async def test_an_image_followed_by_a_script_is_served_as_an_image(client: httpx.AsyncClient) -> None:
    ref = await put(client, PNG + SCRIPT, "a.html")
    answer = await client.get(f"{ARTIFACTS}/{ref}")
    assert answer.headers["content-type"] == "image/png"
    assert "sandbox" in answer.headers["content-security-policy"]


async def test_a_filename_cannot_break_out_of_its_header(client: httpx.AsyncClient) -> None:
    ref = await put(client, b"x", 'a"; filename=evil.html; x="é;.txt')
    header = (await client.get(f"{ARTIFACTS}/{ref}")).headers["content-disposition"]
    way, plain, extended = header.split("; ")
    assert way == "attachment"
    assert plain.count('"') == 2
    assert extended.startswith("filename*=UTF-8''")
    assert '"' not in extended


def traversals() -> list[str]:
    """More than 500 paths: prefixes that go up, combined with file names that an attacker may want."""
    ups = ["..", "../", "..\\", "....//", "..;/", ".", "./", "/", "//", "\\", "~", "%2e%2e/", "%2e%2e%2f", "..%2f"]
    ups += ["..%5c", "%252e%252e%252f", "..%c0%af", "%c0%ae%c0%ae/", "..%00/", "%00", "\u2025/", "\uff0e\uff0e\uff0f"]
    ups += ["C:\\", "\\\\host\\share\\", "\\\\?\\C:\\", "file:///", "CON", "NUL", "COM1", "a" * 300 + "/", "x/../../"]
    goals = ["", "etc/passwd", "data/token", "token", "coterie.db", "../" * 8 + "etc/passwd", "app.py", "__init__.py"]
    goals += [
        "index.html/..",
        ".hidden",
        "static",
        "shell.css\x00.html",
        "incoming",
        "..",
        "%2e%2e%2ftoken",
        "a.html",
        "llmservices.json",
    ]
    return [up + goal for up in ups for goal in goals]


async def status_of(app: Starlette, path: str) -> int:
    """Status of a raw path. An HTTP client would normalize it first."""
    statuses = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    headers = [(b"host", b"127.0.0.1:8642"), (b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    await app({**scope, "client": ("127.0.0.1", 1), "root_path": "", "scheme": "http"}, receive, send)
    return int(statuses[0])


async def test_path_traversal_gets_404(app: Starlette) -> None:
    names = traversals()
    assert len(names) >= 500
    for name in names:
        for path in {name, unquote(name), unquote(unquote(name))}:
            for root in (f"{ARTIFACTS}/", "/static/"):
                assert await status_of(app, root + path) == 404, (root, path)


async def test_a_filename_of_an_upload_contains_no_path(client: httpx.AsyncClient, society: Society) -> None:
    for name in traversals()[:40]:
        answer = await client.post(ARTIFACTS, files={"file": (name, b"x")})
        assert answer.status_code == 201
        assert "/" not in answer.json()["filename"]
        assert "\\" not in answer.json()["filename"]


async def test_the_list_of_artifacts_is_paged(client: httpx.AsyncClient) -> None:
    refs = {await put(client, f"{n}".encode()) for n in range(5)}
    seen: list[str] = []
    url = f"{ARTIFACTS}?limit=2"
    while True:
        page = (await client.get(url)).json()
        seen += [item["artifactRef"] for item in page["items"]]
        if page["next"] is None:
            break
        url = f"{ARTIFACTS}?limit=2&before={page['next']}"
    assert (len(seen), set(seen)) == (5, refs)
    assert (await client.get(f"{ARTIFACTS}?limit=201")).json()["code"] == "request_invalid"


BOUNDARY = {"Content-Type": "multipart/form-data; boundary=b"}


def part(name: str, data: bytes = b"x", filename: str = "f") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'.encode() + data


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"--b--\r\n",
        part("file"),
        part("file") + b"\r\n--b",
        part("other") + b"\r\n--b--\r\n",
        part("file") + b"\r\n" + part("file") + b"\r\n--b--\r\n",
        b"--b\r\n" + b"X-Header: " + b"y" * 100_000 + b"\r\n\r\nx\r\n--b--\r\n",
    ],
)
async def test_an_incomplete_or_malformed_upload_is_refused_and_stores_nothing(
    client: httpx.AsyncClient, society: Society, body: bytes
) -> None:
    answer = await client.post(ARTIFACTS, content=body, headers=BOUNDARY)
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
    assert (await client.get(ARTIFACTS)).json()["items"] == []


async def test_other_form_fields_are_ignored(client: httpx.AsyncClient) -> None:
    body = part("note") + b"\r\n" + part("file", b"yes") + b"\r\n" + part("end") + b"\r\n--b--\r\n"
    answer = await client.post(ARTIFACTS, content=body, headers=BOUNDARY)
    assert (answer.status_code, answer.json()["size"]) == (201, 3)


async def test_a_file_over_the_limit_is_refused_before_it_is_received_whole(
    client: httpx.AsyncClient, society: Society
) -> None:
    society.artifacts.set_max_file_bytes(1_000)
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        yield part("file")
        while taken < 1_000:
            taken += 1
            yield b"x" * 100

    answer = await client.post(ARTIFACTS, content=endless(), headers=BOUNDARY)
    assert (answer.status_code, answer.json()["code"]) == (413, "artifact_too_large")
    assert taken < 100
    assert (await client.get(ARTIFACTS)).json()["items"] == []


@pytest.mark.parametrize(
    "kind", ["multipart/form-data", "multipart/form-data; boundary=", f"multipart/form-data; boundary={'b' * 300}"]
)
async def test_an_upload_without_a_valid_boundary_is_refused(client: httpx.AsyncClient, kind: str) -> None:
    answer = await client.post(ARTIFACTS, content=b"x", headers={"Content-Type": kind})
    assert answer.json()["code"] == "request_invalid"
