"""Messages and their validation.

`make_envelope` validates every send, whether it comes from HTTP, the command line, Python or an agent's tool.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Literal

import msgspec

from coterie.artifacts import Artifact
from coterie.clock import to_rfc3339
from coterie.errors import CoterieError, Refused, StoreUnavailable
from coterie.ids import id_for, keyed_id, new_id
from coterie.text import is_blank, one_line, to_storable

log = logging.getLogger(__name__)

Payload = dict[str, Any]
State = Literal["delayed", "pending", "taken", "withdrawn", "dead"]
CutOff = Literal["length", "content_filter"]
"""Why a model's answer is incomplete: it reached the length limit, or a filter of the service ended it."""

PERSON = "user"
SYSTEM = "system"
RESERVED_IDS = frozenset({PERSON, SYSTEM})

NEW_CHAIN_DELAY = timedelta(seconds=60)
"""A message delayed this long starts a new causal chain, so that `max_hops` does not end repeated reminders."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A validated message that is not stored yet."""

    # A Struct: one is made for every send, and it is cheaper to make than a dataclass. The same for Receipt, Message.

    id: str
    sender: str
    to: str
    payload_json: str
    delay: timedelta = timedelta(0)
    every: str | None = None
    """The recurrence, in its canonical form. None: the message is sent once."""
    may_exist: bool = False
    """The id is derived from a key, so the store may hold the message already."""
    is_keyed: bool = False
    """The id is a hash of the sender's key. The store hashes it again with the society's secret."""
    in_reply_to: str | None = None
    option: int | None = None
    """Index of the chosen quick reply of `in_reply_to`, from 0."""
    cause: str | None = None
    """The message that the sender was handling."""
    attachments: tuple[str, ...] = ()
    is_question: bool = False
    """True if it offers quick replies to the person."""
    about_agent: str | None = None
    """The agent that a system notice concerns."""
    unless_answered: str | None = None
    """A message of the sender. An answer to it withdraws this one, which is delayed."""
    via: str | None = None
    """Name of the key with which a program sent it. None: the person, or an agent."""
    asks_back: bool = False
    """The person asks about the call that `in_reply_to` wants approved, and does not decide yet."""
    only_new: bool = False
    """Refuse it with `already_sent` if the store holds the message already."""
    unless_paused: bool = False
    """Refuse it with `recipient_paused` if the recipient would not read it before its owner resumes it."""

    @property
    def thread(self) -> str | None:
        """The id of the agent in whose conversation with the person it appears; None if in none."""
        if self.sender == PERSON:
            return self.to if self.to != PERSON else None
        if self.to == PERSON:
            return self.about_agent if self.sender == SYSTEM else self.sender
        return None


