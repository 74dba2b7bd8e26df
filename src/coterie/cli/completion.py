"""Names that the shell completes: read from the folder, beside whoever runs the society, and never with a complaint."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path

import typer

from coterie.cli.options import HOME


def agent_ids(context: typer.Context, incomplete: str) -> list[str]:
    folder = Path(context.params.get("dir") or os.environ.get("COTERIE_DIR") or HOME)
    known = _stored(folder) or _configured(folder)
    return [name for name in known if name.startswith(incomplete)]


def _stored(folder: Path) -> list[str]:
    import sqlite3  # and not the whole store: somebody holds the tabulator key

    database = folder / "data" / "coterie.db"
    with suppress(sqlite3.Error, OSError):
        if database.exists():
            with closing(sqlite3.connect(f"file:{database.resolve()}?mode=ro", uri=True, timeout=0.2)) as db:
                rows = db.execute("SELECT id FROM agents WHERE kind = 'agent' AND state <> 'terminated' ORDER BY id")
                return [str(row[0]) for row in rows]
    return []


def _configured(folder: Path) -> list[str]:
    """Of a society that has not run yet."""
    import tomllib

    with suppress(OSError, ValueError), (folder / "coterie.toml").open("rb") as file:
        agents = tomllib.load(file).get("agents")
        return sorted(agents) if isinstance(agents, dict) and agents else ["assistant"]
    return []
