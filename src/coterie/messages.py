"""What travels on the bus."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from coterie.clock import to_wire

Payload = dict[str, Any]
State = Literal["delayed", "pending", "taken", "withdrawn", "dead"]

PERSON = "user"
SYSTEM = "system"
RESERVED = frozenset({PERSON, SYSTEM})

NEW_CHAIN_AFTER = timedelta(seconds=60)
"""A message delayed this long starts a causal chain of its own, so that reminders can go on for ever."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A message that passed validation and waits to be stored. `coterie.drafts.seal` makes them."""

    # A Struct and not a dataclass, like Receipt: one of each is made for every send, and it is cheaper to make.

    id: str
    sender: str
    to: str
    payload_json: str
    delay: timedelta = timedelta(0)
    retried: bool = False
    """The id stands for the sender's own name for this message, so the store may hold it already."""
    keyed: bool = False
    """The id is a hash of the sender's own key. The store hashes it again with the society's secret."""
    in_reply_to: str | None = None
    option: int | None = None
    """Which quick reply of `in_reply_to` this is, counted from 0."""
    cause: str | None = None
    """The message its sender was handling."""
    attachments: tuple[str, ...] = ()
    question: bool = False
    """It offers quick replies to the person."""
    about: str | None = None
    """The agent that a notice of the runtime speaks of."""

    @property
    def thread(self) -> str | None:
        """The person's conversation it belongs to, named after the agent they talk with."""
        if self.sender == PERSON:
            return self.to if self.to != PERSON else None
        if self.to == PERSON:
            return self.about if self.sender == SYSTEM else self.sender
        return None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The bus has the message: from here on nothing but its recipient or a withdrawal ends it."""

    message_id: str
    state: Literal["pending", "queued", "delayed"]
    """`queued`: the recipient is at work and meets it as an interjection."""
    scheduled_delivery_time: datetime | None = None

    def to_wire(self) -> dict[str, Any]:
        wire = {"messageId": self.message_id, "state": self.state}
        if self.scheduled_delivery_time:
            wire["scheduledDeliveryTime"] = to_wire(self.scheduled_delivery_time) or ""
        return wire


@dataclass(frozen=True, slots=True)
class Answer:
    """Which message answered a question, and with which of its options; None: in the person's own words."""

    message_id: str
    option: int | None

    def to_wire(self) -> dict[str, Any]:
        return {"messageId": self.message_id, "option": self.option}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    # Like Envelope, it is made by the thousand.

    seq: int
    """Send order over the whole society; the cursor of every listing."""
    id: str
    sender: str
    to: str
    payload: Payload
    state: State
    created_at: datetime
    deliver_at: datetime | None = None
    """Earliest delivery. None: at once."""
    delivered_at: datetime | None = None
    taken_at: datetime | None = None
    """When it entered the recipient's context; for the person, when it was read."""
    in_seq: int | None = None
    """Its place in the recipient's mailbox, given at delivery."""
    in_reply_to: str | None = None
    option: int | None = None
    cause: str | None = None
    hops: int = 0
    early: bool = False
    """Delivered before `deliver_at`, because the runtime stopped."""
    stopped: bool = False
    reason: str | None = None
    """Why it is dead."""
    replay_of: str | None = None
    answer: Answer | None = None
    """On a message with quick replies to the person, once it is answered."""

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {
            "id": self.id,
            "from": self.sender,
            "to": self.to,
            "payload": self.payload,
            "createdAt": to_wire(self.created_at),
            "deliverAt": to_wire(self.deliver_at),
            "deliveredAt": to_wire(self.delivered_at),
            "takenAt": to_wire(self.taken_at),
            "state": self.state,
            "inReplyTo": self.in_reply_to,
            "cause": self.cause,
            "hops": self.hops,
            "early": self.early,
            "stopped": self.stopped,
        }
        optional: dict[str, Any] = {"option": self.option, "reason": self.reason, "replayOf": self.replay_of}
        if self.answer:
            optional["answer"] = self.answer.to_wire()
        return wire | {key: value for key, value in optional.items() if value is not None}
