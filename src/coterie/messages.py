"""What travels on the bus.

The one validation of a send: HTTP, the command line, Python and the tool all seal their drafts here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from coterie.clock import to_wire
from coterie.errors import Refused
from coterie.ids import id_for, new_id
from coterie.text import clean, one_line

Payload = dict[str, Any]
State = Literal["delayed", "pending", "taken", "withdrawn", "dead"]

PERSON = "user"
SYSTEM = "system"
RESERVED = frozenset({PERSON, SYSTEM})

NEW_CHAIN_AFTER = timedelta(seconds=60)
"""A message delayed this long starts a causal chain of its own, so that reminders can go on for ever."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A message that passed validation and waits to be stored. `coterie.messages.seal` makes them."""

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


MAX_PAYLOAD_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_QUICK_REPLIES = 10
MAX_DELAY = timedelta(days=3653)

_encode = msgspec.json.Encoder().encode


def seal(
    *,
    sender: str,
    to: object,
    payload: object,
    delay_ms: object = None,
    quick_replies: object = None,
    client_id: str | None = None,
    in_reply_to: object = None,
    option: object = None,
    cause: str | None = None,
) -> Envelope:
    """The draft as an envelope ready to be stored; `Refused` when anything about it is wrong.

    Sealing again with the same `client_id` gives the same message, which the store accepts once. The store derives the
    public id of such a message with the society's secret; the receipt has it.
    """
    if not isinstance(to, str) or not to:
        raise Refused("unknown_recipient", f"to must be the id of an agent or a person, got {_shown(to)}")
    checked = check_payload(payload)
    options = check_quick_replies(checked.pop("quickReplies", None) if quick_replies is None else quick_replies)
    if options:
        checked["quickReplies"] = options
    attachments = check_attachments(checked)
    return Envelope(
        # An empty one names nothing: taken at its word, it would make one message of all that have it.
        id=id_for("message", sender, client_id) if client_id else new_id(),
        sender=sender,
        to=clean(to),
        payload_json=encode_payload(checked),
        delay=check_delay(delay_ms),
        retried=bool(client_id),
        keyed=bool(client_id),
        in_reply_to=_check_reply(in_reply_to),
        option=_check_option(option, in_reply_to),
        cause=cause,
        attachments=attachments,
        question=options is not None and to == PERSON and sender != PERSON,
        about=_agent_spoken_of(checked) if sender == SYSTEM else None,
    )


def _agent_spoken_of(payload: Payload) -> str | None:
    problem = payload.get("problem")
    agent = problem.get("agent") if isinstance(problem, dict) else None
    return agent if isinstance(agent, str) else None


def check_payload(payload: object) -> Payload:
    if not isinstance(payload, Mapping):
        raise Refused(
            "payload_invalid", f'payload must be a JSON object such as {{"text": "…"}}, got {_shown(payload)}'
        )
    checked = _plain(payload, "payload", MAX_DEPTH)
    if not isinstance(checked.get("text", ""), str):
        raise Refused("payload_invalid", f"payload.text must be a string, got {_shown(checked['text'])}")
    return checked  # type: ignore[no-any-return]


def encode_payload(payload: Payload) -> str:
    data = _encode(payload)
    if len(data) > MAX_PAYLOAD_BYTES:
        raise Refused(
            "payload_too_large",
            f"the payload is {len(data):,} bytes, the most is {MAX_PAYLOAD_BYTES:,}: attach long content as a file",
        )
    return data.decode()


def check_quick_replies(value: object) -> list[str] | None:
    """The options in their order, or None when none were given (absent, null and [] are the same)."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise Refused("quickReplies_invalid_type", f"quickReplies must be an array of strings, got {_shown(value)}")
    if not value:
        return None
    if len(value) > MAX_QUICK_REPLIES:
        raise Refused("quickReplies_too_many", f"at most {MAX_QUICK_REPLIES} quick replies, got {len(value)}")
    for place, item in enumerate(value):
        if not isinstance(item, str):
            raise Refused("quickReplies_invalid_type", f"quickReplies[{place}] must be a string, got {_shown(item)}")
        if not item.strip():
            raise Refused("quickReplies_empty_string", f"quickReplies[{place}] must not be empty")
    return [clean(item) for item in value]


def check_delay(value: object) -> timedelta:
    """The wait before delivery in whole milliseconds, rounded up so that nothing is ever early; 0 for none or less."""
    if value is None:
        return timedelta(0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused("delayMs_invalid", f"delayMs must be a number of milliseconds, got {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused("delayMs_invalid", f"delayMs must be a finite number, got {value}")
    if value > MAX_DELAY.total_seconds() * 1000:
        raise Refused("delayMs_invalid", "delayMs must be at most ten years")
    return timedelta(milliseconds=max(0, math.ceil(value)))


def check_attachments(payload: Payload) -> tuple[str, ...]:
    """The artifacts the payload names; the runtime fills in what they are before the message is stored."""
    attachments = payload.get("attachments")
    if attachments is None:
        payload.pop("attachments", None)
        return ()
    if not isinstance(attachments, list):
        raise Refused("payload_invalid", f"payload.attachments must be an array, got {_shown(attachments)}")
    for place, item in enumerate(attachments):
        if not isinstance(item, dict) or not isinstance(item.get("artifactRef"), str):
            raise Refused("payload_invalid", f'payload.attachments[{place}] must be an object with an "artifactRef"')
        if not isinstance(item.get("filename", ""), str | None):
            raise Refused("payload_invalid", f"payload.attachments[{place}].filename must be a string")
    return tuple(item["artifactRef"] for item in attachments)


def _check_reply(in_reply_to: object) -> str | None:
    if in_reply_to is None or isinstance(in_reply_to, str):
        return in_reply_to and clean(in_reply_to)
    raise Refused("inReplyTo_unknown", f"inReplyTo must be the id of a message, got {_shown(in_reply_to)}")


def _check_option(option: object, in_reply_to: object) -> int | None:
    if option is None:
        return None
    if isinstance(option, bool) or not isinstance(option, int) or option < 0:
        raise Refused(
            "option_invalid", f"option must be the index of a quick reply, counted from 0, got {_shown(option)}"
        )
    if in_reply_to is None:
        raise Refused("option_invalid", "option needs inReplyTo: the message whose quick reply it is")
    return option


def _plain(value: object, place: str, depth: int) -> Any:
    """A copy made of JSON's own types only, with text that every engine can store."""
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if -(2**63) <= value < 2**64:
            return value
        raise Refused("payload_invalid", f"{place} is a whole number of more than 64 bits, which few programs can read")
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise Refused("payload_invalid", f"{place} is {value}, which JSON cannot carry")
    if depth == 0:
        raise Refused("payload_invalid", f"payload is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise Refused("payload_invalid", f"{place} has the key {_shown(key)}; keys must be strings")
        # Most items are text; asking here spares each of them a call and the words of an error that does not happen.
        return {
            clean(key): clean(item) if type(item) is str else _plain(item, f"{place}.{key}", depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{index}]", depth - 1) for index, item in enumerate(value)]
    raise Refused("payload_invalid", f"{place} is a {type(value).__name__}, which JSON cannot carry")


def _shown(value: object) -> str:
    """A foreign value as an error message may quote it."""
    return f"{type(value).__name__} {one_line(repr(value), 40)}" if value is not None else "nothing"
