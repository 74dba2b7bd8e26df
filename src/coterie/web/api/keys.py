"""Keys of programs: list, add, revoke. Only the owner may; a key never reaches these addresses."""

from __future__ import annotations

from typing import Annotated, Any, Self

from msgspec import Meta
from msgspec.structs import asdict

from coterie import keys
from coterie.clock import to_rfc3339
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Router, SocietyDep
from coterie.web.schemas import Schema, Time

router = Router(prefix=API, tags=["keys"], responses=COMMON_PROBLEMS)


class Key(Schema, kw_only=True):
    """A program's key. Its token is shown once, when it is made."""

    name: str
    agents: Annotated[list[str] | None, Meta(description="Agents that it may reach; null: all.")]
    doors: Annotated[list[keys.Door], Meta(description="Protocols that it may use.")]
    created_at: Time | None
    used_at: Annotated[Time | None, Meta(description="Last use, to the minute.")]
    revoked_at: Time | None

    @classmethod
    def of(cls, key: keys.Key, **more: Any) -> Self:
        return cls(
            name=key.name,
            agents=None if key.agents is None else list(key.agents),
            doors=list(key.doors),
            created_at=to_rfc3339(key.created_at),
            used_at=to_rfc3339(key.used_at),
            revoked_at=to_rfc3339(key.revoked_at),
            **more,
        )


class CreatedKey(Key, kw_only=True):
    token: Annotated[str, Meta(description="The only time that it is shown: the store has its hash.")]


class NewKey(Schema):
    name: Annotated[Any, Meta(extra_json_schema={"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,63}$"})] = None
    agents: Annotated[
        Any,
        Meta(
            extra_json_schema={"type": ["array", "null"], "items": {"type": "string"}},
            description="Ids of agents; null: all, also future ones.",
        ),
    ] = None
    doors: Annotated[
        Any,
        Meta(
            extra_json_schema={"type": ["array", "null"], "items": {"enum": list(keys.DOORS)}},
            description="Protocols; null: all.",
        ),
    ] = None


class KeyPage(Schema):
    items: list[Key]


@router.get("/keys", summary="List the keys of programs, revoked ones too, by name")
async def list_keys(society: SocietyDep) -> KeyPage:
    return KeyPage(items=[Key.of(key) for key in await society.store.keys()])


@router.post(
    "/keys",
    status_code=201,
    summary="Make a key for a program",
    responses=problems("id_taken", "unknown_agent", "key_invalid", _422="`request_invalid`"),
)
async def add_key(body: NewKey, society: SocietyDep) -> CreatedKey:
    """The program sends the token as `Authorization: Bearer …`. A new key may take the name of a revoked one."""
    key, token = keys.make_key(**asdict(body))
    return CreatedKey.of(await society.store.add_key(key), token=token)


@router.delete("/keys/{name}", summary="Revoke a key", responses=problems("unknown_key"))
async def revoke_key(name: str, society: SocietyDep) -> Key:
    """From now on its requests get 401. What it has asked already is still answered. Idempotent."""
    return Key.of(await society.store.revoke_key(name))
