"""Conversations as models were last shown them, kept so that the next request need not read the whole history.

A conversation is valid for one `history_version` of its agent. Every transaction that changes a history changes that
version, in this process or in another, and every claim carries it. So a kept conversation is used only when its version
is the claim's; otherwise the history is read from the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.agent.context import said
from coterie.llm.types import Said
from coterie.turn_store import Claim, HistoryRow, View

CONVERSATIONS = 512
CHARACTERS = 32 << 20
"""All that is kept together."""


@dataclass(slots=True)
class Conversation:
    summary: str = ""
    version: int = 0
    """The history version that `summary` and `said` belong to."""
    said: list[Said] = field(default_factory=list)
    size: int = 0

    def add(self, rows: Sequence[HistoryRow]) -> None:
        for row in rows:
            self.said.append(said(row))
            self.size += _size(row)


class Memory:
    def __init__(self, conversations: int = CONVERSATIONS, characters: int = CHARACTERS) -> None:
        self._most, self._room = conversations, characters
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._size = 0

    def recall(self, agent_id: str, version: int) -> Conversation | None:
        """The conversation at exactly this version of the history; None: read it from the store."""
        conversation = self._kept.get(agent_id)
        return conversation if conversation and conversation.version == version else None

    def keep(self, agent_id: str, view: View) -> Conversation:
        """What was just read from the store."""
        self.forget(agent_id)
        conversation = Conversation(view.summary, view.version)
        conversation.add(view.rows)
        self._kept[agent_id] = conversation
        self._size += conversation.size
        self._make_room()
        return conversation

    def add(self, claim: Claim) -> None:
        """Bring the agent's conversation to the version of `claim`, or drop it when that is not possible."""
        agent_id, rows, version = claim.agent_id, claim.added, claim.history_version
        conversation = self._kept.get(agent_id)
        if conversation is None:
            if rows and rows[0].seq == 1:
                self.keep(agent_id, View("", rows, version))  # the history begins here: there is nothing else to read
            return
        # Each row adds 1 to the version, so a sum that fits proves that nothing else was changed in between.
        if rows is None or conversation.version + len(rows) != version:
            self.forget(agent_id)
            return
        before = conversation.size
        conversation.add(rows)
        conversation.version = version
        self._size += conversation.size - before
        self._kept.move_to_end(agent_id)
        self._make_room()

    def forget(self, agent_id: str) -> None:
        if gone := self._kept.pop(agent_id, None):
            self._size -= gone.size

    def _make_room(self) -> None:
        while len(self._kept) > self._most or (self._size > self._room and self._kept):
            self.forget(next(iter(self._kept)))


def _size(row: HistoryRow) -> int:
    """About what it takes; an object or two around the words."""
    words = len(row.text) + sum(len(str(call.arguments)) for call in row.calls)
    return 500 + words + (len(str(row.message.payload)) if row.message else 0)
