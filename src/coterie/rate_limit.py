"""How often somebody may do something: token buckets, one for each of them, in a map that cannot grow without end."""

from __future__ import annotations

from collections import OrderedDict

from coterie.clock import Clock

CLIENTS = 4096


class Rates:
    """`burst` at once, then `per_second`."""

    def __init__(self, clock: Clock, *, burst: float, per_second: float, clients: int = CLIENTS) -> None:
        self._clock, self._burst, self._per_second, self._clients = clock, burst, per_second, clients
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> float:
        """0.0: go on. Otherwise the seconds until the next one may."""
        now, left = self._look(client)
        if left < 1.0:
            return (1.0 - left) / self._per_second
        self._keep(client, left - 1.0, now)
        return 0.0

    def _look(self, client: str) -> tuple[float, float]:
        now = self._clock.monotonic()
        left, seen = self._left.get(client, (self._burst, now))
        return now, min(self._burst, left + (now - seen) * self._per_second)

    def _keep(self, client: str, left: float, now: float) -> None:
        self._left[client] = (left, now)
        self._left.move_to_end(client)
        if len(self._left) > self._clients:
            self._left.popitem(last=False)

    def __len__(self) -> int:
        return len(self._left)
