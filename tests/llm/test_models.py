"""The door to models: limits, refusals, circuits and fallbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta

import pytest
from msgspec.structs import replace

from coterie.llm.config import Services
from coterie.llm.gateway import FAILURES, REST
from coterie.llm.service import (
    Local,
    Malformed,
    ServiceError,
    Terminal,
    TooLong,
    Transient,
    UnknownService,
    Unsupported,
)
from coterie.llm.types import Answer, Delta, Inline, Request, Text, ToolSpec

from .room import PNG, WAV, HurriedClock, Room, description, parts_of, said, service

HELLO = said(Text("hello"))
DOWN = Transient("not now")


def gate(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        await event.wait()

    return step


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def fail(room: Room, service_id: str, times: int) -> None:
    room.puppets[service_id].plays(DOWN, times=times)
    for _ in range(times):
        with pytest.raises(Transient):
            await room.ask(service_id, HELLO)


async def test_pieces_come_as_they_are_said_and_the_answer_is_signed() -> None:
    room = Room(service("main"))
    room.puppets["main"].plays(Delta("he"), Delta("llo"), Answer(text="hello"))

    assert await room.ask("main", HELLO) == [Delta("he"), Delta("llo"), Answer(text="hello", service="main")]


async def test_a_service_that_is_not_configured_cannot_be_asked() -> None:
    with pytest.raises(UnknownService):
        await Room(service("main")).ask("other", HELLO)


async def test_vision_then_text_then_vision_by_changing_the_service() -> None:
    room = Room(service("seeing", ["vision"]), service("blind", []), agents={"ada": "blind", "seer": "seeing"})
    history = said(Text("what does this chart say?"), room.shelf.keep(PNG, "chart.png"))

    await room.ask("seeing", history)
    await room.ask("blind", history)
    await room.ask("seeing", history)

    first, third = (parts_of(request)[1] for request in room.puppets["seeing"].asked)
    [second] = (parts_of(request)[1] for request in room.puppets["blind"].asked)
    assert isinstance(third, Inline)
    assert third.data == PNG
    assert third == first
    assert description(second)["capableAgents"] == ["seer"]


async def test_a_stream_that_ends_without_an_answer_is_malformed() -> None:
    room = Room(service("main"))
    room.puppets["main"].plays(Delta("he"))

    with pytest.raises(Malformed, match='"main"'):
        await room.ask("main", HELLO)


@pytest.mark.parametrize("error", [TooLong("!"), Terminal("no", category="content")])
async def test_what_the_caller_must_act_on_passes_through_even_with_a_fallback(error: ServiceError) -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"))
    room.puppets["main"].plays(error)

    with pytest.raises(type(error)) as caught:
        await room.ask("main", HELLO)
    assert caught.value is error
    assert room.puppets["spare"].asked == []


# Limits


async def test_no_more_requests_run_at_once_than_the_service_allows() -> None:
    room = Room(service("main", max_concurrent_requests=3), service("other", max_concurrent_requests=1))
    door = asyncio.Event()
    for puppet in room.puppets.values():
        puppet.plays(gate(door), Answer(text="ok"), times=10)

    tasks = [asyncio.create_task(room.ask(name, HELLO)) for name in ["main"] * 10 + ["other"]]
    await settle()
    assert (room.puppets["main"].running, room.puppets["other"].running) == (3, 1)
    door.set()
    await asyncio.gather(*tasks)

    assert room.puppets["main"].most == 3
    assert len(room.puppets["main"].asked) == 10


async def test_a_caller_who_goes_away_ends_the_request_and_frees_its_place() -> None:
    room = Room(service("main", max_concurrent_requests=1))
    room.puppets["main"].plays(Delta("a"), Delta("b"), Answer(text="ab"))

    async with aclosing(room.models.ask("main", HELLO, reader="ada")) as pieces:
        assert await anext(pieces) == Delta("a")
        assert room.puppets["main"].running == 1
    assert room.puppets["main"].running == 0
    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]


async def test_a_cancelled_caller_frees_its_place_in_the_queue_too() -> None:
    room = Room(service("main", max_concurrent_requests=1))
    door = asyncio.Event()
    room.puppets["main"].plays(gate(door), Answer(text="ok"))
    first, second = (asyncio.create_task(room.ask("main", HELLO)) for _ in range(2))
    await settle()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    door.set()
    await first

    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]


# Refusals


async def test_a_refused_kind_of_content_is_described_in_one_more_request_and_remembered() -> None:
    room = Room(service("main", ["vision"]), service("seeing", ["vision"]), agents={"ada": "main", "seer": "seeing"})
    main = room.puppets["main"]
    main.plays(Unsupported("no images", what="vision"))
    request = said(room.shelf.keep(PNG, "a.png"))

    assert await room.ask("main", request) == [Answer(text="ok", service="main")]
    assert len(main.asked) == 2
    assert isinstance(parts_of(main.asked[0])[0], Inline)
    assert description(parts_of(main.asked[1])[0])["capableAgents"] == ["seer"]

    await room.ask("main", request)
    assert len(main.asked) == 3, "no second refusal is provoked"
    assert [one.source for one in room.refusals.of(room.services.entry("main"))] == ["no images"]


async def test_refused_tools_are_left_out_in_one_more_request() -> None:
    room = Room(service("old"))
    room.puppets["old"].plays(Unsupported("no tools", what="tool_calling"))
    tool = ToolSpec(name="t", description="", parameters={})

    await room.ask("old", Request(said=HELLO.said, tools=(tool,)))

    assert [request.tools for request in room.puppets["old"].asked] == [(tool,), ()]


async def test_each_kind_that_is_refused_costs_one_request() -> None:
    room = Room(service("main", ["vision", "audio"]))
    main = room.puppets["main"]
    main.plays(Unsupported("no images", what="vision"))
    main.plays(Unsupported("no sound", what="audio"))

    await room.ask("main", said(room.shelf.keep(PNG, "a.png"), room.shelf.keep(WAV, "a.wav")))

    assert len(main.asked) == 3


async def test_a_service_that_refuses_what_it_was_not_sent_is_not_asked_again() -> None:
    room = Room(service("main", ["vision"]))
    room.puppets["main"].plays(Unsupported("no images", what="vision"), times=100)

    with pytest.raises(Unsupported):
        await room.ask("main", HELLO)
    assert len(room.puppets["main"].asked) == 1
    assert room.refusals.of(room.services.entry("main")) == []


async def test_a_service_that_goes_on_refusing_is_not_asked_for_ever() -> None:
    room = Room(service("main", ["vision"]))
    room.puppets["main"].plays(Unsupported("no images", what="vision"), times=100)

    with pytest.raises(Unsupported):
        await room.ask("main", said(room.shelf.keep(PNG, "a.png")))
    assert len(room.puppets["main"].asked) == 2


# Fallbacks


@pytest.mark.parametrize("category", ["auth", "model", "quota", "request"])
async def test_a_service_that_cannot_answer_is_replaced_by_its_fallback(category: str) -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"))
    room.puppets["main"].plays(Terminal("no", category=category))  # type: ignore[arg-type]

    assert await room.ask("main", HELLO) == [Answer(text="ok", service="spare")]


async def test_a_fallback_gets_what_it_can_read_itself() -> None:
    room = Room(
        service("main", [], fallback=("blind", "seeing")),
        service("blind", [], gives=["text"]),
        service("seeing", ["vision"]),
        agents={"ada": "main", "seer": "seeing"},
    )
    for name in ("main", "blind"):
        room.puppets[name].plays(Terminal("no", category="quota"))
    tool = ToolSpec(name="t", description="", parameters={})
    picture = said(room.shelf.keep(PNG, "a.png"))

    await room.ask("main", replace(picture, tools=(tool,)))

    [main], [blind], [seeing] = (room.puppets[name].asked for name in ("main", "blind", "seeing"))
    assert description(parts_of(main)[0]) == description(parts_of(blind)[0])
    assert (main.tools, blind.tools, seeing.tools) == ((tool,), (), (tool,))
    assert parts_of(seeing) == [Inline(type="image", filename="a.png", mime_type="image/png", data=PNG)]


async def test_a_service_without_its_key_is_not_asked_and_says_what_to_do() -> None:
    room = Room(
        service("main", missing_key="MAIN_API_KEY"),
        service("other", missing_key="X", fallback=("spare",)),
        service("spare"),
    )

    with pytest.raises(Terminal, match=r'"main" has no key: set MAIN_API_KEY') as caught:
        await room.ask("main", HELLO)
    assert caught.value.category == "auth"
    assert room.puppets["main"].asked == []
    assert await room.ask("other", HELLO) == [Answer(text="ok", service="spare")]


async def test_when_every_service_fails_the_error_is_that_of_the_first() -> None:
    room = Room(service("main", fallback=("a", "b")), service("a"), service("b"))
    for name in ("main", "a", "b"):
        room.puppets[name].plays(Terminal(f"{name} says no", category="auth"))

    with pytest.raises(Terminal, match="main says no"):
        await room.ask("main", HELLO)
    assert [len(room.puppets[name].asked) for name in ("main", "a", "b")] == [1, 1, 1]


async def test_a_fallback_of_a_fallback_is_not_followed() -> None:
    room = Room(service("main", fallback=("a",)), service("a", fallback=("main",)))
    for name in ("main", "a"):
        room.puppets[name].plays(Terminal(f"{name} says no", category="auth"), times=5)

    with pytest.raises(Terminal, match="main says no"):
        await room.ask("main", HELLO)


@pytest.mark.parametrize("error", [Terminal("no", category="quota"), Unsupported("no", what="vision")])
async def test_after_the_first_piece_nobody_else_speaks(error: ServiceError) -> None:
    room = Room(service("main", ["vision"], fallback=("spare",)), service("spare"))
    room.puppets["main"].plays(Delta("half an ans"), error)

    heard = []
    with pytest.raises(type(error)):
        async for piece in room.models.ask("main", said(room.shelf.keep(PNG, "a.png")), reader="ada"):
            heard.append(piece)
    assert heard == [Delta("half an ans")]
    assert len(room.puppets["main"].asked) == 1
    assert room.puppets["spare"].asked == []


async def test_a_service_that_cannot_be_made_is_replaced_as_well() -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"))
    make = room.models._make

    def refuse(entry: object) -> object:
        if getattr(entry, "id", "") == "main":
            raise Terminal('service "main": there is no provider "opnai"', category="request")
        return make(entry)  # type: ignore[arg-type]

    room.models._make = refuse  # type: ignore[assignment]
    assert await room.ask("main", HELLO) == [Answer(text="ok", service="spare")]


# The circuit


async def test_after_failures_in_a_row_nobody_asks_until_the_rest_is_over() -> None:
    room = Room(service("main"))
    await fail(room, "main", FAILURES)

    with pytest.raises(Local, match='"main" keeps failing') as caught:
        await room.ask("main", HELLO)
    assert caught.value.retry_after == timedelta(seconds=REST)
    assert len(room.puppets["main"].asked) == FAILURES

    await room.clock.advance(seconds=REST)
    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]


async def test_an_open_circuit_is_a_reason_to_ask_the_fallback() -> None:
    room = Room(service("main", fallback=("spare",)), service("spare"), clock=HurriedClock())
    room.puppets["main"].plays(DOWN, times=2)
    await room.ask("main", HELLO)

    assert await room.ask("main", HELLO) == [Answer(text="ok", service="spare")]
    assert len(room.puppets["main"].asked) == 2


async def test_half_open_one_request_tries_and_the_others_do_not_wait_for_it() -> None:
    room = Room(service("main"))
    await fail(room, "main", FAILURES)
    await room.clock.advance(seconds=REST)
    door = asyncio.Event()
    room.puppets["main"].plays(gate(door), Answer(text="back"))

    probe = asyncio.create_task(room.ask("main", HELLO))
    await settle()
    for _ in range(3):
        with pytest.raises(Local):
            await room.ask("main", HELLO)
    door.set()
    assert await probe == [Answer(text="back", service="main")]
    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]


async def test_a_probe_whose_caller_goes_away_is_followed_by_another() -> None:
    room = Room(service("main"))
    await fail(room, "main", FAILURES)
    await room.clock.advance(seconds=REST)
    room.puppets["main"].plays(Delta("a"), Answer(text="a"))

    async with aclosing(room.models.ask("main", HELLO, reader="ada")) as pieces:
        await anext(pieces)
    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]


async def test_those_who_queue_when_the_circuit_opens_do_not_try_one_by_one() -> None:
    room = Room(service("main", max_concurrent_requests=FAILURES))
    door = asyncio.Event()
    room.puppets["main"].plays(gate(door), DOWN, times=50)

    tasks = [asyncio.create_task(room.ask("main", HELLO)) for _ in range(50)]
    await settle()
    door.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)

    assert len(room.puppets["main"].asked) < 2 * FAILURES
    assert {type(outcome) for outcome in outcomes} == {Transient, Local}


@pytest.mark.parametrize("error", [Terminal("no", category="content"), TooLong("!")])
async def test_a_service_that_answers_no_is_not_down(error: ServiceError) -> None:
    room = Room(service("main"))
    room.puppets["main"].plays(error, times=3 * FAILURES)

    for _ in range(3 * FAILURES):
        with pytest.raises(type(error)):
            await room.ask("main", HELLO)


async def test_one_service_that_is_down_leaves_the_others_alone() -> None:
    room = Room(service("main"), service("other"))
    await fail(room, "main", FAILURES)

    assert await room.ask("other", HELLO) == [Answer(text="ok", service="other")]


# Reload and close


async def test_a_mended_entry_is_asked_at_once_and_the_old_service_is_closed() -> None:
    room = Room(service("main"))
    old = room.puppets["main"]
    await fail(room, "main", FAILURES)

    room.services.adopt(Services([service("main", max_tokens=100)]))

    assert await room.ask("main", HELLO) == [Answer(text="ok", service="main")]
    assert old.closed == 1
    assert room.puppets["main"].closed == 0


async def test_a_request_under_way_during_a_reload_ends_as_it_began() -> None:
    room = Room(service("main"))
    old, door = room.puppets["main"], asyncio.Event()
    old.plays(Delta("a"), gate(door), Answer(text="ab"))
    running = asyncio.create_task(room.ask("main", HELLO))
    await settle()

    room.services.adopt(Services([service("main", max_tokens=100)]))
    await room.ask("main", HELLO)
    assert old.closed == 0

    door.set()
    assert await running == [Delta("a"), Answer(text="ab", service="main")]
    assert old.closed == 1


async def test_closing_closes_every_service_that_was_asked() -> None:
    room = Room(service("main"), service("never"))
    await room.ask("main", HELLO)
    await room.models.close()

    assert (room.puppets["main"].closed, room.puppets["never"].closed) == (1, 0)
