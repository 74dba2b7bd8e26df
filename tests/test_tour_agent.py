from __future__ import annotations

import json
from pathlib import Path

from coterie import Society
from coterie.tour.provider import SEER

SERVICE = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m"}


async def state_of_the_seer(society: Society) -> str | None:
    stored = await society.store.agent(SEER)
    return stored.state if stored else None


async def test_the_second_agent_exists_across_restarts_until_something_is_configured(tmp_path: Path) -> None:
    for _ in range(2):
        async with Society.open(tmp_path) as society:
            assert await society.agents.with_capability("vision") == [SEER]
            assert society.setup.view("tour-sees").used_by == [SEER]


async def test_a_society_with_a_model_has_one_agent(tmp_path: Path) -> None:
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": [SERVICE]}))
    async with Society.open(tmp_path) as society:
        assert list(society.agents) == ["assistant"] and await state_of_the_seer(society) is None


async def test_a_society_with_configured_agents_gets_no_second_agent(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
    async with Society.open(tmp_path) as society:
        assert list(society.agents) == ["ada"] and await state_of_the_seer(society) is None


async def test_the_first_real_service_terminates_the_second_agent_for_good(tmp_path: Path) -> None:
    async with Society.open(tmp_path) as society:
        await society.setup.put("main", SERVICE)
        assert list(society.agents) == ["assistant"] and await state_of_the_seer(society) == "terminated"
        await society.setup.delete("main")
        assert list(society.agents) == ["assistant"]
    async with Society.open(tmp_path) as society:
        assert list(society.agents) == ["assistant"]


async def test_the_second_agent_is_terminated_when_the_owner_configures_agents(tmp_path: Path) -> None:
    async with Society.open(tmp_path) as society:
        (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
        await society.reload()
        assert list(society.agents) == ["ada"] and await state_of_the_seer(society) == "terminated"


async def test_files_changed_while_stopped_count_at_the_start(tmp_path: Path) -> None:
    async with Society.open(tmp_path):
        pass
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": [SERVICE]}))
    async with Society.open(tmp_path) as society:
        assert list(society.agents) == ["assistant"] and await state_of_the_seer(society) == "terminated"


async def test_a_second_agent_terminated_by_the_person_stays_terminated(tmp_path: Path) -> None:
    async with Society.open(tmp_path) as society:
        await society.terminate_agent(SEER)
    async with Society.open(tmp_path) as society:
        await society.reload()
        assert list(society.agents) == ["assistant"]


async def test_an_agent_of_the_person_with_the_same_id_is_kept(tmp_path: Path) -> None:
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": [SERVICE]}))
    async with Society.open(tmp_path) as society:
        await society.create_agent(id=SEER, service="main")
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": []}))
        await society.reload()
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": [SERVICE]}))
        await society.reload()
        assert await state_of_the_seer(society) == "idle" and society.agents.profile(SEER).service == "main"
