"""Rate limiting: one token bucket per client, for a bounded number of clients."""

from __future__ import annotations

from collections import OrderedDict

from coterie.clock import Clock

MAX_CLIENTS = 4096


class RateLimiter:
    """Allows `burst` actions at once, then `per_second`. Forgets the least recently used client when full."""

    def __init__(self, clock: Clock, *, burst: float, per_second: float, clients: int = MAX_CLIENTS) -> None:
        self._clock, self._burst, self._per_second, self._clients = clock, burst, per_second, clients
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens left and when they were counted, by client."""

    def try_acquire(self, client: str) -> float:
        """Take one token and return 0.0, or return the seconds until the next token."""
        now = self._clock.monotonic()
        tokens, counted_at = self._buckets.get(client, (self._burst, now))
        tokens = min(self._burst, tokens + (now - counted_at) * self._per_second)
        if tokens < 1.0:
            return (1.0 - tokens) / self._per_second
        self._buckets[client] = (tokens - 1.0, now)
        self._buckets.move_to_end(client)
        if len(self._buckets) > self._clients:
            self._buckets.popitem(last=False)
        return 0.0

    def __len__(self) -> int:
        return len(self._buckets)
