"""The model services of a running society: what there is, what could be, and changing it.

llmservices.json as a text that programs change: one entry at a time, everything else as its owner wrote it.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.agent.service import Directory
from coterie.clock import Clock
from coterie.config import SocietyFolder
from coterie.errors import ConfigError, Problem, Refused, StoreUnavailable
from coterie.files import write_whole
from coterie.llm.config import FILE, SecretsFile, ServiceEntry, Services, keys_from, parse, read_file, read_services
from coterie.llm.discovery import Offer, Trial, Trials, keys_found, servers_found, try_out
from coterie.llm.providers.factory import TOUR, make_service
from coterie.llm.service import LLMService, UnknownService

log = logging.getLogger(__name__)

# What a listing adds to an entry; a page that sends an entry back as it got it does not mean to write these.
_ONLY_SHOWN = ("problems", "trial", "usedBy", "tour")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
Destination = tuple[str, str]
"""Provider and address: what decides who gets the key."""
_ASSUMED = {"input": ["text"], "output": ["text"]}


class ServicesText:
    """Parsed once, changed, and written again. `ConfigError` when it is no object with an array of services."""

    def __init__(self, data: bytes | None) -> None:
        top = {} if data is None else parse(data)
        if not isinstance(top, dict):
            raise _unusable("", "expected an object")
        if top.get("services") is None:
            top["services"] = []
        if not isinstance(top["services"], list):
            raise _unusable("services", "expected an array")
        self._top: dict[str, Any] = top
        self._services: list[Any] = top["services"]

    def ids(self) -> list[str]:
        """The ids in their order; empty where an entry has none."""
        return [str(item.get("id") or "").strip() if isinstance(item, dict) else "" for item in self._services]

    def entry(self, service_id: str) -> dict[str, Any] | None:
        """The one that counts: of two with the same id, the first."""
        return next((self._services[i] for i, one in enumerate(self.ids()) if one == service_id), None)

    def put(self, service_id: str, fields: Mapping[str, Any]) -> None:
        """The entry has these fields; those it had and that are not named stay, one that is null goes."""
        entry = self.entry(service_id)
        if entry is None:
            entry = {"id": service_id}
            self._services.append(entry)
        for name, value in fields.items():
            if name in _ONLY_SHOWN or name == "id":
                continue
            if value is None:
                entry.pop(name, None)
            else:
                entry[name] = value

    def remove(self, service_id: str) -> bool:
        kept = [item for item, one in zip(self._services, self.ids(), strict=True) if one != service_id]
        removed = len(kept) < len(self._services)
        self._services[:] = kept
        return removed

    def key_name(self, service_id: str) -> str | None:
        """The name that the entry's key goes by, where it is a reference."""
        return reference((self.entry(service_id) or {}).get("apiKey"))

    def names_in_use(self) -> set[str]:
        return {name for item in self._services if isinstance(item, dict) and (name := reference(item.get("apiKey")))}

    def destination(self, service_id: str) -> Destination | None:
        """Where requests of the service go; None if there is no such entry."""
        entry = self.entry(service_id)
        return None if entry is None else destination(entry)

    def destinations_of_key(self, name: str) -> set[Destination]:
        """Where the key of that name is sent."""
        entries = [item for item in self._services if isinstance(item, dict)]
        return {destination(item) for item in entries if reference(item.get("apiKey")) == name}

    def data(self) -> bytes:
        try:
            text = json.dumps(self._top, ensure_ascii=False, indent=2, allow_nan=False)
        except ValueError:
            raise _unusable("", "holds a number too large to be written again") from None
        # Half of a character can be written in JSON, but only as an escape.
        return f"{text}\n".encode("utf-8", "backslashreplace")


def destination(entry: Mapping[str, Any]) -> Destination:
    """Provider and address of an entry, the same however they are written."""
    provider, url = (str(entry.get(name) or "").strip() for name in ("provider", "baseURL"))
    scheme, mark, rest = url.rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    return provider.lower() or "openai", f"{scheme.lower()}{mark}{host.lower()}{slash}{path}"


def reference(value: object) -> str | None:
    found = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
    return found[1] if found else None


