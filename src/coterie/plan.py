"""A plan: the tool calls of one model answer, with their states and results."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, json
from msgspec.structs import replace

from coterie.llm.service import ToolCall

Effect = Literal["pure", "idempotent", "unsafe"]
"""Effect of a tool. After a crash, a started `pure` or `idempotent` call runs again; an `unsafe` one does not."""
CallState = Literal["planned", "gated", "started", "done", "failed", "cancelled", "unknown"]
ENDED_STATES: frozenset[CallState] = frozenset({"done", "failed", "cancelled", "unknown"})
INTERRUPTED_RESULT = '{"status":"cancelled","executed":false,"reason":"interrupted_by_new_message"}'
STOPPED_RESULT = '{"status":"cancelled","executed":false,"reason":"stopped"}'
DENIED_RESULT = '{"status":"denied","executed":false,"reason":"the person did not approve this call"}'
UNKNOWN_RESULT = (
    '{"status":"unknown","reason":"the runtime stopped while this call ran: it may or may not have happened,'
    ' verify before repeating it"}'
)
SEND_MESSAGE_TOOL = "send_message"
"""Name of the tool whose calls are stored in the transaction of their step."""
MAX_QUESTION_ARGUMENT_BYTES = 256 << 10
"""Longer arguments (as JSON) are attached to the approval question as a file."""


class PlannedCall(Struct, frozen=True, kw_only=True, gc=False):
    call: ToolCall
    effect: Effect = "unsafe"
    needs_approval: bool = False
    """A person must approve it before it runs. A started call that needs approval was approved."""
    state: CallState = "planned"
    result: str = ""
    attachments: tuple[dict[str, Any], ...] = ()
    """Files of the result for the model to see, as in a message."""

    @property
    def fits_question(self) -> bool:
        """True if the approval question can carry all arguments inline."""
        return len(json.encode(self.call.arguments)) <= MAX_QUESTION_ARGUMENT_BYTES


class ArgumentsFile(Struct, frozen=True, gc=False):
    """An artifact with all arguments of a call as JSON."""

    artifact_ref: str
    filename: str
    mime_type: str
    size: int
    sha256: str


class Plan(Struct, frozen=True, kw_only=True, gc=False):
    """An assistant message whose calls are being run. It is appended to the history when all calls have a result."""

    text: str
    calls: tuple[PlannedCall, ...]

    def with_state(
        self, index: int, state: CallState, result: str = "", attachments: tuple[dict[str, Any], ...] = ()
    ) -> Plan:
        call = self.calls[index]
        changed = replace(call, state=state, result=result or call.result, attachments=attachments or call.attachments)
        return replace(self, calls=(*self.calls[:index], changed, *self.calls[index + 1 :]))

    def with_rules(self, index: int, effect: Effect, needs_approval: bool) -> Plan:
        changed = replace(self.calls[index], effect=effect, needs_approval=needs_approval)
        return replace(self, calls=(*self.calls[:index], changed, *self.calls[index + 1 :]))

    def close_remaining(self, result: str) -> Plan:
        """Cancel calls that have not started, with `result`. The outcome of a started call is unknown."""

        def close(call: PlannedCall) -> PlannedCall:
            if call.state in ENDED_STATES:
                return call
            if call.state == "started":
                return replace(call, state="unknown", result=UNKNOWN_RESULT)
            return replace(call, state="cancelled", result=result)

        return replace(self, calls=tuple(map(close, self.calls)))

    def next_index(self) -> int | None:
        """Index of the first call that has not started."""
        return next((index for index, call in enumerate(self.calls) if call.state in ("planned", "gated")), None)

    def has_completed(self, name: str) -> bool:
        return any(planned.call.name == name and planned.state == "done" for planned in self.calls)

    def awaiting_approval(self) -> str:
        """Id of the call that waits for a person's approval; empty if none."""
        return next((planned.call.id for planned in self.calls if planned.state == "gated"), "")

    def started_index(self) -> int | None:
        """Index of the call that has started and not ended."""
        return next((index for index, call in enumerate(self.calls) if call.state == "started"), None)
