"""The settings that this process runs with: applied at the start, reloaded, changed, and followed in the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coterie.artifact_service import ArtifactService
from coterie.config import Config, SocietyFolder, changes_needing_restart, merge_reloaded, read_config
from coterie.configuration import Change, Configuration, Document, Settings, agent_of
from coterie.errors import ConfigError, Problem
from coterie.llm.config import SERVICES_FILE, ServiceRegistry
from coterie.stores.open import is_shared, require_driver, store_limits
from coterie.stores.sql.store import SqlStore

log = logging.getLogger(__name__)


class SettingsUser(Protocol):
    """The agents at work, which run with the settings."""

    async def apply(self, services: ServiceRegistry, config: Config | None = None) -> Sequence[Problem]: ...


@dataclass(frozen=True, slots=True)
class ConfigurationHealth:
    """What is wrong with the owner's files, since they were last read."""

    problems: tuple[Problem, ...] = ()
    is_applied: bool = True
    """False: the files could not be read; the settings of before stay in use."""


class RunningConfiguration:
    def __init__(
        self,
        folder: SocietyFolder,
        configuration: Configuration,
        settings: Settings,
        *,
        store: SqlStore,
        artifacts: ArtifactService,
        on_change: Callable[[], object],
    ) -> None:
        """`on_change`: called after the settings were applied."""
        self._folder, self._configuration, self.settings, self.config = folder, configuration, settings, settings.config
        self._store, self._artifacts, self._on_change = store, artifacts, on_change
        self._user: SettingsUser | None = None
        self._lock = asyncio.Lock()
        self._unreadable_version = 0
        """The last version in the database that this process could not read."""
        self.file_problems: Sequence[Problem] = settings.config.problems
        """Of the files, and changes of them that need a restart; without those that the user of the settings finds."""
        self.health = ConfigurationHealth()
        self._health_listeners: list[Callable[[ConfigurationHealth], object]] = []

    def subscribe_health(self, listener: Callable[[ConfigurationHealth], object]) -> None:
        """Call `listener` each time the files are found in another state than before."""
        self._health_listeners.append(listener)

    def start(self, found: Sequence[Problem]) -> None:
        """Record what the user of the settings found in them at the start."""
        self._set_health(ConfigurationHealth((*self.file_problems, *found)))

    def _set_health(self, health: ConfigurationHealth) -> None:
        if health != self.health:
            self.health = health
            for listener in self._health_listeners:
                listener(health)

    def set_user(self, user: SettingsUser) -> None:
        """Apply later changes to `user`, too."""
        self._user = user

    async def read(self) -> tuple[str, Document]:
        """The version of the configuration and its document; see `coterie.configuration.Document`."""
        return await self._configuration.read()

    async def change(self, change: Change, expected_version: str | None = None) -> Sequence[Problem]:
        """Change agents or limits, and apply the change here; other processes follow within a second.

        Returns the problems that the configuration has then. Errors as of `Configuration.write`.
        """
        async with self._lock:
            await self._configuration.write(change, expected_version)
            problems = await self._apply(await self._configuration.load())
        self._on_change()
        return problems

    async def reload(self) -> Sequence[Problem]:
        """Read the owner's files again; as `Society.reload`."""
        async with self._lock:
            try:
                require_driver(read_config(self._folder.path).store)
                synchronized = await self._configuration.synchronize()
                problems = await self._apply(await self._configuration.load(), synchronized)
            except ConfigError as error:
                self._set_health(ConfigurationHealth(error.problems, is_applied=False))
                raise
        self._on_change()
        log.info("configuration reloaded; problems: %d", len(problems))
        return problems

    async def reload_services(self) -> None:
        """Apply changed services. With files only these, so that an error in coterie.toml does not matter."""
        if is_shared(self.config):
            await self.follow()
            return
        async with self._lock:
            services = ServiceRegistry.parse(self._configuration.services_json(), self._folder.path)
            if self._user:
                found = await self._user.apply(services)
                others = [one for one in self.health.problems if not one.location.startswith(SERVICES_FILE)]
                if self.health.is_applied or not others:
                    self._set_health(ConfigurationHealth((*self.file_problems, *found)))
                else:  # coterie.toml still cannot be read
                    self._set_health(ConfigurationHealth((*others, *found), is_applied=False))
        self._on_change()

    async def follow(self) -> None:
        """Apply the configuration that the database has now, if another process changed it.

        If it cannot be read, the applied one stays: a process of a later version may have written it.
        """
        if not is_shared(self.config):
            return
        async with self._lock:
            version = (await self._store.configuration()).version
            if version == int(self.settings.version):
                return
            try:
                settings = await self._configuration.load()
            except ConfigError as error:
                if version != self._unreadable_version:
                    log.warning("version %d of the configuration cannot be read and is not applied: %s", version, error)
                self._unreadable_version = version
                self._set_health(ConfigurationHealth(error.problems, is_applied=False))
                return
            problems = await self._apply(settings)
        self._on_change()
        log.info("applied version %s of the configuration; %d problems", self.settings.version, len(problems))

    async def follow_seen(self) -> None:
        """`follow`, if a transaction of this process saw a later version than the one applied."""
        seen = self._store.seen_configuration  # 0 without a database that is shared
        if seen and seen > max(int(self.settings.version), self._unreadable_version):
            await self.follow()

    async def _apply(self, settings: Settings, synchronized: Sequence[Problem] | None = None) -> Sequence[Problem]:
        """Apply the settings to this process, and return all problems of files and settings.

        `synchronized`: problems of the files that `synchronize` returned; None: `find_file_problems` looks for them.
        """
        if synchronized is None:
            synchronized = await self._configuration.find_file_problems()
        config, before = settings.config, {entry.id: entry for entry in self.config.all_agents}
        changed = [agent_of(entry) for entry in config.all_agents if before.pop(entry.id, None) != entry]
        has_files = not is_shared(self.config)  # a shared store has agents and limits from the same transaction
        if has_files:
            await self._store.add_agents(changed)
            self._store.set_limits(store_limits(config))
        pending = changes_needing_restart(self.config, config)
        self.config = merge_reloaded(self.config, config)
        self._artifacts.set_max_file_bytes(max_file_bytes(config))
        applied = await self._user.apply(settings.services, config) if self._user else ()
        # Only now: a turn that finds its version here goes on without waiting for this.
        self.settings = settings
        if has_files:
            # Their events are sent now that their profiles are in place. Those left in `before` were removed.
            await self._store.add_agents([*changed, *map(agent_of, before.values())])
        self.file_problems = (*synchronized, *config.problems, *pending)
        self._set_health(ConfigurationHealth((*self.file_problems, *applied)))
        return self.health.problems


def max_file_bytes(config: Config) -> int:
    return config.limits.upload_mb * 1_000_000
