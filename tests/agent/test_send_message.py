"""The tool an agent speaks with, as the requirement documents describe it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.agent.builtins import SEND_MESSAGE, send_message
from coterie.agent.runner import PAIR_BURST
from coterie.bus import MessageBus
from coterie.store import Store
from coterie.testing import Calls, FakeClock, Says
from tests.agent.stage import stage

PROPERTIES = SEND_MESSAGE.parameters["properties"]


async def call(bus: MessageBus, **arguments: Any) -> dict[str, Any]:
    return await send_message(bus, "ada", {"to": "user", "payload": {"text": "?"}} | arguments)


def test_the_definition_holds_quick_replies_as_an_optional_array_of_at_most_ten_strings() -> None:
    options = PROPERTIES["quickReplies"]
    assert (options["type"], options["items"], options["maxItems"]) == ("array", {"type": "string"}, 10)
    assert "quickReplies" not in SEND_MESSAGE.parameters["required"]
    assert "可选" in options["description"] and "最多10" in options["description"]


def test_the_definition_holds_an_optional_delay_with_the_agreed_words() -> None:
    assert PROPERTIES["delayMs"] == {
        "type": "number",
        "description": "延迟投递时间（毫秒），消息将在指定时间后才进入收件人队列",
    }
    assert SEND_MESSAGE.parameters["required"] == ["to", "payload"]


async def test_quick_replies_may_be_left_out_or_given(bus: MessageBus, store: Store) -> None:
    assert set(await call(bus)) == {"messageId"}
    assert set(await call(bus, quickReplies=["Yes", "No"])) == {"messageId"}
    without, with_options = await store.waiting("user")
    assert "quickReplies" not in without.payload
    assert with_options.payload["quickReplies"] == ["Yes", "No"]


async def test_an_empty_list_of_quick_replies_is_no_list(bus: MessageBus, store: Store) -> None:
    await call(bus, quickReplies=[])
    assert "quickReplies" not in (await store.waiting("user"))[0].payload


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("Yes", "quickReplies_invalid_type"),
        (["a"] * 11, "quickReplies_too_many"),
        (["a", 2], "quickReplies_invalid_type"),
        (["a", ""], "quickReplies_empty_string"),
    ],
)
async def test_wrong_quick_replies_are_an_error_result_and_nothing_is_sent(
    bus: MessageBus, store: Store, options: object, code: str
) -> None:
    told = await call(bus, quickReplies=options)
    assert told["error"] == code and told["message"]
    assert await store.waiting("user") == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda text: text.strip() and "\x00" not in text), min_size=1, max_size=10))
async def test_the_recipient_gets_exactly_the_options_that_were_sent_in_order(
    bus: MessageBus, store: Store, options: list[str]
) -> None:
    told = await call(bus, quickReplies=options)
    message = await store.message(told["messageId"])
    assert message is not None and message.payload["quickReplies"] == options


async def test_a_delayed_message_tells_its_delivery_time_and_an_immediate_one_has_none(
    bus: MessageBus, clock: FakeClock
) -> None:
    assert (await call(bus, delayMs=1500))["scheduledDeliveryTime"] == "2030-01-01T00:00:01.500Z"
    for delay in (0, -7, None):
        assert set(await call(bus, delayMs=delay)) == {"messageId"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"to": "nobody"}, "unknown_recipient"),
        ({"to": None}, "unknown_recipient"),
        ({"payload": "just text"}, "payload_invalid"),
        ({"payload": None}, "payload_invalid"),
        ({"delayMs": "soon"}, "delayMs_invalid"),
        ({"payload": {"attachments": [{"artifactRef": "x"}]}}, "attachment_unknown"),
        ({"payload": {"text": "x" * (1 << 20)}}, "payload_too_large"),
    ],
)
async def test_every_other_mistake_is_an_error_result_with_its_code(
    bus: MessageBus, arguments: dict[str, Any], code: str
) -> None:
    assert (await call(bus, **arguments))["error"] == code


async def test_a_model_cannot_choose_who_speaks(bus: MessageBus, store: Store) -> None:
    told = await call(bus, **{"from": "user", "sender": "user", "hops": -9})
    message = await store.message(told["messageId"])
    assert message is not None and (message.sender, message.hops) == ("ada", 0)


async def test_the_same_call_run_again_sends_nothing_new(bus: MessageBus, store: Store) -> None:
    arguments = {"to": "user", "payload": {"text": "once"}}
    told = [await send_message(bus, "ada", arguments, key="turn-1/0") for _ in range(2)]
    assert told[0] == told[1]
    assert len(await store.waiting("user")) == 1


async def test_an_agent_cannot_flood_another_and_may_write_again_soon(tmp_path: Path, clock: FakeClock) -> None:
    letter = Calls("send_message", {"to": "bob", "payload": {"text": "and?"}})
    async with stage(tmp_path, clock=clock) as here:
        plans = [Says(calls=(letter,) * (PAIR_BURST // 2)), Says(calls=(letter,) * (PAIR_BURST // 2 + 1))]
        here.server.script(*plans, "all sent", Says(calls=(letter,)), "one more")
        await here.society.pause("bob")
        await here.say("go")
        assert await here.texts() == ["all sent"]
        *sent, refused = [text for role, text in await here.history() if role == "tool"]
        assert all("messageId" in text for text in sent)
        assert json.loads(refused)["error"] == "too_many_messages" and "wait 1 s" in refused

        await clock.advance(seconds=1)
        await here.say("again")
        assert await here.texts(2) == ["all sent", "one more"]
        assert len(await here.society.store.waiting("bob", 1_000)) == PAIR_BURST + 1
