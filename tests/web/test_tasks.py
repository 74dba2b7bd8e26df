"""Tasks over HTTP: listing, tree, stop, continue, reminders that an answer withdraws, and what happened meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from coterie.clock import SystemClock
from coterie.society import Society
from coterie.testing import Calls, FakeClock, Says
from coterie.testing.model_server import ReceivedRequest
from coterie.web.app import build_app
from coterie.web.auth import Access
from tests.agent.stage import Bell, Stage, each, stage

from .conftest import BASE, TOKEN

API = "/api/v1"
PRICE = {"input": 1.0, "output": 2.0, "currency": "EUR"}
THREE = "[agents.ada]\n[agents.bob]\n[agents.cleo]\n"


@asynccontextmanager
async def client_of(here: Stage) -> AsyncIterator[httpx.AsyncClient]:
    clock = SystemClock()
    app = build_app(here.society, Access(TOKEN, here.society.store.info.log_id, clock), clock=clock)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers) as client:
        yield client


def asks(to: str, text: str = "you?", **more: Any) -> Says:
    return Says(calls=(Calls("send_message", {"to": to, "payload": {"text": text}, **more}),))


async def send(client: httpx.AsyncClient, text: str = "hello", to: str = "ada", **more: Any) -> dict[str, Any]:
    answer = await client.post(f"{API}/messages", json={"to": to, "payload": {"text": text}, **more})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def get(client: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await client.get(f"{API}{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def post(client: httpx.AsyncClient, path: str) -> tuple[int, dict[str, Any]]:
    answer = await client.post(f"{API}{path}")
    return answer.status_code, answer.json()


def answers_by_a_message(request: ReceivedRequest) -> Says:
    """Script two agents that answer every message by a message to the other, without end."""
    messages = request.body["messages"]
    if messages[-1]["role"] == "tool":
        return Says("")
    return asks("bob" if "(id: ada)" in str(messages[0]) else "ada")


async def test_a_task_shows_all_its_messages_and_turns_in_order_with_tokens_and_cost(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=THREE, price=PRICE) as here, client_of(here) as client:
        here.server.default = each(
            ada=[asks("bob"), "asked", *["bob says so"] * 9],
            bob=[asks("cleo"), "asking", *["cleo says so"] * 9],
            cleo=["so"] * 9,
        )
        receipt = await send(client, "what do they think?")
        assert receipt["task"] == receipt["messageId"]
        await here.ended(receipt["task"])
        tree = await get(client, f"/tasks/{receipt['messageId']}")
        (listed,) = (await get(client, "/tasks", agent="cleo"))["items"]

        nodes = tree.pop("nodes")
        assert listed == tree
        assert (tree["state"], tree["agent"], tree["from"], tree["text"]) == (
            "done", "ada", "user", "what do they think?",
        )  # fmt: skip
        assert (tree["agents"], tree["active"], tree["activeAgents"], tree["queued"]) == (3, 0, [], 0)
        messages = [node for node in nodes if node["kind"] == "message"]
        turns = [node for node in nodes if node["kind"] == "turn"]
        assert tree["messages"] == len(messages) and tree["turns"] == len(turns)
        assert tree["requests"] == len(here.server.requests) == sum(len(turn["requests"]) for turn in turns)
        for key in ("inputTokens", "outputTokens"):
            assert tree[key] == sum(turn[key] for turn in turns) > 0
        cost = tree["inputTokens"] * 1e-6 + tree["outputTokens"] * 2e-6
        assert tree["currency"] == "EUR" and abs(tree["cost"] - cost) < 1e-12 and tree["unpricedRequests"] == 0
        times = [node.get("createdAt") or node.get("startedAt") for node in nodes]
        assert times == sorted(times)
        assert messages[0]["id"] == receipt["messageId"] and messages[0]["parent"] is None
        ids = {message["id"] for message in messages}
        assert all(message["parent"] in ids for message in messages[1:])
        assert all(turn["parent"] in ids for turn in turns)
        # Any message of the task finds it.
        assert (await get(client, f"/tasks/{messages[-1]['id']}"))["id"] == receipt["task"]

        (day,) = {row["day"] for row in (await get(client, "/usage"))["items"]}
        rows = (await get(client, "/usage"))["items"]
        assert day and abs(sum(row["cost"] for row in rows) - cost) < 1e-12
        assert {row["currency"] for row in rows} == {"EUR"} and all(row["unpricedRequests"] == 0 for row in rows)


async def test_without_prices_the_cost_is_unknown_and_not_zero(tmp_path: Path) -> None:
    async with stage(tmp_path) as here, client_of(here) as client:
        receipt = await send(client)
        await here.texts()
        tree = await get(client, f"/tasks/{receipt['task']}")
        (row,) = (await get(client, "/usage"))["items"]
    assert tree["cost"] is None and tree["currency"] is None and tree["unpricedRequests"] == tree["requests"] == 1
    assert row["cost"] is None and row["unpricedRequests"] == 1
    (turn,) = (node for node in tree["nodes"] if node["kind"] == "turn")
    assert turn["cost"] is None and turn["requests"][0]["cost"] is None


async def test_a_stop_ends_the_turn_and_withdraws_what_would_run(tmp_path: Path) -> None:
    async with stage(tmp_path) as here, client_of(here) as client:
        Bell.may_end.clear()
        later = Says(
            calls=(
                Calls("send_message", {"to": "bob", "payload": {"text": "later"}, "delayMs": 3_600_000}),
                Calls("ring", {"name": "x"}),
            )
        )
        here.server.script(later)
        receipt = await send(client)
        await Bell.rang.wait()
        working = await get(client, f"/tasks/{receipt['task']}")
        assert (working["state"], working["activeAgents"]) == ("working", ["ada"])
        (open_task,) = (await get(client, "/snapshot"))["tasks"]
        assert open_task["id"] == receipt["task"]

        assert await post(client, f"/tasks/{receipt['task']}/stop") == (
            200, {"turns": 1, "messages": 1, "questions": 0},
        )  # fmt: skip
        assert await post(client, f"/tasks/{receipt['task']}/stop") == (
            200, {"turns": 0, "messages": 0, "questions": 0},
        )  # fmt: skip
        await here.state("ada", "idle")
        stopped = await get(client, f"/tasks/{receipt['task']}")
        assert (stopped["state"], stopped["active"], stopped["queued"]) == ("stopped", 0, 0)
        assert stopped["stoppedAt"] is not None
        assert (await get(client, "/delayed"))["count"] == 0
        snapshot = await get(client, "/snapshot")
        assert (snapshot["tasks"], snapshot["taskCount"]) == ([], 0)
        Bell.may_end.set()
        status, problem = await post(client, f"/tasks/{receipt['task']}/continue")
        assert (status, problem["code"]) == (409, "task_stopped")


async def test_at_the_budget_a_task_waits_for_one_answer_and_continue_grants_another_budget(tmp_path: Path) -> None:
    limits = "[limits.task]\nturns = 2\n[agents.ada]\n[agents.bob]\n"
    async with stage(tmp_path, agents=limits) as here, client_of(here) as client:
        here.server.default = answers_by_a_message
        receipt = await send(client, "go")
        (question,) = await here.heard()
        await here.ended(receipt["task"])
        task = await get(client, f"/tasks/{receipt['task']}")
        assert (task["state"], task["budgetQuestion"], task["budgets"]) == ("waiting", question.id, 1)
        assert task["budget"] == {"turns": 2, "tokens": None, "cost": None, "minutes": None}
        assert question.payload["budget"]["task"] == receipt["task"]

        status, continued = await post(client, f"/tasks/{receipt['task']}/continue")
        assert (status, continued["budgets"], continued["budgetQuestion"]) == (200, 2, None)
        _, again = await here.heard(2)
        await here.ended(receipt["task"])
        task = await get(client, f"/tasks/{receipt['task']}")
        assert (task["state"], task["budgetQuestion"]) == ("waiting", again.id) and task["turns"] > 4

        stop = await send(client, "Stop", to=again.sender, inReplyTo=again.id, option=1)
        assert stop["state"] == "withdrawn" and stop["task"] == receipt["task"]
        assert (await get(client, f"/tasks/{receipt['task']}"))["state"] == "stopped"


async def test_a_question_that_a_stop_closed_says_so(tmp_path: Path) -> None:
    async with stage(tmp_path) as here, client_of(here) as client:
        here.server.script(asks("user", "Tea?", quickReplies=["Yes", "No"]), "")
        receipt = await send(client)
        (question,) = await here.heard()
        await here.state("ada", "idle")
        assert (await get(client, f"/tasks/{receipt['task']}"))["state"] == "waiting"
        assert (await post(client, f"/tasks/{receipt['task']}/stop"))[1]["questions"] == 1
        closed = {"messageId": question.id, "option": None, "closed": "stopped"}
        assert (await get(client, f"/messages/{question.id}"))["answer"] == closed
        nodes = (await get(client, f"/tasks/{receipt['task']}"))["nodes"]
        assert [node["answer"] for node in nodes if node.get("question")] == [closed]


async def test_unknown_tasks_and_wrong_parameters_are_refused(client: httpx.AsyncClient) -> None:
    for path in ("/tasks/nothing/stop", "/tasks/nothing/continue"):
        status, problem = await post(client, path)
        assert (status, problem["code"]) == (404, "unknown_task") and "nothing" in problem["detail"]
    assert (await client.get(f"{API}/tasks/nothing")).json()["code"] == "unknown_task"
    for wrong in ("state=asleep", "cursor=x", "limit=0"):
        assert (await client.get(f"{API}/tasks?{wrong}")).json()["code"] == "request_invalid", wrong
    for wrong in ("", "?since=yesterday"):
        assert (await client.get(f"{API}/away{wrong}")).json()["code"] == "request_invalid", wrong


async def test_tasks_are_listed_newest_first_in_pages_by_state_agent_and_person(client: httpx.AsyncClient) -> None:
    sent = [(await send(client, f"m{n}", to="ada" if n % 2 else "bob"))["task"] for n in range(5)]
    await client.delete(f"{API}/messages/{sent[0]}")

    listed: list[str] = []
    cursor: str | None = None
    while page := await get(client, "/tasks", limit=2, **({"cursor": cursor} if cursor else {})):
        listed += [task["id"] for task in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert listed == sent[::-1]
    assert [task["id"] for task in (await get(client, "/tasks", state="done"))["items"]] == sent[:1]
    assert [task["id"] for task in (await get(client, "/tasks", agent="ada"))["items"]] == [sent[3], sent[1]]
    assert len((await get(client, "/tasks", person="user"))["items"]) == 5
    assert (await get(client, "/tasks", person="anna"))["items"] == []


async def test_a_delayed_message_starts_its_task_when_it_is_due(
    client: httpx.AsyncClient, society: Society, clock: FakeClock
) -> None:
    first = await send(client, "go")
    reminder = await society.bus.send(
        sender="ada", to="bob", payload={"text": "remember"}, delay_ms=3_600_000, cause=first["messageId"]
    )
    message = await get(client, f"/messages/{reminder.message_id}")
    assert (message["task"], message["parentTask"]) == (reminder.message_id, first["task"])
    assert (await client.get(f"{API}/tasks/{reminder.message_id}")).status_code == 404
    await clock.jump(hours=1)
    assert (await get(client, f"/tasks/{reminder.message_id}"))["parentTask"] == first["task"]


async def test_an_answer_withdraws_the_message_that_waits_for_none(
    client: httpx.AsyncClient, society: Society, clock: FakeClock
) -> None:
    asked = await send(client, "When?")
    reminder = await send(client, "Well?", to="bob", delayMs=3_600_000, unlessAnswered=asked["messageId"])
    fires = await send(client, "Hello?", to="bob", delayMs=3_600_000, unlessAnswered=(await send(client))["messageId"])
    stored = await get(client, f"/messages/{reminder['messageId']}")
    assert (stored["state"], stored["unlessAnswered"]) == ("delayed", asked["messageId"])

    await society.bus.send(sender="ada", to="user", payload={"text": "Now"}, in_reply_to=asked["messageId"])
    assert (await get(client, f"/messages/{reminder['messageId']}"))["state"] == "withdrawn"
    late = await send(client, "Well?", to="bob", delayMs=3_600_000, unlessAnswered=asked["messageId"])
    assert late["state"] == "withdrawn" and "scheduledDeliveryTime" not in late
    await clock.jump(hours=2)
    assert [message.id for message in await society.store.waiting("bob")] == [fires["messageId"]]


async def test_a_message_that_waits_for_no_question_of_the_person_is_refused(client: httpx.AsyncClient) -> None:
    asked = (await send(client, "When?"))["messageId"]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("unlessAnswered_unknown", {"unlessAnswered": "nothing", "delayMs": 1000}),
        ("unlessAnswered_unknown", {"unlessAnswered": 7, "delayMs": 1000}),
        ("unlessAnswered_invalid", {"unlessAnswered": asked}),
        ("unlessAnswered_invalid", {"unlessAnswered": asked, "delayMs": 1000, "every": "daily 08:00"}),
    ]
    for code, more in wrong:
        answer = await client.post(f"{API}/messages", json={"to": "bob", "payload": {"text": "x"}, **more})
        assert (answer.status_code, answer.json()["code"]) == (422, code), more


async def test_away_tells_what_happened_since_then(tmp_path: Path) -> None:
    async with stage(tmp_path) as here, client_of(here) as client:
        here.server.script("before")
        await send(client, "early")
        await here.texts()
        await here.society.mark_read((await here.heard())[0])
        await here.state("ada", "idle")
        since = (await here.society.tasks())[0].last_at.isoformat().replace("+00:00", "Z")
        while (await get(client, "/away", since=since))["counts"]["finished"]:
            since = SystemClock().now().isoformat().replace("+00:00", "Z")
        here.server.script("after", asks("user", "Tea?", quickReplies=["Yes"]), "")
        done = await send(client, "late")
        await here.texts()
        await here.state("ada", "idle")
        waits = await send(client, "later")
        await here.texts(2)
        await here.state("ada", "idle")
        away = await get(client, "/away", since=since)
    assert away["since"] == since
    assert [task["id"] for task in away["finished"]] == [done["task"]]
    assert [task["id"] for task in away["waiting"]] == [waits["task"]] and away["failed"] == []
    assert away["counts"] == {"finished": 1, "failed": 0, "waiting": 1}
    assert (away["messages"], away["threads"]) == (2, [{"agent": "ada", "unread": 2}])


async def test_metrics_count_tasks_by_state(client: httpx.AsyncClient) -> None:
    await send(client)
    withdrawn = await send(client)
    await client.delete(f"{API}/messages/{withdrawn['messageId']}")
    lines = (await client.get("/metrics")).text.splitlines()
    for state, count in {"working": 1, "waiting": 0, "done": 1, "failed": 0, "stopped": 0}.items():
        assert f'coterie_tasks{{state="{state}"}} {count:.1f}' in lines
