"""Schema scripts of an engine, read from its folder `schema/`.

`0011_schema.sql` creates the whole current schema, version 11. `0011_upgrade_from_0005.sql` brings version 5 to
version 11. A change of the schema edits and renumbers the first, and adds an upgrade from the number before.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from coterie.errors import StoreUnusable

_UPGRADE = re.compile(r"(\d{4})_upgrade_from_(\d{4})\.sql")
_SCHEMA = re.compile(r"(\d{4})_schema\.sql")


class Script(NamedTuple):
    version: int
    """The schema version after the script."""
    sql: str


class SchemaScripts(NamedTuple):
    current: Script
    upgrades: dict[int, Script]
    """By the version that each script upgrades."""

    @property
    def newest(self) -> int:
        return self.current.version

    def scripts_from(self, version: int) -> list[Script]:
        """Return the scripts that bring `version` to the newest one; 0 is an empty database.

        `StoreUnusable`: the version is newer than this program, or too old for an upgrade.
        """
        if version > self.newest:
            raise StoreUnusable(
                f"this society was last run by a newer Coterie (schema {version}, this one knows {self.newest}):"
                " install that version again, or restore a backup made before the change"
            )
        if version == 0:
            return [self.current]
        scripts: list[Script] = []
        while version < self.newest:
            if version not in self.upgrades:
                raise StoreUnusable(
                    f"schema {version} is older than any that this version of Coterie can upgrade"
                    f" ({', '.join(map(str, sorted(self.upgrades)))}): run coterie migrate with Coterie 0.1.0 first"
                )
            scripts.append(self.upgrades[version])
            version = scripts[-1].version
        return scripts


@cache
def read_schema(package: str) -> SchemaScripts:
    """Read the scripts in the folder `schema/` of an engine's package."""
    folder, upgrades = files(package) / "schema", {}
    current = Script(0, "")
    for entry in folder.iterdir():
        if found := _UPGRADE.fullmatch(entry.name):
            upgrades[int(found[2])] = Script(int(found[1]), entry.read_text(encoding="utf-8"))
        elif found := _SCHEMA.fullmatch(entry.name):
            current = Script(int(found[1]), entry.read_text(encoding="utf-8"))
    return SchemaScripts(current, upgrades)
