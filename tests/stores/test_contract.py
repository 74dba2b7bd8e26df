"""Contract of every storage engine: agents, messages, artifacts and events."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.errors import Refused
from coterie.messages import Envelope, Message, make_envelope
from coterie.store import Page, Store
from coterie.testing import FakeClock
from tests.pruning import pruned

HOUR = 3_600_000


def to_ada(text: str = "hello", **changed: Any) -> Envelope:
    return make_envelope(**{"sender": "user", "to": "ada", "payload": {"text": text}} | changed)


def texts(messages: Any) -> list[str]:
    return [message.payload["text"] for message in messages]


async def stored(store: Store, message_id: str) -> Message:
    message = await store.message(message_id)
    assert message is not None
    return message


async def refusal(call: Any) -> str:
    with pytest.raises(Refused) as refused:
        await call
    return refused.value.code


# Sending


async def test_messages_wait_in_the_order_in_which_they_were_sent(store: Store) -> None:
    await asyncio.gather(*(store.send(to_ada(str(n))) for n in range(5)))
    waiting = await store.waiting("ada")
    assert texts(waiting) == ["0", "1", "2", "3", "4"]
    assert [message.mailbox_position for message in waiting] == [1, 2, 3, 4, 5]


async def test_a_message_comes_back_as_it_was_sent(store: Store, clock: FakeClock) -> None:
    question = await store.send(to_ada())
    sealed = make_envelope(
        sender="bob",
        to="ada",
        payload={"text": "第一", "more": {"a": [1, 2.5, None, True]}},
        quick_replies=["b", "a"],
        in_reply_to=question.message_id,
        cause=question.message_id,
    )
    await store.send(sealed)
    message = await stored(store, sealed.id)
    assert (message.sender, message.to, message.state, message.hops) == ("bob", "ada", "pending", 1)
    assert message.payload == {"text": "第一", "more": {"a": [1, 2.5, None, True]}, "quickReplies": ["b", "a"]}
    assert (message.in_reply_to, message.cause) == (question.message_id, question.message_id)
    assert message.created_at == message.delivered_at == clock.now()


async def test_fifty_parallel_sends_with_one_client_id_are_one_message(store: Store) -> None:
    receipts = await asyncio.gather(*(store.send(to_ada(client_id="c")) for _ in range(50)))
    receipts += [await store.send(to_ada(client_id="c"))]
    assert len({(receipt.message_id, receipt.state) for receipt in receipts}) == 1
    assert len(await store.waiting("ada")) == 1


async def test_a_message_sent_again_after_it_was_read_is_not_stored_again(store: Store) -> None:
    reply = make_envelope(sender="ada", to="user", payload={"text": "done"}, client_id="c")
    first = await store.send(reply)
    await store.mark_read("ada", first.message_id)
    assert await store.send(reply) == first
    assert await store.waiting("user") == []


async def test_sends_to_unknown_and_terminated_agents_are_refused(store: Store) -> None:
    assert await refusal(store.send(to_ada(to="nobody"))) == "unknown_recipient"
    assert await refusal(store.send(to_ada(to="system"))) == "unknown_recipient"
    await store.terminate("ada")
    assert await refusal(store.send(to_ada())) == "recipient_terminated"


async def test_a_send_that_must_be_new_is_refused_if_the_message_exists(store: Store) -> None:
    new = to_ada(client_id="c", only_new=True)
    first = await store.send(new)
    assert await refusal(store.send(new)) == "already_sent"
    assert await store.send(to_ada(client_id="c")) == first
    assert len(await store.waiting("ada")) == 1


async def test_a_send_that_nobody_should_wait_for_is_refused_by_a_paused_agent(store: Store) -> None:
    await store.pause("ada")
    assert await refusal(store.send(to_ada("now", unless_paused=True))) == "recipient_paused"
    await store.send(to_ada("some time"))
    await store.resume("ada")
    await store.send(to_ada("now", unless_paused=True))
    assert texts(await store.waiting("ada")) == ["some time", "now"]


async def test_a_full_mailbox_refuses_until_messages_are_taken(store: Store) -> None:
    receipts = [await store.send(to_ada(str(n))) for n in range(5)]
    assert await refusal(store.send(to_ada("too many"))) == "mailbox_full"
    await store.withdraw(receipts[0].message_id, "user")
    await store.send(to_ada("fits"))
    assert texts(await store.waiting("ada")) == ["1", "2", "3", "4", "fits"]


async def test_the_person_has_no_mailbox_limit(store: Store) -> None:
    for n in range(9):
        await store.send(make_envelope(sender="ada", to="user", payload={"text": str(n)}))
    assert len(await store.waiting("user")) == 9


async def test_one_refused_message_does_not_touch_those_sent_at_the_same_moment(store: Store) -> None:
    outcomes = await asyncio.gather(
        store.send(to_ada("a")), store.send(to_ada(to="nobody")), store.send(to_ada("b")), return_exceptions=True
    )
    assert isinstance(outcomes[1], Refused)
    assert texts(await store.waiting("ada")) == ["a", "b"]


async def test_a_chain_of_messages_ends_at_the_hop_limit(store: Store) -> None:
    cause, sender, to = None, "ada", "bob"
    for hops in range(4):
        receipt = await store.send(make_envelope(sender=sender, to=to, payload={}, cause=cause))
        assert (await stored(store, receipt.message_id)).hops == hops
        cause, sender, to = receipt.message_id, to, sender
    assert await refusal(store.send(make_envelope(sender=sender, to=to, payload={}, cause=cause))) == "hop_limit"
    later = await store.send(make_envelope(sender=sender, to=to, payload={}, cause=cause, delay_ms=60_000))
    assert (await stored(store, later.message_id)).hops == 0


async def test_a_reply_names_a_message_that_exists_and_an_option_it_offers(store: Store) -> None:
    asked = await store.send(make_envelope(sender="ada", to="user", payload={"text": "?"}, quick_replies=["Yes", "No"]))
    answer: dict[str, Any] = {"payload": {"text": "No"}, "in_reply_to": asked.message_id}
    assert await refusal(store.send(to_ada(in_reply_to="gone"))) == "inReplyTo_unknown"
    assert await refusal(store.send(to_ada(**answer, option=2))) == "option_invalid"
    assert await refusal(store.send(to_ada(**answer, option=0))) == "option_invalid"
    chosen = await store.send(to_ada(**answer, option=1))
    assert (await stored(store, chosen.message_id)).option == 1


# Delayed messages


async def test_a_delayed_message_is_not_in_the_mailbox_before_it_is_due(store: Store, clock: FakeClock) -> None:
    receipt = await store.send(to_ada(delay_ms=HOUR))
    assert receipt.state == "delayed"
    assert receipt.scheduled_delivery_time == clock.now() + timedelta(hours=1)
    await clock.advance(minutes=59, seconds=59.999)
    assert (await store.promote_due(10)).delivered == []
    assert await store.waiting("ada") == []
    assert (await store.until_next_due()) == timedelta(milliseconds=1)
    await clock.advance(milliseconds=1)
    assert [delivery.message_id for delivery in (await store.promote_due(10)).delivered] == [receipt.message_id]
    assert texts(await store.waiting("ada")) == ["hello"]


async def test_messages_due_together_are_delivered_in_the_order_they_were_sent(store: Store, clock: FakeClock) -> None:
    await store.send(to_ada("later", delay_ms=1001))
    for n in range(3):
        await store.send(to_ada(str(n), delay_ms=1000))
    await clock.advance(seconds=2)
    first = await store.promote_due(2)
    assert len(first.delivered) == 2
    assert first.next_due is not None and first.next_due <= timedelta(0)
    assert (await store.promote_due(9)).next_due is None
    assert texts(await store.waiting("ada")) == ["0", "1", "2", "later"]


async def test_messages_delivered_early_are_marked(store: Store, clock: FakeClock) -> None:
    due = await store.send(to_ada("due", delay_ms=5))
    early = await store.send(to_ada("early", delay_ms=HOUR))
    await clock.advance(seconds=1)
    await store.promote_due(10, early=True)
    assert (await stored(store, due.message_id)).early is False
    message = await stored(store, early.message_id)
    assert message.early and message.state == "pending"
    assert message.deliver_at == early.scheduled_delivery_time


async def test_delayed_messages_are_counted_and_listed_by_due_time(store: Store) -> None:
    for text, delay in (("b", 2000), ("a", 1000), ("c", 2000)):
        await store.send(to_ada(text, delay_ms=delay))
    await store.send(to_ada("for bob", to="bob", delay_ms=1500))
    assert await store.delayed_count("ada") == 3
    assert await store.delayed_count() == 4
    listed = await store.delayed("ada", limit=2)
    assert texts(listed) == ["a", "b"]
    assert texts(await store.delayed("ada", after=listed[-1])) == ["c"]
    assert texts(await store.delayed(sender="user")) == ["a", "for bob", "b", "c"]


async def test_a_delayed_message_can_be_rescheduled_until_it_is_delivered(store: Store, clock: FakeClock) -> None:
    receipt = await store.send(to_ada(delay_ms=HOUR))
    moved = await store.reschedule(receipt.message_id, timedelta(seconds=1), "user")
    assert moved.deliver_at == clock.now() + timedelta(seconds=1)
    await clock.advance(seconds=1)
    await store.promote_due(10)
    assert await refusal(store.reschedule(receipt.message_id, timedelta(seconds=1), "user")) == "already_delivered"


async def test_a_delayed_message_to_a_terminated_agent_is_a_dead_letter_and_its_sender_is_notified_once(
    store: Store, clock: FakeClock
) -> None:
    lost = [await store.send(to_ada(str(n), sender="bob", delay_ms=1000)) for n in range(3)]
    await store.terminate("ada")
    await clock.advance(seconds=1)
    promotion = await store.promote_due(10)
    assert (len(promotion.delivered), promotion.dead) == (0, 3)
    assert {(await stored(store, receipt.message_id)).state for receipt in lost} == {"dead"}
    (notice,) = await store.waiting("bob")
    assert notice.sender == "system"
    assert notice.payload["notice"]["messageIds"] == [receipt.message_id for receipt in lost]


# Withdrawing, reading, dead letters


@pytest.mark.parametrize("delay", [None, HOUR])
async def test_a_message_can_be_withdrawn_until_it_is_taken_and_again_is_the_same(
    store: Store, delay: int | None
) -> None:
    receipt = await store.send(to_ada(delay_ms=delay))
    for _ in range(2):
        assert (await store.withdraw(receipt.message_id, "user")).state == "withdrawn"
    assert await store.waiting("ada") == []
    assert await store.delayed_count("ada") == 0
    agent = await store.agent("ada")
    assert agent is not None and agent.state == "idle"


async def test_a_message_that_was_read_cannot_be_withdrawn(store: Store) -> None:
    receipt = await store.send(make_envelope(sender="ada", to="user", payload={"text": "news"}))
    assert await store.mark_read("ada", receipt.message_id) == 1
    assert await refusal(store.withdraw(receipt.message_id, "ada")) == "already_taken"
    assert (await stored(store, receipt.message_id)).taken_at is not None


async def test_an_agent_withdraws_only_its_own_messages_and_the_person_all(store: Store) -> None:
    receipt = await store.send(to_ada(sender="bob"))
    assert await refusal(store.withdraw(receipt.message_id, "ada")) == "not_yours"
    assert await refusal(store.withdraw("gone", "user")) == "unknown_message"
    await store.withdraw(receipt.message_id, "user")


async def test_reading_one_conversation_leaves_the_others_unread(store: Store) -> None:
    first, _, last = [
        await store.send(make_envelope(sender=sender, to="user", payload={"text": sender}))
        for sender in ("ada", "bob", "ada")
    ]
    assert await store.mark_read("ada", first.message_id) == 1
    assert await store.mark_read("ada", last.message_id) == 1
    assert await store.mark_read("ada", last.message_id) == 0
    assert await refusal(store.mark_read("bob", last.message_id)) == "unknown_message"
    assert texts(await store.waiting("user")) == ["bob"]


async def test_messages_can_be_marked_unread_again(store: Store) -> None:
    first, last = [await store.send(make_envelope(sender="ada", to="user", payload={"text": text})) for text in "ab"]
    await store.mark_read("ada", last.message_id)
    seen = await store.last_event()
    assert await store.mark_unread("ada", last.message_id) == 1
    assert texts(await store.waiting("user")) == ["b"]
    assert await store.mark_unread("ada", first.message_id) == 1
    assert await store.mark_unread("ada", first.message_id) == 0
    kinds = [event.kind for event in await store.events(seen, 10)]
    assert kinds == ["unread", "unread"]
    assert texts(await store.waiting("user")) == ["a", "b"]
    assert await refusal(store.mark_unread("bob", last.message_id)) == "unknown_message"


async def test_messages_to_a_terminated_agent_are_dead_letters_that_can_be_resent_or_deleted(store: Store) -> None:
    first, second = [await store.send(to_ada(text, to="bob")) for text in ("a", "b")]
    await store.terminate("bob")
    await store.terminate("bob")
    assert texts(await store.messages(Page(), state="dead")) == ["b", "a"]
    assert len(await store.waiting("user")) == 1
    assert await refusal(store.resend_dead_letter(first.message_id)) == "recipient_terminated"
    await store.delete_dead_letter(second.message_id)
    assert await store.message(second.message_id) is None
    assert await refusal(store.delete_dead_letter(second.message_id)) == "unknown_message"


async def test_the_person_cannot_be_terminated(store: Store) -> None:
    assert await refusal(store.terminate("user")) == "unknown_agent"
    assert await refusal(store.terminate("nobody")) == "unknown_agent"


# Agents


async def test_a_message_wakes_an_idle_agent(store: Store) -> None:
    assert (await store.agents())[0].state == "idle"
    await store.send(to_ada())
    ada = await store.agent("ada")
    assert ada is not None and (ada.state, ada.waiting) == ("ready", 1)


async def test_an_agent_added_again_keeps_its_mail_and_takes_the_new_name(store: Store) -> None:
    await store.send(to_ada())
    await store.add_agents([Agent(id="ada", name="Lady Ada")])
    ada = await store.agent("ada")
    assert ada is not None and (ada.name, ada.waiting) == ("Lady Ada", 1)


# Artifacts


def picture(clock: FakeClock, ref: str = "ref-1", sha256: str = "00") -> Artifact:
    return Artifact(
        ref=ref, filename="a.png", type="image", mime_type="image/png", size=3, sha256=sha256, created_at=clock.now()
    )


async def test_a_message_can_only_carry_artifacts_that_exist(store: Store, clock: FakeClock) -> None:
    with_picture = to_ada(payload={"attachments": [{"artifactRef": "ref-1"}]})
    assert await refusal(store.send(with_picture)) == "attachment_unknown"
    await store.add_artifact(picture(clock))
    await store.send(with_picture)
    assert len(await store.waiting("ada")) == 1


async def test_an_unused_upload_is_deleted_after_a_day_and_its_bytes_with_the_last_artifact(
    store: Store, clock: FakeClock
) -> None:
    for ref, sha256 in (("kept", "aa"), ("loose", "bb"), ("shared", "aa")):
        await store.add_artifact(picture(clock, ref, sha256))
    await store.send(to_ada(payload={"attachments": [{"artifactRef": "kept"}]}))
    await clock.advance(hours=23)
    day = timedelta(days=1)
    assert (await store.unused_artifacts(day)).refs == []
    await clock.advance(hours=2)
    unused = await store.unused_artifacts(day)
    assert await store.delete_artifacts(["kept", *unused.refs], day) == (2, ["bb"])
    assert set(await store.artifacts(["kept", "loose", "shared"])) == {"kept"}


# The log, and care


async def test_the_event_log_is_in_order(store: Store, clock: FakeClock) -> None:
    start = await store.last_event()
    now = await store.send(to_ada())
    later = await store.send(to_ada(delay_ms=1000))
    await store.withdraw(now.message_id, "user")
    await clock.advance(seconds=1)
    await store.promote_due(10)
    events = await store.events(start)
    assert [(event.kind, event.subject) for event in events] == [
        ("message.created", now.message_id),
        ("delayed.scheduled", later.message_id),
        ("queue.changed", "ada"),
        ("task.changed", now.message_id),
        ("message.updated", now.message_id),
        ("delayed.delivered", later.message_id),
    ]
    assert [event.seq for event in events] == list(range(start + 1, start + 7))


async def test_events_report_reads_and_terminations_but_no_roles(store: Store) -> None:
    receipt = await store.send(make_envelope(sender="ada", to="user", payload={"text": "news"}))
    start = await store.last_event()
    await store.put_role("scout", "{}")
    await store.mark_read("ada", receipt.message_id)
    await store.terminate("ada")
    events = await store.events(start)
    assert [(event.kind, event.subject, event.data) for event in events] == [
        ("read", "ada", f'{{"upto":"{receipt.message_id}"}}'),
        ("agent.state", "ada", None),
        ("agent.removed", "ada", None),
    ]


async def test_pruning_deletes_old_messages_but_never_waiting_ones(store: Store, clock: FakeClock) -> None:
    read = await store.send(make_envelope(sender="ada", to="user", payload={"text": "old"}))
    await store.send(to_ada("waits"))
    await store.mark_read("ada", read.message_id)
    await clock.advance(days=8)
    assert (await pruned(store)).messages == 0
    assert (await pruned(store, messages=timedelta(days=7))).messages == 1
    assert await store.message(read.message_id) is None
    assert texts(await store.waiting("ada")) == ["waits"]


async def test_old_events_are_deleted_but_numbers_are_never_reused(store: Store, clock: FakeClock) -> None:
    await store.send(to_ada())
    last = await store.last_event()
    await clock.advance(days=8)
    assert (await pruned(store)).events > 0
    assert await store.last_event() == last
    await store.send(to_ada())
    assert await store.last_event() == last + 1


async def test_a_backup_taken_between_two_messages_holds_the_first_and_not_the_second(
    store: Store, tmp_path: Path
) -> None:
    await store.send(to_ada("first"))
    await store.backup(tmp_path / "copy.db")
    await store.send(to_ada("second"))
    copy = (tmp_path / "copy.db").read_bytes()
    assert b"first" in copy and b"second" not in copy


async def test_messages_are_listed_newest_first_page_by_page(store: Store) -> None:
    for n in range(4):
        await store.send(to_ada(str(n), to="ada" if n % 2 else "bob"))
    page = await store.messages(Page(limit=2))
    assert texts(page) == ["3", "2"]
    assert texts(await store.messages(Page(before=page[-1].seq))) == ["1", "0"]
    assert texts(await store.messages(Page(), agent="bob")) == ["2", "0"]
