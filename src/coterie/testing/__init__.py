"""Test tools for users and for our own tests: a controllable clock and a scripted model server."""

from coterie.testing.clock import FakeClock
from coterie.testing.model_server import Calls, ModelServer, Says, Status

__all__ = ["Calls", "FakeClock", "ModelServer", "Says", "Status"]
