"""Metrics for Prometheus, liveness and readiness."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from coterie.files import DiskMonitor
from coterie.society import Society
from coterie.store import Statistics, Store, Worker
from coterie.tasks import TaskState
from coterie.web.errors import RequestRejected
from coterie.web.openapi import problems
from coterie.web.routing import Router
from coterie.web.schemas import HealthStatus

router = Router(tags=["health"])

API = "/api/v1"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BUCKET_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
CALL_OUTCOMES = {"done": "ok", "failed": "error", "cancelled": "cancelled", "unknown": "unknown"}
"""By a tool call's last state."""


class Metrics:
    """Counters since the process started, and gauges read from the store at each scrape."""

    def __init__(self, society: Society, stream_clients: Callable[[], int]) -> None:
        self._society, self._stream_clients = society, stream_clients
        self._events: Counter[str] = Counter()
        self._counted = 0
        """The last event that `_events` counts."""
        self._requests = Histogram(
            "coterie_http_request_duration_seconds",
            "HTTP requests and their duration",
            ["method", "route", "status"],
            buckets=BUCKET_SECONDS,
            registry=None,
        )
        # `labels()` takes a lock and costs more than the observation itself.
        self._labelled = functools.cache(self._requests.labels)

    def observe_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Labels take few values: known methods, route templates, statuses."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._labelled(method, _route_template(scope), status).observe(seconds)

    async def render(self) -> bytes:
        statistics = await self._society.store.statistics(self._counted)
        if statistics.seq > self._counted:  # a concurrent scrape may have counted the same events
            self._counted = statistics.seq
            self._events.update(statistics.events)
        workers = await self._society.store.workers()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families([*self._society_metrics(statistics), *_worker_metrics(workers)]))
        registry.register(self._requests)
        if self._society.model_metrics:
            for collector in self._society.model_metrics.collectors:
                registry.register(collector)
        return generate_latest(registry)

    def _society_metrics(self, found: Statistics) -> Iterator[Metric]:
        events, store = self._events, self._society.store
        accepted = {"delayed": events["delayed.scheduled"], "immediate": events["message.created"]}
        calls = {outcome: found.tool_calls.get(state, 0) for state, outcome in CALL_OUTCOMES.items()}
        yield _counters("coterie_messages_accepted", "Accepted messages, by kind", "kind", accepted)
        yield CounterMetricFamily("coterie_turns", "Turns that agents started", found.turns)
        yield _counters("coterie_model_calls", "Model answers, by outcome", "outcome", found.model_calls)
        yield _counters("coterie_tool_calls", "Finished tool calls, by outcome", "outcome", calls)
        yield CounterMetricFamily(
            "coterie_plans_withdrawn", "Plans and answers withdrawn by a message", found.withdrawn_plans
        )
        yield CounterMetricFamily(
            "coterie_delayed_delivered", "Delayed messages delivered", events["delayed.delivered"]
        )
        yield GaugeMetricFamily("coterie_delayed_messages", "Delayed messages not yet due", found.delayed)
        yield GaugeMetricFamily("coterie_mailbox_messages", "Messages waiting in mailboxes", found.waiting)
        yield GaugeMetricFamily("coterie_mailbox_fullest", "Messages in the fullest mailbox", found.largest_mailbox)
        yield _gauges("coterie_agents", "Agents, by state", "state", found.agents)
        tasks = dict.fromkeys(get_args(TaskState), 0) | dict(found.tasks)
        yield _gauges("coterie_tasks", "Tasks, by state", "state", tasks)
        yield GaugeMetricFamily("coterie_stream_clients", "Clients of the event stream", self._stream_clients())
        yield GaugeMetricFamily("coterie_store_healthy", "1 while the store can write", float(store.is_healthy))


def _route_template(scope: Scope) -> str:
    path: str = getattr(scope.get("route"), "path", "")
    # A router's routes do not include the prefix that the router is mounted under.
    prefix = API if scope["path"].startswith(API) and not path.startswith(API) else ""
    return f"{prefix}{path}" if path else "unmatched"


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _worker_metrics(workers: Sequence[Worker]) -> Iterator[Metric]:
    """Metrics of all live processes: most workers have no HTTP server of their own."""
    claims, heartbeats, fenced, takeovers = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for worker in workers:
        claims[worker.name] += worker.claims
        heartbeats[worker.name] += worker.heartbeats
        fenced[worker.name] += worker.fenced
        takeovers[worker.name] += worker.takeovers
    yield _gauges("coterie_worker_claims", "Agents claimed by a worker", "worker", claims)
    yield _counters("coterie_worker_heartbeats", "Heartbeats, each renews all claims", "worker", heartbeats)
    yield _counters("coterie_worker_fenced_writes", "Writes refused because a claim was lost", "worker", fenced)
    yield _counters("coterie_worker_lease_takeovers", "Turns taken over from lost workers", "worker", takeovers)


def _counters(name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauges(name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


@router.get(
    "/metrics",
    summary="Get metrics for Prometheus",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def get_metrics(request: Request) -> Response:
    metrics = cast(Metrics, request.app.state.metrics)
    return Response(await metrics.render(), media_type=CONTENT_TYPE_LATEST)


class Health:
    def __init__(self, store: Store, disk: DiskMonitor) -> None:
        self._store, self._disk = store, disk
        self.draining = False
        """True from the start of a stop: new requests are refused."""

    @property
    def problem(self) -> tuple[str, str] | None:
        """Code and sentence of what is wrong; None: ready."""
        if self.draining:
            return "stopping", "the society is stopping"
        if not self._store.is_healthy:
            return "store_unavailable", self._store.write_error or "the store cannot write: the log says why"
        if missing := self._disk.folder_error:
            return "store_unavailable", missing
        if self._disk.is_full():
            return "store_full", self._disk.status_message
        return None


@router.get("/healthz", summary="Check that the process is alive")
async def get_health() -> HealthStatus:
    return HealthStatus(status="alive")


@router.get(
    "/readyz",
    summary="Check that the society can work",
    responses=problems(_503="`stopping`, `store_unavailable`, `store_full`"),
)
async def get_readiness(request: Request) -> HealthStatus:
    if found := cast(Health, request.app.state.health).problem:
        raise RequestRejected(503, *found)
    return HealthStatus(status="ready")
