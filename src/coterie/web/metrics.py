"""Numbers for Prometheus. What the store knows is read when somebody asks for it.

Requests counted as they pass: a dictionary and a list of numbers, so that counting costs next to nothing.

Whether the process lives, and whether it can be given work.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from coterie.files import DiskMonitor
from coterie.society import Society
from coterie.store import Statistics, Store, Worker
from coterie.web.errors import problem

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds."""


@dataclass(slots=True)
class Durations:
    total: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def note(self, seconds: float) -> None:
        self.total += seconds
        self.counts[bisect_left(BUCKETS, seconds)] += 1


class HttpMeter:
    """Requests by method, route template and status. A template is ours, so there are only so many of them."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], Durations] = {}

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        key = (method, template(scope), status)
        found = self.requests.get(key)
        if found is None:
            found = self.requests[key] = Durations()
        found.note(seconds)


API = "/api/v1"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def template(scope: Scope) -> str:
    path: str = getattr(scope.get("route"), "path", "")
    # A router's own routes do not know under which prefix they were mounted.
    prefix = API if scope["path"].startswith(API) and not path.startswith(API) else ""
    return f"{prefix}{path}" if path else "unmatched"


router = APIRouter(tags=["health"])

ENDS = {"done": "ok", "failed": "error", "cancelled": "cancelled", "unknown": "unknown"}
"""A call's last state, and the outcome it is counted as."""


class Numbers:
    """What happened since the process began, and how things stand."""

    def __init__(self, society: Society, meter: HttpMeter, stream_clients: Callable[[], int]) -> None:
        self._society, self._meter, self._stream_clients = society, meter, stream_clients
        self._events: Counter[str] = Counter()
        self._seen = 0

    async def text(self) -> bytes:
        found = await self._society.store.statistics(self._seen)
        if found.seq > self._seen:  # two may ask at once, and both count the same events
            self._seen = found.seq
            self._events.update(found.events)
        registry = CollectorRegistry(auto_describe=False)
        workers = await self._society.store.workers()
        registry.register(_Once([*self._of_society(found), *_of_workers(workers), *_of_http(self._meter)]))
        return generate_latest(registry)

    def _of_society(self, found: Statistics) -> Iterator[Metric]:
        events, store = self._events, self._society.store
        accepted = {"delayed": events["delayed.scheduled"], "immediate": events["message.created"]}
        calls = {outcome: found.tool_calls.get(state, 0) for state, outcome in ENDS.items()}
        yield _counters("coterie_messages_accepted", "Messages taken in, by kind", "kind", accepted)
        yield CounterMetricFamily("coterie_turns", "Turns that agents began", found.turns)
        yield _counters("coterie_model_calls", "Answers of models, by outcome", "outcome", found.model_calls)
        yield _counters("coterie_tool_calls", "Tool calls that ended, by outcome", "outcome", calls)
        yield CounterMetricFamily("coterie_plans_withdrawn", "Plans that a message withdrew", found.withdrawn_plans)
        yield CounterMetricFamily(
            "coterie_delayed_delivered", "Delayed messages delivered", events["delayed.delivered"]
        )
        yield GaugeMetricFamily("coterie_delayed_messages", "Messages that wait for their time", found.delayed)
        yield GaugeMetricFamily("coterie_mailbox_messages", "Messages that wait for agents", found.waiting)
        yield GaugeMetricFamily("coterie_mailbox_fullest", "Messages in the fullest mailbox", found.largest_mailbox)
        yield _gauges("coterie_agents", "Agents, by state", "state", found.agents)
        yield GaugeMetricFamily("coterie_stream_clients", "Pages that listen to events", self._stream_clients())
        yield GaugeMetricFamily(
            "coterie_store_healthy", "1 while what is written gets through", float(store.is_healthy)
        )


@router.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    numbers = cast(Numbers, request.app.state.numbers)
    return Response(await numbers.text(), media_type=CONTENT_TYPE_LATEST)


class _Once(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _of_workers(workers: Sequence[Worker]) -> Iterator[Metric]:
    """Of every process that lives, not of this one only: most workers have no door to ask at."""
    claims, beats, fenced, takeovers = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for one in workers:
        claims[one.name] += one.claims
        beats[one.name] += one.heartbeats
        fenced[one.name] += one.fenced
        takeovers[one.name] += one.takeovers
    yield _gauges("coterie_worker_claims", "Agents that a worker is at work on", "worker", claims)
    yield _counters("coterie_worker_heartbeats", "Signs of life, with all claims renewed", "worker", beats)
    yield _counters("coterie_worker_fenced_writes", "Writes refused to a worker that was too late", "worker", fenced)
    yield _counters("coterie_worker_lease_takeovers", "Turns taken over from workers gone", "worker", takeovers)


def _of_http(meter: HttpMeter) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "coterie_http_request_duration_seconds", "Requests and how long they took", labels=["method", "route", "status"]
    )
    bounds = [*map(str, BUCKETS), "+Inf"]
    for (method, route, status), durations in meter.requests.items():
        counted = zip(bounds, itertools.accumulate(durations.counts), strict=True)
        family.add_metric([method, route, str(status)], list(counted), durations.total)
    yield family


def _counters(name: str, words: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, words, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauges(name: str, words: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class Health:
    def __init__(self, store: Store, disk: DiskMonitor) -> None:
        self._store, self._disk = store, disk
        self.draining = False
        """Set when a stop begins: from then on no new request is taken."""

    @property
    def trouble(self) -> tuple[str, str] | None:
        """Code and sentence; None: ready."""
        if self.draining:
            return "stopping", "the society is stopping"
        if not self._store.is_healthy:
            sentence = "what is written does not get through to the disk: the log says why"
            return "store_unavailable", self._store.write_error or sentence
        if missing := self._disk.folder_error:
            return "store_unavailable", missing
        if self._disk.is_full():
            return "store_full", self._disk.status_message
        return None


@router.get("/healthz", summary="Alive")
async def alive() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/readyz", summary="Ready for work")
async def ready(request: Request) -> Response:
    if trouble := cast(Health, request.app.state.health).trouble:
        return problem(503, *trouble)
    return JSONResponse({"status": "ready"})
