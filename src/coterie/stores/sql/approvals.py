"""The question whether a call may run: asked once, and answered for that very call."""

from __future__ import annotations

import msgspec

from coterie.drafts import check_payload, encode_payload
from coterie.errors import Refused
from coterie.ids import id_for
from coterie.llm.chat import Call

VERDICTS = ("Approve", "Deny")
APPROVE = 0
SHOWN_OF_ARGUMENTS = 4_000


def question(call: Call) -> str:
    def asking(arguments: object) -> str:
        asked = {
            "text": f"May I run `{call.name}`?",
            "approval": {"callId": call.id, "tool": call.name, "arguments": arguments},
            "quickReplies": list(VERDICTS),
        }
        return encode_payload(check_payload(asked))

    try:
        return asking(call.arguments)
    except Refused:  # more, or deeper, than a message can carry
        return asking({"shortened": msgspec.json.encode(call.arguments).decode()[:SHOWN_OF_ARGUMENTS]})


def question_id(agent_id: str, call_id: str) -> str:
    """Names the question about a gated call: an answer to it speaks of that very call, and of no other."""
    return id_for("approval", agent_id, call_id)
