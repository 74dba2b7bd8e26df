"""How much is stored, what retention is set, and the deletion of old data."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Self

from msgspec import Meta

from coterie import retention
from coterie.clock import to_rfc3339
from coterie.retention import RetentionService
from coterie.retention_store import Pruned
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Router, SocietyDep
from coterie.web.schemas import Schema, Time

router = Router(prefix=API, tags=["society"], responses=COMMON_PROBLEMS)


class DeletedRows(Schema):
    messages: int
    history: Annotated[int, Meta(description="Rows of agents' histories.")]
    plans: int
    calls: Annotated[int, Meta(description="Tool calls.")]
    model_calls: int
    tasks: int
    turns: int
    schedules: int
    events: int
    artifacts: int

    @classmethod
    def of(cls, deleted: Pruned) -> Self:
        return cls(**asdict(deleted))


class LastPrune(Schema):
    at: Time
    deleted: DeletedRows


class PruneRun(Schema):
    """A run that was started by a request, in this process."""

    dry_run: bool
    running: bool
    deleted: Annotated[DeletedRows, Meta(description="So far. A dry run only counts.")]
    kept_days: Annotated[float | None, Meta(description="Age up to which messages stay. null: all stay.")]
    error: str | None

    @classmethod
    def of(cls, run: retention.PruneRun) -> Self:
        return cls(
            dry_run=run.dry_run,
            running=run.is_running,
            deleted=DeletedRows.of(run.deleted),
            kept_days=None if run.kept is None else run.kept / timedelta(days=1),
            error=run.error,
        )


class StoredRows(Schema):
    agents: int
    messages: int
    history: Annotated[int, Meta(description="Rows of agents' histories.")]
    tasks: int
    calls: Annotated[int, Meta(description="Tool calls.")]
    llm_calls: Annotated[int, Meta(description="Model calls.")]
    events: int
    artifacts: int


class Storage(Schema):
    """With PostgreSQL, `usedBytes` and `rows` are estimates of its statistics."""

    engine: str
    file_bytes: Annotated[int, Meta(description="Size of the database.")]
    used_bytes: Annotated[int, Meta(description="The part of it that is in use.")]
    artifact_bytes: int
    rows: StoredRows
    oldest: Annotated[Time | None, Meta(description="Time of the oldest message.")]
    keep_days: Annotated[int, Meta(description="0: no limit.")]
    keep_gb: Annotated[float, Meta(description="0: no limit.")]
    can_shrink: Annotated[bool, Meta(description="false: the file keeps its size until it is rewritten.")]
    last_prune: LastPrune | None
    run: PruneRun | None

    @classmethod
    async def read(cls, service: RetentionService, engine: str) -> Self:
        figures, settings = await service.figures(), service.settings
        last = figures.last_prune
        return cls(
            engine=engine,
            file_bytes=figures.file_bytes,
            used_bytes=figures.used_bytes,
            artifact_bytes=figures.artifact_bytes,
            rows=StoredRows(**figures.rows),
            oldest=to_rfc3339(figures.oldest),
            keep_days=settings.keep_days,
            keep_gb=settings.keep_gb,
            can_shrink=figures.can_shrink,
            last_prune=LastPrune(at=to_rfc3339(last.at) or "", deleted=DeletedRows.of(last.deleted)) if last else None,
            run=PruneRun.of(service.run) if service.run else None,
        )


class NewPruneRun(Schema):
    dry_run: Annotated[bool, Meta(description="Only count what would be deleted.")] = False
    rewrite: Annotated[
        bool, Meta(description="Afterwards write an SQLite file anew, so that it shrinks. Writers wait meanwhile.")
    ] = False


@router.get("/storage", summary="Get sizes, row counts, retention and the last deletion of old data")
async def get_storage(society: SocietyDep) -> Storage:
    return await Storage.read(society.retention, society.store.info.engine)


@router.post(
    "/storage/prune",
    status_code=202,
    summary="Start to delete what is older than the retention allows",
    responses=problems("prune_running", _422="`request_invalid`"),
)
async def start_prune(body: NewPruneRun, society: SocietyDep) -> PruneRun:
    """The run goes on after the answer; `GET /storage/prune` shows its progress."""
    return PruneRun.of(society.retention.start_run(dry_run=body.dry_run, rewrite=body.rewrite))


@router.get("/storage/prune", summary="Get the progress of the last run that was started by a request")
async def get_prune(society: SocietyDep) -> PruneRun:
    """All zero if there was none since the start. Faster than `GET /storage`, which counts rows."""
    return PruneRun.of(society.retention.run or retention.PruneRun(dry_run=False, is_running=False))
