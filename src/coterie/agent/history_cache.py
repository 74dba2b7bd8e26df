"""In-memory cache of rendered conversations, so that a request need not read the whole history.

A conversation is valid for one `history_version` of its agent. Every transaction that changes a history, in any
process, changes that version, and every claim carries it. A version that differs from the claim's is a cache miss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.agent.context import render_row
from coterie.llm.types import ChatMessage
from coterie.turn_store import Claim, HistoryRow, HistoryView

MAX_CONVERSATIONS = 512
MAX_CHARACTERS = 32 << 20
"""Approximate size of all conversations together."""


@dataclass(slots=True)
class Conversation:
    summary: str = ""
    version: int = 0
    """The history version that `summary` and `said` belong to."""
    items: list[ChatMessage] = field(default_factory=list)
    size: int = 0

    def add(self, rows: Sequence[HistoryRow]) -> None:
        for row in rows:
            self.items.append(render_row(row))
            self.size += _size(row)


class HistoryCache:
    def __init__(self, conversations: int = MAX_CONVERSATIONS, characters: int = MAX_CHARACTERS) -> None:
        self._max_conversations, self._max_characters = conversations, characters
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._size = 0

    def get(self, agent_id: str, version: int) -> Conversation | None:
        """Return the conversation at exactly this version; None: read it from the store."""
        conversation = self._conversations.get(agent_id)
        return conversation if conversation and conversation.version == version else None

    def put(self, agent_id: str, view: HistoryView) -> Conversation:
        """Cache a view that was read from the store."""
        self.invalidate(agent_id)
        conversation = Conversation(view.summary, view.version)
        conversation.add(view.rows)
        self._conversations[agent_id] = conversation
        self._size += conversation.size
        self._evict()
        return conversation

    def apply_claim(self, claim: Claim) -> None:
        """Add the claim's rows to the agent's conversation, or invalidate it if versions do not match."""
        agent_id, rows, version = claim.agent_id, claim.added_rows, claim.history_version
        conversation = self._conversations.get(agent_id)
        if conversation is None:
            if rows and rows[0].seq == 1:
                self.put(agent_id, HistoryView("", rows, version))  # the rows are the whole history
            return
        # Each row adds 1 to the version, so an equal sum proves that nothing else has changed.
        if rows is None or conversation.version + len(rows) != version:
            self.invalidate(agent_id)
            return
        before = conversation.size
        conversation.add(rows)
        conversation.version = version
        self._size += conversation.size - before
        self._conversations.move_to_end(agent_id)
        self._evict()

    def invalidate(self, agent_id: str) -> None:
        if conversation := self._conversations.pop(agent_id, None):
            self._size -= conversation.size

    def _evict(self) -> None:
        while len(self._conversations) > self._max_conversations or (
            self._size > self._max_characters and self._conversations
        ):
            self.invalidate(next(iter(self._conversations)))


def _size(row: HistoryRow) -> int:
    """Estimate the memory of a row, with 500 bytes for its objects."""
    characters = len(row.text) + sum(len(str(call.arguments)) for call in row.calls)
    return 500 + characters + (len(str(row.message.payload)) if row.message else 0)
