from __future__ import annotations

import httpx


async def test_the_shell_is_there_for_anybody_and_names_nobody(stranger: httpx.AsyncClient) -> None:
    answer = await stranger.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "coterie send" in answer.text
    assert 'lang="zh"' in answer.text
    assert "<script" not in answer.text
    for secret in ("Ada", "Bob", '"ada"', "<style"):
        assert secret not in answer.text


async def test_static_files_have_their_type_and_are_not_sent_twice(stranger: httpx.AsyncClient) -> None:
    answer = await stranger.get("/static/shell.css")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/css; charset=utf-8")
    again = await stranger.get("/static/shell.css", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_what_is_no_file_of_ours_is_not_found(stranger: httpx.AsyncClient) -> None:
    for path in (
        "",
        "nothing.css",
        "shell.css/x.css",
        "..%2fapp.py",
        "%2e%2e/app.py",
        ".css",
        "shell",
        "a/" * 9 + "a.css",
    ):
        answer = await stranger.get(f"/static/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path
