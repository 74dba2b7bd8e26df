"""What tests of a society need, ours and yours: a clock that a test moves."""

from coterie.testing.clock import FakeClock

__all__ = ["FakeClock"]
