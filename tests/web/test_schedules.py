"""Recurring messages over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from coterie.society import Society
from coterie.testing import FakeClock

API = "/api/v1"


async def send(client: httpx.AsyncClient, every: str = "weekdays 08:00", **more: Any) -> dict[str, Any]:
    body = {"to": "ada", "payload": {"text": "Stand up"}, "every": every, "timeZone": "Europe/Berlin", **more}
    answer = await client.post(f"{API}/messages", json=body)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def test_a_recurring_message_is_listed_and_delivered_again_and_again(
    client: httpx.AsyncClient, society: Society, clock: FakeClock
) -> None:
    receipt = await send(client)
    assert receipt["state"] == "delayed" and receipt["scheduledDeliveryTime"] == "2030-01-01T07:00:00.000Z"

    (schedule,) = (await client.get(f"{API}/schedules")).json()["items"]
    assert schedule == (await client.get(f"{API}/schedules/{receipt['scheduleId']}")).json()
    assert schedule | {"createdAt": None} == {
        "id": receipt["scheduleId"],
        "from": "user",
        "to": "ada",
        "payload": {"text": "Stand up"},
        "every": "weekdays 08:00 Europe/Berlin",
        "state": "active",
        "createdAt": None,
        "messageId": receipt["messageId"],
        "deliverAt": "2030-01-01T07:00:00.000Z",
        "nextAt": "2030-01-01T07:00:00.000Z",
    }
    (delayed,) = (await client.get(f"{API}/delayed")).json()["items"]
    assert (delayed["every"], delayed["scheduleId"]) == (schedule["every"], schedule["id"])

    await clock.jump(hours=7)
    assert len(await society.store.waiting("ada")) == 1
    (delayed,) = (await client.get(f"{API}/delayed")).json()["items"]
    assert delayed["deliverAt"] == "2030-01-02T07:00:00.000Z"


async def test_after_a_long_sleep_one_message_stands_for_all_that_were_missed(
    client: httpx.AsyncClient, clock: FakeClock
) -> None:
    receipt = await send(client)
    await clock.jump(days=3)
    message = (await client.get(f"{API}/messages/{receipt['messageId']}")).json()
    assert (message["state"], message["missed"], message["every"]) == ("pending", 3, "weekdays 08:00 Europe/Berlin")


async def test_a_recurring_message_is_paused_changed_resumed_and_ended(
    client: httpx.AsyncClient, clock: FakeClock
) -> None:
    receipt = await send(client)
    path = f"{API}/schedules/{receipt['scheduleId']}"

    paused = (await client.patch(path, json={"paused": True})).json()
    assert (paused["state"], paused["deliverAt"]) == ("paused", None)
    assert (await client.get(f"{API}/delayed")).json()["count"] == 0
    changed = (await client.patch(path, json={"every": "daily 10:00", "timeZone": "UTC"})).json()
    assert (changed["state"], changed["every"]) == ("paused", "daily 10:00 UTC")
    resumed = (await client.patch(path, json={"paused": False})).json()
    assert (resumed["state"], resumed["deliverAt"]) == ("active", "2030-01-01T10:00:00.000Z")

    for _ in range(2):
        assert (await client.delete(path)).status_code == 204
    assert (await client.get(path)).json()["state"] == "ended"
    assert (await client.get(f"{API}/schedules")).json() == {"items": [], "next": None}
    refused = await client.patch(path, json={"paused": False})
    assert (refused.status_code, refused.json()["code"]) == (409, "already_ended")


async def test_a_changed_recurrence_starts_when_it_is_told(client: httpx.AsyncClient) -> None:
    path = f"{API}/schedules/{(await send(client))['scheduleId']}"
    two_days = 2 * 86_400_000
    change = {"every": "daily 10:00", "timeZone": "UTC", "delayMs": two_days}
    assert (await client.patch(path, json=change)).json()["deliverAt"] == "2030-01-03T10:00:00.000Z"
    assert (await client.patch(path, json={"delayMs": 0})).json()["deliverAt"] == "2030-01-01T10:00:00.000Z"
    refused = await client.patch(path, json={"delayMs": "soon"})
    assert (refused.status_code, refused.json()["code"]) == (422, "delayMs_invalid")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"every": "sometimes"}, "every cannot be read"),
        ({"every": 5}, "every must be a string"),
        ({"every": None}, "timeZone needs every"),
        ({"timeZone": "Europe/Berlim"}, "did you mean 'Europe/Berlin'?"),
        ({"inReplyTo": "x"}, "an answer cannot recur"),
    ],
)
async def test_a_recurrence_that_cannot_be_is_refused(
    client: httpx.AsyncClient, more: dict[str, Any], expected: str
) -> None:
    body = {"to": "ada", "payload": {}, "every": "daily 08:00", "timeZone": "Europe/Berlin"} | more
    answer = await client.post(f"{API}/messages", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "every_invalid")
    assert expected in answer.json()["detail"]


async def test_an_unknown_schedule_is_not_found(client: httpx.AsyncClient) -> None:
    for method, body in (("GET", None), ("PATCH", {"paused": True}), ("DELETE", None)):
        answer = await client.request(method, f"{API}/schedules/nowhere", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_schedule")


async def test_changes_of_a_schedule_are_events(client: httpx.AsyncClient, society: Society) -> None:
    receipt = await send(client)
    await client.patch(f"{API}/schedules/{receipt['scheduleId']}", json={"paused": True})
    kinds = [event.kind for event in await society.store.events(0)]
    assert kinds[-4:] == ["schedule.changed", "delayed.scheduled", "delayed.withdrawn", "schedule.changed"]
