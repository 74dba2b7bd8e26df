"""Makes and ends agents while the society runs: roles to make them after, parents who answer for their children."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace

from coterie.agent.directory import Directory
from coterie.agent.profile import Profile
from coterie.agents import ID, Agent
from coterie.errors import Refused
from coterie.ids import id_for, new_id
from coterie.llm.service import ServiceNotAllowed
from coterie.messages import PERSON, RESERVED
from coterie.store import Store
from coterie.text import clean, nearest, one_line

MAX_CHILDREN = 64
"""Living children of one agent: an agent that makes agents without end is stopped here."""
MAX_FAMILY = 512
"""Living agents below one that nobody made, children of children included: a few from each soon are very many."""
_PAGE = 200


class Registrar:
    def __init__(self, store: Store, directory: Directory) -> None:
        self._store, self._directory = store, directory
        self._making = asyncio.Lock()
        """Whether an id is free and that it is taken are one step."""

    async def recall(self) -> None:
        """Those made at run time before the last stop are in the directory again, those that were ended are not."""
        # Read first, then added without a pause: an agent is never known here before its maker.
        for agent in [agent async for agent in self._all()]:
            if agent.state == "terminated":
                self._directory.remove(agent.id)
            elif agent.profile:
                self._directory.add(_profile(agent.profile))

    async def blocked(self) -> Sequence[Agent]:
        return [agent async for agent in self._all() if agent.state == "blocked"]

    async def _all(self) -> AsyncIterator[Agent]:
        after = ""
        while page := await self._store.agents(after, _PAGE):
            for agent in page:
                yield agent
            after = page[-1].id

    async def create_role(
        self,
        name: str,
        prompt: str,
        tools: Sequence[str] | None = None,
        service: str | None = None,
        maker: str = PERSON,
    ) -> None:
        """`tools` None: all that whoever makes an agent of it may use; empty: none. `Refused("role_taken")`: it is
        somebody else's."""
        if not ID.fullmatch(name):
            raise Refused("payload_invalid", f"a role's name is a-z, 0-9, _ and -, got {one_line(name, 40)!r}")
        self._check_service(maker, service)
        allowed = ("*",) if tools is None else tuple(clean(one) for one in tools)
        role = Profile(id=name, name=name, prompt=clean(prompt), tools=allowed, service=service)
        await self._store.put_role(name, json.dumps(asdict(role)), maker)

    def _check_service(self, maker: str, service: str | None) -> None:
        self._directory.check_service(service)
        if service is not None and maker != PERSON and not self._directory.may_use(maker, service):
            raise ServiceNotAllowed(service, maker)

    async def spawn(
        self,
        parent: str,
        role: str,
        *,
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        key: str,
    ) -> Profile:
        """A new agent after `role`. Spawned again under the same `key`, it is the same one."""
        pattern = await self._role(role, parent)
        self._check_service(parent, pattern.service)
        made = replace(
            pattern,
            id=id or f"{role[:50]}-{id_for('agent', key)[:6]}",
            name=clean(name or pattern.name),
            parent=None if parent == PERSON else parent,
            maker=None if parent == PERSON else parent,
            role=role,
            made_by=key,
        )
        async with self._making:
            if await self._is_made(made):
                return made
            await self._check_room(parent)
            await self._add(made)
        return made

    async def create(
        self,
        *,
        id: str | None,  # noqa: A002
        name: str | None,
        prompt: str,
        service: str | None,
        tools: Sequence[str] | None,
        parent: str | None,
    ) -> Profile:
        """An agent made by the person, without a role.

        `tools` None: all; below a parent, what the parent may use. A list is the person's word and counts as it is.
        """
        self._directory.check_service(service)
        parent = None if parent == PERSON else parent
        if parent is not None:
            self._directory.profile(parent)
        key = new_id()
        chosen = id or f"agent-{id_for('agent', key)[:6]}"
        made = Profile(
            id=chosen,
            name=clean(name or "").strip() or chosen,
            service=service,
            prompt=clean(prompt),
            tools=("*",) if tools is None else tuple(clean(one) for one in tools),
            parent=parent,
            maker=parent if tools is None else None,
            made_by=key,
        )
        async with self._making:
            await self._is_made(made)
            await self._add(made)
        return made

    async def _add(self, made: Profile) -> None:
        await self._store.add_agents([_agent(made)])
        self._directory.add(made)

    async def terminate(self, agent_id: str, by: str) -> Sequence[str]:
        """It, and all it made, read and answer nothing more. An agent may end its own children only."""
        if by not in (PERSON, await self._parent(agent_id)):
            raise Refused("not_yours", f"only its parent or the person may terminate {agent_id}")
        ended = [*self._below(agent_id), agent_id]
        for one in ended:
            await self._store.terminate(one)
            self._directory.remove(one)
        return ended

    async def _parent(self, agent_id: str) -> str | None:
        try:
            return self._directory.profile(agent_id).parent
        except Refused:
            stored = await self._store.agent(agent_id)
            if stored is None or stored.kind == "person" or stored.state == "terminated":
                raise
            # The owner's file describes it no more; it can be ended all the same.
            return stored.parent

    async def _role(self, role: str, spawner: str) -> Profile:
        """One that the spawner may use: of the owner, its own, or of an agent that it comes from."""
        roles = {
            name: stored.profile
            for name, stored in (await self._store.roles()).items()
            if stored.maker in (None, PERSON) or spawner == PERSON
            or self._directory.descends_from(spawner, stored.maker)
        }  # fmt: skip
        if role not in roles:
            meant = nearest(role, set(roles))
            hint = f", did you mean {meant!r}?" if meant else ": make it first with create_role"
            raise Refused("unknown_agent", f"there is no role {one_line(role, 40)!r}{hint}")
        return _profile(roles[role])

    async def _is_made(self, wanted: Profile) -> bool:
        if wanted.id in RESERVED or not ID.fullmatch(wanted.id):
            raise Refused("payload_invalid", "an id is 1 to 64 of a-z, 0-9, _ and -, and neither user nor system")
        known = await self._store.agent(wanted.id)
        if known is None:
            return False
        if known.profile and _profile(known.profile).made_by == wanted.made_by:
            return True
        raise Refused("id_taken", f"the id {wanted.id!r} is taken: choose another, or leave it out")

    async def _check_room(self, parent: str) -> None:
        children = sum(1 for one in self._directory if self._directory.profile(one).parent == parent)
        if children >= MAX_CHILDREN:
            raise Refused("mailbox_full", f"{parent} has {children} agents already: terminate some first")
        eldest = self._eldest(parent)
        if (family := len(self._below(eldest))) >= MAX_FAMILY:
            raise Refused("mailbox_full", f"there are {family} agents below {eldest} already: terminate some first")

    def _eldest(self, agent_id: str) -> str:
        """Whom it comes from in the end: somebody whom no agent made."""
        parents = {one.id: one.parent for one in self._directory.everybody()}
        line = [agent_id]
        while (parent := parents.get(line[-1])) is not None and parent not in line:
            line.append(parent)
        return line[-1]

    def _below(self, agent_id: str) -> list[str]:
        """Everybody it made, and whom they made, the youngest first."""
        children: dict[str | None, list[str]] = {}
        for one in self._directory.everybody():
            children.setdefault(one.parent, []).append(one.id)
        found, below = [agent_id], {agent_id}
        for parent in found:
            more = [child for child in children.get(parent, ()) if child not in below]
            found += more  # and so their children are looked at in their turn
            below.update(more)
        return found[:0:-1]


def _agent(profile: Profile) -> Agent:
    return Agent(id=profile.id, name=profile.name, parent=profile.parent, profile=json.dumps(asdict(profile)))


def _profile(written: str) -> Profile:
    fields = json.loads(written)
    if "maker" not in fields:
        # Stored before makers were: who was made after a role was made by its parent.
        fields["maker"] = fields.get("parent") if fields.get("role") else None
    return Profile(**fields | {"tools": tuple(fields["tools"]), "services": tuple(fields.get("services", ()))})