def as_written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as a listing shows it, as the file has it: without what was inferred, masked or noted beside it."""
    written = dict(fields)
    key = written.get("apiKey")
    if isinstance(key, str) and key.startswith("…"):
        del written["apiKey"]
    capabilities = written.get("capabilities")
    if isinstance(capabilities, dict) and "source" in capabilities:
        told = {name: value for name, value in capabilities.items() if name != "source"}
        inferred = capabilities["source"] == "inferred" and told == _ASSUMED
        written["capabilities"] = None if inferred else told
    return written


def _unusable(path: str, message: str) -> ConfigError:
    return ConfigError([Problem(f"{FILE}: {path}" if path else FILE, f"{message}: mend the file first", fatal=True)])


Reload = Callable[[], Awaitable[None]]
_PLACE = re.compile(r"services\[(\d+)\](?:\.(.*))?$")
_SLIP = "expected"
"""How a problem begins that made the reader leave something out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """One service as its owner sees it."""

    entry: ServiceEntry
    problems: Sequence[Problem]
    trial: Trial | None
    """None: nobody has tried it out as it is now."""
    used_by: Sequence[str]
    """The agents that think with it."""

    def to_wire(self) -> dict[str, Any]:
        return self.entry.to_wire() | {
            "problems": [{"place": one.place, "message": one.message} for one in self.problems],
            "trial": self.trial and self.trial.to_wire(),
            "usedBy": list(self.used_by),
            "tour": self.entry.provider == TOUR,
        }


