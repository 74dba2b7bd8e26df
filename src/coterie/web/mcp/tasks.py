"""The protocol's tasks extension: a call returns a handle at once, and the client asks for its state.

The id of such a task is that of the message that the call sent, so a handle is valid after a restart of the server.
"""

from __future__ import annotations

from typing import Any

import mcp.types as types
from mcp import MCPError
from mcp.types import INVALID_PARAMS, METHOD_NOT_FOUND, RequestParams
from pydantic import BaseModel

from coterie.clock import to_rfc3339
from coterie.errors import Refused
from coterie.messages import Message
from coterie.task_following import TaskOutcome
from coterie.web.mcp.calls import Call, WaitingCalls, answerable, elicitation
from coterie.web.mcp.tools import sent_result

EXTENSION = "io.modelcontextprotocol/tasks"
MISSING_CAPABILITY = -32021
POLL_INTERVAL_MS = 1_000
_STATUS = {"working": "working", "delayed": "working", "stopped": "cancelled"}
"""By the state of a task. The others have a result, which says whether it is an error."""


class TaskParams(RequestParams):
    task_id: str


class UpdateParams(TaskParams):
    input_responses: types.InputResponses


def wants_handle(call: Call) -> bool:
    """True if the client of this call can follow a task by itself."""
    wanted = types.ClientCapabilities(extensions={EXTENSION: {}})
    return call.is_modern and call.context.session.check_client_capability(wanted)


class TaskMethods:
    """The methods `tasks/get`, `tasks/update` and `tasks/cancel`."""

    def __init__(self, calls: WaitingCalls) -> None:
        self._calls = calls

    def handle(self, message: Message) -> dict[str, Any]:
        """The result of a call that goes on as a task."""
        return {"resultType": "task"} | _fields(message, "working")

    async def get(self, call: Call, params: TaskParams) -> dict[str, Any]:
        message = await self._find(call, params)
        outcome = await self._calls.follower(message).outcome()
        status = _STATUS.get(outcome.state, "completed")
        asked = answerable(call, outcome) if outcome.state == "waiting" and call.can_ask else ()
        if asked:
            requests = {one.id: _dump(elicitation(one)) for one in asked}
            return _fields(message, "input_required", outcome) | {"inputRequests": requests}
        if status != "completed":
            return _fields(message, status, outcome)
        self._calls.returned(message, outcome)
        return _fields(message, status, outcome) | {"result": _dump(sent_result(message, outcome))}

    async def update(self, call: Call, params: UpdateParams) -> dict[str, Any]:
        message = await self._find(call, params)
        await self._calls.take_responses(call, message, params.input_responses)
        return {}

    async def cancel(self, call: Call, params: TaskParams) -> dict[str, Any]:
        message = await self._find(call, params)
        await call.scope.society.stop_task(message.task or message.id)
        return {}

    async def _find(self, call: Call, params: TaskParams) -> Message:
        if not call.is_modern:
            raise MCPError(METHOD_NOT_FOUND, "Method not found")
        if not wants_handle(call):
            required: dict[str, Any] = {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}
            raise MCPError(MISSING_CAPABILITY, f"the request does not declare the extension {EXTENSION}", required)
        try:
            return await call.scope.request(params.task_id)
        except Refused as refused:
            raise MCPError(INVALID_PARAMS, "there is no such task") from refused


def _fields(message: Message, status: str, outcome: TaskOutcome | None = None) -> dict[str, Any]:
    task = outcome.task if outcome else None
    fields: dict[str, Any] = {
        "taskId": message.id,
        "status": status,
        "createdAt": to_rfc3339(message.created_at),
        "lastUpdatedAt": to_rfc3339(task.last_at if task else message.created_at),
        "ttlMs": None,
        "pollIntervalMs": POLL_INTERVAL_MS,
    }
    if outcome and outcome.problem:
        fields["statusMessage"] = outcome.problem
    elif task and task.active_agents:
        fields["statusMessage"] = f"{', '.join(sorted(task.active_agents))} at work"
    return fields


def _dump(value: BaseModel) -> dict[str, Any]:
    return value.model_dump(by_alias=True, mode="json", exclude_none=True)
