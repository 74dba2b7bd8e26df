"""What tests of a society need, ours and yours: a clock that a test moves, and a model service that is not there."""

from coterie.testing.clock import FakeClock
from coterie.testing.model_server import Calls, ModelServer, Says, Status

__all__ = ["Calls", "FakeClock", "ModelServer", "Says", "Status"]
