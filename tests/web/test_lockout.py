"""Wrong secrets are rate limited; they never block a right one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette

from coterie.society import Society
from coterie.testing import FakeClock
from coterie.web.app import build_app
from coterie.web.auth import Access

from .conftest import BASE, TOKEN

BEARER = {"Authorization": f"Bearer {TOKEN}"}
WRONG = {"Authorization": "Bearer nonsense"}
IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
"""What a browser adds to `<img src="http://127.0.0.1:8642/?code=x">` on a foreign page."""
PROXY = "10.0.0.1"


def cookie_of(access: Access) -> dict[str, str]:
    line = access.redeem(access.new_code())
    assert line is not None
    return {"Cookie": line.partition(";")[0]}


def from_address(app: Starlette, address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(address, 4000)), base_url=BASE)


async def guess_codes(client: httpx.AsyncClient, count: int, headers: dict[str, str] | None = None) -> list[int]:
    answers = [await client.get("/", params={"code": f"{n}"}, headers=headers) for n in range(count)]
    return [answer.status_code for answer in answers]


async def guess_tokens(client: httpx.AsyncClient, count: int, **headers: str) -> list[int]:
    return [(await client.get("/metrics", headers={**WRONG, **headers})).status_code for _ in range(count)]


@pytest.mark.parametrize("headers", [{}, IMAGE], ids=["program", "foreign page"])
async def test_wrong_codes_from_the_owners_address_do_not_block_a_right_secret(
    anonymous: httpx.AsyncClient, access: Access, headers: dict[str, str]
) -> None:
    cookie, code = cookie_of(access), access.new_code()
    assert await guess_codes(anonymous, 30, headers) == [401] * 20 + [429] * 10
    assert (await anonymous.get("/metrics", headers=BEARER)).status_code == 200
    assert (await anonymous.get("/metrics", headers=cookie)).status_code == 200
    assert (await anonymous.get("/", params={"code": code})).status_code == 303
    again = await anonymous.post("/session", json={"code": access.new_code()}, headers={"Origin": BASE})
    assert again.status_code == 303


async def test_wrong_tokens_and_cookies_get_429_with_retry_after(
    anonymous: httpx.AsyncClient, access: Access, clock: FakeClock
) -> None:
    assert await guess_tokens(anonymous, 21) == [401] * 20 + [429]
    for wrong in (WRONG, {"Cookie": f"{access.cookie_name}=nonsense"}):
        answer = await anonymous.get("/metrics", headers=wrong)
        assert (answer.status_code, answer.json()["code"]) == (429, "too_many_requests")
        assert int(answer.headers["retry-after"]) >= 1
    answer = await anonymous.get("/", params={"code": "wrong"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert (await anonymous.get("/metrics", headers=BEARER)).status_code == 200
    await clock.advance(seconds=1)
    assert await guess_tokens(anonymous, 2) == [401, 429]


async def test_requests_of_a_foreign_page_have_a_rate_limit_of_their_own(
    anonymous: httpx.AsyncClient, access: Access
) -> None:
    flood = [(await anonymous.get("/healthz", headers=IMAGE)).status_code for _ in range(1_001)]
    assert flood[-1] == 429
    assert (await anonymous.get("/", headers={"Sec-Fetch-Site": "none"})).status_code == 200
    assert await guess_codes(anonymous, 1) == [401]


async def test_a_flood_without_secrets_does_not_block_a_right_code(
    anonymous: httpx.AsyncClient, access: Access
) -> None:
    flood = [(await anonymous.get("/healthz")).status_code for _ in range(1_001)]
    assert flood[-1] == 429
    assert (await anonymous.get("/", params={"code": "wrong"})).status_code == 429
    assert (await anonymous.get("/", params={"code": access.new_code()})).status_code == 303
    anonymous.cookies.clear()
    again = await anonymous.post("/session", json={"code": access.new_code()}, headers={"Origin": BASE})
    assert again.status_code == 303


async def test_a_browser_with_an_old_cookie_still_gets_the_page_and_may_use_a_new_link(
    anonymous: httpx.AsyncClient, access: Access
) -> None:
    """The token was changed, so the cookie is wrong; the browser sends it with every file of the page."""
    old = {"Cookie": f"{access.cookie_name}=of-another-token"}
    assert [(await anonymous.get("/static/app.js", headers=old)).status_code for _ in range(40)] == [200] * 40
    assert (await anonymous.get("/", params={"code": access.new_code()}, headers=old)).status_code == 303


async def test_a_second_cookie_of_the_same_name_does_not_hide_the_right_one(
    anonymous: httpx.AsyncClient, access: Access
) -> None:
    """Servers on other ports of the same machine may set cookies for this one."""
    right = cookie_of(access)["Cookie"]
    for line in (f"{access.cookie_name}=bad; {right}", f"{right}; {access.cookie_name}=bad"):
        assert (await anonymous.get("/metrics", headers={"Cookie": line})).status_code == 200
    both = {**WRONG, "Cookie": right}
    assert (await anonymous.get("/metrics", headers=both)).status_code == 200


# Behind a proxy


@pytest.fixture
async def proxied(society: Society, access: Access, clock: FakeClock) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose requests come from a trusted proxy."""
    server = replace(society.config.server, trusted_proxies=(PROXY, "fd00::/8"))
    society.configuration.config = replace(society.config, server=server)
    async with from_address(build_app(society, access, clock=clock), PROXY) as client:
        yield client


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"X-Forwarded-For": "198.51.100.1"}, {"X-Forwarded-For": "198.51.100.2"}),
        ({"Forwarded": "for=198.51.100.1;proto=https"}, {"Forwarded": 'For="[2001:db8::7]:4711"'}),
        ({"X-Forwarded-For": "198.51.100.1, fd00::9"}, {"X-Forwarded-For": "198.51.100.2:5000, 10.0.0.1"}),
    ],
)
async def test_two_clients_of_a_trusted_proxy_do_not_share_a_rate_limit(
    proxied: httpx.AsyncClient, first: dict[str, str], second: dict[str, str]
) -> None:
    assert await guess_tokens(proxied, 21, **first) == [401] * 20 + [429]
    assert await guess_tokens(proxied, 1, **second) == [401]
    assert await guess_tokens(proxied, 1, **first) == [429]


