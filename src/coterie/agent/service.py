"""The agents of a running society.

`AgentDirectory` holds the profiles in memory and answers what each agent may use and what its model can do.
`AgentService` creates and terminates agents: it writes to the store and then updates the directory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase

from coterie.agents import AGENT_ID, MAX_DESCRIPTION, Agent, Profile
from coterie.artifacts import ArtifactType
from coterie.errors import Refused
from coterie.ids import id_for, new_id
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.learned_limits import LearnedLimits
from coterie.llm.routing import accepts_tools
from coterie.llm.service import CAPABILITY_BY_TYPE, Capabilities, Direction, Sampling, ServiceNotAllowed
from coterie.messages import PERSON, RESERVED_IDS
from coterie.store import Store, StoredProfile
from coterie.text import closest_match, one_line, to_storable


class AgentDirectory:
    def __init__(self, services: ServiceRegistry, learned_limits: LearnedLimits, agents: Iterable[Profile]) -> None:
        self._services, self._learned_limits = services, learned_limits
        self._agents: dict[str, Profile | str] = {profile.id: profile for profile in agents}
        """Profiles by id. A profile of the store stays JSON until its first use: there may be very many."""
        self._terminated: set[str] = set()
        self._changes = 0

    def add(self, profile: Profile) -> None:
        """Add an agent, or replace its profile. A terminated agent is not added again."""
        if profile.id in self._terminated:
            return
        self._agents[profile.id] = profile
        self._changes += 1

    def add_stored(self, agent_id: str, data: str) -> None:
        """Add an agent with its profile as JSON, as `add` does."""
        if agent_id not in self._terminated:
            self._agents[agent_id] = data
            self._changes += 1

    def mark_terminated(self, agent_id: str) -> None:
        """Remove a terminated agent; later calls of `add` for it do nothing."""
        self.remove(agent_id)
        self._terminated.add(agent_id)

    def remove(self, agent_id: str) -> None:
        """Remove an agent that coterie.toml no longer describes. Its mail stays; `add` brings it back."""
        self._agents.pop(agent_id, None)
        self._changes += 1

    @property
    def currency(self) -> str | None:
        """The currency of the prices of services; None: no service has a price."""
        return self._services.currency

    @property
    def lacks_keys(self) -> bool:
        """True if a service cannot be used in this process, because its key is not set here."""
        return any(entry.missing_key for entry in self._services)

    def is_terminated(self, agent_id: str) -> bool:
        return agent_id in self._terminated

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of agents whose service exists and is allowed."""
        known = {entry.id for entry in self._services}
        return (agent.id for agent in self.all_profiles() if known and self._has_service(agent, known))

    def _has_service(self, agent: Profile, known: Container[str]) -> bool:
        service_id = self._service_id(agent)
        if service_id is not None and service_id not in known:
            return False
        return agent.maker is None or self.may_use(agent.id, self._services.get(service_id).id)

    def __len__(self) -> int:
        return len(self._agents)

    def all_profiles(self) -> list[Profile]:
        """Return all agents, including those without a usable service."""
        return [profile for agent_id in [*self._agents] if (profile := self.find(agent_id))]

    def check_service(self, service: str | None) -> None:
        """Raise `UnknownService` if the service does not exist."""
        if service is not None:
            self._services.get(service)

    def has(self, agent_id: str) -> bool:
        return agent_id in self._agents

    def profile(self, agent_id: str) -> Profile:
        if agent_id in self._terminated:
            raise Refused("recipient_terminated", f'"{one_line(agent_id)}" was terminated')
        profile = self.find(agent_id)
        if profile is None:
            raise Refused("unknown_agent", f'there is no agent "{one_line(agent_id)}"')
        return profile

    def find(self, agent_id: str) -> Profile | None:
        """The profile of the agent; None if it is unknown or was terminated."""
        profile = self._agents.get(agent_id)
        if isinstance(profile, str):
            profile = self._agents[agent_id] = _parse_profile(profile)
        return profile

    def name_of(self, agent_id: str) -> str:
        """The agent's display name; its id if it has none or is unknown."""
        profile = self.find(agent_id)
        return (profile and profile.name) or agent_id

    def description_of(self, agent_id: str) -> str:
        """What the agent is for, on one line; empty if it has no description or is unknown."""
        profile = self.find(agent_id)
        return one_line(profile.description, MAX_DESCRIPTION) if profile else ""

    def service_of(self, agent_id: str) -> ServiceEntry:
        """Return the service of the agent, else of its maker. `UnknownService`: there is none or it is not allowed."""
        profile = self.profile(agent_id)
        if profile.maker is None:
            return self._services.get(profile.service)
        entry = self._services.get(self._service_id(profile))
        if not self.may_use(agent_id, entry.id):
            raise ServiceNotAllowed(entry.id, profile.maker, gone=self._ancestry(agent_id) is None)
        return entry

    def accepts_tools(self, agent_id: str) -> bool:
        """True if the agent's requests contain tools."""
        return accepts_tools(self.service_of(agent_id), self._learned_limits)

    # Rights. They are computed at each use: an agent never has more rights than its maker has now.

    def tools_of(self, agent_id: str) -> tuple[tuple[str, ...], ...]:
        """Return the pattern lists of the agent and its makers. A tool is allowed if each list allows it."""
        profile = self.find(agent_id)
        if profile is not None and profile.maker is None:
            return (profile.tools,)
        ancestry = self._ancestry(agent_id)
        return tuple(dict.fromkeys(profile.tools for profile in ancestry)) if ancestry else ((),)

    def may_use(self, agent_id: str, service_id: str) -> bool:
        """True if the agent may use the service, for itself and for agents that it creates."""
        ancestry = self._ancestry(agent_id)
        if not ancestry or service_id not in {entry.id for entry in self._services}:
            return False
        first = ancestry[-1]  # its entry holds for all its descendants
        own = self._services.get(first.service).id if first.service is None else first.service
        return service_id == own or any(fnmatchcase(service_id, pattern) for pattern in first.services)

    def descends_from(self, agent_id: str, maker: str) -> bool:
        """True if `maker` is the agent itself or one of its makers."""
        return any(profile.id == maker for profile in self._ancestry(agent_id) or ())

    def _ancestry(self, agent_id: str) -> list[Profile] | None:
        """Return the agent, its maker and so on up to an agent without a maker. None: one of them is missing."""
        ancestry, next_id = list[Profile](), agent_id
        while (profile := self.find(next_id)) is not None and profile not in ancestry:
            ancestry.append(profile)
            if profile.maker is None:
                return ancestry
            next_id = profile.maker
        return None

    def _service_id(self, profile: Profile) -> str | None:
        """Return the service that the agent or its nearest maker names. None: use the first service."""
        ancestry = self._ancestry(profile.id) or [profile]
        return next((ancestor.service for ancestor in ancestry if ancestor.service is not None), None)

    def capabilities_of(self, agent_id: str) -> Capabilities:
        return self._learned_limits.effective_capabilities(self.service_of(agent_id))

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes with every change of agents, services or capabilities."""
        return self._changes, self._services.version, self._learned_limits.version

    async def with_capability(self, capability: str, direction: Direction = "input") -> Sequence[str]:
        """Return the ids of agents whose models have the capability."""
        return [agent for agent in self if self.capabilities_of(agent).has(capability, direction)]

    async def readers_of(self, kind: ArtifactType, size: int, mime_type: str = "") -> Sequence[str]:
        """Return the ids of agents whose models read a file of that type and size natively."""
        needed = CAPABILITY_BY_TYPE[kind]
        entries = {agent: self.service_of(agent) for agent in await self.with_capability(needed)}
        return [
            agent
            for agent, entry in entries.items()
            if size <= entry.limits.for_type(kind) and self._learned_limits.takes_type(entry, needed, mime_type)
        ]


MAX_CHILDREN = 64
"""Living children per agent."""
MAX_DESCENDANTS = 512
"""Living descendants, of all generations, per agent without a parent."""
MAX_NAMED_ROLES = 20
"""Roles named in an error."""
_PAGE_SIZE = 200


class AgentService:
    def __init__(self, store: Store, directory: AgentDirectory) -> None:
        self._store, self._directory = store, directory
        self._creation_lock = asyncio.Lock()
        """Makes checking that an id is free and storing the agent one step."""

    async def refresh_directory(self) -> None:
        """Add all agents that were created at run time, here or by another process; remove terminated ones."""
        # All are read before the first is added, so that no agent is in the directory before its maker.
        found, after = list[StoredProfile](), ""
        while page := await self._store.agent_profiles(after=after):
            found += page
            after = page[-1].agent_id
        for profile in found:
            self._apply(profile)

    async def refresh_agents(self, ids: Sequence[str]) -> None:
        """Update these agents in the directory, and makers of them that it does not know."""
        missing = [*ids]
        found = list[StoredProfile]()
        while missing:
            page = await self._store.agent_profiles(missing)
            found += page
            makers = {json.loads(one.profile).get("maker") for one in page if one.profile and not one.is_terminated}
            known = {one.agent_id for one in found}
            missing = [maker for maker in makers if maker and maker not in known and not self._directory.find(maker)]
        for profile in reversed(found):
            self._apply(profile)

    def _apply(self, profile: StoredProfile) -> None:
        if profile.is_terminated:
            self._directory.mark_terminated(profile.agent_id)
        elif profile.profile:
            self._directory.add_stored(profile.agent_id, profile.profile)

    async def list_blocked(self) -> Sequence[Agent]:
        return [agent async for agent in self._all() if agent.state == "blocked"]

    async def _all(self) -> AsyncIterator[Agent]:
        after = ""
        while page := await self._store.agents(after, _PAGE_SIZE):
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
        description: str = "",
    ) -> None:
        """Create or replace a role. `Refused("role_taken")`: the role has another maker.

        `tools`: patterns of tool names. None: all tools of the agent that spawns; empty: none.
        """
        if not AGENT_ID.fullmatch(name):
            raise Refused("payload_invalid", f"a role's name is a-z, 0-9, _ and -, got {one_line(name, 40)!r}")
        self._check_service(maker, service)
        allowed = ("*",) if tools is None else tuple(map(to_storable, tools))
        role = Profile(
            id=name,
            name=name,
            prompt=to_storable(prompt),
            description=_check_description(description),
            tools=allowed,
            service=service,
        )
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
        description: str | None = None,
        key: str,
    ) -> Profile:
        """Create an agent from `role`. Idempotent for the same `key`. `description`: by default the role's."""
        template = await self._find_role(role, parent)
        self._check_service(parent, template.service)
        profile = replace(
            template,
            id=id or f"{role[:50]}-{id_for('agent', key)[:6]}",
            name=to_storable(name or template.name),
            description=template.description if description is None else _check_description(description),
            parent=None if parent == PERSON else parent,
            maker=None if parent == PERSON else parent,
            role=role,
            made_by=key,
        )
        async with self._creation_lock:
            if await self._exists(profile):
                return profile
            self._check_child_limits(parent)
            await self._add(profile)
        return profile

    async def create(
        self,
        *,
        id: str | None,  # noqa: A002
        name: str | None,
        prompt: str,
        service: str | None,
        tools: Sequence[str] | None,
        parent: str | None,
        description: str = "",
    ) -> Profile:
        """Create an agent without a role, on a person's request.

        `tools`: patterns of tool names, which the rights of `parent` do not limit. None: all tools, or those of
        `parent`.
        """
        self._directory.check_service(service)
        parent = None if parent == PERSON else parent
        if parent is not None and not self._directory.has(parent):
            await self.refresh_directory()  # another process may have created it a moment ago
            self._directory.profile(parent)
        key = new_id()
        agent_id = id or f"agent-{id_for('agent', key)[:6]}"
        profile = Profile(
            id=agent_id,
            name=to_storable(name or "").strip() or agent_id,
            service=service,
            prompt=to_storable(prompt),
            description=_check_description(description),
            tools=("*",) if tools is None else tuple(map(to_storable, tools)),
            parent=parent,
            maker=parent if tools is None else None,
            made_by=key,
        )
        async with self._creation_lock:
            await self._exists(profile)
            await self._add(profile)
        return profile

    async def _add(self, profile: Profile) -> None:
        data = json.dumps(asdict(profile))
        try:
            await self._store.create_agent(Agent(id=profile.id, name=profile.name, parent=profile.parent, profile=data))
        except Refused:
            # Another process was faster: with the same creation after a takeover, or with another agent. Or the
            # parent was terminated.
            if not await self._exists(profile):
                raise
        self._directory.add(profile)

    async def terminate(self, agent_id: str, by: str) -> Sequence[str]:
        """Terminate the agent and its descendants; return their ids. `by`: the agent's parent or a person."""
        if by not in (PERSON, await self._parent(agent_id)):
            raise Refused("not_yours", f"only its parent or the person may terminate {agent_id}")
        await self.refresh_directory()  # other processes may have created descendants a moment ago
        terminated, family = list[str](), [*self._descendants([agent_id]), agent_id]
        while family:
            for one in family:
                await self._store.terminate(one)
                self._directory.mark_terminated(one)
            terminated = [*terminated, *family]
            # Each of them may have created agents until it was terminated.
            await self.refresh_directory()
            family = self._descendants(terminated)
        return terminated

    async def _parent(self, agent_id: str) -> str | None:
        try:
            return self._directory.profile(agent_id).parent
        except Refused:
            stored = await self._store.agent(agent_id)
            if stored is None or stored.kind == "person" or stored.state == "terminated":
                raise
            # coterie.toml no longer describes it, but it can still be terminated.
            return stored.parent

    async def _find_role(self, role: str, spawner: str) -> Profile:
        """Return a role of a person, of the spawner or of one of its makers. `Refused("unknown_role")`."""
        roles = {
            name: stored.profile
            for name, stored in (await self._store.roles()).items()
            if stored.maker in (None, PERSON) or spawner == PERSON
            or self._directory.descends_from(spawner, stored.maker)
        }  # fmt: skip
        if role not in roles:
            meant = closest_match(role, set(roles))
            known = f": there are {', '.join(sorted(roles)[:MAX_NAMED_ROLES])}" if roles else ": there is none yet"
            hint = f", did you mean {meant!r}?" if meant else known
            raise Refused("unknown_role", f"there is no role {one_line(role, 40)!r}{hint}")
        return _parse_profile(roles[role])

    async def _exists(self, profile: Profile) -> bool:
        """True if this creation was stored before. `Refused`: the id is invalid, or another agent has it."""
        if profile.id in RESERVED_IDS or not AGENT_ID.fullmatch(profile.id):
            raise Refused("payload_invalid", "an id is 1 to 64 of a-z, 0-9, _ and -, and neither user nor system")
        stored = await self._store.agent(profile.id)
        if stored is None:
            return False
        if stored.profile and _parse_profile(stored.profile).made_by == profile.made_by:
            return True
        raise Refused("id_taken", f"the id {profile.id!r} is taken: choose another, or leave it out")

    def _check_child_limits(self, parent: str) -> None:
        children = sum(1 for agent_id in self._directory if self._directory.profile(agent_id).parent == parent)
        if children >= MAX_CHILDREN:
            raise Refused("too_many_children", f"{parent} has {children} agents already: terminate some first")
        root = self._root(parent)
        if (count := len(self._descendants([root]))) >= MAX_DESCENDANTS:
            raise Refused("too_many_children", f"there are {count} agents below {root} already: terminate some first")

    def _root(self, agent_id: str) -> str:
        """Return the topmost ancestor by `parent`."""
        parents = {profile.id: profile.parent for profile in self._directory.all_profiles()}
        path = [agent_id]
        while (parent := parents.get(path[-1])) is not None and parent not in path:
            path.append(parent)
        return path[-1]

    def _descendants(self, ancestors: Sequence[str]) -> list[str]:
        """Return all descendants of these agents by `parent`, deepest first."""
        children: dict[str | None, list[str]] = {}
        for profile in self._directory.all_profiles():
            children.setdefault(profile.parent, []).append(profile.id)
        queue, seen = [*ancestors], {*ancestors}
        for parent in queue:
            new = [child for child in children.get(parent, ()) if child not in seen]
            queue += new  # extends this loop
            seen.update(new)
        return queue[len(ancestors) :][::-1]


def _check_description(text: str) -> str:
    """The description as it is stored; `Refused` if it is too long."""
    if len(text) > MAX_DESCRIPTION:
        raise Refused(
            "payload_invalid", f"a description has at most {MAX_DESCRIPTION} characters, got {len(text):,}: shorten it"
        )
    return to_storable(text).strip()


def _parse_profile(data: str) -> Profile:
    fields = json.loads(data)
    if "maker" not in fields:
        # Stored by a version without makers: the maker of an agent with a role is its parent.
        fields["maker"] = fields.get("parent") if fields.get("role") else None
    fields["tools"], fields["services"] = tuple(fields["tools"]), tuple(fields.get("services", ()))
    return Profile(**fields | {"sampling": Sampling(**fields.get("sampling") or {})})
