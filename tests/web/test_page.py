from __future__ import annotations

import re

import httpx


async def test_the_shell_is_there_for_anybody_and_names_nobody(anonymous: httpx.AsyncClient) -> None:
    answer = await anonymous.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "coterie chat" in answer.text
    assert 'lang="zh"' in answer.text
    for secret in ("Ada", "Bob", '"ada"', "<style"):
        assert secret not in answer.text


async def test_the_shell_names_only_files_of_ours_that_are_there(anonymous: httpx.AsyncClient) -> None:
    shell = (await anonymous.get("/")).text
    named = re.findall(r'(?:src|href)="([^"]+)"', shell)
    assert {path.rpartition(".")[2] for path in named} == {"js", "css", "svg"}
    for path in named:
        assert (await anonymous.get(path)).status_code == 200, path
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", shell))  # the policy runs no other


async def test_every_script_that_the_first_one_needs_is_fetched_ahead(anonymous: httpx.AsyncClient) -> None:
    shell = (await anonymous.get("/")).text
    ahead = set(re.findall(r'modulepreload" href="/static/(\w+\.js)"', shell))
    needed, left = {"app.js"}, ["app.js"]
    while left:
        text = (await anonymous.get(f"/static/{left.pop()}")).text
        found = set(re.findall(r"(?:import|\})[^;'\"]*?from *'\./(\w+\.js)'", text)) - needed
        needed |= found
        left += found
    assert needed - {"app.js"} == ahead


async def test_static_files_have_their_type_and_are_not_sent_twice(anonymous: httpx.AsyncClient) -> None:
    answer = await anonymous.get("/static/tokens.css")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/css; charset=utf-8")
    again = await anonymous.get("/static/tokens.css", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_what_is_no_file_of_ours_is_not_found(anonymous: httpx.AsyncClient) -> None:
    for path in (
        "",
        "nothing.css",
        "tokens.css/x.css",
        "..%2fapp.py",
        "%2e%2e/app.py",
        ".css",
        "shell",
        "a/" * 9 + "a.css",
    ):
        answer = await anonymous.get(f"/static/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path


async def test_files_go_out_compressed_to_those_who_take_it_that_way(anonymous: httpx.AsyncClient) -> None:
    async def asked(encodings: str, **more: str) -> httpx.Response:
        return await anonymous.get("/static/thread.js", headers={"Accept-Encoding": encodings} | more)

    plain, packed = await asked("identity"), await asked("br, gzip;q=0.5")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.text == packed.text
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert "content-encoding" not in (await asked("gzip;q=0, br")).headers
    # A cache that holds the one must not be told that it has the other.
    assert plain.headers["etag"] != packed.headers["etag"]
    assert (await asked("gzip", **{"If-None-Match": packed.headers["etag"]})).status_code == 304
    assert (await asked("gzip", **{"If-None-Match": plain.headers["etag"]})).status_code == 200
