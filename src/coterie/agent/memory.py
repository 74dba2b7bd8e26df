"""What models were last shown of their conversations, kept while they are likely to be shown them again.

A conversation only grows, so whoever knows its last row needs only what a step has added to it. Nothing depends on
this: what is not kept here, or does not fit together, is read from the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.agent.context import said
from coterie.llm.chat import Said
from coterie.turns import HistoryRow, View

CONVERSATIONS = 512
CHARACTERS = 32 << 20
"""All that is kept together."""


@dataclass(slots=True)
class Conversation:
    summary: str = ""
    last: int = 0
    """The number of the last row in it."""
    said: list[Said] = field(default_factory=list)
    size: int = 0

    def add(self, rows: Sequence[HistoryRow]) -> None:
        for row in rows:
            self.said.append(said(row))
            self.size += _size(row)
            self.last = row.seq


class Memory:
    def __init__(self, conversations: int = CONVERSATIONS, characters: int = CHARACTERS) -> None:
        self._most, self._room = conversations, characters
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._size = 0

    def recall(self, agent_id: str) -> Conversation | None:
        return self._kept.get(agent_id)

    def keep(self, agent_id: str, view: View) -> Conversation:
        """What was just read from the store."""
        self.forget(agent_id)
        conversation = Conversation(view.summary)
        conversation.add(view.rows)
        self._kept[agent_id] = conversation
        self._size += conversation.size
        self._make_room()
        return conversation

    def add(self, agent_id: str, rows: Sequence[HistoryRow] | None) -> None:
        """A step has added `rows`. None: it has changed earlier ones."""
        conversation = self._kept.get(agent_id)
        if conversation is None:
            if rows and rows[0].seq == 1:
                self.keep(agent_id, View("", rows))  # the first words: there is nothing else to read
            return
        if rows is None or (rows and rows[0].seq != conversation.last + 1):
            self.forget(agent_id)
            return
        before = conversation.size
        conversation.add(rows)
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
