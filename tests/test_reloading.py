"""Reloading the owner's files while the society runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.testing import Calls, Says, Status
from tests.agent.stage import Bell, Stage, each, stage

TWO = "[agents.ada]\n[agents.bob]\n"


def locations(problems: Any) -> list[str]:
    return [problem.location for problem in problems]


def services(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "llmservices.json"
    document = json.loads(file.read_text())
    change(document["services"][0])
    file.write_text(json.dumps(document))


async def state_of(here: Stage, agent: str) -> str:
    found = await here.society.store.agent(agent)
    assert found is not None
    return found.state


@pytest.mark.parametrize(
    ("file", "text", "place"),
    [
        ("llmservices.json", '{"services": [', "llmservices.json: line 1"),
        ("coterie.toml", "[agents.ada", "coterie.toml"),
        ("coterie.toml", "[limits]\nmax_rounds = 0\n[agents.zoe]\n", "coterie.toml: limits.max_rounds"),
    ],
)
async def test_a_file_that_cannot_be_read_leaves_everything_as_it_was(
    tmp_path: Path, file: str, text: str, place: str
) -> None:
    async with stage(tmp_path) as here:
        before = here.society.config
        (tmp_path / file).write_text(text)
        with pytest.raises(ConfigError) as error:
            await here.society.reload()
        assert str(error.value.problems[0]).startswith(place)
        assert here.society.config == before and [entry.id for entry in here.society.services] == ["main"]
        await here.say("still there?")
        assert await here.texts() == ["ok"]
        assert await here.society.store.agent("zoe") is None
        (tmp_path / file).write_text(TWO if file == "coterie.toml" else '{"services": []}')


async def test_a_services_file_that_was_mended_is_no_longer_a_problem(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        configuration, file = here.society.configuration, tmp_path / "llmservices.json"
        before = file.read_text()
        file.write_text('{"services": [')
        with pytest.raises(ConfigError):
            await here.society.reload()
        assert not configuration.health.is_applied
        file.write_text(before)
        await configuration.reload_services()  # what the setup page does
        assert (configuration.health.problems, configuration.health.is_applied) == ((), True)
        (tmp_path / "coterie.toml").write_text("[agents.ada")
        with pytest.raises(ConfigError):
            await here.society.reload()
        await configuration.reload_services()
        assert locations(configuration.health.problems)[0].startswith("coterie.toml")
        assert not configuration.health.is_applied
        (tmp_path / "coterie.toml").write_text(TWO)


async def test_a_reload_adds_new_agents_and_updates_existing_ones(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        (tmp_path / "coterie.toml").write_text(
            '[agents.ada]\nname = "Countess"\nprompt = "You count."\n[agents.bob]\n[agents.zoe]\nparent = "ada"\n'
        )
        assert await here.society.reload() == ()
        await here.say("hello", to="zoe")
        assert await here.texts() == ["ok"]
        await here.say("hello")
        assert "You count." in (await here.server.wait_for_request(2)).body["messages"][0]["content"]
        ada, zoe = await here.society.store.agent("ada"), await here.society.store.agent("zoe")
        assert ada is not None and ada.name == "Countess" and zoe is not None and zoe.parent == "ada"


async def test_an_agent_removed_from_the_file_keeps_its_mail_and_continues_when_it_is_added_again(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as here:
        (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
        assert locations(await here.society.reload()) == ["coterie.toml: agents.bob"]
        await here.say("where are you?", to="bob")
        await here.state("bob", "blocked")
        assert "bob" not in list(here.society.agents)
        (tmp_path / "coterie.toml").write_text(TWO)
        assert await here.society.reload() == ()
        texts = await here.texts(2)
        assert "no longer described" in texts[0] and texts[1] == "ok"


async def test_blocked_agents_continue_once_their_service_is_repaired(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(401, "no"))
        await here.say("hello")
        await here.state("ada", "blocked")
        await here.society.reload()
        await here.say("are you there?", to="bob")
        await here.texts(2)
        assert len(here.server.requests) == 2, "nothing was mended, so only bob was asked"
        services(tmp_path, lambda entry: entry.update(apiKey="a-new-key"))
        await here.society.reload()
        assert (await here.texts(3))[2] == "ok"
        assert here.server.requests[-1].headers["authorization"] == "Bearer a-new-key"


async def test_a_paused_agent_is_not_woken_by_a_repaired_service(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(401, "no"))
        await here.say("hello")
        await here.state("ada", "blocked")
        await here.society.pause("ada")
        services(tmp_path, lambda entry: entry.update(apiKey="a-new-key"))
        await here.society.reload()
        await here.say("are you there?", to="bob")
        await here.texts(2)
        assert len(here.server.requests) == 2 and await state_of(here, "ada") == "blocked"
        await here.society.resume("ada")
        assert (await here.texts(3))[2] == "ok"


async def test_an_approved_call_runs_although_the_service_of_its_agent_is_gone(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[agents.ada]\nservice = 'main'\n") as here:
        here.server.script(Says(calls=(Calls("dangerous", {"name": "a"}),)), "done")
        await here.say("go")
        (question,) = await here.heard()
        services(tmp_path, lambda entry: entry.update(id="renamed"))
        await here.society.reload()
        await here.say(question.payload["quickReplies"][0], in_reply_to=question.id, option=0)
        await here.state("ada", "blocked")
        assert Bell.rings == ["a"] and len(here.server.requests) == 1
        services(tmp_path, lambda entry: entry.update(id="main"))
        await here.society.reload()
        assert (await here.texts(3))[2] == "done"
        assert [text for role, text in await here.history() if role == "tool"] == ["a rang"]


async def test_a_raised_token_budget_unblocks_agents(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[limits]\ntokens_per_day = 1\n" + TWO) as here:
        await here.say("one")
        await here.texts()
        await here.say("two")
        await here.state("ada", "blocked")
        (tmp_path / "coterie.toml").write_text("[limits]\ntokens_per_day = 1000000\n" + TWO)
        await here.society.reload()
        assert (await here.texts(3))[2] == "ok"


async def test_changed_limits_apply_from_the_next_step(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        rules = "[limits]\nmax_rounds = 1\nmailbox = 1\nupload_mb = 1\n[shutdown]\ndelayed = 'keep'\n"
        (tmp_path / "coterie.toml").write_text(rules + TWO)
        assert await here.society.reload() == ()
        here.server.default = each(ada=[Says(calls=(Calls("look", {}),))])
        await here.say("work")
        await here.texts()
        assert len(here.server.requests) == 1 and here.society.artifacts.max_file_bytes == 1_000_000
        assert here.society.config.shutdown.delayed == "keep" and here.society.store.limits.mailbox == 1


async def test_settings_that_need_a_restart_are_reported_until_then(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        later = '[server]\nport = 9999\n[store]\ndurability = "relaxed"\nkeep_days = 3\n[mcp.x]\nurl = "http://127.0.0.1:9"\n'
        (tmp_path / "coterie.toml").write_text(later + TWO)
        for _ in range(2):
            problems = await here.society.reload()
            assert locations(problems) == ["coterie.toml: server", "coterie.toml: store", "coterie.toml: mcp"]
        assert here.society.config.server.port == 8642 and here.society.config.store.keep_days == 3
        (tmp_path / "coterie.toml").write_text(TWO)


async def test_user_tools_are_reloaded_and_errors_in_them_are_reported(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        code = "from coterie import tool\n@tool\ndef hum() -> str:\n    'Hum.'\n    return 'mmm'\n"
        (tmp_path / "tools.py").write_text(code)
        await here.society.reload()
        await here.say("hello")
        offered = [tool["function"]["name"] for tool in (await here.server.wait_for_request()).body["tools"]]
        assert "hum" in offered and "ring" not in offered
        (tmp_path / "tools.py").write_text("def oops(:\n")
        assert locations(await here.society.reload()) == ["tools.py"]


async def test_an_unknown_service_of_an_agent_is_reported_with_a_suggestion(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as here:
        (tmp_path / "coterie.toml").write_text("[agents.ada]\nservice = 'mian'\n[agents.bob]\n")
        (problem,) = await here.society.reload()
        assert problem.location == "coterie.toml: agents.ada.service" and 'did you mean "main"' in problem.message
        await here.say("hello")
        await here.state("ada", "blocked")
        assert "mian" in (await here.texts())[0]
        (tmp_path / "coterie.toml").write_text(TWO)


async def test_a_reload_does_not_disturb_a_running_turn(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(Calls("ring", {"name": "tower"}),)), "it rang")
        await here.say("ring it")
        await Bell.rang.wait()
        services(tmp_path, lambda entry: entry.update(name="Another name"))
        await here.society.reload()
        Bell.may_end.set()
        assert await here.texts() == ["it rang"]


async def test_a_terminated_agent_in_the_file_stays_terminated_after_a_reload(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        await here.society.terminate_agent("bob")
        (problem,) = await here.society.reload()
        assert problem.location == "coterie.toml: agents.bob" and "terminated" in problem.message
        assert list(here.society.agents) == ["ada"]
