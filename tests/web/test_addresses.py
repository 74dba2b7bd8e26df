from __future__ import annotations

import pytest

from coterie.errors import ConfigError
from coterie.rate_limit import RateLimiter
from coterie.testing import FakeClock
from coterie.web.addresses import addresses, is_loopback


def test_allowed_hosts_are_loopback_and_the_configured_names() -> None:
    where = addresses("192.168.1.7", 8642, "https://Coterie.example", ["lan.example", "other.example:9000"])
    assert {b"127.0.0.1:8642", b"localhost:8642", b"[::1]:8642", b"192.168.1.7:8642"} <= where.hosts
    assert {b"coterie.example", b"lan.example", b"lan.example:8642", b"other.example:9000"} <= where.hosts
    assert not {b"other.example", b"coterie.example:8642", b"127.0.0.1", b"0.0.0.0:8642"} & where.hosts
    assert b"https://coterie.example" in where.origins
    assert b"http://coterie.example" not in where.origins
    assert (where.url, where.secure) == ("https://coterie.example", True)
    assert where.local == "http://192.168.1.7:8642"


def test_only_loopback_names_are_trusted_origins_over_plain_http() -> None:
    where = addresses("0.0.0.0", 80, allowed=["lan.example"])
    assert {b"localhost:80", b"localhost"} <= where.hosts
    assert b"localhost:80" in where.trusted
    assert b"lan.example:80" not in where.trusted
    assert (where.url, where.secure) == ("http://127.0.0.1:80", False)


@pytest.mark.parametrize(
    "url", ["coterie.example", "ftp://x", "https://", "https://x/path", "http://[x", "http://x:99999", "http://x:0"]
)
def test_an_invalid_public_url_is_reported_with_the_name_of_its_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"coterie\.toml: server\.public_url"):
        addresses("127.0.0.1", 8642, url)


def test_loopback_addresses_are_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "192.168.1.7", "localhost.evil.example")))


async def test_the_rate_limiter_refills_and_keeps_a_bounded_number_of_clients(clock: FakeClock) -> None:
    rates = RateLimiter(clock, burst=2, per_second=1, clients=10)
    assert [rates.try_acquire("a") for _ in range(3)] == [0.0, 0.0, 1.0]
    await clock.advance(seconds=1)
    assert [rates.try_acquire("a") for _ in range(2)] == [0.0, 1.0]
    for number in range(100):
        rates.try_acquire(f"{number}")
    assert len(rates) == 10
