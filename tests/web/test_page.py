from __future__ import annotations

import re

import httpx


async def test_the_page_is_public_and_contains_no_names_of_agents(anonymous: httpx.AsyncClient) -> None:
    answer = await anonymous.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "coterie chat" in answer.text
    assert 'lang="zh"' in answer.text
    for secret in ("Ada", "Bob", '"ada"', "<style"):
        assert secret not in answer.text


async def test_the_page_refers_only_to_existing_static_files(anonymous: httpx.AsyncClient) -> None:
    shell = (await anonymous.get("/")).text
    named = re.findall(r'(?:src|href)="([^"]+)"', shell)
    assert {path.rpartition(".")[2] for path in named} == {"js", "css", "svg", "png", "webmanifest"}
    for path in named:
        assert (await anonymous.get(path)).status_code == 200, path
    assert all(
        "src=" in tag for tag in re.findall(r"<script[^>]*>", shell)
    )  # the content security policy forbids inline scripts


async def test_every_static_import_of_the_first_script_is_preloaded(anonymous: httpx.AsyncClient) -> None:
    shell = (await anonymous.get("/")).text
    ahead = set(re.findall(r'modulepreload" href="/static/(\w+\.js)"', shell))
    needed, left = {"app.js"}, ["app.js"]
    while left:
        text = (await anonymous.get(f"/static/{left.pop()}")).text
        found = set(re.findall(r"(?:import|\})[^;'\"]*?from *'\./(\w+\.js)'", text)) - needed
        needed |= found
        left += found
    assert needed - {"app.js"} == ahead


async def test_static_files_have_a_media_type_and_an_etag(anonymous: httpx.AsyncClient) -> None:
    answer = await anonymous.get("/static/tokens.css")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/css; charset=utf-8")
    again = await anonymous.get("/static/tokens.css", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_paths_outside_the_static_files_get_404(anonymous: httpx.AsyncClient) -> None:
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


async def test_static_files_are_compressed_for_clients_that_accept_gzip(anonymous: httpx.AsyncClient) -> None:
    async def get(encodings: str, **more: str) -> httpx.Response:
        return await anonymous.get("/static/thread.js", headers={"Accept-Encoding": encodings} | more)

    plain, packed = await get("identity"), await get("br, gzip;q=0.5")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.text == packed.text
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert "content-encoding" not in (await get("gzip;q=0, br")).headers
    # Both variants need their own ETag, or a cache would confuse them.
    assert plain.headers["etag"] != packed.headers["etag"]
    assert (await get("gzip", **{"If-None-Match": packed.headers["etag"]})).status_code == 304
    assert (await get("gzip", **{"If-None-Match": plain.headers["etag"]})).status_code == 200
