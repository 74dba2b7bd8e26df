"""The tool `send_message`: how an agent speaks to anybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.bus import MessageBus
from coterie.drafts import MAX_QUICK_REPLIES, seal
from coterie.errors import Refused
from coterie.llm.chat import ToolSpec
from coterie.messages import Envelope, Receipt

SEND_MESSAGE = ToolSpec(
    name="send_message",
    description=(
        "Send a message to an agent or to the person (`user`). It arrives on its own; do not wait for an answer."
        " `payload.text` is what the recipient reads; `payload.attachments` forwards files by their artifactRef."
    ),
    parameters={
        "type": "object",
        "properties": {
            "to": {"type": "string", "description": "The id of the recipient."},
            "payload": {
                "type": "object",
                "description": 'A JSON object, such as {"text": "…", "attachments": [{"artifactRef": "…"}]}.',
            },
            "delayMs": {"type": "number", "description": "延迟投递时间（毫秒），消息将在指定时间后才进入收件人队列"},
            "quickReplies": {
                "type": "array",
                "items": {"type": "string"},
                "maxItems": MAX_QUICK_REPLIES,
                "description": (
                    "可选的快速回复建议列表，最多10个字符串。"
                    "Optional: up to 10 short answers to offer. They are suggestions: the recipient may pick one,"
                    " or ignore them and answer freely."
                ),
            },
        },
        "required": ["to", "payload"],
    },
)


async def send_message(
    bus: MessageBus, sender: str, arguments: Mapping[str, Any], *, key: str | None = None, cause: str | None = None
) -> dict[str, Any]:
    """What the model is told: the message's id and due time, or what was wrong, and then nothing was sent.

    `from` and whatever else a model may add is ignored: the runtime says who speaks.
    """
    try:
        receipt = await bus.post(seal_call(sender, arguments, key=key, cause=cause))
    except Refused as refusal:
        return refusal.to_wire()
    return told(receipt)


def seal_call(sender: str, arguments: Mapping[str, Any], *, key: str | None, cause: str | None) -> Envelope:
    """A call of the tool as an envelope; the same `key` is the same message, however often the call runs."""
    return seal(
        sender=sender,
        to=arguments.get("to"),
        payload=arguments.get("payload"),
        delay_ms=arguments.get("delayMs"),
        quick_replies=arguments.get("quickReplies"),
        client_id=key,
        cause=cause,
    )


def told(receipt: Receipt) -> dict[str, Any]:
    """What the model hears of a message that was sent."""
    wire = receipt.to_wire()
    del wire["state"]
    return wire
