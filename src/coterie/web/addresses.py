"""Under which names this server is asked for. Whoever asks for another was led here by a foreign name server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

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
