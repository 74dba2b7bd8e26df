"""Tool calls that wait for agents: progress while they work, elicitation when they ask, one message per request.

A call can be repeated after a lost connection or a crash of the server: everything that it needs is in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import mcp.types as types
import msgspec
from mcp.server.context import ServerRequestContext
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

from coterie.errors import Refused, StoreError
from coterie.messages import PERSON, Message, thread_of
from coterie.society import Society
from coterie.task_following import TaskFollower, TaskFollowing, TaskOutcome, TaskProgress, is_open_question
from coterie.web.caller_scope import CallerScope
from coterie.web.mcp.tools import DEFAULT_WAIT_SECONDS, AnswerQuestion, Send, sent_result

REPEAT_WINDOW = timedelta(minutes=10)
"""The same call within this time is taken for a repetition if its answer was not returned yet."""
SEARCHED_MESSAGES = 100
"""Newest messages of a conversation that are searched for the message of a repeated call."""
READ_DELAY = timedelta(seconds=2)
"""After this time a returned answer counts as read. A server that dies before then has perhaps not returned it."""
MAX_RETURNED = 10_000

Context = ServerRequestContext[Any, Any]


class RequestState(msgspec.Struct):
    """What a client sends back with the answer to an elicitation. The SDK encrypts it."""

    message: str
    """The message that is followed."""
    declined: list[str] = msgspec.field(default_factory=list)
    """Questions that the person did not want to answer."""


class Call:
    """One tool call: its client, its caller, and whether it can be asked."""

    def __init__(self, context: Context, scope: CallerScope) -> None:
        self.context, self.scope = context, scope
        self.is_modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        self.message: Message | None = None
        """The message that the call sent or waits for. A cancellation stops its task."""
        self.is_cancelled = False
        """The client has cancelled the call by a notification."""
        wanted = types.ClientCapabilities(elicitation=types.ElicitationCapability())
        self.can_ask = context.session.check_client_capability(wanted)
        self._reports = 0

    async def report(self, text: str) -> None:
        self._reports += 1
        await self.context.session.report_progress(self._reports, None, text)


class WaitingCalls:
    def __init__(self, society: Society, following: TaskFollowing) -> None:
        self._society, self._following, self._clock = society, following, following.clock
        self._returned: dict[str, None] = {}
        """Requests whose answers this process has returned: their repetition is a new message."""
        self._sending = asyncio.Lock()
        """Two equal calls at the same time must find each other's message."""
        self._marking: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """Store that returned answers are read. After a restart, the same call is then a new message."""
        self._closing.set()
        await asyncio.gather(*self._marking)

    # Sending

    async def send(self, call: Call, args: Send) -> Message:
        """The message of this call: a new one, or that of an earlier equal call that was not answered yet."""
        await call.scope.agent(args.agent)
        if args.key is not None:
            # The name of the key first: programs do not share their keys of messages.
            return await self._send(call, args, client_id=f"mcp {call.scope.caller.key or ''} {args.key}")
        async with self._sending:
            earlier = None if args.delay_ms else await self._find_repeated(call, args)
            return earlier or await self._send(call, args)

    async def _send(self, call: Call, args: Send, client_id: str | None = None) -> Message:
        receipt = await self._society.bus.send(
            sender=PERSON,
            to=args.agent,
            payload=_payload(args),
            delay_ms=args.delay_ms or None,
            quick_replies=args.quick_replies,
            client_id=client_id,
            via=call.scope.caller.key,
        )
        return await self._read(receipt.message_id)

    async def _find_repeated(self, call: Call, args: Send) -> Message | None:
        since = self._clock.now() - REPEAT_WINDOW
        wanted = _content(_payload(args) | {"quickReplies": args.quick_replies})
        conversation = await self._society.store.thread(args.agent, limit=SEARCHED_MESSAGES)
        for message in reversed(conversation):
            if message.created_at < since:
                return None
            is_equal = message.sender == PERSON and message.via == call.scope.caller.key
            if is_equal and message.in_reply_to is None and _content(message.payload) == wanted:
                return message if await self._is_unreturned(message) else None
        return None

    async def _is_unreturned(self, message: Message) -> bool:
        if message.id in self._returned or message.state in ("withdrawn", "dead", "delayed"):
            return False
        outcome = await self.follower(message).outcome()
        if outcome.state == "stopped":
            return False
        return not outcome.messages or any(one.taken_at is None for one in outcome.messages)

    async def answer(self, call: Call, args: AnswerQuestion) -> Message:
        """Answer a question. The same answer again finds the first one."""
        question = await call.scope.question(args.question)
        if (args.option is None) == (args.text is None):
            raise Refused("option_invalid", "give either the index of an option or text")
        return await self._answer(call, question, args.option, args.text)

    async def _answer(self, call: Call, question: Message, option: int | None, text: str | None) -> Message:
        options: Sequence[str] = question.payload.get("quickReplies") or ()
        if option is not None:
            if not options:
                raise Refused("option_invalid", "the message offers no options: answer with text")
            if not 0 <= option < len(options):
                raise Refused("option_invalid", f"option must be from 0 to {len(options) - 1}, got {option}")
            text = options[option]
        caller = call.scope.caller.key
        receipt = await self._society.bus.send(
            sender=PERSON,
            to=question.sender,
            payload={"text": text or ""},
            in_reply_to=question.id,
            option=option,
            client_id=f"mcp {caller or ''} answer {question.id} {option} {text}",
            via=caller,
        )
        return await self._read(receipt.message_id)

    async def _read(self, message_id: str) -> Message:
        message = await self._society.store.message(message_id)
        if message is None:
            raise Refused("unknown_message", "the conversation was cleared meanwhile: send the message again")
        return message

    # Waiting

    def follower(self, message: Message) -> TaskFollower:
        return self._following.follower(message)

    async def wait(
        self, call: Call, message: Message, seconds: float | None, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Wait for the outcome of the message, asking the person through the client where agents ask."""
        if seconds is None:
            seconds = 0 if message.state == "delayed" else DEFAULT_WAIT_SECONDS
        declined = await self._take_responses(call, params)
        call.message = message
        until = self._clock.monotonic() + seconds
        while True:
            outcome = await self.wait_once(call, message, max(0.0, until - self._clock.monotonic()))
            open_questions = [one for one in answerable(call, outcome) if one.id not in declined]
            if outcome.state != "waiting" or not open_questions or not call.can_ask:
                return self.returned(message, outcome)
            if call.is_modern:
                state = RequestState(message.id, sorted(declined))
                return types.InputRequiredResult(
                    input_requests={one.id: elicitation(one) for one in open_questions},
                    request_state=msgspec.json.encode(state).decode(),
                )
            question = open_questions[0]
            asked = elicitation(question).params
            assert isinstance(asked, types.ElicitRequestFormParams)  # noqa: S101
            result = await call.context.session.elicit_form(
                asked.message, asked.requested_schema, related_request_id=call.context.request_id
            )
            if not await self._take_answer(call, question, result):
                declined.add(question.id)
            until = self._clock.monotonic() + seconds  # the person's time is not the agent's

    async def wait_once(self, call: Call, message: Message, seconds: float) -> TaskOutcome:
        """Report progress until the task does not work, or the time is over."""
        follower = self.follower(message)
        async with aclosing(follower.follow(timedelta(seconds=seconds))) as updates:
            async for update in updates:
                if isinstance(update, TaskProgress):
                    await call.report(update.text)
                else:
                    return update
        return await follower.outcome()

    def returned(self, message: Message, outcome: TaskOutcome) -> types.CallToolResult:
        """The result of the call. Its messages soon count as read."""
        if outcome.messages and outcome.state != "working":
            self._returned[message.id] = None
            while len(self._returned) > MAX_RETURNED:
                self._returned.pop(next(iter(self._returned)))
        # A read mark covers the whole conversation up to its message: a program must not set the owner's.
        if outcome.messages and message.via is None:
            marking = asyncio.create_task(self._mark_read(outcome.messages), name=f"coterie-mcp-read-{message.id}")
            self._marking.add(marking)
            marking.add_done_callback(self._marking.discard)
        return sent_result(message, outcome)

    async def _mark_read(self, read: Sequence[Message]) -> None:
        await self._clock.wait(self._closing, READ_DELAY)
        newest = {thread_of(message): message for message in read}
        for message in newest.values():
            try:
                await self._society.mark_read(message)
            except (Refused, StoreError):  # cleared meanwhile, or the society stops: it stays unread
                return

    # Elicitation

    async def resumed(self, call: Call, params: types.CallToolRequestParams) -> Message | None:
        """The message that a repeated call with the answers to an elicitation waits for; None: a first call."""
        if params.request_state is None:
            return None
        state = msgspec.json.decode(params.request_state, type=RequestState)
        return await call.scope.request(state.message)

    async def _take_responses(self, call: Call, params: types.CallToolRequestParams) -> set[str]:
        """Send the answers that came with the call; return the questions that were declined."""
        if params.request_state is None:
            return set()
        state = msgspec.json.decode(params.request_state, type=RequestState)
        declined = set(state.declined)
        for question_id, response in (params.input_responses or {}).items():
            question = await call.scope.question(question_id)
            if not await self._take_answer(call, question, response):
                declined.add(question_id)
        return declined

    async def take_responses(self, call: Call, task: Message, responses: Mapping[str, Any]) -> None:
        """Send answers to questions of one task. Others, and those that are answered already, are ignored."""
        outcome = await self.follower(task).outcome()
        for question in answerable(call, outcome):
            if question.id in responses:
                await self._take_answer(call, question, responses[question.id])

    async def _take_answer(self, call: Call, question: Message, response: Any) -> bool:
        """Send the person's answer. False: there is none."""
        if getattr(response, "action", None) != "accept":
            return False
        content = response.content or {}
        options: Sequence[str] = question.payload.get("quickReplies") or ()
        choice, text = content.get("choice"), content.get("text")
        option = options.index(choice) if isinstance(choice, str) and choice in options else None
        if option is None and not (isinstance(text, str) and text.strip()):
            return False
        if not is_open_question(await self._read(question.id)):
            return True
        await self._answer(call, question, option, None if option is not None else str(text))
        return True


def answerable(call: Call, outcome: TaskOutcome) -> Sequence[Message]:
    """Open questions that the caller may answer."""
    return [question for question in outcome.questions if call.scope.caller.may_answer(question)]


def elicitation(question: Message) -> types.ElicitRequest:
    """The question as a form: one of its options, or other words."""
    options = list(dict.fromkeys(question.payload.get("quickReplies") or ()))
    schema = {
        "type": "object",
        "properties": {
            "choice": {"type": "string", "title": "Answer", "enum": options},
            "text": {"type": "string", "title": "Or in other words"},
        },
    }
    return types.ElicitRequest(
        params=types.ElicitRequestFormParams(
            message=f"{question.sender} asks: {question.payload.get('text', '')}", requested_schema=schema
        )
    )


def _payload(args: Send) -> dict[str, Any]:
    attachments = [{"artifactRef": ref} for ref in args.attachments]
    return {"text": args.text} | ({"attachments": attachments} if attachments else {})


def _content(payload: Mapping[str, Any]) -> tuple[Any, ...]:
    files = [item.get("artifactRef") for item in payload.get("attachments") or ()]
    return payload.get("text", ""), files, list(payload.get("quickReplies") or ())
