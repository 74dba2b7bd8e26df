"""How a terminal shows a message."""

from __future__ import annotations

import io
from typing import Any

import pytest

from coterie.cli.chat import MessageView, Screen, format_message
from coterie.cli.conversation import AgentStatus, ChatMessage, RetryPlanned

RETRYING = AgentStatus(state="active", phase="retry", reason="busy")
THINKING = AgentStatus(state="active", phase="thinking")


def lines_of(payload: dict[str, Any]) -> list[str]:
    wire = {"id": "m", "from": "ada", "to": "user", "state": "pending", "payload": payload}
    return format_message(ChatMessage.from_json(wire), Screen(io.StringIO()))


def test_an_approval_shows_all_arguments_of_the_call() -> None:
    arguments = {"to": "bob", "amount": 12.5, "note": "rent\nfor June", "more": {"iban": "DE00"}}
    payload = {
        "text": "May I run `pay`?",
        "approval": {"callId": "c", "tool": "pay", "arguments": arguments},
        "quickReplies": ["Approve", "Deny"],
    }
    assert lines_of(payload) == [
        "ada: May I run `pay`?",
        "  to: bob",
        "  amount: 12.5",
        "  note: rent",
        "  for June",
        '  more: {"iban": "DE00"}',
        "  1) Approve",
        "  2) Deny",
    ]


def test_arguments_cannot_write_control_characters_to_the_terminal() -> None:
    approval = {"callId": "c", "tool": "pay", "arguments": {"note": "\x1b[2Jgone"}}
    assert "\x1b" not in "".join(lines_of({"text": "May I?", "approval": approval}))


def test_a_message_that_imitates_an_approval_is_shown_as_a_message() -> None:
    for approval in ("yes", None, {}, {"arguments": "all"}):
        assert lines_of({"text": "Hello", "approval": approval}) == ["ada: Hello"]


@pytest.mark.parametrize("status", [RETRYING, THINKING], ids=["in time", "too late"])
def test_a_retry_is_noted_once_also_if_its_status_is_over_when_it_is_read(
    capsys: pytest.CaptureFixture[str], status: AgentStatus
) -> None:
    view = MessageView(Screen(io.StringIO()))
    for _ in range(2):
        for event in (status, RetryPlanned("busy"), THINKING):
            view.handle_status(event)
    assert capsys.readouterr().err.count("the model is asked again: busy") == 2