class Receipt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Confirms that the message is stored durably."""

    message_id: str
    state: Literal["pending", "queued", "delayed", "withdrawn"]
    """`queued`: the recipient is working on a turn; the message interrupts it. `withdrawn`: the recipient will not read
    it, because the question of `unlessAnswered` is answered, or because the message stopped its own task."""
    task: str = ""
    """The task that the message belongs to; it starts one if that is its own id."""
    scheduled_delivery_time: datetime | None = None
    schedule_id: str | None = None
    """The schedule that sends the message again."""

    def to_dict(self) -> dict[str, Any]:
        data = {"messageId": self.message_id, "state": self.state, "task": self.task or self.message_id}
        if self.scheduled_delivery_time:
            data["scheduledDeliveryTime"] = to_rfc3339(self.scheduled_delivery_time) or ""
        if self.schedule_id:
            data["scheduleId"] = self.schedule_id
        return data


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """The message that answered a question."""

    message_id: str
    """The question's own id: it was closed without an answer."""
    option: int | None
    """Index of the chosen quick reply. None: the person wrote text."""
    is_stopped: bool = False
    """The question was closed because its task was stopped."""

    def to_dict(self) -> dict[str, Any]:
        data = {"messageId": self.message_id, "option": self.option}
        return data | {"closed": "stopped"} if self.is_stopped else data


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    seq: int
    """Send order in the whole society; the cursor of listings."""
    id: str
    sender: str
    to: str
    payload: Payload
    state: State
    created_at: datetime
    deliver_at: datetime | None = None
    """Earliest delivery. None: immediately."""
    delivered_at: datetime | None = None
    taken_at: datetime | None = None
    """When it entered the recipient's context. For the person: when it was read."""
    mailbox_position: int | None = None
    """Order in the recipient's mailbox, assigned at delivery."""
    in_reply_to: str | None = None
    option: int | None = None
    cause: str | None = None
    hops: int = 0
    early: bool = False
    """Delivered before `deliver_at` because the society stopped."""
    stopped: bool = False
    """The person stopped the agent in the middle of this answer."""
    cut_off: CutOff | None = None
    reason: str | None = None
    """Why it is a dead letter."""
    replay_of: str | None = None
    answer: QuestionAnswer | None = None
    """The answer to a message with quick replies to the person."""
    schedule_id: str | None = None
    """The schedule that sends the message again and again."""
    every: str | None = None
    """The recurrence of the schedule when the message was stored: `weekdays 08:00 Europe/Berlin`."""
    missed: int = 0
    """Due times of the schedule that passed without a delivery; this message stands for them."""
    task: str = ""
    """Id of the first message of its task."""
    parent_task: str | None = None
    """The task that sent a message which starts a task of its own when it is due."""
    unless_answered: str | None = None
    """An answer to this message withdraws it."""
    via: str | None = None
    """Name of the key with which a program sent it."""
    asks_back: bool = False
    """It asks about the call that `in_reply_to` wants approved, and does not decide."""

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "id": self.id,
            "from": self.sender,
            "to": self.to,
            "payload": self.payload,
            "createdAt": to_rfc3339(self.created_at),
            "deliverAt": to_rfc3339(self.deliver_at),
            "deliveredAt": to_rfc3339(self.delivered_at),
            "takenAt": to_rfc3339(self.taken_at),
            "state": self.state,
            "inReplyTo": self.in_reply_to,
            "cause": self.cause,
            "task": self.task or self.id,
            "hops": self.hops,
            "early": self.early,
            "stopped": self.stopped,
        }
        optional: dict[str, Any] = {
            "option": self.option,
            "cutOff": self.cut_off,
            "reason": self.reason,
            "replayOf": self.replay_of,
            "scheduleId": self.schedule_id,
            "every": self.every,
            "missed": self.missed or None,
            "parentTask": self.parent_task,
            "unlessAnswered": self.unless_answered,
            "via": self.via,
            "asksBack": self.asks_back or None,
        }
        if self.answer:
            optional["answer"] = self.answer.to_dict()
        return data | {key: value for key, value in optional.items() if value is not None}


ScheduleState = Literal["active", "paused", "ended"]


class Schedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A recurring message. While it is active, exactly one delayed message, its next occurrence, exists."""

    id: str
    sender: str
    to: str
    payload: Payload
    every: str
    """The recurrence with its time zone: `weekdays 08:00 Europe/Berlin`."""
    state: ScheduleState
    created_at: datetime
    message_id: str
    """The next occurrence; the last one if the schedule is not active."""
    due_at: datetime
    """When that occurrence is or was due by the recurrence."""
    next_at: datetime
    """When that occurrence is or was to be delivered: not at `due_at` if it was rescheduled itself."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "from": self.sender,
            "to": self.to,
            "payload": self.payload,
            "every": self.every,
            "state": self.state,
            "createdAt": to_rfc3339(self.created_at),
            "messageId": self.message_id,
            "deliverAt": to_rfc3339(self.due_at) if self.state == "active" else None,
            "nextAt": to_rfc3339(self.next_at) if self.state == "active" else None,
        }


MAX_PAYLOAD_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_QUICK_REPLIES = 10
MAX_DELAY = timedelta(days=3653)
_TOO_DEEP = f"payload is nested more than {MAX_DEPTH} levels deep"
_MAPPING = (dict, Mapping)
"""`dict` first: the check of an abstract class takes ten times as long."""

_encode = msgspec.json.Encoder().encode
_NO_SETTINGS = (None,) * 9


def message_id_of(secret: bytes, client_id: str, sender: str = PERSON) -> str:
    """The id of the message that was or will be sent with this client id. `secret`: of the society."""
    return keyed_id(secret, id_for("message", sender, client_id))


