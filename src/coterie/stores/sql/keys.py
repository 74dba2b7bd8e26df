"""Keys of programs: store, revoke and find them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from coterie.clock import from_ms
from coterie.errors import Refused
from coterie.keys import Key, NewKey
from coterie.messages import PERSON
from coterie.stores.sql.rows import Connection, json_keys
from coterie.stores.sql.unit_of_work import UnitOfWork

KEY_COLUMNS = "name, agents, doors, created_at, used_at, revoked_at"
"""Columns of `_KeyRow`."""
_SELECT_KEYS = f"SELECT {KEY_COLUMNS} FROM keys ORDER BY name"
_SELECT_KEY = f"SELECT {KEY_COLUMNS} FROM keys WHERE name = :name"
_SELECT_BY_DIGEST = f"SELECT {KEY_COLUMNS} FROM keys WHERE digest = :digest AND revoked_at IS NULL"
# A name is free if no key has it, or a revoked one: two processes that add the same name at once see that here.
_INSERT = """
INSERT INTO keys (name, digest, agents, doors, created_at) VALUES (:name, :digest, :agents, :doors, :now)
    ON CONFLICT (name) DO UPDATE SET digest = excluded.digest, agents = excluded.agents, doors = excluded.doors,
        created_at = excluded.created_at, used_at = NULL, revoked_at = NULL
     WHERE keys.revoked_at IS NOT NULL
"""
_SELECT_AGENTS = "SELECT id FROM agents WHERE id IN (SELECT key FROM json_each(:ids)) AND kind = 'agent'"
_REVOKE = "UPDATE keys SET revoked_at = :now WHERE name = :name AND revoked_at IS NULL"
_MARK_USED = "UPDATE keys SET used_at = :now WHERE name = :name"

_encode = msgspec.json.Encoder().encode


class _KeyRow(NamedTuple):
    name: str
    agents: str | None
    doors: str
    created_at: int
    used_at: int | None
    revoked_at: int | None

    def to_key(self) -> Key:
        return Key(
            name=self.name,
            agents=None if self.agents is None else tuple(msgspec.json.decode(self.agents)),
            doors=tuple(msgspec.json.decode(self.doors)),
            created_at=from_ms(self.created_at),
            used_at=None if self.used_at is None else from_ms(self.used_at),
            revoked_at=None if self.revoked_at is None else from_ms(self.revoked_at),
        )


def add_key(db: Connection, uow: UnitOfWork, key: NewKey) -> Key:
    if key.agents is not None:
        known = {agent_id for (agent_id,) in db.execute(_SELECT_AGENTS, {"ids": json_keys(key.agents)})}
        if missing := [agent_id for agent_id in key.agents if agent_id not in known or agent_id == PERSON]:
            raise Refused("unknown_agent", f"there is no agent {missing[0]!r}: list them with coterie agents")
    agents = None if key.agents is None else _encode(key.agents).decode()
    values = {"name": key.name, "digest": key.digest, "agents": agents, "doors": _encode(key.doors).decode()}
    if not db.execute(_INSERT, values | {"now": uow.timestamp}).rowcount:
        raise Refused("id_taken", f"there is a key {key.name!r} already: revoke it first, or choose another name")
    return _read_key(db, key.name)


def revoke_key(db: Connection, uow: UnitOfWork, name: str) -> Key:
    db.execute(_REVOKE, {"name": name, "now": uow.timestamp})
    return _read_key(db, name)


def mark_used(db: Connection, uow: UnitOfWork, name: str) -> None:
    db.execute(_MARK_USED, {"name": name, "now": uow.timestamp})


def find_key(db: Connection, digest: str) -> Key | None:
    row = db.execute(_SELECT_BY_DIGEST, {"digest": digest}).fetchone()
    return row and _KeyRow._make(row).to_key()


def read_keys(db: Connection) -> list[Key]:
    return [_KeyRow._make(row).to_key() for row in db.execute(_SELECT_KEYS)]


def _read_key(db: Connection, name: str) -> Key:
    row = db.execute(_SELECT_KEY, {"name": name}).fetchone()
    if row is None:
        raise Refused("unknown_key", f"there is no key {name!r}: list them with coterie keys list")
    return _KeyRow._make(row).to_key()
