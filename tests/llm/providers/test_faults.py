"""Faults F30 to F39 in the response of a service: each gives the right error, in time and without a retry."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from coterie.llm.providers.openai import OpenAIService
from coterie.llm.providers.openai_stream import MAX_CALLS
from coterie.llm.service import (
    AssistantMessage,
    Completion,
    ContextTooLong,
    Deadlines,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    ServiceError,
    ToolCall,
    ToolMessage,
    TransientError,
)
from coterie.testing import FakeClock, model_faults
from coterie.testing.clock import START
from coterie.testing.model_server import (
    Calls,
    CustomReply,
    ModelServer,
    Reply,
    Says,
    ServerConnection,
    Status,
    call_chunks,
    chunk,
)

from .helpers import GRACE_SECONDS, HELLO, KEY, LONG, SHORT, Outcome, ask, call, service, user

MAX_BYTES = 8_000_000


@dataclass(frozen=True)
class Fault:
    """A reply of the server and the expected error."""

    name: str
    reply: Reply
    outcome: type[ServiceError]
    message: str = ""
    """Pattern of the error message."""
    category: str | None = None
    retry_after: float | None = None


def cases(*faults: Fault) -> list[Any]:
    names = [fault.name for fault in faults]
    assert len(set(names)) == len(names)
    return [pytest.param(fault, id=fault.name) for fault in faults]


def in_(seconds: float) -> str:
    return format_datetime(START + timedelta(seconds=seconds), usegmt=True)


def busy(**headers: str) -> Status:
    return Status(429, "slow down", {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer(api_key=KEY) as opened:
        yield opened


@pytest.fixture
async def main(server: ModelServer, request: pytest.FixtureRequest) -> AsyncIterator[OpenAIService]:
    """Short deadlines only for faults that exceed them."""
    opened = service(server.base_url, deadlines=_deadlines(request), clock=FakeClock(), max_bytes=MAX_BYTES)
    yield opened
    await opened.close()


def _deadlines(request: pytest.FixtureRequest) -> Deadlines:
    return SHORT if re.search("F33", request.node.name) else LONG


async def ask_once(server: ModelServer, main: OpenAIService, reply: Reply, request: ModelRequest = HELLO) -> Outcome:
    server.script(reply)
    server.default = Status(418, "asked again")
    outcome = await ask(main, request)
    assert len(server.requests) == 1, "the request was repeated"
    assert server.refused == []
    assert outcome.seconds < main.deadlines.total.total_seconds() + GRACE_SECONDS
    assert KEY not in str(outcome.error) and KEY not in repr(outcome.error)
    return outcome


FAILURES = cases(
    Fault("F30 429 without a header", busy(), TransientError),
    Fault("F30 429 seconds", busy(retry_after="7"), TransientError, retry_after=7),
    Fault("F30 429 part of a second", busy(retry_after="0.5"), TransientError, retry_after=0.5),
    Fault("F30 429 date", busy(retry_after=in_(90)), TransientError, retry_after=90),
    Fault("F30 429 date in the past", busy(retry_after=in_(-90)), TransientError, retry_after=0),
    Fault("F30 429 date in a year", busy(retry_after=in_(3e7)), TransientError, retry_after=600),
    Fault("F30 429 negative", busy(retry_after="-5"), TransientError, retry_after=0),
    Fault("F30 429 a billion seconds", busy(retry_after="1000000000"), TransientError, retry_after=600),
    Fault("F30 429 more digits than a float has", busy(retry_after="9" * 400), TransientError, retry_after=600),
    Fault("F30 429 no number", busy(retry_after="soon"), TransientError),
    Fault("F30 429 not a number", busy(retry_after="nan"), TransientError),
    Fault("F30 503 seconds", Status(503, "busy", {"retry-after": "3"}), TransientError, retry_after=3),
    Fault(
        "F30 429 quota by the minute",
        Status(429, "exceeded your current quota", {"retry-after": "9"}),
        TransientError,
        retry_after=9,
    ),
    Fault("F31 500", Status(500, "oops"), TransientError, "not able to answer"),
    Fault("F31 502 HTML", Status(502, b"<html><h1>Bad gateway</h1></html>"), TransientError, "Bad gateway"),
    Fault("F31 503 empty", Status(503, b""), TransientError),
    Fault("F31 504", Status(504, "timeout"), TransientError),
    Fault("F31 524", Status(524, b"a timeout occurred"), TransientError),
    Fault("F31 529", Status(529, "Overloaded"), TransientError),
    Fault("F31 408", Status(408, "timeout"), TransientError),
    Fault("F31 409", Status(409, "conflict"), TransientError),
    Fault("F31 425", Status(425, "too early"), TransientError),
    Fault(
        "F31 overload in the stream",
        model_faults.error_in_stream({"type": "overloaded_error", "message": "Overloaded"}),
        TransientError,
    ),
    Fault("F31 502 in the stream", model_faults.error_in_stream({"code": 502, "message": "upstream"}), TransientError),
    Fault(
        "F31 an error string in the stream",
        model_faults.error_in_stream("something broke"),
        TransientError,
        "something broke",
    ),
    Fault(
        "F31 an error that is no event",
        CustomReply(lambda wire: _broken_stream(wire, b'{"error": {"message": "gone", "code": 503}}\n')),
        TransientError,
        "gone",
    ),
    Fault(
        "F31 refused content in the stream",
        model_faults.error_in_stream({"code": "content_filter", "message": "no"}),
        PermanentError,
        category="content",
    ),
    Fault(
        "F31 bad request in the stream",
        model_faults.error_in_stream({"type": "invalid_request_error", "message": "no such thing"}),
        PermanentError,
        category="request",
    ),
    Fault(
        "F31 overload in a 200 document", model_faults.document(b'{"error": {"message": "Overloaded"}}'), TransientError
    ),
    Fault("F32 reset without a word", model_faults.reset(), TransientError, "connection reset|cannot be reached"),
    Fault("F32 reset in the middle", model_faults.reset(after=2), TransientError, "broke off"),
    Fault("F32 closed without a word", model_faults.cut(after=0), TransientError, "cannot be reached"),
    Fault(
        "F32 no HTTP at all",
        CustomReply(lambda wire: wire.send(b"SSH-2.0-nope\r\n")),
        TransientError,
        "cannot be reached",
    ),
    Fault(
        "F32 closed in the head", CustomReply(lambda wire: wire.send(b"HTTP/1.1 200 OK\r\ncontent-")), TransientError
    ),
    Fault("F33 no first byte", model_faults.no_first_byte(), TransientError, "did not begin to answer within 0.6 s"),
    Fault("F33 a head and no more", model_faults.head_and_nothing(), TransientError, "did not begin to answer"),
    Fault("F33 a stall between chunks", model_faults.stall(), TransientError, "fell silent for 0.45 s"),
    Fault("F33 one byte now and then", model_faults.drip(0.05), TransientError, "did not finish within 0.9 s"),
    Fault("F33 one byte after another", model_faults.drip(0.001), TransientError, "did not finish"),
    Fault("F33 never ending", model_faults.never_ending(), TransientError, "did not finish"),
    Fault("F33 never ending, no pause", model_faults.never_ending(0), TransientError, "did not finish"),
    Fault(
        "F33 an unending refusal", CustomReply(lambda wire: _unending_refusal(wire)), PermanentError, category="request"
    ),
    Fault("F34 cut in the arguments", model_faults.cut_in_arguments(), TransientError, "broke off"),
    Fault("F34 cut in the text", model_faults.cut(), TransientError, "broke off"),
    Fault(
        "F34 ended in good order, unfinished",
        model_faults.deltas({"content": "Hel"}, finish=None, done=False),
        TransientError,
    ),
    Fault(
        "F34 cut in an event",
        CustomReply(lambda wire: _broken_stream(wire, b'data: {"choices": [{"del')),
        TransientError,
    ),
    Fault(
        "F34 cut between calls", model_faults.events(*list(call_chunks((Calls("a"), Calls("b"))))[:3]), TransientError
    ),
    Fault("F35 HTML", model_faults.html(), MalformedResponse, "no JSON"),
    Fault("F35 garbage", model_faults.document(bytes(range(256)) * 50), MalformedResponse),
    Fault("F35 empty", model_faults.document(b""), TransientError, "empty answer"),
    Fault("F35 nothing but space", model_faults.document(b" \n\n"), TransientError, "empty answer"),
    Fault("F35 an empty stream", model_faults.events(), TransientError, "empty answer"),
    Fault("F35 204", Status(204, b""), TransientError, "empty answer"),
    Fault("F35 50 MB", model_faults.huge(50_000_000), MalformedResponse, "too large"),
    Fault("F35 a flood of comments", model_faults.flood(), MalformedResponse, "too large"),
    Fault("F35 100,000 deep", model_faults.nested(100_000), MalformedResponse),
    Fault("F35 100,000 deep in an event", model_faults.events("[" * 100_000, "[DONE]"), MalformedResponse),
    Fault("F35 an array", model_faults.document(b"[1, 2]"), MalformedResponse),
    Fault("F35 a number", model_faults.document(b"7"), MalformedResponse),
    Fault("F35 null", model_faults.document(b"null"), MalformedResponse),
    Fault("F35 no choices", model_faults.document(b'{"choices": []}'), MalformedResponse, "no choices"),
    Fault("F35 choices that are none", model_faults.document(b'{"choices": "many"}'), MalformedResponse, "no choices"),
    Fault("F35 nothing but the end", model_faults.events("[DONE]"), MalformedResponse, "no choices"),
    Fault("F35 an event that is no JSON", model_faults.events("{oops}", "[DONE]"), MalformedResponse, "no JSON"),
    Fault(
        "F35 compressed unasked", Status(200, b"\x1f\x8b" + bytes(60), {"content-encoding": "gzip"}), MalformedResponse
    ),
    Fault(
        "F36 500 calls",
        Says(calls=tuple(Calls("look_up") for _ in range(500))),
        MalformedResponse,
        f"more than {MAX_CALLS}",
    ),
    Fault("F36 no name", Says(calls=(Calls(None),)), MalformedResponse, "no name"),
    Fault("F36 an empty name", Says(calls=(Calls(""),)), MalformedResponse, "no name"),
    Fault(
        "F36 a call that is a string", model_faults.deltas({"tool_calls": ["look_up"]}), MalformedResponse, "no object"
    ),
    Fault(
        "F38 too long by code",
        Status(400, "This model's maximum context length is 8192 tokens", code="context_length_exceeded"),
        ContextTooLong,
        "too long",
    ),
    Fault("F38 too long by message", Status(400, "the request exceeds the available context size"), ContextTooLong),
    Fault("F38 too long as a server error", Status(500, "prompt is too long: 250000 tokens"), ContextTooLong),
    Fault("F38 413", Status(413, b"<h1>Payload Too Large</h1>"), ContextTooLong),
    Fault(
        "F38 too long in the stream", model_faults.error_in_stream({"code": "context_length_exceeded"}), ContextTooLong
    ),
    Fault(
        "F39 401",
        Status(401, f"bad key {KEY}"),
        PermanentError,
        "refused the key .401.: set MAIN_API_KEY or edit apiKey",
        "auth",
    ),
    Fault("F39 403", Status(403, "not allowed"), PermanentError, "refused the key .403.", "auth"),
    Fault("F39 403 content", Status(403, "flagged by moderation"), PermanentError, category="content"),
    Fault(
        "F39 404 model",
        Status(404, "The model `m` does not exist", code="model_not_found"),
        PermanentError,
        'the model "m".*check model and baseURL in llmservices.json',
        "model",
    ),
    Fault("F39 404 page", Status(404, b"<h1>Not found</h1>"), PermanentError, "check model and baseURL", "model"),
    Fault("F39 400 model", Status(400, "Model 'm' not found"), PermanentError, category="model"),
    Fault("F39 402", Status(402, "pay"), PermanentError, "no quota left", "quota"),
    Fault(
        "F39 429 quota", Status(429, "check your billing", code="insufficient_quota"), PermanentError, category="quota"
    ),
    Fault(
        "F39 400",
        Status(400, "temperature must be positive"),
        PermanentError,
        "temperature must be positive",
        "request",
    ),
    Fault("F39 405", Status(405, b""), PermanentError, category="request"),
    Fault(
        "F39 redirect",
        Status(307, b"", {"location": "http://127.0.0.1:1/"}),
        PermanentError,
        "another address",
        "request",
    ),
    Fault("F39 content", Status(400, "no", code="content_policy_violation"), PermanentError, category="content"),
    Fault("F39 all filtered", Says("", finish="content_filter"), PermanentError, "content filter", "content"),
    Fault("F39 the key echoed", Status(400, f"header was Bearer {KEY}, really"), PermanentError, r"\*\*\*", "request"),
    Fault(
        "F39 half of the key echoed",
        Status(400, f"you sent {KEY[:20]}..."),
        PermanentError,
        r"you sent \*\*\*",
        "request",
    ),
)


@pytest.mark.parametrize("fault", FAILURES)
async def test_a_fault_in_the_response_gives_its_error_in_time(
    fault: Fault, server: ModelServer, main: OpenAIService
) -> None:
    outcome = await ask_once(server, main, fault.reply)

    assert outcome.answer is None, "there is no answer"
    assert type(outcome.error) is fault.outcome, outcome.error
    assert re.search(fault.message, str(outcome.error)), outcome.error
    assert "\n" not in str(outcome.error) and str(outcome.error).startswith('service "main" ')
    assert getattr(outcome.error, "category", None) == fault.category
    wait = getattr(outcome.error, "retry_after", None)
    assert wait == (None if fault.retry_after is None else timedelta(seconds=fault.retry_after))


@dataclass(frozen=True)
class Deviation:
    """A deviating reply that can still be read."""

    name: str
    reply: Reply
    check: Callable[[Completion], bool]


def only(answer: Completion) -> ToolCall:
    (one,) = answer.calls
    return one


def unreadable(raw: str) -> Callable[[Completion], bool]:
    return lambda answer: (only(answer).arguments, only(answer).invalid_arguments) == ({}, raw)


def distinct(count: int) -> Callable[[Completion], bool]:
    return lambda answer: len({one.id for one in answer.calls}) == count == len(answer.calls)


DEEP = '{"a":' * 200 + "1" + "}" * 200
DEVIATIONS = [
    Deviation(
        "F31 an error after the end",
        model_faults.events(chunk({"content": "ok"}, "stop"), "[DONE]", {"error": "x"}),
        lambda a: a.text == "ok",
    ),
    Deviation(
        "F32 reset after the finish",
        CustomReply(lambda wire: _finished_then(wire, wire.reset)),
        lambda a: a.text == "ok",
    ),
    Deviation(
        "F33 a stall after the finish",
        CustomReply(lambda wire: _finished_then(wire, wire.wait_for_close)),
        lambda a: a.text == "ok",
    ),
    Deviation("F34 no [DONE]", model_faults.deltas({"content": "ok"}, done=False), lambda a: a.text == "ok"),
    Deviation(
        "F34 no finish reason", model_faults.deltas({"content": "ok"}, finish=None), lambda a: a.finish_reason == "stop"
    ),
    Deviation(
        "F35 a document for a stream",
        model_faults.document(b'{"choices":[{"message":{"content":"ok"}}]}'),
        lambda a: a.text == "ok",
    ),
    Deviation(
        "F35 a document on many lines",
        model_faults.document(b'{\n "choices": [\n  {"message":\n {"content": "ok"}}]}'),
        lambda a: a.text == "ok",
    ),
    Deviation(
        "F35 a stream that calls itself JSON", CustomReply(lambda wire: _mislabelled(wire)), lambda a: a.text == "ok"
    ),
    Deviation(
        "F35 bad UTF-8",
        CustomReply(
            lambda wire: _broken_stream(
                wire, b'data: {"choices":[{"delta":{"content":"o\xffk"},"finish_reason":"stop"}]}\n\n'
            )
        ),
        lambda a: a.text == "Hello" + "o\ufffdk",
    ),
    Deviation(
        "F36 arguments that are no JSON", Says(calls=(Calls("look_up", "{city: Oslo"),)), unreadable("{city: Oslo")
    ),
    Deviation("F36 arguments that are an array", Says(calls=(Calls("look_up", "[1, 2]"),)), unreadable("[1, 2]")),
    Deviation("F36 arguments that are a string", Says(calls=(Calls("look_up", '"Oslo"'),)), unreadable('"Oslo"')),
    Deviation("F36 arguments that are null", Says(calls=(Calls("look_up", "null"),)), unreadable("null")),
    Deviation("F36 arguments with NaN", Says(calls=(Calls("look_up", '{"a": NaN}'),)), unreadable('{"a": NaN}')),
    Deviation(
        "F36 arguments beyond numbers", Says(calls=(Calls("look_up", '{"a": 1e999}'),)), unreadable('{"a": 1e999}')
    ),
    Deviation("F36 arguments 200 deep", Says(calls=(Calls("look_up", DEEP),)), unreadable(DEEP)),
    Deviation(
        "F36 arguments 100,000 deep",
        Says(calls=(Calls("look_up", "[" * 100_000),)),
        lambda a: only(a).invalid_arguments is not None,
    ),
    Deviation(
        "F36 arguments cut by the length",
        Says(calls=(Calls("look_up", '{"a'),), finish="length"),
        lambda a: only(a).invalid_arguments == '{"a' and a.finish_reason == "length",
    ),
    Deviation(
        "F36 no arguments",
        Says(calls=(Calls("look_up", ""),)),
        lambda a: (only(a).arguments, only(a).invalid_arguments) == ({}, None),
    ),
    Deviation(
        "F36 arguments as an object",
        model_faults.deltas(
            {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "look_up", "arguments": {"a": 1}}}]}
        ),
        lambda a: only(a).arguments == {"a": 1},
    ),
    Deviation("F36 an unknown tool", Says(calls=(Calls("fly"),)), lambda a: only(a).name == "fly"),
    Deviation("F36 a name that is no name", Says(calls=(Calls("look up!\n"),)), lambda a: only(a).name == "look up!\n"),
    Deviation("F36 a name of 1,000 letters", Says(calls=(Calls("x" * 1000),)), lambda a: only(a).name == "x" * 256),
    Deviation("F36 duplicate ids", Says(calls=(Calls("a", id="c"), Calls("b", id="c"))), distinct(2)),
    Deviation("F36 missing ids", Says(calls=(Calls("a", id=None), Calls("b", id=None))), distinct(2)),
    Deviation("F36 empty ids", Says(calls=(Calls("a", id=""), Calls("b", id=""))), distinct(2)),
    Deviation("F36 an id from the history", Says(calls=(Calls("look_up", id="old"),)), lambda a: only(a).id != "old"),
    Deviation(
        "F36 an id of 500 letters", Says(calls=(Calls("look_up", id="x" * 500),)), lambda a: len(only(a).id) <= 64
    ),
    Deviation(
        "F36 an id with a line break", Says(calls=(Calls("look_up", id="a\nb"),)), lambda a: only(a).id.isprintable()
    ),
    Deviation(
        "F36 one index for all",
        model_faults.deltas(
            {"tool_calls": [{"index": 0, "id": name, "function": {"name": name, "arguments": "{}"}} for name in "abc"]}
        ),
        distinct(3),
    ),
    Deviation(
        "F36 no index",
        model_faults.deltas(
            {"tool_calls": [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "abc"]}
        ),
        distinct(3),
    ),
    Deviation("F36 64 calls", Says(calls=tuple(Calls("look_up") for _ in range(MAX_CALLS))), distinct(MAX_CALLS)),
    Deviation("F37 NUL in the text", Says("a\x00b"), lambda a: a.text == "a\ufffdb"),
    Deviation("F37 lone surrogates in the text", Says("a\ud800b\udfff"), lambda a: a.text == "a\ufffdb\ufffd"),
    Deviation("F37 a whole pair in the text", Says("a😀b"), lambda a: a.text == "a😀b"),
    Deviation("F37 bidi overrides in the text", Says("a\u202eb"), lambda a: a.text == "a\u202eb"),
    Deviation(
        "F37 a million combining marks",
        Says("a" + "\u0301" * 1_000_000, token_size=100_000),
        lambda a: len(a.text) == 1_000_001,
    ),
    Deviation(
        "F37 NUL in the arguments",
        Says(calls=(Calls("look_up", {"a\x00": "b\x00"}),)),
        lambda a: only(a).arguments == {"a\ufffd": "b\ufffd"},
    ),
    Deviation(
        "F37 surrogates in the arguments",
        Says(calls=(Calls("look_up", {"a\ud800": ["\udc00"]}),)),
        lambda a: only(a).arguments == {"a\ufffd": ["\ufffd"]},
    ),
    Deviation("F37 NUL in bad arguments", Says(calls=(Calls("look_up", "{\x00"),)), unreadable("{\ufffd")),
    Deviation(
        "F37 NUL and surrogates in a name",
        Says(calls=(Calls("a\x00\ud800"),)),
        lambda a: only(a).name == "a\ufffd\ufffd",
    ),
    Deviation(
        "F38 cut at the limit", Says("half", finish="length"), lambda a: (a.text, a.finish_reason) == ("half", "length")
    ),
    Deviation(
        "F39 filtered in the middle",
        Says("half", finish="content_filter"),
        lambda a: a.finish_reason == "content_filter",
    ),
]


@pytest.mark.parametrize("deviation", [pytest.param(deviation, id=deviation.name) for deviation in DEVIATIONS])
async def test_a_deviating_response_is_read_as_far_as_possible(
    deviation: Deviation, server: ModelServer, main: OpenAIService
) -> None:
    history = (*HELLO.messages, _assistant(call("old")), _result("old"), user("And now?"))

    outcome = await ask_once(server, main, deviation.reply, ModelRequest(messages=history, tools=HELLO.tools))

    assert outcome.answer, outcome.error
    assert deviation.check(outcome.answer), outcome.answer
    assert "".join(outcome.deltas) == outcome.answer.text
    await _assert_history_is_accepted(
        server, main, (*history, _assistant(*outcome.answer.calls, text=outcome.answer.text))
    )


def _assistant(*calls: ToolCall, text: str = "") -> AssistantMessage:
    return AssistantMessage(text, calls)


def _result(call_id: str) -> ToolMessage:
    return ToolMessage(call_id, "{}")


async def _assert_history_is_accepted(server: ModelServer, main: OpenAIService, said: tuple[Any, ...]) -> None:
    """Require that a strict server accepts the history with this answer and its tool results."""
    server.default = "fine"
    results = [_result(one.id) for one in said[-1].calls]
    outcome = await ask(main, ModelRequest(messages=(*said, *results, user("Go on.")), tools=HELLO.tools))
    assert outcome.answer, outcome.error


async def _broken_stream(wire: ServerConnection, last: bytes) -> None:
    await wire.begin()
    await wire.event(chunk({"content": "Hello"}))
    await wire.send(last)
    await wire.end()


async def _finished_then(wire: ServerConnection, then: Callable[[], Any]) -> None:
    await wire.begin()
    await wire.event(chunk({"content": "ok"}, "stop"))
    if waits := then():
        await waits


async def _mislabelled(wire: ServerConnection) -> None:
    await wire.begin(content_type="application/json")
    await wire.event(chunk({"content": "ok"}, "stop"))
    await wire.end()


async def _unending_refusal(wire: ServerConnection) -> None:
    await wire.begin(400)
    while True:
        await wire.send(b"no " * 1000)