def make_envelope(
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
    every: object = None,
    time_zone: object = None,
    unless_answered: object = None,
    via: str | None = None,
    asks_back: object = None,
    only_new: bool = False,
    unless_paused: bool = False,
) -> Envelope:
    """Validate a send and return its envelope; raise `Refused` if anything is invalid.

    `every` makes it recurring; with `delay_ms` too, the first one is due no earlier than then.

    The same `client_id` gives the same message, which the store accepts once. The store derives the public id of
    such a message with the society's secret; the receipt has it.
    """
    if not isinstance(to, str) or not to:
        raise Refused("unknown_recipient", f"to must be the id of an agent or a person, got {_shown(to)}")
    checked = validate_payload(payload)
    options = validate_quick_replies(checked.pop("quickReplies", None) if quick_replies is None else quick_replies)
    if options:
        checked["quickReplies"] = options
    attachments = validate_attachments(checked)
    envelope = Envelope(
        # An empty client_id counts as none: otherwise all messages with an empty one would be the same message.
        id=id_for("message", sender, client_id) if client_id else new_id(),
        sender=sender,
        to=to_storable(to),
        payload_json=encode_payload(checked),
        cause=cause,
        attachments=attachments,
        is_question=options is not None and to == PERSON and sender != PERSON,
    )
    settings = (delay_ms, in_reply_to, client_id, via, every, time_zone, option, unless_answered, asks_back)
    if settings == _NO_SETTINGS and sender != SYSTEM and not only_new and not unless_paused:
        return envelope  # as most: each further field takes time
    delay = validate_delay(delay_ms)
    return msgspec.structs.replace(
        envelope,
        delay=delay,
        every=_validate_every(every, time_zone, in_reply_to),
        may_exist=bool(client_id),
        is_keyed=bool(client_id),
        in_reply_to=_validate_in_reply_to(in_reply_to),
        option=_validate_option(option, in_reply_to),
        about_agent=_problem_agent(checked) if sender == SYSTEM else None,
        unless_answered=_validate_unless_answered(unless_answered, delay, every),
        via=via,
        asks_back=_validate_asks_back(asks_back, in_reply_to, option, delay_ms, every),
        only_new=only_new,
        unless_paused=unless_paused,
    )


def thread_of(message: Message) -> str:
    """The conversation of the person that a message belongs to: an agent's id, or `system` for other notices."""
    if message.sender == PERSON:
        return message.to
    return (_problem_agent(message.payload) or SYSTEM) if message.sender == SYSTEM else message.sender


def _problem_agent(payload: Payload) -> str | None:
    problem = payload.get("problem")
    agent = problem.get("agent") if isinstance(problem, dict) else None
    return agent if isinstance(agent, str) else None


def validate_payload(payload: object) -> Payload:
    if not isinstance(payload, _MAPPING):
        raise Refused(
            "payload_invalid", f'payload must be a JSON object such as {{"text": "…"}}, got {_shown(payload)}'
        )
    checked = _copy_json(payload, "payload", MAX_DEPTH)
    if not isinstance(checked.get("text", ""), str):
        raise Refused("payload_invalid", f"payload.text must be a string, got {_shown(checked['text'])}")
    return checked  # type: ignore[no-any-return]


def encode_payload(payload: Payload) -> str:
    data = _encode(payload)
    if len(data) > MAX_PAYLOAD_BYTES:
        raise Refused(
            "payload_too_large",
            f"the payload has {len(data):,} bytes, the limit is {MAX_PAYLOAD_BYTES:,}: attach long content as a file",
        )
    return data.decode()


