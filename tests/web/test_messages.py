"""Messages over HTTP: send, read, reschedule, withdraw."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from coterie.society import Society
from coterie.testing import FakeClock

API = "/api/v1"
HOUR = 3_600_000


async def send(client: httpx.AsyncClient, text: str = "hello", to: str = "ada", **more: Any) -> str:
    answer = await client.post(f"{API}/messages", json={"to": to, "payload": {"text": text}, **more})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["messageId"])


async def test_a_sent_message_is_accepted_and_can_be_read_back(client: httpx.AsyncClient, society: Society) -> None:
    answer = await client.post(f"{API}/messages", json={"to": "ada", "payload": {"text": "**hi**"}, "from": "bob"})

    assert answer.status_code == 202 and answer.json()["state"] == "pending"
    assert "scheduledDeliveryTime" not in answer.json()
    found = (await client.get(f"{API}/messages/{answer.json()['messageId']}")).json()
    assert found["from"] == "user" and found["payload"] == {"text": "**hi**"}
    assert found["rendered"] == [{"t": "p", "c": [{"t": "strong", "c": ["hi"]}]}]


async def test_a_message_is_found_by_the_client_id_that_it_was_sent_with(client: httpx.AsyncClient) -> None:
    sent = await send(client, clientId="c 1")
    await send(client, clientId="c 2")

    for client_id, found in (("c 1", [sent]), ("c 3", []), ("", [])):
        page = (await client.get(f"{API}/messages", params={"clientId": client_id})).json()
        assert ([one["id"] for one in page["items"]], page["next"]) == (found, None)


async def test_the_receipt_of_a_delayed_message_has_its_due_time(client: httpx.AsyncClient, clock: FakeClock) -> None:
    answer = await client.post(f"{API}/messages", json={"to": "ada", "payload": {"text": "later"}, "delayMs": HOUR})

    assert answer.json()["state"] == "delayed"
    assert answer.json()["scheduledDeliveryTime"] == "2030-01-01T01:00:00.000Z"


async def test_fifty_sends_with_one_client_id_store_one_message_and_get_one_receipt(
    client: httpx.AsyncClient, society: Society
) -> None:
    body = {"to": "ada", "payload": {"text": "once"}, "clientId": "c-1", "delayMs": 500}

    answers = await asyncio.gather(*(client.post(f"{API}/messages", json=body) for _ in range(50)))

    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.text for answer in answers}) == 1
    assert await society.store.delayed_count() == 1


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"to": "nobody", "payload": {}}, 404, "unknown_recipient"),
        ({"payload": {}}, 404, "unknown_recipient"),
        ({"to": "ada", "payload": "words"}, 422, "payload_invalid"),
        ({"to": "ada"}, 422, "payload_invalid"),
        ({"to": "ada", "payload": {}, "delayMs": "soon"}, 422, "delayMs_invalid"),
        ({"to": "ada", "payload": {}, "quickReplies": ["a"] * 11}, 422, "quickReplies_too_many"),
        ({"to": "ada", "payload": {}, "quickReplies": [1]}, 422, "quickReplies_invalid_type"),
        ({"to": "ada", "payload": {}, "quickReplies": [" "]}, 422, "quickReplies_empty_string"),
        ({"to": "ada", "payload": {}, "inReplyTo": "nothing"}, 422, "inReplyTo_unknown"),
        ({"to": "ada", "payload": {}, "option": 1}, 422, "option_invalid"),
        ({"to": "ada", "payload": {"attachments": [{"artifactRef": "x"}]}}, 422, "attachment_unknown"),
        ({"to": "ada", "payload": {}, "clientId": 7}, 422, "request_invalid"),
        ({"to": "ada", "payload": {"text": "x" * 1_100_000}}, 413, "payload_too_large"),
        ([], 422, "request_invalid"),
    ],
)
async def test_an_invalid_send_is_refused_with_status_and_code(
    client: httpx.AsyncClient, society: Society, body: Any, status: int, code: str
) -> None:
    answer = await client.post(f"{API}/messages", json=body)

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert await society.waiting("ada") == []


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b'{"to": NaN}'])
async def test_a_body_that_is_not_json_gets_400(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post(f"{API}/messages", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "json_invalid")


async def test_a_deeply_nested_body_is_refused(client: httpx.AsyncClient) -> None:
    body = b'{"to": "ada", "payload": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001
    answer = await client.post(f"{API}/messages", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (422, "payload_invalid")


async def test_a_send_to_a_terminated_agent_gets_410(client: httpx.AsyncClient, society: Society) -> None:
    await society.store.terminate("bob")
    answer = await client.post(f"{API}/messages", json={"to": "bob", "payload": {}})
    assert (answer.status_code, answer.json()["code"]) == (410, "recipient_terminated")


async def test_a_withdrawal_is_idempotent_and_refused_once_the_message_is_read(
    client: httpx.AsyncClient, society: Society
) -> None:
    waiting = await send(client)
    assert [(await client.delete(f"{API}/messages/{waiting}")).status_code for _ in range(2)] == [204, 204]

    read = await society.bus.send(sender="ada", to="user", payload={"text": "seen"})
    await society.store.mark_read("ada", read.message_id)
    answer = await client.delete(f"{API}/messages/{read.message_id}")
    assert (answer.status_code, answer.json()["code"]) == (409, "already_taken")


async def test_a_delayed_message_can_be_rescheduled_until_it_is_delivered(
    client: httpx.AsyncClient, clock: FakeClock
) -> None:
    later = await send(client, delayMs=HOUR)
    moved = await client.patch(f"{API}/messages/{later}", json={"delayMs": 1000})
    assert moved.status_code == 200 and moved.json()["deliverAt"] == "2030-01-01T00:00:01.000Z"

    await clock.advance(seconds=1)
    answer = await client.patch(f"{API}/messages/{later}", json={"delayMs": 1000})
    assert (answer.status_code, answer.json()["code"]) == (409, "already_delivered")


@pytest.mark.parametrize("delay", [True, "5", 1e15, None, [], {}])
async def test_an_invalid_delay_of_a_reschedule_is_refused(client: httpx.AsyncClient, delay: Any) -> None:
    later = await send(client, delayMs=HOUR)
    answer = await client.patch(f"{API}/messages/{later}", json={"delayMs": delay})
    assert (answer.status_code, answer.json()["code"]) == (422, "delayMs_invalid")


async def test_a_reschedule_without_a_delay_is_refused(client: httpx.AsyncClient) -> None:
    later = await send(client, delayMs=HOUR)
    answer = await client.patch(f"{API}/messages/{later}", json={})
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")


OBJECT_PAYLOADS: list[dict[str, Any]] = [
    {"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {"command": "true"}},
    {"lc": 2, "type": "secret", "id": ["COTERIE_TOKEN"]},
    {"py/object": "os.system", "py/reduce": [{"py/function": "os.system"}, ["true"]]},
    {"__reduce__": ["os.system", ["true"]], "__class__": "Exploit", "__proto__": {"admin": True}},
    {"$type": "System.Diagnostics.Process", "$ref": "#/definitions/x", "@class": "java.lang.Runtime"},
    {"text": "!!python/object/apply:os.system ['true']", "more": "{{7*7}} ${7*7} <%= 7*7 %>"},
]


@pytest.mark.parametrize("payload", OBJECT_PAYLOADS)
async def test_payloads_that_name_classes_or_templates_are_stored_as_data(
    client: httpx.AsyncClient, payload: dict[str, Any]
) -> None:
    sent = await client.post(f"{API}/messages", json={"to": "ada", "payload": payload})
    assert sent.status_code == 202
    assert (await client.get(f"{API}/messages/{sent.json()['messageId']}")).json()["payload"] == payload


async def test_an_empty_client_id_does_not_deduplicate(client: httpx.AsyncClient) -> None:
    assert await send(client, clientId="") != await send(client, clientId="")


async def test_a_lone_surrogate_is_stored_as_a_replacement_character(client: httpx.AsyncClient) -> None:
    body = rb'{"to": "ada", "payload": {"text": "cut \ud83d"}, "clientId": "\ud83d"}'
    sent = await client.post(f"{API}/messages", content=body, headers={"Content-Type": "application/json"})
    assert sent.status_code == 202
    stored = await client.get(f"{API}/messages/{sent.json()['messageId']}")
    assert stored.json()["payload"] == {"text": "cut \ufffd"}


@pytest.mark.parametrize("text", [rb'"\ud83d", "x": NaN', rb'"\ud83d" oops'])
async def test_invalid_json_with_a_lone_surrogate_is_still_refused(client: httpx.AsyncClient, text: bytes) -> None:
    body = b'{"to": "ada", "payload": {"text": ' + text + b"}}"
    answer = await client.post(f"{API}/messages", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "json_invalid")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/messages/nothing"),
        ("DELETE", "/messages/nothing"),
        ("PATCH", "/messages/nothing"),
        ("GET", "/messages?before=nothing"),
        ("GET", "/delayed?after=nothing"),
        ("POST", "/dead-letters/nothing/resend"),
        ("DELETE", "/dead-letters/nothing"),
    ],
)
async def test_requests_about_an_unknown_message_get_404(client: httpx.AsyncClient, method: str, path: str) -> None:
    body = {"delayMs": 5} if method == "PATCH" else None
    answer = await client.request(method, API + path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_message")


async def test_the_timeline_is_paged_with_the_newest_message_first(client: httpx.AsyncClient) -> None:
    sent = [await send(client, f"n{n}", to="ada" if n % 2 else "bob") for n in range(7)]

    first = (await client.get(f"{API}/messages", params={"limit": 4})).json()
    second = (await client.get(f"{API}/messages", params={"limit": 4, "before": first["next"]})).json()
    assert [m["id"] for m in first["items"] + second["items"]] == sent[::-1] and second["next"] is None
    behind = (await client.get(f"{API}/messages", params={"before": sent[2], "agent": "ada"})).json()
    assert [m["id"] for m in behind["items"]] == [sent[1]]


@pytest.mark.parametrize("limit", ["0", "201", "many"])
async def test_a_page_limit_outside_1_to_200_is_refused(client: httpx.AsyncClient, limit: str) -> None:
    answer = await client.get(f"{API}/messages", params={"limit": limit})
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")


async def test_delayed_messages_are_counted_and_listed_by_due_time(client: httpx.AsyncClient) -> None:
    late, soon, other = [await send(client, to=to, delayMs=ms) for to, ms in (("ada", 9), ("ada", 5), ("bob", 7))]

    everything = (await client.get(f"{API}/delayed")).json()
    assert everything["count"] == 3 and [m["id"] for m in everything["items"]] == [soon, other, late]
    first = (await client.get(f"{API}/delayed", params={"recipient": "ada", "limit": 1})).json()
    assert (first["count"], [m["id"] for m in first["items"]]) == (2, [soon])
    rest = (await client.get(f"{API}/delayed", params={"recipient": "ada", "after": first["next"]})).json()
    assert [m["id"] for m in rest["items"]] == [late]


async def test_a_dead_letter_can_be_listed_resent_and_deleted(client: httpx.AsyncClient, society: Society) -> None:
    message = await send(client, to="bob")
    await society.store.terminate("bob")
    dead = (await client.get(f"{API}/dead-letters")).json()["items"]
    assert [m["id"] for m in dead] == [message] and dead[0]["reason"] == "recipient_terminated"

    again = await client.post(f"{API}/dead-letters/{message}/resend")
    assert (again.status_code, again.json()["code"]) == (410, "recipient_terminated")
    assert (await client.delete(f"{API}/dead-letters/{message}")).status_code == 204
    assert (await client.get(f"{API}/dead-letters")).json() == {"items": [], "next": None}


# Questions


async def ask(society: Society, options: list[str]) -> str:
    asked = await society.bus.send(sender="ada", to="user", payload={"text": "which?"}, quick_replies=options)
    return asked.message_id


async def test_of_two_concurrent_answers_one_wins_and_the_other_gets_409_with_the_winner(
    client: httpx.AsyncClient, society: Society
) -> None:
    question = await ask(society, ["Yes", "No"])

    async def choose(option: int) -> httpx.Response:
        text = ["Yes", "No"][option]
        body = {"to": "ada", "payload": {"text": text}, "inReplyTo": question, "option": option}
        return await client.post(f"{API}/messages", json=body)

    answers = await asyncio.gather(choose(0), choose(1))

    (won,) = [answer for answer in answers if answer.status_code == 202]
    (lost,) = [answer for answer in answers if answer.status_code == 409]
    assert lost.json()["code"] == "already_answered"
    assert lost.json()["answer"]["messageId"] == won.json()["messageId"]
    shown = (await client.get(f"{API}/messages/{question}")).json()
    assert shown["answer"] == lost.json()["answer"]


async def test_an_option_outside_the_quick_replies_is_refused(client: httpx.AsyncClient, society: Society) -> None:
    question = await ask(society, ["Yes"])
    body = {"to": "ada", "payload": {"text": "Maybe"}, "inReplyTo": question, "option": 1}
    answer = await client.post(f"{API}/messages", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "option_invalid")
