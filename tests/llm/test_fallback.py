"""A service that fails is replaced by its fallback within a bound, whatever way it fails in."""

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
from coterie.clock import SystemClock
from coterie.live import Draft
from coterie.llm.config import ServiceEntry
from coterie.llm.gateway import REPLACE_WITHIN, REST, Models
from coterie.llm.providers.factory import make_service
from coterie.llm.service import Local, Malformed, Terminal, Transient
from coterie.llm.types import Answer, Delta, Inline, Request, Text, ToolSpec
from coterie.testing import ModelServer, Status
from coterie.testing import model_faults as faults
from coterie.testing.replies import Plays, Reply
from coterie.testing.wire import Wire

from .room import PNG, HurriedClock, Room, description, parts_of, said, service

HELLO = said(Text("hello"))
PATIENCE = 20
"""Seconds, less than the limits for slow answers. On a machine that is not busy it takes less than three."""
DOWN = Transient("main is down", why="busy")
SPARE = Answer(text="ok", service="spare")


def refusal_without_its_body() -> Plays:
    """Says 503 and then nothing more, with the connection open."""

    async def play(wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 100\r\n\r\nsor")
        await wire.silence()

    return Plays(play)


AT_ONCE: dict[str, Reply] = {
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
SILENT: dict[str, Reply] = {"no first byte": faults.no_first_byte(), "head and nothing": faults.head_and_nothing()}


def entry(service_id: str, url: str, **more: object) -> ServiceEntry:
    return ServiceEntry(id=service_id, base_url=url, model="m", **more)  # type: ignore[arg-type]


@asynccontextmanager
async def wired(main_url: str, spare: ModelServer, **more: object) -> AsyncIterator[Room]:
    """Services over real HTTP. Sleeps take no real time and are counted by the clock."""
    room = Room(
        entry("main", main_url, fallback=("spare",), **more), entry("spare", spare.base_url), clock=HurriedClock()
    )
    room.models = Models(
        room.services, room.router, room.refusals, lambda one: make_service(one, room.clock), room.clock
    )
    yield room
    await room.models.close()


@pytest.mark.parametrize("fault", [*AT_ONCE])
async def test_whatever_the_fault_the_spare_answers_within_the_bound(fault: str) -> None:
    async with ModelServer() as main, ModelServer() as spare, wired(main.base_url, spare) as room:
        main.default, spare.default = AT_ONCE[fault], "from the spare"
        async with asyncio.timeout(PATIENCE):
            answer = (await room.ask("main", HELLO))[-1]

        assert isinstance(answer, Answer)
        assert (answer.text, answer.service) == ("from the spare", "spare")
        assert room.clock.monotonic() <= REPLACE_WITHIN.total_seconds()
        assert len(main.requests) <= 2, "one quick retry at most"


async def test_a_service_that_refuses_connections_is_replaced_within_the_bound() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        async with ModelServer() as spare, wired(url, spare) as room:
            answer = (await room.ask("main", HELLO))[-1]
            assert isinstance(answer, Answer)
            assert answer.service == "spare"
            assert room.clock.monotonic() <= REPLACE_WITHIN.total_seconds()


@pytest.mark.parametrize("fault", [*SILENT])
async def test_a_silent_service_is_replaced_after_its_limit_for_the_first_byte_and_not_retried(fault: str) -> None:
    limit = timedelta(seconds=0.4)
    async with ModelServer() as main, ModelServer() as spare, wired(main.base_url, spare, timeout=limit) as room:
        main.default = SILENT[fault]
        answer = (await room.ask("main", HELLO))[-1]

        assert isinstance(answer, Answer)
        assert answer.service == "spare"
        assert len(main.requests) == 1
        assert room.clock.monotonic() == 0


# The quick retry


async def test_a_fault_that_passes_at_once_costs_one_retry_and_no_change_of_model() -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"), clock=HurriedClock())
    room.puppets["main"].plays(DOWN)

    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]
    assert room.puppets["spare"].asked == []


async def test_a_retry_that_hangs_is_given_up_when_the_time_is_over() -> None:
    main, spare = service("main", fallback=("spare",)), service("spare")
    room = Room(main, spare, clock=HurriedClock(), replace_within=timedelta(seconds=1.1))
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    room.puppets["main"].plays(DOWN)
    room.puppets["main"].plays(hang)

    assert await room.ask("main", HELLO) == [SPARE]
    assert room.puppets["main"].running == 0


async def test_without_a_fallback_nothing_is_retried_here() -> None:
    room = Room(service("main"), clock=HurriedClock())
    room.puppets["main"].plays(DOWN)

    with pytest.raises(Transient) as caught:
        await room.ask("main", HELLO)
    assert caught.value is DOWN
    assert len(room.puppets["main"].asked) == 1


# What is remembered


async def test_the_requests_that_follow_go_to_the_spare_at_once_until_a_probe_succeeds() -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"), clock=HurriedClock())
    main = room.puppets["main"]
    main.plays(DOWN, times=3)
    await room.ask("main", HELLO)
    assert len(main.asked) == 2

    assert await room.ask("main", HELLO) == [SPARE]
    assert len(main.asked) == 2, "it is left alone"

    await room.clock.advance(seconds=REST)
    assert await room.ask("main", HELLO) == [SPARE]
    assert len(main.asked) == 3, "one probe, which is not retried"

    await room.clock.advance(seconds=2 * REST)
    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]