def validate_quick_replies(value: object) -> list[str] | None:
    """The quick replies in order; None if there are none (absent, null or [])."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise Refused("quickReplies_invalid_type", f"quickReplies must be an array of strings, got {_shown(value)}")
    if not value:
        return None
    if len(value) > MAX_QUICK_REPLIES:
        raise Refused("quickReplies_too_many", f"at most {MAX_QUICK_REPLIES} quick replies, got {len(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise Refused("quickReplies_invalid_type", f"quickReplies[{index}] must be a string, got {_shown(item)}")
        if is_blank(item):
            raise Refused("quickReplies_empty_string", f"quickReplies[{index}] must have visible characters")
    return [to_storable(item) for item in value]


def validate_delay(value: object) -> timedelta:
    """The delay in whole milliseconds, rounded up so that no delivery is early; 0 for None or a negative value."""
    if value is None:
        return timedelta(0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused("delayMs_invalid", f"delayMs must be a number of milliseconds, got {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused("delayMs_invalid", f"delayMs must be a finite number, got {value}")
    if value > MAX_DELAY.total_seconds() * 1000:
        raise Refused("delayMs_invalid", "delayMs must be at most ten years")
    return timedelta(milliseconds=max(0, math.ceil(value)))


def _validate_every(every: object, time_zone: object, in_reply_to: object) -> str | None:
    if every is None:
        if time_zone is not None:
            raise Refused("every_invalid", "timeZone needs every: it is the time zone of the recurrence")
        return None
    if in_reply_to is not None:
        raise Refused("every_invalid", "an answer cannot recur: leave out every or inReplyTo")
    from coterie.recurrence import parse_recurrence  # few messages recur

    return parse_recurrence(every, time_zone).text


def validate_attachments(payload: Payload) -> tuple[str, ...]:
    """The artifact refs in the payload. `MessageBus` adds type and size before the message is stored."""
    attachments = payload.get("attachments")
    if attachments is None:
        payload.pop("attachments", None)
        return ()
    if not isinstance(attachments, list):
        raise Refused("payload_invalid", f"payload.attachments must be an array, got {_shown(attachments)}")
    for index, item in enumerate(attachments):
        if not isinstance(item, dict) or not isinstance(item.get("artifactRef"), str):
            raise Refused("payload_invalid", f'payload.attachments[{index}] must be an object with an "artifactRef"')
        if not isinstance(item.get("filename", ""), str | None):
            raise Refused("payload_invalid", f"payload.attachments[{index}].filename must be a string")
    return tuple(item["artifactRef"] for item in attachments)


def _validate_in_reply_to(in_reply_to: object) -> str | None:
    if in_reply_to is None or isinstance(in_reply_to, str):
        return in_reply_to and to_storable(in_reply_to)
    raise Refused("inReplyTo_unknown", f"inReplyTo must be the id of a message, got {_shown(in_reply_to)}")


def _validate_unless_answered(message_id: object, delay: timedelta, every: object) -> str | None:
    if message_id is None:
        return None
    if not isinstance(message_id, str) or not message_id:
        raise Refused(
            "unlessAnswered_unknown", f"unlessAnswered must be the id of a message of yours, got {_shown(message_id)}"
        )
    if not delay or every is not None:
        raise Refused(
            "unlessAnswered_invalid", "unlessAnswered needs delayMs, and no every: how long the answer may take"
        )
    return to_storable(message_id)


def _validate_option(option: object, in_reply_to: object) -> int | None:
    if option is None:
        return None
    if isinstance(option, bool) or not isinstance(option, int) or option < 0:
        raise Refused(
            "option_invalid", f"option must be the index of a quick reply, counted from 0, got {_shown(option)}"
        )
    if in_reply_to is None:
        raise Refused("option_invalid", "option needs inReplyTo: the id of the message with the quick reply")
    return option


def _validate_asks_back(asks_back: object, in_reply_to: object, *excluded: object) -> bool:
    if asks_back is None or asks_back is False:
        return False
    if asks_back is not True:
        raise Refused("asksBack_invalid", f"asksBack must be true or false, got {_shown(asks_back)}")
    if in_reply_to is None or any(value is not None for value in excluded):
        raise Refused(
            "asksBack_invalid", "asksBack needs inReplyTo, an approval question, and no option, delay or every"
        )
    return True


def _copy_json(value: object, path: str, depth: int) -> Any:
    """A copy made of JSON types only, with text that every engine can store."""
    if isinstance(value, _MAPPING):
        if depth == 0:
            raise Refused("payload_invalid", _TOO_DEEP)
        if (copied := _copy_texts(value)) is not None:
            return copied
        checked: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise Refused("payload_invalid", f"{path} has the key {_shown(key)}; keys must be strings")
            checked[to_storable(key)] = _copy_json(item, f"{path}.{key}", depth - 1)
        return checked
    if isinstance(value, str):
        return to_storable(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if -(2**63) <= value < 2**64:
            return value
        raise Refused("payload_invalid", f"{path} is an integer of more than 64 bits, which few programs can read")
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise Refused("payload_invalid", f"{path} is {value}, which JSON cannot represent")
    if depth == 0:
        raise Refused("payload_invalid", _TOO_DEEP)
    if isinstance(value, list | tuple):
        return [_copy_json(item, f"{path}[{index}]", depth - 1) for index, item in enumerate(value)]
    raise Refused("payload_invalid", f"{path} is a {type(value).__name__}, which JSON cannot represent")


def _copy_texts(value: Mapping[Any, Any]) -> dict[str, str] | None:
    """A copy of an object that has only texts, as most payloads; None if it has others or a text must be changed."""
    try:
        text = "".join(chain(value, value.values()))  # one check of all texts takes less time than one of each
    except TypeError:
        return None
    return dict(value) if to_storable(text) == text else None


def _shown(value: object) -> str:
    """An untrusted value as an error message quotes it."""
    return f"{type(value).__name__} {one_line(repr(value), 40)}" if value is not None else "nothing"


MAX_SHOWN_CHARS = 32_000
"""Characters that a shortened text keeps, in its message and in the history."""
LONG_ANSWER_FILENAME = "answer.md"
_RESERVED_BYTES = 4_096
"""Bytes of a payload for everything except the text."""
_MAX_JSON_BYTES_PER_CHAR = 6
"""Length of an escaped control character."""
SaveFile = Callable[[bytes, str], Awaitable[Artifact]]
"""Stores bytes durably under a filename."""


def is_too_long(text: str) -> bool:
    """True if no message can carry `text`."""
    limit = MAX_PAYLOAD_BYTES - _RESERVED_BYTES
    return len(text) * _MAX_JSON_BYTES_PER_CHAR > limit and len(msgspec.json.encode(text)) > limit


def shorten(text: str, note: str) -> str:
    """Return the beginning of `text` with a note about the missing part."""
    head, shown, total = text[:MAX_SHOWN_CHARS], f"{MAX_SHOWN_CHARS:,}", f"{len(text):,}"
    return f"{head}\n\n[Shortened: these are the first {shown} of {total} characters. {note}]"


async def fit_answer(text: str, save_file: SaveFile | None) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the text for the message, and the attachment with the whole text if it was shortened.

    The file is durable before the message that names it. If it cannot be stored, the text says so.
    """
    if not is_too_long(text):
        return text, ()
    if save_file is None:
        return shorten(text, "The rest was not kept."), ()
    try:
        artifact = await save_file(text.encode(), LONG_ANSWER_FILENAME)
    except StoreUnavailable:
        raise  # temporary: the caller retries
    except (CoterieError, OSError) as error:
        log.warning(
            "an answer of %d characters was shortened, because it cannot be stored as a file: %s", len(text), error
        )
        return shorten(text, f"The rest could not be kept: {str(error)[:200]}"), ()
    return shorten(text, f"The whole is in the file {LONG_ANSWER_FILENAME}, artifactRef {artifact.ref}."), (
        artifact.to_dict(),
    )


