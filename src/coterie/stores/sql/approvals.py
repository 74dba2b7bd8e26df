"""The question whether a call may run: asked once, and answered for that very call."""

from __future__ import annotations

from typing import Any

import msgspec

from coterie.agent.turn import ArgumentsFile
from coterie.drafts import check_payload, encode_payload
from coterie.errors import Refused
from coterie.ids import id_for
from coterie.llm.chat import Call

VERDICTS = ("Approve", "Deny")
APPROVE = 0
SHOWN_OF_ARGUMENTS = 4_000
"""Characters of arguments that the question shows when a file has all of them."""


def question(call: Call, file: ArgumentsFile | None = None) -> str:
    """The payload of the question, as JSON. It shows all arguments, or names `file`, which holds them."""
    text = f"May I run `{call.name}`?"
    asked: dict[str, Any] = {"callId": call.id, "tool": call.name}
    if file is None:
        payload = {"text": text, "approval": asked, "quickReplies": list(VERDICTS)}
        try:
            return encode_payload(check_payload(payload | {"approval": asked | {"arguments": call.arguments}}))
        except Refused:  # numbers too large or objects too deep for a payload: shown as the text of their JSON
            shown = {"json": msgspec.json.encode(call.arguments).decode()}
            return encode_payload(check_payload(payload | {"approval": asked | {"arguments": shown}}))
    shown = {"shortened": msgspec.json.encode(call.arguments).decode()[:SHOWN_OF_ARGUMENTS]}
    attachment = {
        "artifactRef": file.artifact_ref,
        "filename": file.filename,
        "type": "file",
        "mimeType": file.mime_type,
        "size": file.size,
    }
    long: dict[str, Any] = {
        "text": f"{text} Its arguments are {file.size:,} bytes long: the attached file has all of them.",
        "attachments": [attachment],
        "approval": asked | {"arguments": shown, "argumentsRef": file.artifact_ref, "argumentsSha256": file.sha256},
        "quickReplies": list(VERDICTS),
    }
    return encode_payload(check_payload(long))


def question_id(agent_id: str, call_id: str) -> str:
    """Names the question about a gated call: an answer to it speaks of that very call, and of no other."""
    return id_for("approval", agent_id, call_id)
