"""A whole conversation, to be kept elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.agents import Agent
from coterie.clock import to_wire
from coterie.messages import PERSON, Message
from coterie.overview import Overview

PAGE = 200


async def whole_thread(store: Overview, agent_id: str) -> Sequence[Message]:
    """The person's conversation with the agent, oldest first."""
    pages: list[Sequence[Message]] = []
    before = None
    while page := await store.thread(agent_id, before=before, limit=PAGE):
        pages.append(page)
        before = page[0].id
    return [message for page in reversed(pages) for message in page]


def as_markdown(agent: Agent, messages: Sequence[Message]) -> str:
    parts = [f"# {agent.name}\n"]
    for message in messages:
        who = "You" if message.sender == PERSON else agent.name if message.sender == agent.id else message.sender
        parts.append(f"## {who}, {to_wire(message.delivered_at or message.created_at)}\n")
        parts.append(f"{_words(message)}\n")
    return "\n".join(parts)


def _words(message: Message) -> str:
    payload: dict[str, Any] = message.payload
    lines = [str(payload["text"])] if payload.get("text") else []
    lines += [f"- file: {item.get('filename', 'file')}" for item in payload.get("attachments", [])]
    chosen = message.answer.option if message.answer else None
    for number, option in enumerate(payload.get("quickReplies", [])):
        lines.append(f"- [{'x' if number == chosen else ' '}] {option}")
    return "\n".join(lines)
