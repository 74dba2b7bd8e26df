"""Threads, snapshot, search and read marks over HTTP."""

from __future__ import annotations

import httpx
import pytest

from coterie.society import Society
from coterie.testing import FakeClock

API = "/api/v1"


async def talk(society: Society, lines: int) -> list[str]:
    """Store `lines` messages, alternately of the person and of ada; return their ids."""
    ids = []
    for number in range(lines):
        sender, to = ("user", "ada") if number % 2 == 0 else ("ada", "user")
        ids.append((await society.bus.send(sender=sender, to=to, payload={"text": f"line {number}"})).message_id)
    return ids


async def page(client: httpx.AsyncClient, **params: str | int) -> list[str]:
    answer = await client.get(f"{API}/threads/ada/messages", params=params)
    assert answer.status_code == 200, answer.text
    return [message["id"] for message in answer.json()["items"]]


async def test_a_thread_is_paged_from_any_message_in_both_directions(
    client: httpx.AsyncClient, society: Society
) -> None:
    ids = await talk(society, 9)
    await society.send(to="bob", text="elsewhere")

    assert await page(client) == ids
    assert await page(client, limit=3) == ids[6:]
    assert await page(client, limit=3, before=ids[6]) == ids[3:6]
    assert await page(client, limit=3, after=ids[3]) == ids[4:7]
    assert ids[4] in await page(client, limit=3, around=ids[4])


async def test_next_continues_in_the_same_direction(client: httpx.AsyncClient, society: Society) -> None:
    ids = await talk(society, 5)
    url = f"{API}/threads/ada/messages"
    back = (await client.get(url, params={"limit": 3})).json()["next"]
    assert await page(client, before=back) == ids[:2]
    on = (await client.get(url, params={"limit": 2, "after": ids[0]})).json()["next"]
    assert await page(client, after=on) == ids[3:]


async def test_two_positions_in_one_request_are_refused(client: httpx.AsyncClient, society: Society) -> None:
    (one,) = await talk(society, 1)
    answer = await client.get(f"{API}/threads/ada/messages", params={"before": one, "after": one})
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/threads/nobody/messages", "unknown_agent"),
        ("/threads/user/messages", "unknown_agent"),
        ("/threads/nobody/export", "unknown_agent"),
        ("/threads/ada/messages?before=nothing", "unknown_message"),
    ],
)
async def test_an_unknown_thread_or_position_gets_404(client: httpx.AsyncClient, path: str, code: str) -> None:
    answer = await client.get(API + path)
    assert (answer.status_code, answer.json()["code"]) == (404, code)


async def test_clearing_a_thread_leaves_the_others(client: httpx.AsyncClient, society: Society) -> None:
    ids = await talk(society, 4)
    await society.send(to="bob", text="stays")
    await client.post(f"{API}/read", json={"thread": "ada", "upto": ids[-1]})

    cleared = await client.delete(f"{API}/threads/ada")

    assert cleared.status_code == 200 and cleared.json()["messages"] > 0
    assert len((await client.get(f"{API}/threads/bob/messages")).json()["items"]) == 1
    assert (await client.delete(f"{API}/threads/nobody")).json()["code"] == "unknown_agent"


async def test_a_thread_is_exported_as_markdown_or_json(client: httpx.AsyncClient, society: Society) -> None:
    await talk(society, 2)
    await society.bus.send(sender="ada", to="user", payload={"text": "which?"}, quick_replies=["Tea", "Coffee"])
    url = f"{API}/threads/ada/export"

    written = await client.get(url)
    assert written.headers["content-type"].startswith("text/markdown")
    assert "## You, " in written.text and "line 1" in written.text and "- [ ] Tea" in written.text
    for asked in ({"params": {"format": "json"}}, {"headers": {"Accept": "application/json"}}):
        exported = (await client.get(url, **asked)).json()  # type: ignore[arg-type]
        assert [m["payload"]["text"] for m in exported["messages"]] == ["line 0", "line 1", "which?"]


async def test_messages_marked_as_read_are_no_longer_unread(client: httpx.AsyncClient, society: Society) -> None:
    ids = await talk(society, 4)
    before = (await client.get(f"{API}/snapshot")).json()["threads"][0]
    assert (before["agent"], before["unread"], before["firstUnread"]) == ("ada", 2, ids[1])

    assert (await client.post(f"{API}/read", json={"thread": "ada", "upto": ids[3]})).json() == {"read": 2}
    assert (await client.get(f"{API}/snapshot")).json()["threads"][0]["unread"] == 0
    answer = await client.post(f"{API}/read", json={"thread": "ada", "upto": "nothing"})
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_message")
    assert (await client.post(f"{API}/read", json={"thread": "ada"})).status_code == 422


async def test_the_snapshot_has_the_whole_state_and_its_position_in_the_log(
    client: httpx.AsyncClient, society: Society, clock: FakeClock
) -> None:
    await society.send(to="ada", text="waits")
    await society.send(to="ada", text="later", delay_ms=1000)
    await society.bus.send(sender="ada", to="user", payload={"text": "which?"}, quick_replies=["A"])

    shown = (await client.get(f"{API}/snapshot")).json()

    assert shown["seq"] == await society.store.last_event() and shown["serverTime"] == "2030-01-01T00:00:00.000Z"
    assert {agent["id"]: agent["unread"] for agent in shown["agents"]} == {"ada": 1, "bob": 0}
    assert [m["payload"]["text"] for m in shown["queues"]] == ["waits"]
    assert [m["payload"]["text"] for m in shown["delayed"]] == ["later"] and shown["delayedCount"] == 1
    assert [m["payload"]["text"] for m in shown["openQuestions"]] == ["which?"]


async def test_search_matches_all_words_in_any_case_and_is_paged(client: httpx.AsyncClient, society: Society) -> None:
    for text in ("Red apple", "green APPLE", "red pear", "an apple, red"):
        await society.send(to="ada", text=text)

    found = (await client.get(f"{API}/search", params={"q": "apple red", "limit": 1})).json()
    assert [m["payload"]["text"] for m in found["items"]] == ["an apple, red"]
    rest = (await client.get(f"{API}/search", params={"q": "apple red", "before": found["next"]})).json()
    assert [m["payload"]["text"] for m in rest["items"]] == ["Red apple"]
    assert (await client.get(f"{API}/search")).status_code == 422


async def test_runs_and_usage_of_a_new_society_are_empty(client: httpx.AsyncClient) -> None:
    for path in ("/runs", "/usage"):
        assert (await client.get(API + path)).json() == {"items": [], "next": None}
    assert (await client.get(f"{API}/runs", params={"before": "x"})).status_code == 422


async def test_notices_of_the_runtime_can_be_marked_as_read(client: httpx.AsyncClient, society: Society) -> None:
    await society.send(to="bob", text="too late")
    await society.store.terminate("bob")
    (notice,) = await society.waiting("user")
    marked = await client.post(f"{API}/read", json={"thread": "system", "upto": notice.id})
    assert marked.json() == {"read": 1}
