"""Reading of responses: any bytes give a storable completion or a ServiceError."""

from __future__ import annotations

import json
import random
from datetime import timedelta

import pytest

from coterie.llm.providers.errors import RequestContext, parse_retry_after
from coterie.llm.providers.openai_stream import MAX_CALLS, CompletionBuilder, ResponseReader
from coterie.llm.service import Completion, Deadlines, ServiceError
from coterie.redaction import redact
from coterie.sse_parser import ServerSentEvent, SseParser
from coterie.testing.clock import START
from coterie.testing.model_server import Calls, call_chunks, chunk

CONTEXT = RequestContext(service="main", address="http://x/v1", model="m", key="sk-0123456789")
PARTS = [
    *(bytes([char]) for char in b'"{}[]:,\\\x00\xff\n'),
    *(b"null", b"true", b"1e999", b"-1", b"\\ud800", b"\\u0000", b"\n\n", b"\r\n", b"data:", b"data: [DONE]\n\n"),
    *(b"error", b"choices", b"delta", b"tool_calls", b"index"),
]


def read(data: bytes, cuts: int = 7) -> Completion:
    reader = ResponseReader(CONTEXT, CompletionBuilder(), START)
    for at in range(0, len(data), cuts):
        if not reader.is_done:
            reader.feed(data[at : at + cuts])
    if not reader.is_done:
        reader.finish()
    return reader.completion()


def stream() -> bytes:
    calls = call_chunks((Calls("look_up", {"city": "Oslo", "deep": [[{"a": None}]]}), Calls("look_up", "oops", None)))
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    events = [chunk({"content": "Grüße 😀"}), *calls, chunk({}, "tool_calls"), usage]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def corrupted(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 6)):
        at, part = chance.randrange(len(data) + 1), chance.choice(PARTS)
        gone = chance.choice([0, 0, 1, 3, 40])
        data = data[:at] + part * chance.choice([1, 1, 1, 300]) + data[at + gone :]
    return data


@pytest.mark.parametrize("seed", range(20))
def test_corrupt_responses_never_raise_other_errors(seed: int) -> None:
    chance = random.Random(seed)
    good, whole = 0, stream()
    for number in range(150):
        data = corrupted(whole, chance)
        try:
            answer = read(data, chance.choice([1, 7, 100_000]))
        except ServiceError:
            continue
        good += 1
        text = json.dumps(
            [answer.text, [(call.id, call.name, call.arguments, call.invalid_arguments) for call in answer.calls]]
        )
        assert "\\u0000" not in text and "\\ud800" not in text.replace("\\\\ud800", ""), f"seed {seed}, number {number}"
        assert len({call.id for call in answer.calls}) == len(answer.calls) <= MAX_CALLS
    assert 0 < good < 150, "all or none of the responses were corrupted"


@pytest.mark.parametrize("cuts", [1, 2, 3, 5, 100, 1_000_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_an_answer_does_not_depend_on_the_chunk_boundaries(cuts: int, newline: bytes) -> None:
    answer = read(stream().replace(b"\n", newline), cuts)

    assert answer.text == "Grüße 😀" and [call.invalid_arguments for call in answer.calls] == [None, "oops"]


def test_events_of_several_lines_comments_and_other_fields() -> None:
    parser = SseParser()

    events = list(parser.feed(b': hello\nevent: x\nid: 7\nretry: 1\ndata: {"a":\ndata: 1}\n\ndata\n\ndata:last\n'))

    assert events == [ServerSentEvent(b'{"a":\n1}', "x", "7"), ServerSentEvent(b"")]
    assert list(parser.finish()) == [ServerSentEvent(b"last")] and parser.other_lines == b""


def test_a_long_line_is_not_searched_again_with_every_piece() -> None:
    parser = SseParser()
    for _ in range(20_000):
        assert list(parser.feed(b"x" * 500)) == []

    assert list(parser.finish()) == [] and len(parser.other_lines) == 10_000_000


@pytest.mark.parametrize("value", ["", "soon", "nan", "1e400", "-1e400", "Wed, 99 Foo 2030 00:00:00 GMT", "٣"])
def test_any_retry_after_is_none_or_within_ten_minutes(value: str) -> None:
    wait = parse_retry_after(value, START)

    assert wait is None or timedelta(0) <= wait <= timedelta(minutes=10)


def test_a_key_is_redacted_everywhere() -> None:
    key = "sk-0123456789"

    assert redact(f"{key} and {key}{key} and {key[:9]}x", (key,), fragments=True) == "*** and *** and ***x"
    assert redact("none of this", ("none",), fragments=True) == "none of this"
    assert redact("short", ("",), fragments=True) == "short"


def test_deadlines_are_derived_from_the_longest_silence() -> None:
    two_minutes = Deadlines.from_timeout(timedelta(minutes=2))

    assert (two_minutes.connect, two_minutes.idle) == (timedelta(seconds=10), timedelta(minutes=2))
    assert two_minutes.first_byte == timedelta(minutes=5), "a model may have to be loaded first"
    assert two_minutes.total == timedelta(hours=1)