async def test_a_service_that_asks_for_a_long_pause_gets_it() -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"), clock=HurriedClock())
    main = room.puppets["main"]
    main.plays(Transient("slow down", retry_after=timedelta(seconds=300)))

    assert await room.ask("main", HELLO) == [SPARE]
    assert room.clock.monotonic() == 0, "nobody waits for a pause that is longer than the bound"
    await room.clock.advance(seconds=299)
    assert await room.ask("main", HELLO) == [SPARE]
    assert len(main.asked) == 1
    await room.clock.advance(seconds=2)
    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]


async def test_requests_in_the_queue_of_a_service_that_breaks_go_to_the_spare() -> None:
    room = Room(service("main", fallback=("spare",), max_concurrent_requests=1), service("spare"), clock=HurriedClock())
    room.puppets["main"].plays(DOWN, times=50)

    answers = await asyncio.gather(*(room.ask("main", HELLO) for _ in range(20)))

    assert answers == [[SPARE]] * 20
    assert len(room.puppets["main"].asked) == 2


# Several fallbacks


async def test_the_fallbacks_are_asked_in_their_order_each_within_the_bound() -> None:
    room = Room(service("main", fallback=("a", "b")), service("a"), service("b"), clock=HurriedClock())
    room.puppets["main"].plays(DOWN, times=2)
    room.puppets["a"].plays(Malformed("garbage"), times=2)

    assert await room.ask("main", HELLO) == [Answer(text="ok", service="b")]
    assert room.clock.monotonic() <= 2 * REPLACE_WITHIN.total_seconds()


async def test_services_that_name_each_other_are_each_asked_once_a_turn() -> None:
    room = Room(service("main", fallback=("a",)), service("a", fallback=("main",)), clock=HurriedClock())
    room.puppets["main"].plays(DOWN, times=9)
    room.puppets["a"].plays(Transient("a is down"), times=9)

    with pytest.raises(Transient):
        await room.ask("main", HELLO)
    assert [len(room.puppets[name].asked) for name in ("main", "a")] == [2, 1]


async def test_when_all_are_down_the_error_names_them_all_and_asks_for_another_try() -> None:
    room = Room(service("main", fallback=("a", "b")), service("a"), service("b"), clock=HurriedClock())
    room.puppets["main"].plays(Terminal('service "main" refused the key', category="auth"))
    room.puppets["a"].plays(Transient('service "a" is down'), times=2)
    room.puppets["b"].plays(Malformed('service "b" sends garbage'))

    with pytest.raises(Transient) as caught:
        await room.ask("main", HELLO)
    assert all(f'service "{name}"' in str(caught.value) for name in ("main", "a", "b"))
    assert caught.value.retry_after is None


async def test_when_all_rest_the_next_try_is_when_the_first_of_them_may_be_asked_again() -> None:
    room = Room(service("main", fallback=("a", "b")), service("a", fallback=("b",)), service("b"), clock=HurriedClock())
    room.puppets["main"].plays(Transient("main", retry_after=timedelta(seconds=90)))
    room.puppets["a"].plays(Transient("a", retry_after=timedelta(seconds=40)))
    room.puppets["b"].plays(Transient("b", retry_after=timedelta(seconds=70)))

    with pytest.raises(Transient) as caught:
        await room.ask("main", HELLO)
    assert caught.value.retry_after == timedelta(seconds=40)


