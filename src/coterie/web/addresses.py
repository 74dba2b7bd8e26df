"""Under which names this server is asked for. Whoever asks for another was led here by a foreign name server.

The address that a request counts for: the peer's, or the client's that a trusted proxy names.
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

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ANY = ("0.0.0.0", "::", "")  # noqa: S104 - named to be told apart, not to listen on


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    hosts: frozenset[bytes]
    """What `Host` may say, each exact and with its port."""
    origins: frozenset[bytes]
    """What `Origin` may say."""
    trusted: frozenset[bytes]
    """Those hosts at which every browser says where a request comes from: on loopback, and over https."""
    local: str
    """Where programs on the same machine reach it."""
    url: str
    """The one to tell people."""

    @property
    def secure(self) -> bool:
        return self.url.startswith("https:")


def addresses(host: str, port: int, public_url: str = "", allowed: Sequence[str] = ()) -> Addresses:
    """For a server that listens on `host` and `port`; `public_url` is what people type, `allowed` more names."""
    own = [f"{name}:{port}" for name in LOOPBACK]
    if host not in _ANY:
        own.append(f"{bracketed(host)}:{port}")
    # A browser leaves out the port that its scheme implies, and a proxy may have taken the other one.
    named = [*allowed, *(f"{name}:{port}" for name in allowed if not _has_port(name))]
    hosts = [name.lower() for name in (*own, *named, *(n.removesuffix(":80") for n in own if port == 80))]
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
        sentence = f'expected an address such as "https://coterie.example", got "{url}"'
        raise ConfigError([Problem("coterie.toml: server.public_url", sentence, fatal=True)])
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def _encoded(names: Sequence[str]) -> frozenset[bytes]:
    return frozenset(name.encode("utf-8") for name in names)


IPV6_PREFIX = 64
"""One customer of a provider has at least this network, so it has one budget."""
Headers = Iterable[tuple[bytes, bytes]]
_FOR = re.compile(rb'(?:^|;)\s*for\s*=\s*"?([^";]*)"?', re.I)


class ClientAddresses:
    """Finds the client behind proxies that the owner named; `trusted`: their addresses or networks."""

    def __init__(self, trusted: Sequence[str] = ()) -> None:
        self._networks = tuple(ip_network(one, strict=False) for one in trusted)
        self.trusts = lru_cache(maxsize=1024)(self._is_trusted)

    def resolve(self, scope: Scope) -> None:
        """Replace `scope["client"]` by the client that a trusted peer names."""
        peer = scope["client"][0] if scope["client"] else ""
        if self._networks and self.trusts(peer):
            scope["client"] = (self._behind(peer, scope["headers"]), 0)

    def _behind(self, peer: str, headers: Headers) -> str:
        told = list(headers)
        found = {
            address
            for chain in (list(_x_forwarded_for(told)), list(_forwarded(told)))
            if chain and (address := self._first_untrusted(chain))
        }
        # A proxy writes one of the two headers and passes the other on as its client sent it. Which one it writes is
        # not known here, so two different addresses mean that the client tries to choose its own.
        return found.pop() if len(found) == 1 else peer

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


def budget_of(scope: Scope) -> str:
    """The key under which requests without a right secret are counted."""
    key = budget_of_address(scope["client"][0] if scope["client"] else "")
    return f"{key} foreign page" if _is_of_foreign_page(scope["headers"]) else key


@lru_cache(maxsize=4096)
def budget_of_address(address: str) -> str:
    """The address itself; for IPv6 its network."""
    parsed = _address(address)
    if isinstance(parsed, IPv6Address):
        return str(ip_network((parsed, IPV6_PREFIX), strict=False))
    return str(parsed) if parsed else address


def _is_of_foreign_page(headers: Headers) -> bool:
    """True if a browser says that a page of another site loads this, but not by a link that was followed.

    Such a page runs at the owner's own address. Its requests get a budget of their own.
    """
    told = dict(headers)
    site, target = told.get(b"sec-fetch-site"), told.get(b"sec-fetch-dest")
    return site not in (None, b"same-origin", b"none") and target != b"document"


def _x_forwarded_for(headers: Headers) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"x-forwarded-for":
            yield from value.split(b",")


def _forwarded(headers: Headers) -> Iterator[bytes]:
    """The `for` parameters of RFC 7239, in order; an element without one counts as unreadable."""
    for name, value in headers:
        if name == b"forwarded":
            for element in value.split(b","):
                found = _FOR.search(element)
                yield found[1] if found else b""


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
