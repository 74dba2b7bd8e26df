"""llmservices.json as a text that programs change: one entry at a time, everything else as its owner wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from coterie.errors import ConfigError, Problem
from coterie.llm.services_file import FILE, parse

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
