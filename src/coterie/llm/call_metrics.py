"""Metrics of requests to model services in this process: duration, tokens, cost, failures and retries, by service.

They are Prometheus objects without a registry; `web/metrics.py` shows them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Counter, Histogram
from prometheus_client.registry import Collector

from coterie.llm.config import ServiceEntry
from coterie.llm.price import BILLION
from coterie.llm.service import (
    Completion,
    ModelRequest,
    ServiceError,
    TokenUsage,
    failure_code,
)

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1_280.0, 2_560.0)
TOKENS = (16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576)


class SentRequest(Struct, frozen=True, gc=False):
    """A request of an agent that is under way."""

    entry: ServiceEntry
    """The service that is asked, as configured when the request was sent; may be a fallback."""
    request: ModelRequest
    sent_at: float
    """Monotonic seconds of the `Clock`."""

    def complete_usage(self, usage: TokenUsage, now: float) -> TokenUsage:
        """Return the usage with its cost and the time since the sending."""
        price = self.entry.price
        cost = price.cost(usage) if price else None
        return replace(usage, cost=cost, model_ms=max(round((now - self.sent_at) * 1_000), 0))


@dataclass(frozen=True, slots=True)
class _AnswerMetrics:
    """Metrics of one service that every answer changes."""

    first_token: Histogram
    duration: Histogram
    input: Histogram
    output: Histogram


class ModelCallMetrics:
    """Label values are few: ids of configured services, and fixed words."""

    def __init__(self) -> None:
        self._duration = Histogram(
            "coterie_model_request_duration_seconds",
            "Requests to model services and their duration, by outcome: ok, failed or cancelled",
            ["service", "outcome"],
            buckets=SECONDS,
            registry=None,
        )
        self._first_token = Histogram(
            "coterie_model_time_to_first_token_seconds",
            "Time until a model service begins to answer",
            ["service"],
            buckets=SECONDS,
            registry=None,
        )
        self._tokens = Histogram(
            "coterie_model_tokens",
            "Tokens of an answered request, by direction: input or output",
            ["service", "direction"],
            buckets=TOKENS,
            registry=None,
        )
        self._failures = Counter(
            "coterie_model_failures", "Failed requests to model services", ["service", "reason"], registry=None
        )
        self._retries = Counter(
            "coterie_model_retries",
            "Model calls of agents that are repeated later",
            ["service", "reason"],
            registry=None,
        )

        self._used_tokens = Counter(
            "coterie_tokens",
            "Tokens of agents' requests, also estimated ones, by kind: input, cached (part of input) or output",
            ["service", "kind"],
            registry=None,
        )
        self._cost = Counter(
            "coterie_cost",
            "Cost of agents' requests to services with a price, in units of the currency",
            ["service", "currency"],
            registry=None,
        )
        self._unpriced = Counter(
            "coterie_unpriced_requests",
            "Requests of agents to services without a price, whose cost is unknown",
            ["service"],
            registry=None,
        )
        self._answered: dict[str, _AnswerMetrics] = {}
        """By service. Finding a child by its labels takes longer than counting."""
        self._kinds: dict[str, list[Counter]] = {}
        """Children of `_used_tokens` by service: input, cached, output."""

    @property
    def collectors(self) -> tuple[Collector, ...]:
        requests = (self._duration, self._first_token, self._tokens, self._failures, self._retries)
        return *requests, self._used_tokens, self._cost, self._unpriced

    def count_retry(self, service_id: str, error: ServiceError) -> None:
        """The turn asks again later; `service_id`: the agent's service."""
        self._retries.labels(service_id, failure_code(error)).inc()

    def count_usage(self, entry: ServiceEntry, usage: TokenUsage) -> None:
        """Count what one request of an agent used. `entry`: the service that was asked."""
        if entry.id not in self._kinds:
            self._kinds[entry.id] = [self._used_tokens.labels(entry.id, kind) for kind in ("input", "cached", "output")]
        tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens)
        for counter, count in zip(self._kinds[entry.id], tokens, strict=True):
            if count:
                counter.inc(count)
        if entry.price is None or usage.cost is None:
            self._unpriced.labels(entry.id).inc()
        else:
            self._cost.labels(entry.id, entry.price.currency).inc(usage.cost / BILLION)

    def _of(self, service_id: str) -> _AnswerMetrics:
        if (children := self._answered.get(service_id)) is None:
            children = self._answered[service_id] = _AnswerMetrics(
                self._first_token.labels(service_id),
                self._duration.labels(service_id, "ok"),
                self._tokens.labels(service_id, "input"),
                self._tokens.labels(service_id, "output"),
            )
        return children

    def start(self, service_id: str) -> CallMeasurement:
        """Measure a request that is sent now."""
        return CallMeasurement(self, service_id)

    def observe_first_token(self, service_id: str, seconds: float) -> None:
        self._of(service_id).first_token.observe(seconds)

    def observe_answer(self, service_id: str, seconds: float, answer: Completion) -> None:
        children = self._of(service_id)
        children.duration.observe(seconds)
        children.input.observe(answer.usage.input_tokens)
        children.output.observe(answer.usage.output_tokens)

    def observe_failure(self, service_id: str, seconds: float, error: ServiceError) -> None:
        self._duration.labels(service_id, "failed").observe(seconds)
        self._failures.labels(service_id, failure_code(error)).inc()

    def observe_cancelled(self, service_id: str, seconds: float) -> None:
        self._duration.labels(service_id, "cancelled").observe(seconds)


class CallMeasurement:
    """Observes one request: its first piece, and how it ends. Only the first end counts."""

    __slots__ = ("_has_ended", "_metrics", "_service_id", "_started")

    def __init__(self, metrics: ModelCallMetrics, service_id: str) -> None:
        # Network time, as in the deadlines, not the time of the `Clock`.
        self._metrics, self._service_id, self._started, self._has_ended = metrics, service_id, time.monotonic(), False

    def observe_first_piece(self) -> None:
        self._metrics.observe_first_token(self._service_id, time.monotonic() - self._started)

    def end(self, result: Completion | BaseException) -> None:
        """`result`: the answer or the error. Any other error than `ServiceError` is a cancellation by the caller."""
        if self._has_ended:
            return
        self._has_ended, seconds = True, time.monotonic() - self._started
        if isinstance(result, Completion):
            self._metrics.observe_answer(self._service_id, seconds, result)
        elif isinstance(result, ServiceError):
            self._metrics.observe_failure(self._service_id, seconds, result)
        else:
            self._metrics.observe_cancelled(self._service_id, seconds)
