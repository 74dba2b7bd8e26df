"""Addresses: the host names this server answers to, and the client address that a request is counted for.

Requests for other host names are refused, because DNS rebinding sends such requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from starlette.types import Scope

from coterie.errors import ConfigError, Problem
from coterie.problem_texts import ProblemText

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ANY = ("0.0.0.0", "::", "")  # noqa: S104 - only compared with, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    hosts: frozenset[bytes]
    """Allowed values of `Host`, with port."""
    origins: frozenset[bytes]
    """Allowed values of `Origin`."""
    trusted: frozenset[bytes]
    """Hosts for which every browser sends `Sec-Fetch-Site`: loopback and https."""
    local: str
    """The URL for programs on the same machine."""
    url: str
    """The URL for people."""

    @property
    def secure(self) -> bool:
        return self.url.startswith("https:")


def addresses(host: str, port: int, public_url: str = "", allowed: Sequence[str] = ()) -> Addresses:
    """Addresses of a server that listens on `host` and `port`; `allowed`: further host names."""
    own = [f"{name}:{port}" for name in LOOPBACK]
    if host not in _ANY:
        own.append(f"{bracketed(host)}:{port}")
    # Browsers omit a scheme's default port, and a proxy may listen on another port.
    named = [*allowed, *(f"{name}:{port}" for name in allowed if not _has_port(name))]
    hosts = [name.lower() for name in (*own, *named, *(name.removesuffix(":80") for name in own if port == 80))]
    origins = [f"http://{name}" for name in hosts] + [f"https://{name.lower()}" for name in named]
    trusted = [name for name in hosts if is_loopback(name.rpartition(":")[0])]
    if public := _public(public_url):
        scheme, name = public
        hosts.append(name)
        origins.append(f"{scheme}://{name}")
        trusted += [name] if scheme == "https" else []
    local = f"http://{'127.0.0.1' if host in _ANY else bracketed(host)}:{port}"
    return Addresses(
        hosts=_encoded(hosts),
        origins=_encoded(origins),
        trusted=_encoded(trusted),
        local=local,
        url="://".join(public) if public else local,
    )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _has_port(name: str) -> bool:
    return name.rpartition(":")[2].isdigit() and not name.endswith("]")


def _public(url: str) -> tuple[str, str] | None:
    if not url:
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if port == 0 or parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        wrong = ProblemText("expected_public_url", got=f'"{url}"')
        raise ConfigError([Problem("coterie.toml: server.public_url", wrong, fatal=True)])
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def _encoded(names: Sequence[str]) -> frozenset[bytes]:
    return frozenset(name.encode("utf-8") for name in names)


IPV6_PREFIX = 64
"""One subscriber has at least a network of this size, so all its addresses are counted as one."""
Headers = Iterable[tuple[bytes, bytes]]
_FOR = re.compile(rb'(?:^|;)\s*for\s*=\s*"?([^";]*)"?', re.I)


class ClientAddresses:
    """Finds the client behind trusted proxies; `trusted`: their addresses or networks."""

    def __init__(self, trusted: Sequence[str] = ()) -> None:
        self._networks = tuple(ip_network(network, strict=False) for network in trusted)
        self.trusts = lru_cache(maxsize=1024)(self._is_trusted)

    def resolve(self, scope: Scope) -> None:
        """Replace `scope["client"]` by the client that a trusted proxy names."""
        peer = scope["client"][0] if scope["client"] else ""
        if self._networks and self.trusts(peer):
            scope["client"] = (self._behind(peer, scope["headers"]), 0)

    def _behind(self, peer: str, headers: Headers) -> str:
        pairs = list(headers)
        candidates = {
            address
            for chain in (list(_x_forwarded_for(pairs)), list(_forwarded(pairs)))
            if chain and (address := self._first_untrusted(chain))
        }
        # A proxy sets one of the two headers and passes the other through unchanged. Which one is unknown here, so two
        # different addresses mean that the client forged one.
        return candidates.pop() if len(candidates) == 1 else peer

    def _first_untrusted(self, chain: Sequence[bytes]) -> str | None:
        """The last address that a trusted proxy added; None if it is not readable."""
        for item in reversed(chain):
            address = _parse(item)
            if address is None or not self.trusts(address):
                return address
        return None

    def _is_trusted(self, address: str) -> bool:
        parsed = _address(address)
        return parsed is not None and any(parsed in network for network in self._networks)


def client_key(scope: Scope) -> str:
    """The key that a request's rate limits are counted under."""
    key = client_key_of_address(scope["client"][0] if scope["client"] else "")
    return f"{key} foreign page" if _is_of_foreign_page(scope["headers"]) else key


@lru_cache(maxsize=4096)
def client_key_of_address(address: str) -> str:
    """The address itself; for IPv6 its /64 network."""
    parsed = _address(address)
    if isinstance(parsed, IPv6Address):
        return str(ip_network((parsed, IPV6_PREFIX), strict=False))
    return str(parsed) if parsed else address


def _is_of_foreign_page(headers: Headers) -> bool:
    """True if a page of another site makes the request, other than by a link.

    Such a page runs in the owner's browser, at the owner's address. Its requests are counted apart.
    """
    by_name = dict(headers)
    site, target = by_name.get(b"sec-fetch-site"), by_name.get(b"sec-fetch-dest")
    return site not in (None, b"same-origin", b"none") and target != b"document"


def _x_forwarded_for(headers: Headers) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"x-forwarded-for":
            yield from value.split(b",")


def _forwarded(headers: Headers) -> Iterator[bytes]:
    """The `for` parameters of RFC 7239, in order; empty for an element without one."""
    for name, value in headers:
        if name == b"forwarded":
            for element in value.split(b","):
                match = _FOR.search(element)
                yield match[1] if match else b""


def _parse(item: bytes) -> str | None:
    """An address with or without port, as text; None for anything else."""
    text = item.decode("latin-1").strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    parsed = _address(text)
    return str(parsed) if parsed else None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        parsed = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return parsed.ipv4_mapped or parsed if isinstance(parsed, IPv6Address) else parsed