async def test_when_all_refuse_for_good_it_is_no_reason_to_try_again() -> None:
    room = Room(service("main", fallback=("a",)), service("a"), clock=HurriedClock())
    room.puppets["main"].plays(Terminal("main: no key", category="auth"))
    room.puppets["a"].plays(Terminal("a: no quota", category="quota"))

    with pytest.raises(Terminal, match="main: no key; a: no quota") as caught:
        await room.ask("main", HELLO)
    assert caught.value.category == "auth"


@pytest.mark.parametrize("error", [DOWN, Malformed("garbage")])
async def test_a_spare_that_lacks_tools_and_eyes_gets_a_request_it_can_read(error: Exception) -> None:
    room = Room(
        service("main", ["vision"], fallback=("blind",)),
        service("blind", [], gives=["text"]),
        agents={"ada": "main"},
        clock=HurriedClock(),
    )
    room.puppets["main"].plays(error, times=2)
    tool = ToolSpec(name="t", description="", parameters={})
    request = Request(said=said(room.shelf.keep(PNG, "a.png")).said, tools=(tool,))

    assert await room.ask("main", request) == [Answer(text="ok", service="blind")]

    [main, _], [blind] = (room.puppets[name].asked for name in ("main", "blind"))
    assert (main.tools, blind.tools) == ((tool,), ())
    assert isinstance(parts_of(main)[0], Inline)
    assert description(parts_of(blind)[0])["unsupported"] == "vision"


# An answer that breaks off


@pytest.mark.parametrize("error", [Transient("cut", why="cut"), Malformed("garbage")])
async def test_after_half_an_answer_the_error_asks_for_another_try_at_once_which_goes_to_the_spare(
    error: Exception,
) -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"), clock=HurriedClock())
    room.puppets["main"].plays(Delta("half an ans"), error)

    heard = []
    with pytest.raises(Transient) as caught:
        async for piece in room.models.ask("main", HELLO, reader="ada"):
            heard.append(piece)
    assert heard == [Delta("half an ans")]
    assert caught.value.retry_after == timedelta(0)
    assert await room.ask("main", HELLO) == [SPARE]
    assert len(room.puppets["main"].asked) == 1


async def test_a_person_sees_the_spares_whole_answer_once_after_half_of_another(tmp_path: Path) -> None:
    async with ModelServer() as main, ModelServer() as spare:
        main.default, spare.default = faults.cut(2), "the whole answer"
        services = [
            {"id": "main", "baseURL": main.base_url, "model": "m", "fallback": ["spare"]},
            {"id": "spare", "baseURL": spare.base_url, "model": "m"},
        ]
        (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
        drafts: dict[str, tuple[str, str | None]] = {}

        def hear(draft: Draft) -> None:
            drafts[draft.id] = (draft.text, draft.outcome)

        async with Society.open(tmp_path, clock=SystemClock()) as society, asyncio.timeout(30):
            society.live.listen(hear)
            await society.send(to="ada", text="hello")
            message = await anext(aiter(society.inbox()))
            await society.send(to="ada", text="and again")
            again = [one async for one in _first(society, 2)][-1]

        assert (message.payload["text"], again.payload["text"]) == ("the whole answer", "the whole answer")
        assert [*drafts.values()][:2] == [("HelloHello", "failed"), ("the whole answer", "stored")]
        assert len(main.requests) == 1, "the second turn goes to the spare at once"


async def _first(society: Society, count: int) -> AsyncIterator[Message]:
    async for message in society.inbox():
        yield message
        count -= 1
        if not count:
            return


# What else rests


async def test_a_circuit_that_is_open_is_no_reason_to_wait() -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"), clock=HurriedClock())
    room.puppets["main"].plays(DOWN, times=2)
    room.puppets["spare"].plays(Answer(text="ok"))
    room.puppets["spare"].plays(Transient("spare is down", retry_after=timedelta(seconds=99)), times=2)
    await room.ask("main", HELLO)

    with pytest.raises(Transient, match=r'"main" keeps failing.*spare is down') as caught:
        await room.ask("main", HELLO)
    assert caught.value.retry_after == timedelta(seconds=REST)
    assert not isinstance(caught.value, Local)
