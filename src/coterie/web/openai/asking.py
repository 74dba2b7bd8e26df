"""A request of an OpenAI client becomes one message to an agent: what is new in it, asked once even if it is retried.

An agent has one memory. So only what the client's list adds to an earlier request is sent. The ids of
messages are derived from the requests, so the store itself knows what was asked, also after a restart. A request is
sent without a read of the store before: the store refuses what was sent already. Only files need a read first.

* The *base* id is a hash of key, agent, conversation and the client's own messages, up to some point of its list. If a
  message has the base id of a beginning of the list, that beginning is known.
* A request with an `Idempotency-Key` has the id of that key, whatever its body. Another body is refused.
* A request whose base id is used is a retry while its task works, and for a minute after its answer. Later, or after a
  failure, it is asked again, under an id with the minute in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any

import msgspec

from coterie.clock import Clock, to_ms
from coterie.errors import Refused
from coterie.messages import PERSON, Message, Receipt, make_envelope, message_id_of
from coterie.society import Society
from coterie.task_following import TaskStream
from coterie.text import to_storable
from coterie.web.auth import Caller
from coterie.web.errors import RequestRejected
from coterie.web.openai.answering import NO_RETRY
from coterie.web.openai.content import (
    SYSTEM_ROLES,
    ClientMessage,
    answer_text,
    chosen_option,
    instructions_of,
    render_new,
)
from coterie.web.routing import State

RETRY_TIME = timedelta(minutes=1)
MAX_REPEATS = 8
"""Ids of one minute for the same request. Further repetitions in that minute get the last answer."""
KNOWN_PAGE = 16
"""Beginnings of a conversation that are looked up together, longest first."""
RECENT_MESSAGES = 50
"""Messages of a thread among which the client's last answer and instructions are looked for."""
MIN_MATCH = 16
"""Characters of an answer that is recognised by its text."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks an agent."""

    agent_id: str
    messages: Sequence[ClientMessage]
    conversation: str = ""
    """Chosen by the client. Then everything after the last answer in its list is new."""
    user: str = ""
    """The client's name for its user: requests of different users are never retries of each other."""
    idempotency_key: str = ""
    previous: Message | None = None
    """The message of the request that this one continues: all `messages` are new."""

    may_wait: bool = False
    """Send it to a paused agent, too: the client does not wait for the answer."""

    @property
    def instructions(self) -> str:
        return "\n\n".join(one.text for one in self.messages if one.role in SYSTEM_ROLES)


class Asked(msgspec.Struct, frozen=True):
    """The message of a request."""

    receipt: Receipt
    is_new: bool = False
    """It was sent just now. False: it may be that of an earlier attempt."""