async def test_a_client_of_a_trusted_proxy_cannot_forge_its_address(
    proxied: httpx.AsyncClient,
) -> None:
    """The proxy appends the address that it sees, so only the right end of the list counts."""
    statuses = [await guess_tokens(proxied, 1, **{"X-Forwarded-For": f"192.0.2.{n}, 198.51.100.1"}) for n in range(21)]
    assert statuses[-1] == [429]
    # This proxy writes only X-Forwarded-For; it passes the client's other header on unchanged.
    headers = {"X-Forwarded-For": "198.51.100.9"}
    statuses = [await guess_tokens(proxied, 1, **headers, Forwarded=f"for=192.0.2.{n}") for n in range(21)]
    assert statuses[-1] == [429]
    for odd in ("unknown", "for=_hidden", "999.1.1.1", "x" * 5_000, ",,,", ""):
        assert await guess_tokens(proxied, 1, **{"X-Forwarded-For": odd}) == [429]


async def test_an_untrusted_peer_cannot_choose_its_address(app: Starlette) -> None:
    async with from_address(app, "203.0.113.5") as client:
        statuses = [
            await guess_tokens(client, 1, **{"X-Forwarded-For": f"192.0.2.{n}", "Forwarded": f"for=192.0.2.{n}"})
            for n in range(21)
        ]
        assert statuses[-1] == [429]
    async with from_address(app, "203.0.113.6") as client:
        assert await guess_tokens(client, 1) == [401]


async def test_an_ipv6_network_shares_one_rate_limit(app: Starlette) -> None:
    """A customer of a provider gets 2^64 addresses."""
    for number in range(20):
        async with from_address(app, f"2001:db8:0:1::{number + 1:x}") as client:
            assert await guess_tokens(client, 1) == [401]
    async with from_address(app, "2001:db8:0:1::ffff") as client:
        assert await guess_tokens(client, 1) == [429]
    async with from_address(app, "2001:db8:0:2::1") as client:
        assert await guess_tokens(client, 1) == [401]
