"""OpenTelemetry spans of turns, requests and tool calls, without message text."""

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
from coterie.otel import OtelTracing
from coterie.telemetry import Tracing, make_tracing
from coterie.testing import Calls, FakeClock, Says, Status
from tests.agent.stage import Stage, each, stage


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """An exporter of a tracer that the host program has set up."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


async def spans(here: Stage, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """Stop the society, so that all spans have ended; return them by start time."""
    await here.society.stop()
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def named(all_: list[ReadableSpan], name: str) -> ReadableSpan:
    (one,) = [span for span in all_ if span.name == name]
    return one


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


async def test_a_turn_holds_its_requests_and_tool_calls_with_the_names_of_the_conventions(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    price = {"input": 1, "cachedInput": 0.5, "output": 2, "currency": "EUR"}
    entry: dict[str, Any] = {"name": "Main model", "maxTokens": 99, "temperature": 0.5, "price": price}
    async with stage(tmp_path, agents='[agents.ada]\nname = "Ada"\n', **entry) as here:
        calls = (Calls("look", {"name": "SECRET-ARGUMENT"}),)
        here.server.script(Says(calls=calls, cached_tokens=64), "SECRET-ANSWER")
        await here.say("SECRET-QUESTION")
        await here.texts()
        found = await spans(here, exporter)
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
    read, written = asked["gen_ai.usage.input_tokens"], asked["gen_ai.usage.output_tokens"]
    assert isinstance(read, int) and isinstance(written, int) and read > 64 and written > 0
    assert (asked["gen_ai.usage.cache_read.input_tokens"], asked["coterie.currency"]) == (64, "EUR")
    assert asked["coterie.cost"] == pytest.approx((read - 32 + 2 * written) / 1e6)
    assert (asked["coterie.service.id"], asked["coterie.service.name"]) == ("main", "Main model")
    assert asked["gen_ai.response.model"] == "m" and asked["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert asked["gen_ai.request.temperature"] == 0.5 and "gen_ai.response.time_to_first_chunk" in asked
    assert dict(tool.attributes or {})["gen_ai.tool.name"] == "look"
    assert dict(tool.attributes or {})["gen_ai.tool.call.id"]
    assert all(span.status.is_unset for span in found)
    assert "SECRET" not in "".join(span.to_json() for span in found)


async def test_a_cascade_is_one_trace_with_causing_turns_as_parents(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async with stage(tmp_path) as here:
        ask_bob = Says(calls=(Calls("send_message", {"to": "bob", "payload": {"text": "you?"}}),))
        here.server.default = each(ada=[ask_bob, "asked", "bob says so"], bob=["I think so"])
        await here.say("what does bob think?")
        await here.texts(2)
        found = await spans(here, exporter)
    first, second = (span for span in found if span.name == "invoke_agent ada")
    bob = named(found, "invoke_agent bob")
    assert len({ids(span)[0] for span in found}) == 1
    assert (parent(first), parent(bob), parent(second)) == (None, ids(first)[1], ids(bob)[1])


async def test_two_messages_of_the_person_start_two_traces(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with stage(tmp_path) as here:
        await here.say("one")
        await here.texts()
        await here.say("two")
        await here.texts(2)
        found = await spans(here, exporter)
    assert len({ids(span)[0] for span in found}) == 2 and len(found) == 4


async def test_after_a_restart_a_cascade_continues_its_trace_under_its_first_span(
    tmp_path: Path, exporter: InMemorySpanExporter
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
        found = await spans(here, exporter)
    before, after = (span for span in found if span.name == "invoke_agent ada")
    bob = named(found, "invoke_agent bob")
    assert {ids(span)[0] for span in found} == {ids(before)[0]}
    assert (parent(bob), parent(after)) == (ids(before)[1], ids(bob)[1])


async def test_failures_are_marked_with_their_kind_and_without_text(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says(calls=(Calls("nothing_of_the_kind", {}),)), Status(401, "SECRET complaint"))
        await here.say("hello")
        await here.state("ada", "blocked")
        found = await spans(here, exporter)
    kinds = {span.name: dict(span.attributes or {}).get("error.type") for span in found}
    assert kinds == {"invoke_agent ada": None, "execute_tool nothing_of_the_kind": "tool_error", "chat m": "auth"}
    assert "SECRET" not in "".join(span.to_json() for span in found)


async def test_an_interruption_of_the_person_stays_in_the_trace_of_the_task(
    tmp_path: Path, exporter: InMemorySpanExporter
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
        found = await spans(here, exporter)
    before, after = (span for span in found if span.name == "invoke_agent ada")
    assert ids(before)[0] == ids(after)[0] and parent(after) == ids(before)[1]
    assert {ids(span)[0] for span in found} == {ids(before)[0]}


async def test_every_span_of_a_task_names_it_and_a_scheduled_task_has_a_trace_of_its_own_with_a_link(
    tmp_path: Path, exporter: InMemorySpanExporter, clock: FakeClock
) -> None:
    async with stage(tmp_path, clock=clock) as here:
        later = {"to": "bob", "payload": {"text": "later"}, "delayMs": 60_000}
        here.server.default = each(ada=[Says(calls=(Calls("send_message", later),)), "done", "he is"], bob=["I am"])
        task = await here.say("remind bob")
        await here.texts()
        await here.state("ada", "idle")
        (reminder,) = await here.society.store.delayed("bob")
        await clock.advance(seconds=61)
        await here.texts(2)
        found = await spans(here, exporter)
    named_tasks: dict[int, set[object]] = {}
    for span in found:
        named_tasks.setdefault(ids(span)[0], set()).add((span.attributes or {}).get("coterie.task"))
    assert sorted(named_tasks.values(), key=str) == sorted([{task}, {reminder.id}], key=str)
    first, bob = found[0], named(found, "invoke_agent bob")
    assert ids(first)[0] != ids(bob)[0] and parent(bob) is None
    assert [(link.context.trace_id, link.context.span_id) for link in bob.links] == [ids(first)]


async def test_a_store_error_loses_a_span_but_no_turn(
    tmp_path: Path, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: OtelTracing, *_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(OtelTracing, "start_turn", fails)
    async with stage(tmp_path) as here:
        await here.say("hello")
        assert await here.texts() == ["ok"]


async def no_parent(_: str) -> None:
    return None


def test_tracing_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    assert type(make_tracing(no_parent, {})) is Tracing
    off = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}
    assert type(make_tracing(no_parent, off)) is Tracing


async def test_a_collector_in_the_environment_turns_tracing_on_and_an_unreachable_one_delays_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    monkeypatch.setattr("coterie.otel.EXPORT_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    spans = make_tracing(no_parent)
    assert isinstance(spans, OtelTracing)
    turn = spans.turn("ada", "Ada")
    await turn.set_cause(None)
    turn.end()
    await spans.close()


@pytest.mark.slow
def test_without_tracing_opentelemetry_is_not_imported() -> None:
    script = (
        "import asyncio, sys, json, tempfile\nfrom coterie import Society\n"
        "async def main():\n"
        "    async with Society.open(tempfile.mkdtemp() + '/s'): pass\n"
        "asyncio.run(main())\n"
        "print(json.dumps([m for m in sys.modules if m.startswith('opentelemetry.sdk')]))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout.splitlines()[-1]) == []