class Asking:
    """Sends requests of clients to agents."""

    def __init__(self, society: Society, clock: Clock) -> None:
        self._society, self._store, self._clock = society, society.store, clock

    async def ask(self, caller: Caller, ask: Ask, stream: TaskStream | None = None) -> Asked:
        """Send the request, or find the message of an earlier attempt. `stream`: expects the message."""
        own = [one for one in ask.messages if _is_own(one)]
        if not own:
            raise Refused("payload_invalid", "messages: expected at least one message of the user", param="messages")
        if ask.agent_id == PERSON or not caller.may_reach(ask.agent_id):
            raise unknown_model()
        if self._store.seen_paused and not ask.may_wait:
            raise _agent_resting("the society is paused: the owner must resume it. Nothing was sent")
        try:
            return await self._ask_once(caller, ask, own, stream)
        except Refused as refused:
            if refused.code in ("unknown_recipient", "recipient_terminated"):
                raise unknown_model() from refused
            if refused.code == "recipient_paused":
                raise _agent_resting(refused.message) from refused
            raise

    async def _ask_once(
        self, caller: Caller, ask: Ask, own: Sequence[ClientMessage], stream: TaskStream | None
    ) -> Asked:
        bases = self._bases(caller, ask, own)
        client_id = bases[-1]
        if ask.idempotency_key:
            named = f"{caller.key or ''}\0{ask.idempotency_key}"
            client_id = f"openai/key/{hashlib.sha256(named.encode()).hexdigest()}"
        if any(one.files for one in own):
            await self._require_agent(ask)  # files are stored before the message
        else:
            if stream:
                await stream.expect(self._message_id(client_id))
            try:
                return Asked(await self._send(caller, ask, own, bases, client_id, only_new=True), is_new=True)
            except Refused as refused:
                if refused.code != "already_sent":
                    raise
        client_id, earlier = await self._choose_id(caller, client_id, ask)
        if earlier:
            if ask.idempotency_key and not _has_content(earlier, ask.agent_id, own[-1]):
                reused = "this Idempotency-Key was used for another request: use a new one for each request"
                raise RequestRejected(422, "idempotency_key_reused", reused, headers=NO_RETRY)
            return Asked(Receipt(message_id=earlier.id, state="pending", task=earlier.task))
        return Asked(await self._send(caller, ask, own, bases, client_id))

    async def _require_agent(self, ask: Ask) -> None:
        agent = await self._store.agent(ask.agent_id)
        if agent is None or agent.state == "terminated":
            raise unknown_model()
        if agent.state == "paused" and not ask.may_wait:
            raise _agent_resting(f"{agent.id} is paused: the owner must resume it. Nothing was sent")

    async def _send(
        self,
        caller: Caller,
        ask: Ask,
        own: Sequence[ClientMessage],
        bases: Sequence[str],
        client_id: str,
        *,
        only_new: bool = False,
    ) -> Receipt:
        """Send what is new. `only_new`: `Refused("already_sent")` if there is a message with this client id."""
        known, recent = await self._known_count(caller, bases[:-1], ask)
        new = [one for one in ask.messages[known:] if one.role not in SYSTEM_ROLES]
        if not any(one.role != "assistant" for one in new):
            new = [own[-1]]  # nothing is new: the last message is asked again
        instructions = ask.instructions
        if instructions:
            thread = await self._recent(ask.agent_id) if recent is None else recent
            instructions = "" if _knows(thread, instructions, caller.key) else instructions
        payload: dict[str, Any] = {"text": render_new(new, instructions)}
        files = [file for one in new for file in one.files]
        if files:
            refs = []
            for number, file in enumerate(files):
                stored = await self._society.artifacts.put(file.data, file.name, f"{client_id}/{number}")
                refs.append({"artifactRef": stored.ref, "filename": stored.filename})
            payload["attachments"] = refs
        reply = await self._find_question(caller, ask, new) if len(new) == 1 and not files else {}
        if reply:
            payload["text"] = reply.pop("text")
        envelope = make_envelope(
            sender=PERSON,
            to=ask.agent_id,
            payload=payload,
            client_id=client_id,
            via=caller.key,
            only_new=only_new,
            unless_paused=not ask.may_wait,
            **reply,
        )
        return await self._society.bus.send_envelope(envelope)

    # Retries

    def _bases(self, caller: Caller, ask: Ask, own: Sequence[ClientMessage]) -> list[str]:
        """The base of each beginning of the list that ends with a message of the client, shortest first."""
        start = "\0".join(
            (caller.key or "", ask.agent_id, ask.conversation, ask.user, ask.previous.id if ask.previous else "")
        )
        digest, bases = hashlib.sha256(start.encode()), list[str]()
        for message in own:
            digest.update(message.digest)
            bases.append(f"openai/{digest.hexdigest()}")
        return bases

    async def _choose_id(self, caller: Caller, base: str, ask: Ask) -> tuple[str, Message | None]:
        """The client id to send with; or that of an earlier attempt, with its message."""
        minute = to_ms(self._clock.now()) // 60_000
        repeats = [f"{base}/{minute - age}/{number}" for age in (1, 0) for number in range(MAX_REPEATS)]
        found = await self._find([base, *repeats])
        if base not in found:
            return base, None
        client_id, last = [*found.items()][-1]
        if ask.idempotency_key or (await self._has_instructions(caller, last, ask) and await self._is_retry(last)):
            return client_id, last
        free = [repeat for repeat in repeats[MAX_REPEATS:] if repeat not in found]
        return (free[0], None) if free else (client_id, last)

    async def _has_instructions(self, caller: Caller, asked: Message, ask: Ask) -> bool:
        """Whether the message was sent with the instructions of this request, or after them."""
        carried = instructions_of(asked)
        if carried is not None or not ask.instructions:
            return carried is None or (bool(ask.instructions) and carried.startswith(_head(ask.instructions)))
        thread = await self._recent(ask.agent_id)
        before = [one for one in thread if one.seq < asked.seq]
        if not before and len(thread) == RECENT_MESSAGES:
            return True  # the message is older than what was read: a retry must not ask twice
        return _knows(before, ask.instructions, caller.key)

    async def _is_retry(self, asked: Message) -> bool:
        """Whether the same request means this message: it has no answer yet, or one of the last minute."""
        if asked.state in ("withdrawn", "dead"):
            return False
        task = (await self._store.tasks_by_id([asked.task])).get(asked.task)
        if task is None or task.state in ("failed", "stopped"):
            return False
        return task.state == "working" or self._clock.now() - task.last_at < RETRY_TIME

    async def _find(self, client_ids: Sequence[str]) -> Mapping[str, Message]:
        """The messages that were sent with these client ids, in their order."""
        ids = {one: self._message_id(one) for one in client_ids}
        found = await self._store.messages_by_id([*ids.values()])
        return {one: found[id_] for one, id_ in ids.items() if id_ in found}

    def _message_id(self, client_id: str) -> str:
        return message_id_of(self._store.info.secret, client_id)

    # What is new

    async def _known_count(
        self, caller: Caller, bases: Sequence[str], ask: Ask
    ) -> tuple[int, Sequence[Message] | None]:
        """How many messages of the list the agent knows; and the newest messages of its thread, if they were read."""
        answers = [index for index, one in enumerate(ask.messages) if one.role == "assistant"]
        if ask.previous or not answers:
            return 0, None
        if ask.conversation:
            return answers[-1] + 1, None
        positions = [index for index, one in enumerate(ask.messages) if _is_own(one)]
        for end in range(len(bases), 0, -KNOWN_PAGE):
            start = max(0, end - KNOWN_PAGE)
            if found := await self._find(bases[start:end]):
                longest = max(index for index in range(start, end) if bases[index] in found)
                count = positions[longest] + 1
                # The answers to it follow; the client may have changed their text.
                while count < len(ask.messages) and ask.messages[count].role == "assistant":
                    count += 1
                return count, None
        # The last answer is recognised by its text: a client may have dropped the beginning of a long conversation.
        # A short answer is one if the client's message before it is recognised too, as after requests with a key.
        recent = await self._recent(ask.agent_id)
        said = _squeezed(ask.messages[answers[-1]].text)
        before = next((one for one in reversed(ask.messages[: answers[-1]]) if _is_own(one)), None)
        mine = [one for one in recent if one.via == caller.key]
        asked = {one.id for one in mine if before and _has_content(one, ask.agent_id, before)}
        for one in recent:
            text = _squeezed(answer_text(one, ask.agent_id)) if one.sender == ask.agent_id else ""
            if text and ((len(text) >= MIN_MATCH and text in said) or (one.in_reply_to in asked and text == said)):
                return answers[-1] + 1, recent
        return 0, recent

    async def _recent(self, agent_id: str) -> Sequence[Message]:
        return await self._store.thread(agent_id, limit=RECENT_MESSAGES)

    async def _find_question(self, caller: Caller, ask: Ask, new: Sequence[ClientMessage]) -> dict[str, Any]:
        """`in_reply_to`, `option` and `text` if a quick reply of the agent's newest open question is chosen."""
        text = new[-1].text
        if len(text) > 200 or (ask.previous is None and len(ask.messages) < 2):
            return {}
        for question in await self._store.open_questions(ask.agent_id):
            first = await self._store.message(question.task)
            if first is not None and (first.via or "") == (caller.key or ""):
                options = question.payload.get("quickReplies") or ()
                option = chosen_option(text, options)
                if option is not None:
                    return {"in_reply_to": question.id, "option": option, "text": options[option]}
                return {}
        return {}


