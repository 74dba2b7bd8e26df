"""Whether the process lives, and whether it can be given work."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from coterie.disk import Disk
from coterie.store import Store
from coterie.web.problems import problem

router = APIRouter(tags=["health"])


class Health:
    def __init__(self, store: Store, disk: Disk) -> None:
        self._store, self._disk = store, disk
        self.draining = False
        """Set when a stop begins: from then on no new request is taken."""

    @property
    def trouble(self) -> tuple[str, str] | None:
        """Code and sentence; None: ready."""
        if self.draining:
            return "stopping", "the society is stopping"
        if not self._store.healthy:
            sentence = "what is written does not get through to the disk: the log says why"
            return "store_unavailable", self._store.trouble or sentence
        if missing := self._disk.missing:
            return "store_unavailable", missing
        if self._disk.is_full():
            return "store_full", self._disk.sentence
        return None


@router.get("/healthz", summary="Alive")
async def alive() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/readyz", summary="Ready for work")
async def ready(request: Request) -> Response:
    if trouble := cast(Health, request.app.state.health).trouble:
        return problem(503, *trouble)
    return JSONResponse({"status": "ready"})