def describe_receipt(receipt: Receipt) -> dict[str, Any]:
    """Return the result that reports a sent message to the model."""
    hidden = ("task",) if receipt.state == "withdrawn" else ("task", "state")
    return {key: value for key, value in receipt.to_dict().items() if key not in hidden}


MAX_IDS_IN_NOTICE = 20
_REASON_TEXT = {
    "recipient_terminated": "terminated before it could be read",
    "hop_limit": "since this chain of messages is too long already",
    "mailbox_full": "whose mailbox is full",
    "poison": "since it is damaged and cannot be read",
}


def undeliverable_payload(dead: list[tuple[str, str]], reason: str) -> dict[str, Any]:
    """Payload of the notice to the sender of dead letters, given as pairs of id and recipient."""
    recipients = sorted({recipient for _, recipient in dead})
    count = f"{len(dead)} messages" if len(dead) > 1 else "a message"
    why = _REASON_TEXT.get(reason, f"refused as {reason}")
    return {
        "text": f"Not delivered: {count} to {', '.join(recipients)}, {why}. Kept as a dead letter.",
        "notice": {
            "kind": "undeliverable",
            "reason": reason,
            "recipients": recipients,
            "count": len(dead),
            "messageIds": [message_id for message_id, _ in dead[:MAX_IDS_IN_NOTICE]],
        },
    }
