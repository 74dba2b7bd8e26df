"""Runs a whole deletion of old data without pauses, for tests."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from coterie.retention_store import Pruned, Retention, RetentionStore
from coterie.society import Society


async def pruned(store: RetentionStore, *, dry_run: bool = False, full: bool = True, **retention: Any) -> Pruned:
    """Delete what is older than `Retention(**retention)` allows, and return the numbers of rows."""
    total = Pruned()
    async for deleted in store.prune(Retention(**retention), dry_run=dry_run, full=full):
        total += deleted or Pruned()
    return total


async def delete_unused(society: Society, age: timedelta = timedelta(days=1)) -> int:
    """Delete unused artifacts with their bytes; return their number."""
    return sum([count async for count in society.artifacts.delete_unused(age)])


async def delete_unnamed_bytes(society: Society) -> None:
    """Delete bytes of one part that no artifact names."""
    async for _ in society.artifacts.delete_unnamed_bytes():
        pass