class Setup:
    def __init__(
        self,
        place: SocietyFolder,
        services: Services,
        directory: Directory,
        reload: Reload,
        clock: Clock,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._file = place.path / FILE
        self._secrets = SecretsFile(place.data / "secrets.json")
        self._trials = Trials(place.data / "trials.json")
        self._services, self._directory, self._reload = services, directory, reload
        self._clock, self._environ = clock, environ
        self._changing = asyncio.Lock()

    @property
    def problems(self) -> Sequence[Problem]:
        """Everything that is wrong with the file and the keys, also of entries too wrong to be listed."""
        return self._services.problems

    def list(self) -> Sequence[ServiceView]:
        """The services in use, in their order; the tour's while there is no other."""
        try:
            places = {one: i for i, one in reversed([*enumerate(self._text().ids())])}
        except ConfigError:
            places = {}  # the file was spoilt since it was read; what runs is shown all the same
        return [self._view(entry, places.get(entry.id)) for entry in self._services]

    def view(self, service_id: str) -> ServiceView:
        self._services.entry(service_id)
        return next(one for one in self.list() if one.entry.id == service_id)

    async def found(self, *, probe: bool = False) -> Sequence[Offer]:
        """What could be set up at a word: keys in the environment and, if asked to `probe`, servers on this machine."""
        return [*keys_found(self._environ), *(await servers_found() if probe else [])]

    async def put(self, service_id: str, fields: Mapping[str, Any], key: str | None = None) -> ServiceView:
        """The service is as `fields` say, in the file and at work. Fields that are not named stay as they are.

        `key`: goes into data/secrets.json, the file gets a reference to it; empty: it needs none; None: as it was.
        A key that was entered for one address is not sent to another: with a new address, `key` must be given.
        `Refused("service_invalid")` says what is wrong with it, and then nothing was written.
        """
        async with self._changing:
            draft = self._draft(service_id, fields, key)
            if draft.name:
                name, value = draft.name, draft.key
                await _written(lambda: self._secrets.put(name, value))
            try:
                # A crash before this line leaves a key that nobody names, and the file as it was.
                await _written(lambda: write_whole(self._file, draft.text.data()))
            except StoreUnavailable:
                await self._forget_key(draft.name, self._text())
                raise
            await self._forget_key(draft.old, draft.text)
            self._trials.saved(draft.entry, new_key=self._has_new_key(draft.entry))
            await self._reload()
        return self.view(draft.entry.id)

    async def delete(self, service_id: str) -> None:
        """The service is gone, and its key. Who named none goes on with the first of the others, or with the tour."""
        async with self._changing:
            text = self._text()
            old = text.key_name(service_id)
            if not text.remove(service_id):
                raise UnknownService(service_id, [one for one in text.ids() if one])
            if users := [agent.id for agent in self._directory.everybody() if agent.service == service_id]:
                who = ", ".join(users[:5]) + (" and others" if len(users) > 5 else "")
                raise Refused("service_in_use", f"{who} think with it: give them another service first")
            await _written(lambda: write_whole(self._file, text.data()))
            await self._forget_key(old, text)
            await self._reload()

    async def test(self, service_id: str) -> Trial:
        """One real question to the service as it is; how that went is remembered until the entry changes."""
        entry = self._services.entry(service_id)
        trial = await try_out(entry, self._make, self._clock)
        self._trials.note(entry, trial)
        return trial

    async def test_entry(self, service_id: str, fields: Mapping[str, Any], key: str | None = None) -> Trial:
        """One real question to a service that is not saved: what `put` would make of the same words."""
        draft = self._draft(service_id, fields, key)
        trial = await try_out(draft.entry, self._make, self._clock)
        self._trials.note_draft(draft.entry, trial)
        return trial

    # What is shown

    def _view(self, entry: ServiceEntry, index: int | None) -> ServiceView:
        return ServiceView(
            entry=entry,
            problems=[problem for problem in self._services.problems if index is not None and _is_of(problem, index)],
            trial=self._trials.of(entry),
            used_by=[one for one in self._directory if self._directory.service_of(one).id == entry.id],
        )

    # What is written

    def _text(self) -> ServicesText:
        return ServicesText(read_file(self._file))

    def _draft(self, service_id: str, fields: Mapping[str, Any], key: str | None) -> _Draft:
        service_id = service_id.strip()
        if not service_id:
            raise Refused("service_invalid", "id: expected a non-empty string")
        text, written = self._text(), as_written(fields)
        old = text.key_name(service_id)
        told = written.get("apiKey")
        if key is None and isinstance(told, str) and told.strip() and "${" not in told:
            key = told  # a key that was put where its reference belongs
        name = self._name_for(service_id, text, key.strip()) if key else None
        if key is not None:
            written["apiKey"] = f"${{{name}}}" if name else None
        before = text.destination(service_id)
        stored_for = self._stored_for(written.get("apiKey"), text)
        text.put(service_id, written)
        now = text.destination(service_id)
        is_kept = before is not None and "apiKey" not in written and (text.entry(service_id) or {}).get("apiKey")
        if key is None and ((is_kept and now != before) or (stored_for is not None and now not in stored_for)):
            words = "key: it was entered for another address; enter the key again, or an empty one if none is needed"
            raise Refused("service_invalid", words)
        fresh = name if name != old else None
        value = (key or "").strip()
        entry = self._read_back(text, service_id, {name: value} if name else {})
        return _Draft(text=text, entry=entry, name=fresh, key=value, old=old)

    def _stored_for(self, told: object, text: ServicesText) -> set[Destination] | None:
        """Where the stored key that `told` refers to may be sent; None if it is not one of data/secrets.json."""
        name = reference(told)
        if name is None or name not in self._secrets.read()[0]:
            return None
        return text.destinations_of_key(name)

    def _name_for(self, service_id: str, text: ServicesText, key: str) -> str:
        """Its old name for the key it has; else one that means nothing to anybody yet, here or in the environment."""
        stored, _ = self._secrets.read()
        old = text.key_name(service_id)
        if old and stored.get(old) == key and old not in self._environ:
            return old
        base = re.sub(r"[^A-Z0-9]+", "_", service_id.upper()).strip("_")
        first = f"{base if base[:1].isalpha() else f'SERVICE_{base}'.strip('_')}_API_KEY"
        taken = {*stored, *text.names_in_use(), *self._environ}
        return next(one for n in itertools.count(1) if (one := first if n == 1 else f"{first}_{n}") not in taken)

    def _has_new_key(self, entry: ServiceEntry) -> bool:
        return entry.id not in self._services or self._services.entry(entry.id).api_key != entry.api_key

    def _read_back(self, text: ServicesText, service_id: str, new: Mapping[str, str]) -> ServiceEntry:
        """The entry as the file's own reader understands it."""
        stored, _ = self._secrets.read()
        entries, problems = read_services(text.data(), keys_from(self._environ, {**stored, **new}))
        index = text.ids().index(service_id)
        wrong = [one for one in problems if _is_of(one, index) and (one.message.startswith(_SLIP) or new)]
        entry = next((one for one in entries if one.id == service_id), None)
        if wrong or entry is None:
            raise Refused("service_invalid", "; ".join(map(_in_entry, wrong)) or "it cannot be used")
        return entry

    async def _forget_key(self, name: str | None, text: ServicesText) -> None:
        """A key that no entry names any more is not kept."""
        if name is None or name in text.names_in_use():
            return
        try:
            await asyncio.to_thread(self._secrets.remove, name)
        except (OSError, ConfigError) as error:
            log.warning("the key %s is not used any more, but could not be deleted: %s", name, error)

    def _make(self, entry: ServiceEntry) -> LLMService:
        return make_service(entry, self._clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """The file as it shall be, and what must be written beside it."""

    text: ServicesText
    entry: ServiceEntry
    name: str | None
    """What the new key is kept under. None: there is no new one."""
    key: str = field(repr=False)
    old: str | None
    """The name of the key it had."""


async def _written(write: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(write)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "let the society's owner write to its folder"
        words = f"nothing was changed ({error.strerror}): {remedy}, then try again"
        raise StoreUnavailable(words, full=full) from error


def _is_of(problem: Problem, index: int) -> bool:
    found = _PLACE.search(problem.place)
    return found is not None and int(found[1]) == index


def _in_entry(problem: Problem) -> str:
    found = _PLACE.search(problem.place)
    return f"{found[2]}: {problem.message}" if found and found[2] else problem.message
