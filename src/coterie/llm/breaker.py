"""A circuit breaker: after some failures in a row nobody asks for a while, then one request tries."""

from __future__ import annotations

FAILURES = 5
REST = 15.0
LONGEST_REST = 120.0
WHILE_TRYING = 1.0


class Breaker:
    """Closed; after failures open for a rest; then half open: one probe at a time. Times are monotonic seconds."""

    def __init__(self, failures: int = FAILURES, rest: float = REST, longest: float = LONGEST_REST) -> None:
        self._allowed, self._first_rest, self._longest = failures, rest, longest
        self._failures = 0
        self._rest = rest
        self._probe_at: float | None = None
        """When the next probe may go. None: closed."""
        self._probing = False

    def wait(self, now: float) -> float:
        """How long until a request may go; 0 when it may go now."""
        if self._probe_at is None:
            return 0.0
        if now < self._probe_at:
            return self._probe_at - now
        return WHILE_TRYING if self._probing else 0.0

    def enter(self) -> bool:
        """A request goes, after `wait` said it may. True: it is the probe, and its end must be told."""
        self._probing = self._probe_at is not None
        return self._probing

    def succeeded(self) -> None:
        self._failures, self._rest = 0, self._first_rest
        self._probe_at, self._probing = None, False

    def failed(self, now: float, *, probe: bool) -> None:
        # Requests that went before it opened fail afterwards, all of one cause: they do not count again.
        if self._probe_at is not None and not probe:
            return
        self._failures += 1
        if probe or self._failures >= self._allowed:
            self._probe_at, self._probing = now + self._rest, False
            self._rest = min(self._longest, self._rest * 2)

    def trip(self, now: float, *, at_least: float = 0.0) -> None:
        """Open now, without waiting for more failures: another service answers meanwhile.

        `at_least`: the service asked for so many seconds.
        """
        if self._probe_at is None:
            self._probe_at = now + self._rest
            self._rest = min(self._longest, self._rest * 2)
        if not self._probing:
            self._probe_at = max(self._probe_at, now + at_least)

    def left(self, *, probe: bool) -> None:
        """The request ended without saying anything about the service: its caller went away."""
        if probe:
            self._probing = False
