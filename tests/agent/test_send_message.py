"""The tool `send_message`, as the requirement documents describe it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.agent.builtins import SEND_MESSAGE, build_envelope
from coterie.agent.runner import PAIR_BURST
from coterie.bus import MessageBus
from coterie.errors import Refused
from coterie.messages import describe_receipt
from coterie.store import Store
from coterie.testing import Calls, FakeClock, Says
from tests.agent.stage import stage

PROPERTIES = SEND_MESSAGE.parameters["properties"]


async def call(bus: MessageBus, *, key: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Send as ada with these arguments of `send_message`; return the result that the model would get."""
    given = {"to": "user", "payload": {"text": "?"}} | arguments
    try:
        return describe_receipt(await bus.send_envelope(build_envelope("ada", given, key=key, cause=None)))
    except Refused as refusal:
        return refusal.to_dict()


def test_the_schema_has_quick_replies_as_an_optional_array_of_at_most_ten_strings() -> None:
    options = PROPERTIES["quickReplies"]
    assert (options["type"], options["items"], options["maxItems"]) == ("array", {"type": "string"}, 10)
    assert "quickReplies" not in SEND_MESSAGE.parameters["required"]
    assert "Optional" in options["description"] and "up to 10" in options["description"]


def test_the_schema_has_an_optional_delay_described_in_english() -> None:
    assert PROPERTIES["delayMs"] == {"type": "number", "description": "Delay in ms"}
    assert SEND_MESSAGE.parameters["required"] == ["to", "payload"]


async def test_quick_replies_are_optional(bus: MessageBus, store: Store) -> None:
    assert set(await call(bus)) == {"messageId"}
    assert set(await call(bus, quickReplies=["Yes", "No"])) == {"messageId"}
    without, with_options = await store.waiting("user")
    assert "quickReplies" not in without.payload
    assert with_options.payload["quickReplies"] == ["Yes", "No"]


async def test_an_empty_list_of_quick_replies_is_not_stored(bus: MessageBus, store: Store) -> None:
    await call(bus, quickReplies=[])
    assert "quickReplies" not in (await store.waiting("user"))[0].payload


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("Yes", "quickReplies_invalid_type"),
        (["a"] * 11, "quickReplies_too_many"),
        (["a", 2], "quickReplies_invalid_type"),
        (["a", ""], "quickReplies_empty_string"),
        ([" \t"], "quickReplies_empty_string"),
        (["\ufeff"], "quickReplies_empty_string"),
    ],
)
async def test_invalid_quick_replies_are_an_error_result_and_nothing_is_sent(
    bus: MessageBus, store: Store, options: object, code: str
) -> None:
    result = await call(bus, quickReplies=options)
    assert result["error"] == code and result["message"]
    assert await store.waiting("user") == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda text: text.strip() and "\x00" not in text), min_size=1, max_size=10))
async def test_the_recipient_gets_the_quick_replies_unchanged_and_in_order(
    bus: MessageBus, store: Store, options: list[str]
) -> None:
    result = await call(bus, quickReplies=options)
    message = await store.message(result["messageId"])
    assert message is not None and message.payload["quickReplies"] == options


async def test_only_a_delayed_message_returns_a_delivery_time(bus: MessageBus, clock: FakeClock) -> None:
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
        ({"unlessAnswered": "nothing", "delayMs": 1000}, "unlessAnswered_unknown"),
        ({"unlessAnswered": ["x"], "delayMs": 1000}, "unlessAnswered_unknown"),
        ({"unlessAnswered": "nothing"}, "unlessAnswered_invalid"),
    ],
)
async def test_every_other_invalid_argument_is_an_error_result_with_its_code(
    bus: MessageBus, arguments: dict[str, Any], code: str
) -> None:
    assert (await call(bus, **arguments))["error"] == code


async def test_an_answer_withdraws_a_message_of_the_model_and_a_later_one_is_told_so(
    bus: MessageBus, store: Store
) -> None:
    asked = (await call(bus, quickReplies=["Yes"]))["messageId"]
    reminder = (await call(bus, to="bob", delayMs=60_000, unlessAnswered=asked))["messageId"]
    await bus.send(sender="user", to="ada", payload={"text": "Yes"}, in_reply_to=asked, option=0)
    stored = await store.message(reminder)
    assert stored is not None and stored.state == "withdrawn"
    late = await call(bus, to="bob", delayMs=60_000, unlessAnswered=asked)
    assert late["state"] == "withdrawn" and "scheduledDeliveryTime" not in late


async def test_a_model_cannot_choose_the_sender(bus: MessageBus, store: Store) -> None:
    forged: dict[str, Any] = {"from": "user", "sender": "user", "hops": -9}
    result = await call(bus, **forged)
    message = await store.message(result["messageId"])
    assert message is not None and (message.sender, message.hops) == ("ada", 0)


async def test_a_repeated_call_sends_one_message(bus: MessageBus, store: Store) -> None:
    results = [await call(bus, payload={"text": "once"}, key="turn-1/0") for _ in range(2)]
    assert results[0] == results[1]
    assert len(await store.waiting("user")) == 1


async def test_messages_from_one_agent_to_another_are_rate_limited(tmp_path: Path, clock: FakeClock) -> None:
    message = Calls("send_message", {"to": "bob", "payload": {"text": "and?"}})
    async with stage(tmp_path, clock=clock) as here:
        plans = [Says(calls=(message,) * (PAIR_BURST // 2)), Says(calls=(message,) * (PAIR_BURST // 2 + 1))]
        here.server.script(*plans, "all sent", Says(calls=(message,)), "one more")
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


async def test_a_recurring_message_has_a_schedule_that_its_sender_can_end(
    bus: MessageBus, store: Store, clock: FakeClock
) -> None:
    result = await call(bus, every="daily 08:00 UTC")
    assert set(result) == {"messageId", "scheduledDeliveryTime", "scheduleId"}
    assert result["scheduledDeliveryTime"] == "2030-01-01T08:00:00.000Z"
    assert (await call(bus, every="whenever"))["error"] == "every_invalid"
    assert len(await store.schedules(sender="ada")) == 1
