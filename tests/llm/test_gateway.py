"""Model gateway: concurrency, learned limits, circuit breaker, fallbacks, reload."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta

import pytest
from msgspec.structs import replace

from coterie.artifacts import Artifact
from coterie.llm.config import ServiceRegistry
from coterie.llm.gateway import FIRST_OPEN_SECONDS, MAX_FAILURES
from coterie.llm.service import (
    CircuitOpen,
    Completion,
    ContextTooLong,
    InlineFile,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    ServiceError,
    TextDelta,
    TextPart,
    ToolSpec,
    TransientError,
    UnknownService,
    UnsupportedCapability,
)

from .harness import PNG, WAV, AutoAdvancingClock, Harness, description, parts_of, service, user_request

HELLO = user_request(TextPart("hello"))
DOWN = TransientError("not now")


def gate(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        await event.wait()

    return step


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def fail(harness: Harness, service_id: str, times: int) -> None:
    harness.fakes[service_id].script(DOWN, times=times)
    for _ in range(times):
        with pytest.raises(TransientError):
            await harness.ask(service_id, HELLO)


async def test_deltas_are_streamed_and_the_completion_names_its_service() -> None:
    harness = Harness(service("main"))
    harness.fakes["main"].script(TextDelta("he"), TextDelta("llo"), Completion(text="hello"))

    assert await harness.ask("main", HELLO) == [
        TextDelta("he"),
        TextDelta("llo"),
        Completion(text="hello", service="main"),
    ]


async def test_a_service_that_is_not_configured_cannot_be_asked() -> None:
    with pytest.raises(UnknownService):
        await Harness(service("main")).ask("other", HELLO)


async def test_vision_then_text_then_vision_by_changing_the_service() -> None:
    harness = Harness(service("seeing", ["vision"]), service("blind", []), agents={"ada": "blind", "seer": "seeing"})
    history = user_request(TextPart("what does this chart say?"), harness.artifacts.keep(PNG, "chart.png"))

    await harness.ask("seeing", history)
    await harness.ask("blind", history)
    await harness.ask("seeing", history)

    first, third = (parts_of(request)[1] for request in harness.fakes["seeing"].requests)
    [second] = (parts_of(request)[1] for request in harness.fakes["blind"].requests)
    assert isinstance(third, InlineFile)
    assert third.data == PNG
    assert third == first
    assert description(second)["capableAgents"] == ["seer"]


async def test_a_stream_that_ends_without_an_answer_is_malformed() -> None:
    harness = Harness(service("main"))
    harness.fakes["main"].script(TextDelta("he"))

    with pytest.raises(MalformedResponse, match='"main"'):
        await harness.ask("main", HELLO)


@pytest.mark.parametrize("error", [ContextTooLong("!"), PermanentError("no", category="content")])
async def test_errors_that_the_caller_must_handle_use_no_fallback(error: ServiceError) -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"))
    harness.fakes["main"].script(error)

    with pytest.raises(type(error)) as caught:
        await harness.ask("main", HELLO)
    assert caught.value is error
    assert harness.fakes["spare"].requests == []


async def test_a_refusal_of_a_long_request_names_the_service_that_refused() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"))
    harness.fakes["main"].script(PermanentError("no key", category="auth"))
    harness.fakes["spare"].script(ContextTooLong("!", limit=4_096))

    with pytest.raises(ContextTooLong) as caught:
        await harness.ask("main", HELLO)
    assert (caught.value.service, caught.value.limit) == ("spare", 4_096)


# Limits


async def test_no_more_requests_run_at_once_than_the_service_allows() -> None:
    harness = Harness(service("main", max_concurrent_requests=3), service("other", max_concurrent_requests=1))
    event = asyncio.Event()
    for fake in harness.fakes.values():
        fake.script(gate(event), Completion(text="ok"), times=10)

    tasks = [asyncio.create_task(harness.ask(name, HELLO)) for name in ["main"] * 10 + ["other"]]
    await settle()
    assert (harness.fakes["main"].running, harness.fakes["other"].running) == (3, 1)
    event.set()
    await asyncio.gather(*tasks)

    assert harness.fakes["main"].max_running == 3
    assert len(harness.fakes["main"].requests) == 10


async def test_closing_the_stream_ends_the_request_and_frees_its_slot() -> None:
    harness = Harness(service("main", max_concurrent_requests=1))
    harness.fakes["main"].script(TextDelta("a"), TextDelta("b"), Completion(text="ab"))

    async with aclosing(harness.gateway.generate("main", HELLO, agent_id="ada")) as pieces:
        assert await anext(pieces) == TextDelta("a")
        assert harness.fakes["main"].running == 1
    assert harness.fakes["main"].running == 0
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]


async def test_a_cancelled_request_leaves_the_queue() -> None:
    harness = Harness(service("main", max_concurrent_requests=1))
    event = asyncio.Event()
    harness.fakes["main"].script(gate(event), Completion(text="ok"))
    first, second = (asyncio.create_task(harness.ask("main", HELLO)) for _ in range(2))
    await settle()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    event.set()
    await first

    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]


# Learned limits


async def test_a_refused_kind_of_content_is_described_in_one_more_request_and_remembered() -> None:
    harness = Harness(
        service("main", ["vision"]), service("seeing", ["vision"]), agents={"ada": "main", "seer": "seeing"}
    )
    main = harness.fakes["main"]
    main.script(UnsupportedCapability("no images", capability="vision"))
    request = user_request(harness.artifacts.keep(PNG, "a.png"))

    assert await harness.ask("main", request) == [Completion(text="ok", service="main")]
    assert len(main.requests) == 2
    assert isinstance(parts_of(main.requests[0])[0], InlineFile)
    assert description(parts_of(main.requests[1])[0])["capableAgents"] == ["seer"]

    await harness.ask("main", request)
    assert len(main.requests) == 3, "no second refusal is provoked"
    assert [one.source for one in harness.learned_limits.list_for(harness.services.get("main"))] == ["no images"]


async def test_refused_tools_are_left_out_in_one_more_request() -> None:
    harness = Harness(service("old"))
    harness.fakes["old"].script(UnsupportedCapability("no tools", capability="tool_calling"))
    tool = ToolSpec(name="t", description="", parameters={})

    await harness.ask("old", ModelRequest(messages=HELLO.messages, tools=(tool,)))

    assert [request.tools for request in harness.fakes["old"].requests] == [(tool,), ()]


async def test_each_kind_that_is_refused_costs_one_request() -> None:
    harness = Harness(service("main", ["vision", "audio"]))
    main = harness.fakes["main"]
    main.script(UnsupportedCapability("no images", capability="vision"))
    main.script(UnsupportedCapability("no sound", capability="audio"))

    await harness.ask("main", user_request(harness.artifacts.keep(PNG, "a.png"), harness.artifacts.keep(WAV, "a.wav")))

    assert len(main.requests) == 3


async def test_a_refusal_of_content_that_was_not_sent_is_not_retried() -> None:
    harness = Harness(service("main", ["vision"]))
    harness.fakes["main"].script(UnsupportedCapability("no images", capability="vision"), times=100)

    with pytest.raises(UnsupportedCapability):
        await harness.ask("main", HELLO)
    assert len(harness.fakes["main"].requests) == 1
    assert harness.learned_limits.list_for(harness.services.get("main")) == []


async def test_a_service_that_keeps_refusing_is_asked_a_limited_number_of_times() -> None:
    harness = Harness(service("main", ["vision"]))
    harness.fakes["main"].script(UnsupportedCapability("no images", capability="vision"), times=100)

    with pytest.raises(UnsupportedCapability):
        await harness.ask("main", user_request(harness.artifacts.keep(PNG, "a.png")))
    assert len(harness.fakes["main"].requests) == 2


async def test_of_files_that_are_too_large_together_the_older_half_is_left_out_of_this_request() -> None:
    harness = Harness(service("main", ["vision"]))
    main = harness.fakes["main"]
    main.script(UnsupportedCapability("413", capability="vision", is_size=True), times=2)
    pictures = [harness.artifacts.keep(PNG + bytes([n]), f"{n}.png") for n in range(4)]

    await harness.ask("main", user_request(*pictures))
    await harness.ask("main", user_request(*pictures))

    sent = [[isinstance(part, InlineFile) for part in parts_of(request)] for request in main.requests]
    assert sent == [[True] * 4, [False, False, True, True], [False, False, False, True], [True] * 4]
    assert description(parts_of(main.requests[1])[0])["unsupported"] == "request_size"
    assert harness.learned_limits.list_for(harness.services.get("main")) == []


async def test_copies_of_a_file_that_are_too_large_together_are_no_reason_to_refuse_it_alone() -> None:
    harness = Harness(service("main", ["vision"]))
    main = harness.fakes["main"]
    main.script(UnsupportedCapability("413", capability="vision", is_size=True))
    copies = [harness.artifacts.keep(PNG, f"{n}.png") for n in range(2)]

    await harness.ask("main", user_request(*copies))
    await harness.ask("main", user_request(copies[0]))

    assert [isinstance(parts_of(request)[0], InlineFile) for request in main.requests] == [True, False, True]


# Fallbacks


@pytest.mark.parametrize("category", ["auth", "model", "quota", "request"])
async def test_a_service_that_cannot_answer_is_replaced_by_its_fallback(category: str) -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"))
    harness.fakes["main"].script(PermanentError("no", category=category))  # type: ignore[arg-type]

    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="spare")]


async def test_a_request_is_fitted_to_the_fallback() -> None:
    harness = Harness(
        service("main", [], fallback=("blind", "seeing")),
        service("blind", [], gives=["text"]),
        service("seeing", ["vision"]),
        agents={"ada": "main", "seer": "seeing"},
    )
    for name in ("main", "blind"):
        harness.fakes[name].script(PermanentError("no", category="quota"))
    tool = ToolSpec(name="t", description="", parameters={})
    picture = user_request(harness.artifacts.keep(PNG, "a.png"))

    await harness.ask("main", replace(picture, tools=(tool,)))

    [main], [blind], [seeing] = (harness.fakes[name].requests for name in ("main", "blind", "seeing"))
    assert description(parts_of(main)[0]) == description(parts_of(blind)[0])
    assert (main.tools, blind.tools, seeing.tools) == ((tool,), (), (tool,))
    assert parts_of(seeing) == [InlineFile(type="image", filename="a.png", mime_type="image/png", data=PNG)]


async def test_a_service_without_its_key_gets_no_request() -> None:
    harness = Harness(
        service("main", missing_key="MAIN_API_KEY"),
        service("other", missing_key="X", fallback=("spare",)),
        service("spare"),
    )

    with pytest.raises(PermanentError, match=r'"main" has no key: set MAIN_API_KEY') as caught:
        await harness.ask("main", HELLO)
    assert caught.value.category == "auth"
    assert harness.fakes["main"].requests == []
    assert await harness.ask("other", HELLO) == [Completion(text="ok", service="spare")]


async def test_when_every_service_fails_the_error_is_that_of_the_first() -> None:
    harness = Harness(service("main", fallback=("a", "b")), service("a"), service("b"))
    for name in ("main", "a", "b"):
        harness.fakes[name].script(PermanentError(f"{name} says no", category="auth"))

    with pytest.raises(PermanentError, match="main says no"):
        await harness.ask("main", HELLO)
    assert [len(harness.fakes[name].requests) for name in ("main", "a", "b")] == [1, 1, 1]


async def test_a_fallback_of_a_fallback_is_not_followed() -> None:
    harness = Harness(service("main", fallback=("a",)), service("a", fallback=("main",)))
    for name in ("main", "a"):
        harness.fakes[name].script(PermanentError(f"{name} says no", category="auth"), times=5)

    with pytest.raises(PermanentError, match="main says no"):
        await harness.ask("main", HELLO)


@pytest.mark.parametrize(
    "error", [PermanentError("no", category="quota"), UnsupportedCapability("no", capability="vision")]
)
async def test_after_the_first_delta_no_fallback_is_used(error: ServiceError) -> None:
    harness = Harness(service("main", ["vision"], fallback=("spare",)), service("spare"))
    harness.fakes["main"].script(TextDelta("half an ans"), error)

    heard = []
    with pytest.raises(type(error)):
        async for piece in harness.gateway.generate(
            "main", user_request(harness.artifacts.keep(PNG, "a.png")), agent_id="ada"
        ):
            heard.append(piece)
    assert heard == [TextDelta("half an ans")]
    assert len(harness.fakes["main"].requests) == 1
    assert harness.fakes["spare"].requests == []


async def test_a_service_that_cannot_be_made_is_replaced_as_well() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"))
    harness.creation_errors["main"] = PermanentError('service "main": there is no provider "opnai"', category="request")
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="spare")]


# The circuit


async def test_after_consecutive_failures_no_request_is_sent_while_the_circuit_is_open() -> None:
    harness = Harness(service("main"))
    await fail(harness, "main", MAX_FAILURES)

    with pytest.raises(CircuitOpen, match='"main" keeps failing') as caught:
        await harness.ask("main", HELLO)
    assert caught.value.retry_after == timedelta(seconds=FIRST_OPEN_SECONDS)
    assert len(harness.fakes["main"].requests) == MAX_FAILURES

    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]


async def test_an_open_circuit_is_a_reason_to_ask_the_fallback() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(DOWN, times=2)
    await harness.ask("main", HELLO)

    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="spare")]
    assert len(harness.fakes["main"].requests) == 2


async def test_half_open_one_request_probes_and_the_others_wait_for_its_end() -> None:
    harness = Harness(service("main"))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    event = asyncio.Event()
    harness.fakes["main"].script(gate(event), Completion(text="back"))

    probe = asyncio.create_task(harness.ask("main", HELLO))
    await settle()
    others = [asyncio.create_task(harness.ask("main", HELLO)) for _ in range(3)]
    await settle()
    assert len(harness.fakes["main"].requests) == MAX_FAILURES + 1
    event.set()
    assert await probe == [Completion(text="back", service="main")]
    assert await asyncio.gather(*others) == [[Completion(text="ok", service="main")]] * 3


async def test_the_others_start_when_the_probe_has_its_first_text() -> None:
    harness = Harness(service("main"))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    event = asyncio.Event()
    harness.fakes["main"].script(TextDelta("ba"), gate(event), DOWN)

    probe = asyncio.create_task(harness.ask("main", HELLO))
    await settle()
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]
    event.set()
    with pytest.raises(TransientError):
        await probe


async def test_a_probe_that_breaks_off_opens_the_circuit_again() -> None:
    harness = Harness(service("main"))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    harness.fakes["main"].script(TextDelta("ba"), DOWN)

    with pytest.raises(TransientError):
        await harness.ask("main", HELLO)
    with pytest.raises(CircuitOpen):
        await harness.ask("main", HELLO)


async def test_requests_that_waited_for_a_failed_probe_fail_with_the_time_of_the_next_one() -> None:
    harness = Harness(service("main", max_concurrent_requests=2))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    event = asyncio.Event()
    harness.fakes["main"].script(gate(event), DOWN)

    tasks = [asyncio.create_task(harness.ask("main", HELLO)) for _ in range(4)]
    await settle()
    event.set()
    failed, *waited = await asyncio.gather(*tasks, return_exceptions=True)

    assert failed is DOWN
    assert {type(error) for error in waited} == {CircuitOpen}
    assert {getattr(error, "retry_after", None) for error in waited} == {timedelta(seconds=2 * FIRST_OPEN_SECONDS)}


async def test_a_request_with_a_fallback_does_not_wait_for_a_probe() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"))
    harness.fakes["main"].script(DOWN, times=2)
    first = asyncio.create_task(harness.ask("main", HELLO))
    await settle()
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    await first
    await harness.clock.advance(seconds=2 * FIRST_OPEN_SECONDS)
    event = asyncio.Event()
    harness.fakes["main"].script(gate(event), Completion(text="back"))

    probe = asyncio.create_task(harness.ask("main", HELLO))
    await settle()
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="spare")]
    event.set()
    assert await probe == [Completion(text="back", service="main")]


async def test_an_abandoned_probe_is_followed_by_another() -> None:
    harness = Harness(service("main"))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    harness.fakes["main"].script(TextDelta("a"), Completion(text="a"))

    async with aclosing(harness.gateway.generate("main", HELLO, agent_id="ada")) as pieces:
        await anext(pieces)
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]


async def test_requests_that_waited_for_an_abandoned_probe_wait_for_the_next_one() -> None:
    harness = Harness(service("main"))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    event = asyncio.Event()
    harness.fakes["main"].script(gate(asyncio.Event()))
    harness.fakes["main"].script(gate(event), Completion(text="back"))

    probe, *others = [asyncio.create_task(harness.ask("main", HELLO)) for _ in range(3)]
    await settle()
    probe.cancel()
    await settle()
    assert not any(other.done() for other in others)
    event.set()
    answers = await asyncio.gather(*others)
    assert answers == [[Completion(text=text, service="main")] for text in ("back", "ok")]


async def test_a_request_whose_files_are_read_while_a_probe_starts_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(service("main", ["vision"]))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    read, ended, find = asyncio.Event(), asyncio.Event(), harness.artifacts.artifacts

    async def find_later(refs: Sequence[str]) -> Mapping[str, Artifact]:
        await read.wait()
        return await find(refs)

    monkeypatch.setattr(harness.artifacts, "artifacts", find_later)
    harness.fakes["main"].script(gate(ended), Completion(text="back"))
    picture = user_request(harness.artifacts.keep(PNG, "photo.png"))

    reading = asyncio.create_task(harness.ask("main", picture))
    await settle()
    probe = asyncio.create_task(harness.ask("main", HELLO))
    await settle()
    read.set()
    await settle()
    assert not reading.done()
    ended.set()
    assert await probe == [Completion(text="back", service="main")]
    assert await reading == [Completion(text="ok", service="main")]


async def test_a_request_that_waited_for_a_failed_probe_goes_to_the_repaired_service() -> None:
    harness = Harness(service("main"))
    await fail(harness, "main", MAX_FAILURES)
    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    event = asyncio.Event()
    harness.fakes["main"].script(gate(event), DOWN)

    probe, waiting = [asyncio.create_task(harness.ask("main", HELLO)) for _ in range(2)]
    await settle()
    harness.services.replace_with(ServiceRegistry([service("main", max_tokens=100)]))
    event.set()

    with pytest.raises(TransientError):
        await probe
    assert await waiting == [Completion(text="ok", service="main")]


async def test_queued_requests_fail_when_the_circuit_opens() -> None:
    harness = Harness(service("main", max_concurrent_requests=MAX_FAILURES))
    event = asyncio.Event()
    harness.fakes["main"].script(gate(event), DOWN, times=50)

    tasks = [asyncio.create_task(harness.ask("main", HELLO)) for _ in range(50)]
    await settle()
    event.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)

    assert len(harness.fakes["main"].requests) < 2 * MAX_FAILURES
    assert {type(outcome) for outcome in outcomes} == {TransientError, CircuitOpen}


@pytest.mark.parametrize("error", [PermanentError("no", category="content"), ContextTooLong("!")])
async def test_a_refusal_does_not_open_the_circuit(error: ServiceError) -> None:
    harness = Harness(service("main"))
    harness.fakes["main"].script(error, times=3 * MAX_FAILURES)

    for _ in range(3 * MAX_FAILURES):
        with pytest.raises(type(error)):
            await harness.ask("main", HELLO)


async def test_one_service_that_is_down_leaves_the_others_alone() -> None:
    harness = Harness(service("main"), service("other"))
    await fail(harness, "main", MAX_FAILURES)

    assert await harness.ask("other", HELLO) == [Completion(text="ok", service="other")]


# Reload and close


async def test_a_changed_entry_is_used_at_once_and_the_old_service_is_closed() -> None:
    harness = Harness(service("main"))
    old = harness.fakes["main"]
    await fail(harness, "main", MAX_FAILURES)

    harness.services.replace_with(ServiceRegistry([service("main", max_tokens=100)]))

    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]
    assert old.closed == 1
    assert harness.fakes["main"].closed == 0


async def test_a_request_under_way_during_a_reload_ends_as_it_began() -> None:
    harness = Harness(service("main"))
    old, event = harness.fakes["main"], asyncio.Event()
    old.script(TextDelta("a"), gate(event), Completion(text="ab"))
    running = asyncio.create_task(harness.ask("main", HELLO))
    await settle()

    harness.services.replace_with(ServiceRegistry([service("main", max_tokens=100)]))
    await harness.ask("main", HELLO)
    assert old.closed == 0

    event.set()
    assert await running == [TextDelta("a"), Completion(text="ab", service="main")]
    assert old.closed == 1


async def test_a_request_that_waited_in_the_queue_during_a_reload_goes_to_the_changed_service() -> None:
    harness = Harness(service("main", max_concurrent_requests=1))
    old, event = harness.fakes["main"], asyncio.Event()
    old.script(gate(event), Completion(text="old"))
    tasks = [asyncio.create_task(harness.ask("main", HELLO)) for _ in range(2)]
    await settle()

    harness.services.replace_with(ServiceRegistry([service("main", max_concurrent_requests=1, max_tokens=100)]))
    event.set()

    assert await asyncio.gather(*tasks) == [
        [Completion(text="old", service="main")],
        [Completion(text="ok", service="main")],
    ]
    assert (len(old.requests), len(harness.fakes["main"].requests)) == (1, 1)


async def test_a_request_that_waited_for_a_removed_service_is_not_sent() -> None:
    harness = Harness(service("main", max_concurrent_requests=1))
    event = asyncio.Event()
    harness.fakes["main"].script(gate(event), Completion(text="old"))
    tasks = [asyncio.create_task(harness.ask("main", HELLO)) for _ in range(2)]
    await settle()

    harness.services.replace_with(ServiceRegistry([service("other")]))
    event.set()
    answered, refused = await asyncio.gather(*tasks, return_exceptions=True)

    assert answered == [Completion(text="old", service="main")]
    assert isinstance(refused, UnknownService)
    assert len(harness.fakes["main"].requests) == 1


async def test_an_outdated_fallback_does_not_raise_the_limit_of_the_changed_one() -> None:
    main, event, failing = service("main", fallback=("spare",)), asyncio.Event(), asyncio.Event()
    harness = Harness(main, service("spare", max_concurrent_requests=8))
    harness.fakes["main"].script(gate(failing), PermanentError("no quota", category="quota"))
    first = asyncio.create_task(harness.ask("main", HELLO))
    await settle()

    harness.services.replace_with(ServiceRegistry([main, service("spare", max_concurrent_requests=1)]))
    harness.gateway.queue("spare")  # makes the changed service
    spare = harness.fakes["spare"]
    spare.script(gate(event), Completion(text="ok"), times=2)
    others = [asyncio.create_task(harness.ask("spare", HELLO)) for _ in range(2)]
    await settle()
    failing.set()
    await settle()
    event.set()

    assert await first == [Completion(text="ok", service="main")]
    await asyncio.gather(*others)
    assert spare.max_running == 1


async def test_an_outdated_fallback_without_a_key_is_replaced_by_the_changed_one() -> None:
    main, failing = service("main", fallback=("spare",)), asyncio.Event()
    harness = Harness(main, service("spare", missing_key="SPARE_KEY"))
    harness.fakes["main"].script(gate(failing), PermanentError("no quota", category="quota"))
    harness.fakes["main"].script(PermanentError("no quota", category="quota"))
    asking = asyncio.create_task(harness.ask("main", HELLO))
    await settle()

    harness.services.replace_with(ServiceRegistry([main, service("spare")]))
    failing.set()

    assert await asking == [Completion(text="ok", service="spare")]


async def test_two_requests_that_end_after_a_reload_close_each_old_service_once() -> None:
    names = ("one", "two", "busy")
    harness = Harness(*map(service, names))
    for name in names:
        await harness.ask(name, HELLO)
    one, two, busy = (harness.fakes[name] for name in names)
    events = [asyncio.Event() for _ in range(3)]
    for event in events[:2]:
        busy.script(gate(event), Completion(text="ok"))
    one.before_close = gate(events[2])
    tasks = [asyncio.create_task(harness.ask("busy", HELLO)) for _ in range(2)]
    await settle()

    harness.services.replace_with(ServiceRegistry([*(service(name, max_tokens=100) for name in names)]))
    for event in events:
        event.set()
        await settle()

    assert await asyncio.gather(*tasks) == [[Completion(text="ok", service="busy")]] * 2
    assert (one.closed, two.closed, busy.closed) == (1, 1, 1)


async def test_an_answer_is_not_lost_when_an_old_service_cannot_be_closed() -> None:
    harness = Harness(service("main"), service("other"))
    await harness.ask("main", HELLO)

    async def fail_to_close() -> None:
        raise OSError("the connection is broken")

    harness.fakes["main"].before_close = fail_to_close
    harness.services.replace_with(ServiceRegistry([service("main", max_tokens=100), service("other")]))

    assert await harness.ask("other", HELLO) == [Completion(text="ok", service="other")]


async def test_closing_closes_every_service_that_was_asked() -> None:
    harness = Harness(service("main"), service("never"))
    await harness.ask("main", HELLO)
    await harness.gateway.close()

    assert (harness.fakes["main"].closed, harness.fakes["never"].closed) == (1, 0)
