from __future__ import annotations

import logging
import stat
from pathlib import Path

import httpx
import pytest

from coterie.errors import CoterieError
from coterie.testing import FakeClock
from coterie.web.auth import Access, load_token

from .conftest import BASE, TOKEN


async def test_a_login_link_works_once_and_sets_a_session_cookie(anonymous: httpx.AsyncClient, access: Access) -> None:
    code = access.new_code()
    answer = await anonymous.get("/", params={"code": code})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert TOKEN not in cookie
    assert (await anonymous.get("/metrics")).status_code == 200

    anonymous.cookies.clear()
    again = await anonymous.get("/", params={"code": code})
    assert (again.status_code, again.json()["code"]) == (401, "code_invalid")
    assert (await anonymous.get("/metrics")).status_code == 401


async def test_a_login_code_is_accepted_in_a_request_body(anonymous: httpx.AsyncClient, access: Access) -> None:
    answer = await anonymous.post("/session", json={"code": access.new_code()}, headers={"Origin": BASE})
    assert answer.status_code == 303
    anonymous.cookies.clear()
    headers = {"Content-Type": "application/json"}
    for body in (b"", b"{}", b"[]", b'{"code": 7}', b'{"code": "\xc3\xa4"}'):
        assert (await anonymous.post("/session", content=body, headers=headers)).status_code == 401
    assert (await anonymous.post("/session", content=b"{", headers=headers)).json()["code"] == "json_invalid"


async def test_a_login_link_expires_after_ten_minutes(
    anonymous: httpx.AsyncClient, access: Access, clock: FakeClock
) -> None:
    early, late = access.new_code(), access.new_code()
    await clock.advance(minutes=9, seconds=59)
    assert (await anonymous.get("/", params={"code": early})).status_code == 303
    await clock.advance(seconds=2)
    assert (await anonymous.get("/", params={"code": late})).status_code == 401


async def test_guesses_of_login_codes_are_rate_limited(anonymous: httpx.AsyncClient) -> None:
    statuses = [(await anonymous.get("/", params={"code": f"{n}"})).status_code for n in range(22)]
    assert statuses == [401] * 20 + [429] * 2


async def test_a_login_link_created_over_http_works(client: httpx.AsyncClient, anonymous: httpx.AsyncClient) -> None:
    url = (await client.post("/api/v1/links")).json()["url"]
    assert url.startswith(f"{BASE}/?code=")
    assert TOKEN not in url
    assert (await anonymous.get(url)).status_code == 303


def test_a_cookie_stays_valid_after_a_restart_and_not_after_a_change_of_the_token(clock: FakeClock) -> None:
    def cookie(token: str, society: str) -> str:
        access = Access(token, society, clock, secure=True)
        line = access.redeem(access.new_code())
        assert line is not None
        assert line.endswith("; Secure")
        return line

    assert cookie("one", "a") == cookie("one", "a")
    assert cookie("one", "a").partition("=")[2] != cookie("two", "a").partition("=")[2]
    assert cookie("one", "a").partition("=")[0] != cookie("one", "b").partition("=")[0]


def test_login_codes_have_128_random_bits_and_their_number_is_bounded(clock: FakeClock) -> None:
    access = Access(TOKEN, "a", clock)
    first, *codes = [access.new_code() for _ in range(65)]
    assert len(set(codes)) == 64
    assert all(len(code) >= 22 for code in codes)  # 128 bits in base64
    assert access.redeem(first) is None
    assert access.redeem(codes[-1]) is not None


def test_the_token_file_is_created_once_with_mode_600(tmp_path: Path) -> None:
    token = load_token(tmp_path, None)
    assert len(token) >= 22
    assert load_token(tmp_path, None) == token
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert load_token(tmp_path, "given") == "given"


def test_a_token_file_readable_by_others_is_made_private_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = load_token(tmp_path, None)
    (tmp_path / "token").chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert load_token(tmp_path, None) == token
    assert "was readable by others" in caplog.text
    assert token not in caplog.text
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize("token", ["", "with space", "ümlaut", "new\nline"])
def test_a_token_that_is_invalid_in_a_header_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(CoterieError, match="is invalid"):
        load_token(tmp_path, token)


def test_the_repr_of_access_does_not_contain_the_token(clock: FakeClock) -> None:
    assert TOKEN not in repr(Access(TOKEN, "a", clock))
