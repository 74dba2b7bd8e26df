"""What the person says, handed to a society that is open in this process."""

from __future__ import annotations

from coterie.cli.conversation import Speech
from coterie.messages import Receipt
from coterie.society import Society


async def say(society: Society, to: str, speech: Speech) -> Receipt:
    return await society.send(
        to=to,
        text=speech.text,
        delay_ms=speech.delay_ms,
        quick_replies=speech.quick_replies or None,
        attachments=speech.attachments,
        in_reply_to=speech.answers,
        option=speech.option,
    )