AskingDep = Annotated[Asking, State(lambda request: request.app.state.asking)]


def _is_own(message: ClientMessage) -> bool:
    """True for messages of the client itself: neither instructions nor answers."""
    return message.role not in SYSTEM_ROLES and message.role != "assistant"


def find_model(model: object) -> str:
    """The id of the agent that a model's name stands for, if there is such an agent."""
    if isinstance(model, str):
        return model
    raise unknown_model()


def unknown_model() -> Refused:
    """An agent that the key may not reach does not exist for it."""
    return Refused("unknown_agent", "there is no such model: GET /v1/models lists the agents", param="model")


def _agent_resting(detail: str) -> RequestRejected:
    """The error for an agent that would not answer before the owner acts."""
    return RequestRejected(503, "agent_resting", detail, headers=NO_RETRY)


def _has_content(asked: Message, agent_id: str, given: ClientMessage) -> bool:
    """Whether the message was sent for a request that ends with `given`."""
    if asked.sender != PERSON or asked.to != agent_id:
        return False
    if asked.option is not None or not given.text:
        return True  # its text is that of the chosen option; or only files were sent
    last = render_new((given,), "") if given.role == "user" else f"{given.role}: {given.text}"
    text, last = str(asked.payload.get("text", "")), to_storable(last)
    return text == last or text.endswith(f"\n\n{last}")


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _knows(thread: Sequence[Message], instructions: str, key: str | None) -> bool:
    """Whether the newest instructions that came through the key are these."""
    for message in reversed(thread):
        if message.sender == PERSON and message.via == key and (carried := instructions_of(message)):
            return carried.startswith(_head(instructions))
    return False


def _head(instructions: str) -> str:
    return render_new((), instructions)
