"""The answer to a request of an OpenAI client: everything that its message set off, whole or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.errors import CoterieError, Refused
from coterie.messages import SYSTEM, Message, Receipt
from coterie.society import Society
from coterie.task_following import Ended, Piece, Said, TaskFollowing, TaskStream, find_shared_answer
from coterie.tasks import Task
from coterie.web.connections import wait_for_disconnect
from coterie.web.errors import RequestRejected
from coterie.web.routing import State

KEEP_ALIVE = timedelta(seconds=10)
"""Proxies and clients close a silent connection."""
KEEP_ALIVE_FRAME = b": at work\n\n"
DONE_FRAME = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients repeat failed requests. These cannot succeed before the owner acts."""

T = TypeVar("T")
FollowingDep = Annotated[TaskFollowing, State(lambda request: request.app.state.following)]
_encode = msgspec.json.Encoder().encode


class Outcome(msgspec.Struct):
    """What a request has led to."""

    messages: list[Message]
    """Messages to the person, oldest first."""
    task: Task | None = None
    reason: str = ""
    """Why it cannot go on before somebody acts, if it cannot."""
    is_over: bool = False
    """The task may go on, but the rest of it answers a newer message."""

    @property
    def answers(self) -> list[Message]:
        """The messages without reports of the runtime about a failure."""
        return [one for one in self.messages if not is_failure_report(one)]

    @property
    def state(self) -> str:
        return self.task.state if self.task else "unknown"

    def failure(self) -> RequestRejected | None:
        """The error to answer with, if there is nothing else to say."""
        if self.reason and self.task is None:
            return RequestRejected(503, "unavailable", self.reason)
        if self.reason and not self.answers:
            return RequestRejected(503, "agent_resting", self.reason, headers=NO_RETRY)
        reports = [str(one.payload.get("text", "")) for one in self.messages if one.sender == SYSTEM]
        if self.state == "failed" or (reports and not self.answers):
            detail = reports[-1] if reports else "the agent could not answer"
            return RequestRejected(502, "agent_failed", detail, headers=NO_RETRY)
        if not self.answers:
            if self.state == "stopped":
                return RequestRejected(409, "task_stopped", "the owner stopped this task", headers=NO_RETRY)
            detail = "the agent read the request and sent no answer: the panel shows what it did"
            return RequestRejected(502, "no_answer", detail, headers=NO_RETRY)
        return None

    @property
    def finish_reason(self) -> str:
        last = self.answers[-1].cut_off if self.answers else None
        return last or "stop"


def is_failure_report(message: Message) -> bool:
    return message.sender == SYSTEM and "problem" in message.payload


def unsent_text(whole: str, sent: str) -> str:
    """The rest of a message whose text was streamed up to `sent`. The stored text may lack spaces at the end."""
    return whole.removeprefix(sent) if whole.startswith(sent) else whole.removeprefix(sent.rstrip())


async def collect(pieces: AsyncGenerator[Piece, None]) -> Outcome:
    """Wait for the end."""
    outcome = Outcome(messages=[])
    async with aclosing(pieces):
        async for piece in pieces:
            record(outcome, piece)
    return outcome


def record(outcome: Outcome, piece: Piece) -> None:
    if isinstance(piece, Said):
        outcome.messages.append(piece.message)
    elif isinstance(piece, Ended):
        outcome.task, outcome.reason = piece.task, piece.reason


async def read_outcome(following: TaskFollowing, asked: Message) -> Outcome:
    """What the message has led to so far, without waiting."""
    task, messages = await following.store.task_with_messages(asked.task, after=asked.seq)
    outcome = Outcome(messages=[], task=task)
    for message in messages:
        if message.sender != asked.sender:
            outcome.messages.append(message)
        elif outcome.messages:
            outcome.is_over = True  # the rest answers this newer message
            break
    if task and task.state == "done" and not outcome.messages:
        shared = await find_shared_answer(following.store, asked.id, task)
        outcome.messages += [shared] if shared else []
    return outcome


def frame(data: Any, event: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + _encode(data) + b"\n\n"


class AnswerStream(Response):
    """Sends frames to the client as they come. What the message set off goes on if the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterable[bytes], on_disconnect: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """`on_disconnect`: called if the client goes away before the end."""
        self._frames, self._on_disconnect = frames, on_disconnect
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write() -> None:
            async for data in self._frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        if await _unless_disconnected(receive, write(), self._on_disconnect):
            await send({"type": "http.response.body", "body": b""})


async def answer_or_stop(
    request: Request, answer: Coroutine[Any, Any, T], on_disconnect: Callable[[], Awaitable[object]] | None
) -> T:
    """Wait for an answer that is sent as a whole. Without `on_disconnect`, a client that goes away changes nothing."""
    if on_disconnect is None:
        return await answer
    found = list[T]()

    async def wait() -> None:
        found.append(await answer)

    if not await _unless_disconnected(request.receive, wait(), on_disconnect):
        raise RequestRejected(499, "client_closed_request", "the client went away, and the task was stopped")
    return found[0]


async def _unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, None], on_disconnect: Callable[[], Awaitable[object]] | None
) -> bool:
    """Do `work`, or cancel it when the client goes away. True: it was done."""
    working = asyncio.create_task(work, name="coterie-openai-answer")
    leaving = asyncio.create_task(wait_for_disconnect(receive), name="coterie-openai-disconnect")
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = working.done()
        working.cancel()
        leaving.cancel()
        result, _ = await asyncio.gather(working, leaving, return_exceptions=True)
    if is_done:
        if isinstance(result, BaseException):
            raise result
        return True
    if on_disconnect:
        with suppress(CoterieError):
            await on_disconnect()
    return False


def stop_on_disconnect(society: Society, wanted: bool, sent: Receipt) -> Callable[[], Awaitable[object]] | None:
    return (lambda: society.stop_task(sent.task)) if wanted else None


def follow(stream: TaskStream, sent: Receipt) -> AsyncGenerator[Piece, None]:
    return stream.follow(sent, KEEP_ALIVE)


def wants_stop(extra: Any) -> bool:
    """The field `coterie` of a request: `{"on_disconnect": "stop"}` ends the task when the client goes away."""
    if extra is None:
        return False
    wanted = extra.get("on_disconnect", "continue") if isinstance(extra, dict) else None
    if wanted not in ("stop", "continue"):
        raise Refused(
            "payload_invalid",
            'coterie: expected an object such as {"on_disconnect": "stop"}, or "continue"',
            param="coterie",
        )
    return bool(wanted == "stop")
