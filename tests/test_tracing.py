"""What OpenTelemetry is told of a whole society: who did what in which chain, and never what was said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coterie import Society
from coterie.otel import Spans
from coterie.telemetry import Tracing, tracing_for
from coterie.testing import Calls, Says, Status
from tests.agent.stage import Stage, each, stage


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The program around the society has set up a tracer."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


async def spans(here: Stage, told: InMemorySpanExporter) -> list[ReadableSpan]:
    """All of them, in the order of their beginning; after the stop, so that every one has ended."""
    await here.society.stop()
    return sorted(told.get_finished_spans(), key=lambda span: span.start_time or 0)


def named(all_: list[ReadableSpan], name: str) -> ReadableSpan:
    (one,) = [span for span in all_ if span.name == name]
    return one


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


async def test_a_turn_holds_its_requests_and_tool_calls_with_the_names_of_the_conventions(
    tmp_path: Path, told: InMemorySpanExporter
) -> None:
    async with stage(tmp_path, agents='[agents.ada]\nname = "Ada"\n', maxTokens=99) as here:
        here.server.script(Says(calls=(Calls("look", {"name": "SECRET-ARGUMENT"}),)), "SECRET-ANSWER")
        await here.say("SECRET-QUESTION")
        await here.texts()
        found = await spans(here, told)
    assert [span.name for span in found] == ["invoke_agent Ada", "chat m", "execute_tool look", "chat m"]
    turn, chat, tool, _ = found
    assert all(parent(span) == ids(turn)[1] for span in found[1:]) and parent(turn) is None
    assert {ids(span)[0] for span in found} == {ids(turn)[0]}
    assert turn.attributes is not None and turn.attributes["gen_ai.agent.id"] == "ada"
    assert turn.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert chat.kind is trace.SpanKind.CLIENT
    asked = dict(chat.attributes or {})
    assert asked["gen_ai.provider.name"] == "openai" and asked["gen_ai.request.model"] == "m"
    assert asked["gen_ai.request.max_tokens"] == 99 and asked["server.address"] == "127.0.0.1"
    assert asked["gen_ai.usage.input_tokens"] and asked["gen_ai.usage.output_tokens"]
    assert dict(tool.attributes or {})["gen_ai.tool.name"] == "look"
    assert dict(tool.attributes or {})["gen_ai.tool.call.id"]
    assert all(span.status.is_unset for span in found)
    assert "SECRET" not in "".join(span.to_json() for span in found)


async def test_a_chain_of_messages_is_one_trace_whose_turns_hang_under_those_that_brought_them_about(
    tmp_path: Path, told: InMemorySpanExporter
) -> None:
    async with stage(tmp_path) as here:
        ask_bob = Says(calls=(Calls("send_message", {"to": "bob", "payload": {"text": "you?"}}),))
        here.server.default = each(ada=[ask_bob, "asked", "bob says so"], bob=["I think so"])
        await here.say("what does bob think?")
        await here.texts(2)
        found = await spans(here, told)
    first, second = (span for span in found if span.name == "invoke_agent ada")
    bob = named(found, "invoke_agent bob")
    assert len({ids(span)[0] for span in found}) == 1
    assert (parent(first), parent(bob), parent(second)) == (None, ids(first)[1], ids(bob)[1])


async def test_who_speaks_twice_begins_two_traces(tmp_path: Path, told: InMemorySpanExporter) -> None:
    async with stage(tmp_path) as here:
        await here.say("one")
        await here.texts()
        await here.say("two")
        await here.texts(2)
        found = await spans(here, told)
    assert len({ids(span)[0] for span in found}) == 2 and len(found) == 4


async def test_after_a_restart_a_chain_goes_on_in_its_trace_under_its_first_span(
    tmp_path: Path, told: InMemorySpanExporter
) -> None:
    async with stage(tmp_path, agents="[shutdown]\ndelayed = 'keep'\n[agents.ada]\n[agents.bob]\n") as here:
        later = {"to": "bob", "payload": {"text": "later"}, "delayMs": 700}
        here.server.default = each(ada=[Says(calls=(Calls("send_message", later),)), "done", "he is"], bob=["I am"])
        await here.say("remind bob")
        await here.texts()
        await here.society.stop()
        async with Society.open(tmp_path) as again:
            here.society = again
            await here.texts(2)
        found = await spans(here, told)
    before, after = (span for span in found if span.name == "invoke_agent ada")
    bob = named(found, "invoke_agent bob")
    assert {ids(span)[0] for span in found} == {ids(before)[0]}
    assert (parent(bob), parent(after)) == (ids(before)[1], ids(bob)[1])


async def test_what_fails_is_marked_with_its_kind_and_not_with_words(
    tmp_path: Path, told: InMemorySpanExporter
) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says(calls=(Calls("nothing_of_the_kind", {}),)), Status(401, "SECRET complaint"))
        await here.say("hello")
        await here.state("ada", "blocked")
        found = await spans(here, told)
    kinds = {span.name: dict(span.attributes or {}).get("error.type") for span in found}
    assert kinds == {"invoke_agent ada": None, "execute_tool nothing_of_the_kind": "tool_error", "chat m": "auth"}
    assert "SECRET" not in "".join(span.to_json() for span in found)


async def test_an_interruption_begins_its_own_trace_and_the_rest_of_the_turn_belongs_to_it(
    tmp_path: Path, told: InMemorySpanExporter
) -> None:
    from tests.agent.stage import Bell

    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(Calls("ring", {"name": "x"}),)), "both heard")
        await here.say("one")
        await Bell.rang.wait()
        await here.say("two")
        Bell.may_end.set()
        await here.texts()
        found = await spans(here, told)
    before, after = (span for span in found if span.name == "invoke_agent ada")
    assert ids(before)[0] != ids(after)[0]
    assert [ids(span)[0] for span in found if span.name == "chat m"] == [ids(before)[0], ids(after)[0]]


async def test_a_store_that_cannot_be_read_costs_a_span_and_no_turn(
    tmp_path: Path, told: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Spans, *_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(Spans, "begin", fails)
    async with stage(tmp_path) as here:
        await here.say("hello")
        assert await here.texts() == ["ok"]


async def nobody(_: str) -> None:
    return None


def test_it_is_off_unless_somebody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    assert type(tracing_for(nobody, {})) is Tracing
    off = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}
    assert type(tracing_for(nobody, off)) is Tracing


async def test_a_collector_named_in_the_environment_is_enough_and_an_unreachable_one_holds_up_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    monkeypatch.setattr("coterie.otel.PATIENCE", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    spans = tracing_for(nobody)
    assert isinstance(spans, Spans)
    turn = spans.turn("ada", "Ada")
    await turn.follows(None)
    turn.end()
    await spans.close()


@pytest.mark.slow
def test_switched_off_it_does_not_even_load_the_library() -> None:
    script = (
        "import asyncio, sys, json, tempfile\nfrom coterie import Society\n"
        "async def main():\n"
        "    async with Society.open(tempfile.mkdtemp() + '/s'): pass\n"
        "asyncio.run(main())\n"
        "print(json.dumps([m for m in sys.modules if m.startswith('opentelemetry.sdk')]))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout.splitlines()[-1]) == []
