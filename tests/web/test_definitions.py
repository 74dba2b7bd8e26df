"""Definitions of agents, tools, templates and model lists over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from coterie.clock import SystemClock
from coterie.testing import ModelServer
from coterie.web.app import build_app
from coterie.web.auth import Access
from tests.agent.stage import stage
from tests.web.conftest import BASE, TOKEN

AGENTS = '# mine\n[agents.ada]\nname = "Ada"  # hers\n[agents.bob]\n'


@asynccontextmanager
async def api(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with stage(folder, agents=AGENTS) as here:
        clock = SystemClock()
        app = build_app(here.society, Access(TOKEN, here.society.store.info.log_id, clock), clock=clock)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        base = f"{BASE}/api/v1"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base, headers=headers) as client:
            yield client


async def test_a_team_of_a_template_is_created_changed_retired_and_undone(tmp_path: Path) -> None:
    async with api(tmp_path) as client:
        templates = {one["id"]: one for one in (await client.get("/templates?language=zh")).json()["items"]}
        assert list(templates) == ["assistant", "researcher", "coder", "team"]
        made = await client.post("/definitions", json={"agents": templates["team"]["agents"]})
        assert made.status_code == 201
        lead, *others = made.json()["ids"]
        listed = (await client.get("/definitions")).json()
        by_id = {one["id"]: one for one in listed["items"]}
        assert list(by_id) == ["ada", "bob", lead, *others]
        assert by_id[lead]["name"] == "组长" and {by_id[one]["parent"] for one in others} == {lead}
        shown = (await client.get(f"/agents/{lead}")).json()
        assert (shown["role"], shown["colour"], shown["retired"]) == ("协调", "teal", False)

        stale = {"version": listed["version"], "role": "Boss"}
        assert (await client.patch(f"/definitions/{lead}", json=stale)).status_code == 200
        refused = await client.patch(f"/definitions/{lead}", json=stale | {"role": "Chef"})
        assert (refused.status_code, refused.json()["code"]) == (409, "definitions_changed")

        assert (await client.delete(f"/definitions/{lead}")).status_code == 200
        assert (await client.get(f"/agents/{lead}")).json()["retired"] is True
        changes = (await client.get("/definitions/changes")).json()["items"]
        assert [one["kind"] for one in changes] == ["retired", "changed", "created"]
        assert [one["canUndo"] for one in changes] == [True, False, False]
        assert [field["name"] for field in changes[1]["agents"][0]["fields"]] == ["role"]
        assert (await client.post(f"/definitions/changes/{changes[0]['id']}/undo")).status_code == 200
        assert (await client.get(f"/agents/{lead}")).json()["role"] == "Boss"
        assert (await client.post(f"/definitions/changes/{changes[0]['id']}/undo")).status_code == 409
        text = (tmp_path / "coterie.toml").read_text()
        assert text.startswith("# mine\n") and "# hers" in text


async def test_problems_of_the_file_and_the_request_have_their_codes(tmp_path: Path) -> None:
    async with api(tmp_path) as client:
        for body, status, code in (
            ({"agents": [{"name": "x", "service": "none"}]}, 404, "unknown_service"),
            ({"agents": [{"name": "x", "id": "ada"}]}, 409, "id_taken"),
            ({"agents": [{"name": "x", "id": "Not An Id"}]}, 422, "agent_invalid"),
            ({"agents": [{"name": "x", "colour": "plaid"}]}, 422, "request_invalid"),
            ({"agents": []}, 422, "request_invalid"),
        ):
            answer = await client.post("/definitions", json=body)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert (await client.patch("/definitions/nobody", json={"role": "x"})).json()["code"] == "unknown_agent"
        (tmp_path / "coterie.toml").write_text("[agents.ada")
        broken = await client.post("/definitions", json={"agents": [{"name": "x"}]})
        assert (broken.status_code, broken.json()["code"]) == (422, "config_invalid")
        assert (tmp_path / "coterie.toml").read_text() == "[agents.ada"
        (tmp_path / "coterie.toml").write_text(AGENTS)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ('tools = "*"', {"tools": ["*"]}),
        ('colour = "purple"', {"colour": None}),
        (f'role = "{"x" * 61}"', {"role": "x" * 61}),
        ("name = 5", {"name": "eve"}),
        ('initials = "ABCD"\nparent = 3\nservice = []\ndescription = 1.5', {"initials": "ABCD", "parent": None}),
        ('prompt_file = "long.md"', {"prompt": "x" * 200_001}),
    ],
)
async def test_a_wrong_agent_of_the_file_is_listed_and_others_can_be_changed(
    tmp_path: Path, wrong: str, shown: dict[str, object]
) -> None:
    (tmp_path / "long.md").write_text("x" * 200_001)
    async with api(tmp_path) as client:
        (tmp_path / "coterie.toml").write_text(f"{AGENTS}[agents.eve]\n{wrong}\n")
        got = await client.get("/definitions")
        changed = await client.patch("/definitions/bob", json={"role": "Baker"})
        assert (got.status_code, changed.status_code) == (200, 200)
        listed = {one["id"]: one for one in got.json()["items"]}
        assert list(listed) == ["ada", "bob", "eve"] and listed["eve"] == listed["eve"] | shown
        assert [one["role"] for one in changed.json()["items"]] == ["", "Baker", listed["eve"]["role"]]
        assert wrong in (tmp_path / "coterie.toml").read_text()
        assert (await client.delete("/definitions/eve")).status_code == 200
        assert (await client.get("/definitions/changes")).status_code == 200


async def test_a_value_among_the_agents_is_no_agent_and_stays(tmp_path: Path) -> None:
    async with api(tmp_path) as client:
        (tmp_path / "coterie.toml").write_text('[agents]\nname = "Ada"\n[agents.ada]\n[agents.bob]\n')
        assert [one["id"] for one in (await client.get("/definitions")).json()["items"]] == ["ada", "bob"]
        assert (await client.patch("/definitions/bob", json={"role": "Baker"})).status_code == 200
        assert (await client.delete("/definitions/ada")).status_code == 200
        clash = await client.post("/definitions", json={"agents": [{"name": "Name"}]})
        assert (clash.status_code, clash.json()["code"]) == (422, "config_invalid")
        text = (tmp_path / "coterie.toml").read_text()
        assert text == '[agents]\nname = "Ada"\n[agents.bob]\nrole = "Baker"\n'


async def test_tools_tell_what_they_do_and_whether_they_ask_first(tmp_path: Path) -> None:
    async with api(tmp_path) as client:
        tools = {one["name"]: one for one in (await client.get("/tools")).json()["items"]}
        assert tools["dangerous"] == {
            "name": "dangerous",
            "source": "tools",
            "builtIn": False,
            "description": "Do something that cannot be undone.",
            "approval": True,
        }
        assert tools["send_message"]["builtIn"] and not tools["ring"]["approval"]
        await client.patch("/definitions/bob", json={"tools": ["ring", "!spawn_agent"]})
        given = [one["name"] for one in (await client.get("/tools?agent=bob")).json()["items"]]
        assert "ring" in given and "look" not in given and "spawn_agent" not in given
        assert (await client.get("/tools?agent=nobody")).status_code == 404


async def test_a_service_lists_its_models_with_the_key_that_was_typed(tmp_path: Path) -> None:
    key = "sk-typed-0123456789"
    async with api(tmp_path) as client, ModelServer(models={"small", "large"}, api_key=key) as elsewhere:
        body = {"baseURL": elsewhere.base_url, "key": key}
        found = (await client.post("/services/new/models", json=body)).json()
        assert found == {"code": "ok", "models": ["large", "small"], "detail": ""}
        refused = (await client.post("/services/new/models", json=body | {"key": "sk-wrong"})).json()
        assert refused["code"] == "auth" and "sk-" not in refused["detail"]
        wrong = (await client.post("/services/new/models", json={"baseURL": "http://127.0.0.1:9/v1"})).json()
        assert wrong["code"] == "unreachable" and wrong["models"] == []
        assert (await client.post("/services/main/models")).json()["models"] == ["m"]
        assert (await client.post("/services/none/models")).status_code == 404
