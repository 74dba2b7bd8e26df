"""Fallback services: every fault leads to the fallback in time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from coterie import Message, Society
from coterie.agent_runtime import make_service
from coterie.clock import SystemClock
from coterie.live import LiveReply
from coterie.llm.config import ServiceEntry
from coterie.llm.gateway import FALLBACK_WITHIN, FIRST_OPEN_SECONDS, ModelGateway
from coterie.llm.service import (
    CircuitOpen,
    Completion,
    InlineFile,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    TextDelta,
    TextPart,
    ToolSpec,
    TransientError,
)
from coterie.testing import ModelServer, Status
from coterie.testing import model_faults as faults
from coterie.testing.model_server import CustomReply, Reply, ServerConnection

from .harness import PNG, AutoAdvancingClock, Harness, description, parts_of, service, user_request

HELLO = user_request(TextPart("hello"))
TIMEOUT_SECONDS = 120
"""Shorter than the deadlines of a request. The tests take less than 3 s on an idle machine."""
DOWN = TransientError("main is down", reason="busy")
SPARE = Completion(text="ok", service="spare")


def refusal_without_its_body() -> CustomReply:
    """Sends status 503, then nothing, and keeps the connection open."""

    async def play(wire: ServerConnection) -> None:
        await wire.send(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 100\r\n\r\nsor")
        await wire.wait_for_close()

    return CustomReply(play)


IMMEDIATE: dict[str, Reply] = {
    "500": Status(500),
    "502": Status(502, "<html>Bad Gateway</html>"),
    "503": Status(503),
    "503 in a minute": Status(503, headers={"retry-after": "60"}),
    "503 without its body": refusal_without_its_body(),
    "529": Status(529),
    "408": Status(408),
    "429": Status(429),
    "429 in a second": Status(429, headers={"retry-after": "1"}),
    "429 in five seconds": Status(429, headers={"retry-after": "5"}),
    "429 in an hour": Status(429, headers={"retry-after": "3600"}),
    "401": Status(401),
    "404": Status(404),
    "reset": faults.reset(),
    "cut": faults.cut(0),
    "html": faults.html(),
    "garbage": faults.document(b"\x00\xff{{{ no json"),
    "no choices": faults.document(b'{"choices": []}'),
    "another document": faults.document(b'["hello"]'),
    "nested": faults.nested(),
    "empty": faults.document(b""),
    "empty stream": faults.events(),
    "error in the stream": faults.events({"error": {"message": "overloaded", "type": "server_error"}}),
}
HANGING: dict[str, Reply] = {"no first byte": faults.no_first_byte(), "head and nothing": faults.head_and_nothing()}


def entry(service_id: str, url: str, **more: object) -> ServiceEntry:
    return ServiceEntry(id=service_id, base_url=url, model="m", **more)  # type: ignore[arg-type]


@asynccontextmanager
async def over_http(main_url: str, spare: ModelServer, **more: object) -> AsyncIterator[Harness]:
    """Services over real HTTP. Sleeps take no real time and are counted by the clock."""
    harness = Harness(
        entry("main", main_url, fallback=("spare",), **more), entry("spare", spare.base_url), clock=AutoAdvancingClock()
    )
    harness.gateway = ModelGateway(
        harness.services,
        harness.router,
        harness.learned_limits,
        lambda one: make_service(one, harness.clock),
        harness.clock,
    )
    yield harness
    await harness.gateway.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*IMMEDIATE])
async def test_after_any_fault_the_fallback_answers_in_time(fault: str) -> None:
    async with ModelServer() as main, ModelServer() as spare, over_http(main.base_url, spare) as harness:
        main.default, spare.default = IMMEDIATE[fault], "from the fallback"
        async with asyncio.timeout(TIMEOUT_SECONDS):
            answer = (await harness.ask("main", HELLO))[-1]

        assert isinstance(answer, Completion)
        assert (answer.text, answer.service) == ("from the fallback", "spare")
        assert harness.clock.monotonic() <= FALLBACK_WITHIN.total_seconds()
        assert len(main.requests) <= 2, "one quick retry at most"


async def test_a_service_that_refuses_connections_is_replaced_within_the_bound() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        async with ModelServer() as spare, over_http(url, spare) as harness:
            answer = (await harness.ask("main", HELLO))[-1]
            assert isinstance(answer, Completion)
            assert answer.service == "spare"
            assert harness.clock.monotonic() <= FALLBACK_WITHIN.total_seconds()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*HANGING])
async def test_a_silent_service_is_replaced_after_its_limit_for_the_first_byte_and_not_retried(fault: str) -> None:
    limit = timedelta(seconds=3)
    async with ModelServer() as main, ModelServer() as spare, over_http(main.base_url, spare, timeout=limit) as harness:
        main.default = HANGING[fault]
        answer = (await harness.ask("main", HELLO))[-1]

        assert isinstance(answer, Completion)
        assert answer.service == "spare"
        assert len(main.requests) == 1
        assert harness.clock.monotonic() == 0


# The retry


async def test_a_fault_that_passes_at_once_costs_one_retry_and_no_change_of_model() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(DOWN)

    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]
    assert harness.fakes["spare"].requests == []


async def test_a_retry_that_hangs_is_given_up_when_the_time_is_over() -> None:
    main, spare = service("main", fallback=("spare",)), service("spare")
    harness = Harness(main, spare, clock=AutoAdvancingClock(), fallback_within=timedelta(seconds=1.1))
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    harness.fakes["main"].script(DOWN)
    harness.fakes["main"].script(hang)

    assert await harness.ask("main", HELLO) == [SPARE]
    assert harness.fakes["main"].running == 0


async def test_without_a_fallback_nothing_is_retried_here() -> None:
    harness = Harness(service("main"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(DOWN)

    with pytest.raises(TransientError) as caught:
        await harness.ask("main", HELLO)
    assert caught.value is DOWN
    assert len(harness.fakes["main"].requests) == 1


# Later requests


async def test_later_requests_go_to_the_fallback_at_once_until_a_probe_succeeds() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"), clock=AutoAdvancingClock())
    main = harness.fakes["main"]
    main.script(DOWN, times=3)
    await harness.ask("main", HELLO)
    assert len(main.requests) == 2

    assert await harness.ask("main", HELLO) == [SPARE]
    assert len(main.requests) == 2, "it is left alone"

    await harness.clock.advance(seconds=FIRST_OPEN_SECONDS)
    assert await harness.ask("main", HELLO) == [SPARE]
    assert len(main.requests) == 3, "one probe, which is not retried"

    await harness.clock.advance(seconds=2 * FIRST_OPEN_SECONDS)
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]


async def test_retry_after_keeps_the_circuit_open_for_that_time() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"), clock=AutoAdvancingClock())
    main = harness.fakes["main"]
    main.script(TransientError("slow down", retry_after=timedelta(seconds=300)))

    assert await harness.ask("main", HELLO) == [SPARE]
    assert harness.clock.monotonic() == 0, "a pause longer than the limit is not waited for"
    await harness.clock.advance(seconds=299)
    assert await harness.ask("main", HELLO) == [SPARE]
    assert len(main.requests) == 1
    await harness.clock.advance(seconds=2)
    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="main")]


async def test_queued_requests_of_a_failing_service_go_to_the_fallback() -> None:
    harness = Harness(
        service("main", fallback=("spare",), max_concurrent_requests=1), service("spare"), clock=AutoAdvancingClock()
    )
    harness.fakes["main"].script(DOWN, times=50)

    answers = await asyncio.gather(*(harness.ask("main", HELLO) for _ in range(20)))

    assert answers == [[SPARE]] * 20
    assert len(harness.fakes["main"].requests) == 2


# Several fallbacks


async def test_the_fallbacks_are_asked_in_their_order_each_within_the_bound() -> None:
    harness = Harness(service("main", fallback=("a", "b")), service("a"), service("b"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(DOWN, times=2)
    harness.fakes["a"].script(MalformedResponse("garbage"), times=2)

    assert await harness.ask("main", HELLO) == [Completion(text="ok", service="b")]
    assert harness.clock.monotonic() <= 2 * FALLBACK_WITHIN.total_seconds()


async def test_services_that_name_each_other_are_each_asked_once_a_turn() -> None:
    harness = Harness(service("main", fallback=("a",)), service("a", fallback=("main",)), clock=AutoAdvancingClock())
    harness.fakes["main"].script(DOWN, times=9)
    harness.fakes["a"].script(TransientError("a is down"), times=9)

    with pytest.raises(TransientError):
        await harness.ask("main", HELLO)
    assert [len(harness.fakes[name].requests) for name in ("main", "a")] == [2, 1]


async def test_if_all_services_fail_the_error_names_them_and_is_transient() -> None:
    harness = Harness(service("main", fallback=("a", "b")), service("a"), service("b"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(PermanentError('service "main" refused the key', category="auth"))
    harness.fakes["a"].script(TransientError('service "a" is down'), times=2)
    harness.fakes["b"].script(MalformedResponse('service "b" sends garbage'))

    with pytest.raises(TransientError) as caught:
        await harness.ask("main", HELLO)
    assert all(f'service "{name}"' in str(caught.value) for name in ("main", "a", "b"))
    assert caught.value.retry_after is None


async def test_when_all_circuits_are_open_the_retry_waits_for_the_first_of_them() -> None:
    harness = Harness(
        service("main", fallback=("a", "b")), service("a", fallback=("b",)), service("b"), clock=AutoAdvancingClock()
    )
    harness.fakes["main"].script(TransientError("main", retry_after=timedelta(seconds=90)))
    harness.fakes["a"].script(TransientError("a", retry_after=timedelta(seconds=40)))
    harness.fakes["b"].script(TransientError("b", retry_after=timedelta(seconds=70)))

    with pytest.raises(TransientError) as caught:
        await harness.ask("main", HELLO)
    assert caught.value.retry_after == timedelta(seconds=40)


async def test_if_all_services_refuse_permanently_the_error_is_permanent() -> None:
    harness = Harness(service("main", fallback=("a",)), service("a"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(PermanentError("main: no key", category="auth"))
    harness.fakes["a"].script(PermanentError("a: no quota", category="quota"))

    with pytest.raises(PermanentError, match="main: no key; a: no quota") as caught:
        await harness.ask("main", HELLO)
    assert caught.value.category == "auth"


@pytest.mark.parametrize("error", [DOWN, MalformedResponse("garbage")])
async def test_a_fallback_without_tools_and_vision_gets_a_request_it_can_read(error: Exception) -> None:
    harness = Harness(
        service("main", ["vision"], fallback=("blind",)),
        service("blind", [], gives=["text"]),
        agents={"ada": "main"},
        clock=AutoAdvancingClock(),
    )
    harness.fakes["main"].script(error, times=2)
    tool = ToolSpec(name="t", description="", parameters={})
    request = ModelRequest(messages=user_request(harness.artifacts.keep(PNG, "a.png")).messages, tools=(tool,))

    assert await harness.ask("main", request) == [Completion(text="ok", service="blind")]

    [main, _], [blind] = (harness.fakes[name].requests for name in ("main", "blind"))
    assert (main.tools, blind.tools) == ((tool,), ())
    assert isinstance(parts_of(main)[0], InlineFile)
    assert description(parts_of(blind)[0])["unsupported"] == "vision"


# Truncated answers


@pytest.mark.parametrize("error", [TransientError("cut", reason="truncated"), MalformedResponse("garbage")])
async def test_after_a_partial_answer_the_retry_is_immediate_and_goes_to_the_fallback(
    error: Exception,
) -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(TextDelta("half an ans"), error)

    pieces = []
    with pytest.raises(TransientError) as caught:
        async for piece in harness.gateway.generate("main", HELLO, agent_id="ada"):
            pieces.append(piece)
    assert pieces == [TextDelta("half an ans")]
    assert caught.value.retry_after == timedelta(0)
    assert await harness.ask("main", HELLO) == [SPARE]
    assert len(harness.fakes["main"].requests) == 1


async def test_the_person_gets_the_answer_of_the_fallback_once_after_a_partial_answer(tmp_path: Path) -> None:
    async with ModelServer() as main, ModelServer() as spare:
        main.default, spare.default = faults.cut(2), "the whole answer"
        services = [
            {"id": "main", "baseURL": main.base_url, "model": "m", "fallback": ["spare"]},
            {"id": "spare", "baseURL": spare.base_url, "model": "m"},
        ]
        (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
        drafts: dict[str, tuple[str, str | None]] = {}

        def on_draft(draft: LiveReply) -> None:
            drafts[draft.id] = (draft.text, draft.outcome)

        async with Society.open(tmp_path, clock=SystemClock()) as society, asyncio.timeout(TIMEOUT_SECONDS):
            society.live.subscribe(on_draft)
            await society.send(to="ada", text="hello")
            message = await anext(aiter(society.inbox()))
            await society.send(to="ada", text="and again")
            again = [one async for one in _first(society, 2)][-1]

        assert (message.payload["text"], again.payload["text"]) == ("the whole answer", "the whole answer")
        assert [*drafts.values()][:2] == [("HelloHello", "failed"), ("the whole answer", "stored")]
        assert len(main.requests) == 1, "the second turn goes to the fallback at once"


async def _first(society: Society, count: int) -> AsyncIterator[Message]:
    async for message in society.inbox():
        yield message
        count -= 1
        if not count:
            return


# Open circuits


async def test_an_open_circuit_goes_to_the_fallback_without_waiting() -> None:
    harness = Harness(service("main", fallback=("spare",)), service("spare"), clock=AutoAdvancingClock())
    harness.fakes["main"].script(DOWN, times=2)
    harness.fakes["spare"].script(Completion(text="ok"))
    harness.fakes["spare"].script(TransientError("spare is down", retry_after=timedelta(seconds=99)), times=2)
    await harness.ask("main", HELLO)

    with pytest.raises(TransientError, match=r'"main" keeps failing.*spare is down') as caught:
        await harness.ask("main", HELLO)
    assert caught.value.retry_after == timedelta(seconds=FIRST_OPEN_SECONDS)
    assert not isinstance(caught.value, CircuitOpen)
