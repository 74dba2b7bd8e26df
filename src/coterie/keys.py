"""Keys of programs: what a key allows, how its token is made and checked, and what a store promises about keys.

A program sends the token with every request. The store has only its hash. The owner's own token is no key.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal, Protocol, get_args

from msgspec import Struct

from coterie.agents import AGENT_ID
from coterie.errors import Refused
from coterie.text import closest_match, one_line

Door = Literal["openai", "mcp", "a2a"]
DOORS: tuple[Door, ...] = get_args(Door)
"""Protocols that programs may speak: each has its own addresses and can be switched off in coterie.toml."""
TOKEN_PREFIX = "cot_"  # noqa: S105 - the beginning of every token of a key
TOKEN_BYTES = 24
"""192 random bits: too many to guess, so a plain hash protects them."""
USE_INTERVAL = timedelta(minutes=1)
"""The time of the last use is stored at most this often."""


class Key(Struct, frozen=True, kw_only=True):
    name: str
    agents: tuple[str, ...] | None
    """Agents that the program may reach. None: all."""
    doors: tuple[Door, ...]
    created_at: datetime
    used_at: datetime | None = None
    """Last use, to the minute."""
    revoked_at: datetime | None = None


class NewKey(Struct, frozen=True, kw_only=True):
    """A validated key that is not stored yet."""

    name: str
    digest: str
    agents: tuple[str, ...] | None
    doors: tuple[Door, ...]


class KeyStore(Protocol):
    async def add_key(self, key: NewKey) -> Key:
        """Store a key. It may replace a revoked one of the same name.

        `Refused`: `id_taken`, or `unknown_agent` for an agent that does not exist.
        """
        ...

    async def revoke_key(self, name: str) -> Key:
        """Revoke a key. From then on `find_key` does not find it. Idempotent. `Refused("unknown_key")`."""
        ...

    async def find_key(self, digest: str) -> Key | None:
        """The key with this hash of its token, unless it is revoked. Read from the database at every call."""
        ...

    async def mark_key_used(self, name: str) -> None: ...

    async def keys(self) -> Sequence[Key]:
        """All keys by name, revoked ones too."""
        ...


def make_key(name: object, agents: object, doors: object) -> tuple[NewKey, str]:
    """Validate a new key; return it with its token, which is never shown again. `Refused("key_invalid")`."""
    if not isinstance(name, str) or not AGENT_ID.fullmatch(name):
        raise Refused(
            "key_invalid", "the name of a key is 1 to 64 of a-z, 0-9, _ and -, beginning with a letter or digit"
        )
    token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    return NewKey(name=name, digest=token_digest(token), agents=_agents(agents), doors=_doors(doors)), token


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _agents(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) for item in value):
        raise Refused("key_invalid", "agents must be a list of the ids of agents; leave it out to allow all agents")
    return tuple(dict.fromkeys(value))


def _doors(value: object) -> tuple[Door, ...]:
    if value is None:
        return DOORS
    if not isinstance(value, list | tuple) or not value:
        raise Refused("key_invalid", f"doors must be a list of {', '.join(DOORS)}; leave it out to allow all")
    for item in value:
        if item not in DOORS:
            meant = closest_match(str(item), set(DOORS))
            hint = f', did you mean "{meant}"?' if meant else f": choose from {', '.join(DOORS)}"
            raise Refused("key_invalid", f'there is no door "{one_line(str(item))}"{hint}')
    return tuple(door for door in DOORS if door in value)
