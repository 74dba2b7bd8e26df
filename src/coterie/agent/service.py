"""Who the agents are and what their models can do. Descriptions, `find_agents` and tool contexts all ask here.

Makes and ends agents while the society runs: roles to make them after, parents who answer for their children.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase

from coterie.agents import ID, Agent, Profile
from coterie.artifacts import ArtifactType
from coterie.errors import Refused
from coterie.ids import id_for, new_id
from coterie.llm.config import ServiceEntry, Services
from coterie.llm.learned_limits import Refusals
from coterie.llm.service import NEEDS, Capabilities, Direction, ServiceNotAllowed
from coterie.messages import PERSON, RESERVED
from coterie.store import Store
from coterie.text import clean, nearest, one_line


class Directory:
    def __init__(self, services: Services, refusals: Refusals, agents: Iterable[Profile]) -> None:
        self._services, self._refusals = services, refusals
        self._agents = {profile.id: profile for profile in agents}
        self._ended: set[str] = set()
        self._changes = 0

    def add(self, profile: Profile) -> None:
        """Add an agent, or replace its profile. A terminated agent is not added again."""
        if profile.id in self._ended:
            return
        self._agents[profile.id] = profile
        self._changes += 1

    def remove(self, agent_id: str) -> None:
        """Remove a terminated agent; later calls of `add` for it do nothing."""
        self.forget(agent_id)
        self._ended.add(agent_id)

    def forget(self, agent_id: str) -> None:
        """The owner's file describes it no more. It still has its mail, and comes back when it is described again."""
        self._agents.pop(agent_id, None)
        self._changes += 1

    def has_ended(self, agent_id: str) -> bool:
        return agent_id in self._ended

    def __iter__(self) -> Iterator[str]:
        """The agents whose service exists; the others can do nothing until their configuration is mended."""
        known = {entry.id for entry in self._services}
        return (agent.id for agent in [*self._agents.values()] if known and self._has_service(agent, known))

    def _has_service(self, agent: Profile, known: Container[str]) -> bool:
        wanted = self._service_id(agent)
        if wanted is not None and wanted not in known:
            return False
        return agent.maker is None or self.may_use(agent.id, self._services.entry(wanted).id)

    def __len__(self) -> int:
        return len(self._agents)

    def everybody(self) -> list[Profile]:
        """Also those whose service is not there."""
        return list(self._agents.values())

    def check_service(self, service: str | None) -> None:
        """`UnknownService` when there is none of that id."""
        if service is not None:
            self._services.entry(service)

    def profile(self, agent_id: str) -> Profile:
        if agent_id in self._ended:
            raise Refused("recipient_terminated", f'"{one_line(agent_id)}" was terminated')
        if agent_id not in self._agents:
            raise Refused("unknown_agent", f'there is no agent "{one_line(agent_id)}"')
        return self._agents[agent_id]

    def name_of(self, agent_id: str) -> str:
        """The agent's display name; its id if it has none or is unknown."""
        profile = self._agents.get(agent_id)
        return (profile and profile.name) or agent_id

    def service_of(self, agent_id: str) -> ServiceEntry:
        """Its own, or its maker's. `UnknownService` when there is none, or its maker may not use it."""
        profile = self.profile(agent_id)
        entry = self._services.entry(self._service_id(profile))
        if profile.maker is not None and not self.may_use(agent_id, entry.id):
            raise ServiceNotAllowed(entry.id, profile.maker, gone=self._line(agent_id) is None)
        return entry

    # Rights: those of an agent that an agent made are never more than its maker's, whenever they are looked at

    def tools_of(self, agent_id: str) -> tuple[tuple[str, ...], ...]:
        """Lists of patterns: its own and those of its makers. It may use a tool that every list has a pattern for."""
        line = self._line(agent_id)
        return tuple(dict.fromkeys(one.tools for one in line)) if line else ((),)

    def may_use(self, agent_id: str, service_id: str) -> bool:
        """Whether that service is among the agent's rights: for itself, and for agents that it makes."""
        line = self._line(agent_id)
        if not line or service_id not in {entry.id for entry in self._services}:
            return False
        first = line[-1]  # the owner made it: what its entry says counts for all agents that come from it
        own = self._services.entry(first.service).id if first.service is None else first.service
        return service_id == own or any(fnmatchcase(service_id, pattern) for pattern in first.services)

    def descends_from(self, agent_id: str, maker: str) -> bool:
        """Whether it is that agent, or was made by it, or by one that was."""
        line = self._line(agent_id)
        return any(one.id == maker for one in line or ())

    def _line(self, agent_id: str) -> list[Profile] | None:
        """The agent, its maker, and so on, up to one that the owner made. None: one of them is not there."""
        line, wanted = list[Profile](), agent_id
        while (profile := self._agents.get(wanted)) is not None and profile not in line:
            line.append(profile)
            if profile.maker is None:
                return line
            wanted = profile.maker
        return None

    def _service_id(self, profile: Profile) -> str | None:
        """The id it names, or that its maker thinks with. None: the first service there is."""
        line = self._line(profile.id) or [profile]
        return next((one.service for one in line if one.service is not None), None)

    def capabilities_of(self, agent_id: str) -> Capabilities:
        return self._refusals.left(self.service_of(agent_id))

    @property
    def edition(self) -> tuple[object, ...]:
        """Another one after any change of who is there or of what they can do."""
        return self._changes, self._services.edition, self._refusals.edition

    async def with_capability(self, capability: str, direction: Direction = "input") -> Sequence[str]:
        """The ids of the agents whose models have it."""
        return [agent for agent in self if self.capabilities_of(agent).has(capability, direction)]

    async def readers_of(self, kind: ArtifactType, size: int) -> Sequence[str]:
        """Those who can be sent a file of that kind and size and get it as it is."""
        able = await self.with_capability(NEEDS[kind])
        return [agent for agent in able if size <= self.service_of(agent).limits.of(kind)]


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
