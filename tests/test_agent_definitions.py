"""Creating, changing, retiring and undoing agents of coterie.toml while the society runs."""

from __future__ import annotations

import errno
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from coterie.agent_definitions import NewAgent, edit_agents
from coterie.config import read_config
from coterie.errors import ConfigError, Refused, StoreUnavailable
from coterie.testing import Calls, Says
from tests.agent.stage import Bell, stage

OWNED = """# My society. Do not touch the order.
[limits]
max_rounds = 7          # enough for me

[agents.ada]            # the first one
name = "Ada"            # after the Countess
prompt = "You count."
temperature = 0.3

# Bob is lazy.
[agents.bob]
parent = "ada"

[mcp.none]
command = "true"
"""


def test_an_edit_changes_one_value_and_keeps_every_comment() -> None:
    tables = tomllib.loads(OWNED)["agents"]
    tables["ada"]["prompt"] = 'You count.\n\nSlowly, and in """quotes""" \\ with a slash.\n'
    tables["ada"]["role"] = "Counter"
    tables["zoe"] = {"name": "Zoë", "tools": ["*", "!ring"]}
    edited = edit_agents(OWNED, tables)
    assert tomllib.loads(edited)["agents"] == tables
    assert {line for line in OWNED.splitlines() if "#" in line} <= set(edited.splitlines())
    del tables["bob"]
    edited = edit_agents(edited, tables)
    assert tomllib.loads(edited)["agents"] == tables and "# Bob is lazy." in edited


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment",
        '[agents]\nada = {name = "Ada"}\n',
        'agents.ada.name = "Ada"\n',
        '[agents.ada]\nname = "Ada"\n[limits]\nmax_rounds = 3\n[agents.bob]\nname = "Bob"\n',
        "[agents.ada]\r\nname = 'Ada'\r\n",
    ],
)
def test_any_way_to_write_agents_can_be_edited(text: str) -> None:
    tables = dict(tomllib.loads(text).get("agents", {}))
    for name, fields in tables.items():
        tables[name] = {**fields, "role": "x"}
    tables["new"] = {"name": "New", "prompt": "a\nb"}
    assert tomllib.loads(edit_agents(text, tables)) == tomllib.loads(text) | {"agents": tables}


def test_agents_in_one_inline_table_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"give each a table \[agents.name\]"):
        edit_agents('agents = {ada = {name = "Ada"}}\n', {"ada": {"name": "Ada"}, "bob": {"name": "Bob"}})


def test_a_removed_agent_takes_only_its_own_lines_with_it() -> None:
    tables = tomllib.loads(OWNED)["agents"]
    edited = edit_agents(OWNED, {"bob": tables["bob"]})
    own = OWNED[OWNED.index("[agents.ada]") : OWNED.index("# Bob is lazy.")]
    assert edited == OWNED.replace(own, "")
    assert "# Bob is lazy." in edit_agents(edited, tables)
    # Comments of its neighbours stay when both are removed, and those before an agent's own table are its own.
    nested = OWNED.replace("temperature = 0.3\n", "[agents.ada.extra_body]\nseed = 7\n")
    assert "# Bob is lazy." in edit_agents(nested, {"zoe": {"name": "Zoe"}})


def test_the_commented_rest_of_the_template_stays_behind_the_agents() -> None:
    template = (files("coterie") / "templates" / "coterie.toml").read_text(encoding="utf-8")
    text = template.replace("# [agents.ada]\n# name", "[agents.ada]\nname")
    added = edit_agents(text, {"ada": {"name": "Ada", "role": "Counter"}})
    assert added == text.replace('name = "Ada"\n', 'name = "Ada"\nrole = "Counter"\n')
    removed = edit_agents(text, {"bob": {"name": "Bob"}})
    assert removed.startswith(text.replace('[agents.ada]\nname = "Ada"\n', "").rstrip())
    assert removed.endswith('[agents.bob]\nname = "Bob"\n')


def test_a_new_key_stands_below_the_last_key_and_above_comments() -> None:
    text = '[agents.ada]\n\n# Later.\n[agents.bob]\nname = "Bob"\n\n# The end.\n'
    tables = {"ada": {"role": "Counter"}, "bob": {"name": "Bob", "role": "Helper"}}
    edited = edit_agents(text, tables)
    assert edited == (
        '[agents.ada]\nrole = "Counter"\n\n# Later.\n[agents.bob]\nname = "Bob"\nrole = "Helper"\n\n# The end.\n'
    )


async def test_a_retirement_and_its_undo_keep_comments_and_line_ends(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="") as here:
        file = tmp_path / "coterie.toml"
        text = OWNED.split("[mcp")[0].replace("\n", "\r\n").encode()
        file.write_bytes(text)
        await here.society.definitions.change("bob", {"role": "Sleeper"})
        assert file.read_bytes() == text.replace(b'parent = "ada"', b'parent = "ada"\r\nrole = "Sleeper"')
        await here.society.definitions.retire("ada")
        (retired, _) = await here.society.definitions.changes()
        await here.society.definitions.undo(retired.id)
        after = file.read_bytes()
        assert b"# Bob is lazy.\r\n[agents.bob]" in after and b"# enough for me" in after
        assert after.count(b"\n") == after.count(b"\r\n")


async def test_a_new_agent_answers_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="# mine\n") as here:
        ids = await here.society.definitions.create(
            [NewAgent(fields={"name": "Zoë Müller", "prompt": "You are Zoë.\nBe kind.", "role": "Helper"})]
        )
        assert ids == ["zoe-muller"]
        await here.say("hello", to="zoe-muller")
        assert await here.texts() == ["ok"]
        assert "You are Zoë.\nBe kind." in here.server.requests[0].body["messages"][0]["content"]
    config = read_config(tmp_path)
    # The assistant was there before, although the file did not describe it.
    assert [entry.id for entry in config.agents] == ["assistant", "zoe-muller"] and config.problems == ()
    assert (tmp_path / "coterie.toml").read_text().startswith("# mine\n")


async def test_a_change_by_hand_is_not_overwritten(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=OWNED.split("[mcp")[0]) as here:
        definitions = here.society.definitions
        seen = (await definitions.read()).version
        file = tmp_path / "coterie.toml"
        file.write_text(file.read_text().replace("You count.", "You count to ten."))
        by_hand = file.read_text()
        with pytest.raises(Refused) as refused:
            await definitions.change("ada", {"role": "Counter"}, seen)
        assert refused.value.code == "definitions_changed" and file.read_text() == by_hand
        await definitions.change("ada", {"role": "Counter"}, (await definitions.read()).version)
        assert "You count to ten." in file.read_text() and here.society.agents.profile("ada").role == "Counter"


async def test_each_change_can_be_undone_and_the_undo_too(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=OWNED.split("[mcp")[0]) as here:
        definitions, before = here.society.definitions, (await here.society.definitions.read()).agents
        await definitions.change("ada", {"prompt": "You multiply.", "tools": [], "colour": "red"})
        after = (await definitions.read()).agents
        assert after["ada"] == {**before["ada"], "prompt": "You multiply.", "tools": [], "colour": "red"}
        await definitions.change("bob", {"name": "Robert"})
        renamed, changed = await definitions.changes()
        await definitions.undo(changed.id)
        assert (await definitions.read()).agents == {**before, "bob": {**before["bob"], "name": "Robert"}}
        with pytest.raises(Refused, match="Ada was changed again since"):
            await definitions.undo(changed.id)
        await definitions.undo((await definitions.changes())[0].id)
        await definitions.undo(renamed.id)
        assert (await definitions.read()).agents == {**after, "bob": before["bob"]}
        with pytest.raises(Refused) as refused:
            await definitions.undo("nothing")
        assert refused.value.code == "unknown_change"


async def test_agents_below_one_whose_creation_is_undone_move_up(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=OWNED.split("[mcp")[0]) as here:
        definitions = here.society.definitions
        await definitions.create(
            [
                NewAgent(key="lead", fields={"name": "Lead", "parent": "ada"}),
                NewAgent(fields={"name": "Helper", "parent": "lead"}),
            ]
        )
        (created,) = await definitions.changes()
        await definitions.create([NewAgent(fields={"name": "Zoe", "parent": "helper"})])
        await definitions.change("bob", {"parent": "lead"})
        before = (await definitions.read()).agents
        await definitions.undo(created.id)
        after = (await definitions.read()).agents
        assert {one: fields.get("parent") for one, fields in after.items()} == {"ada": None, "bob": "ada", "zoe": "ada"}
        assert read_config(tmp_path).problems == ()
        await definitions.undo((await definitions.changes())[0].id)
        assert (await definitions.read()).agents == before


async def test_a_retired_agent_stops_and_an_undo_brings_it_back(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=OWNED.split("[mcp")[0]) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(Calls("look", {"name": "a"}),)))
        await here.say("look", to="ada")
        await Bell.rang.wait()
        await here.society.retire_agent("ada")
        await here.state("ada", "idle", "blocked")
        assert "ada" not in [profile.id for profile in here.society.agents.all_profiles()]
        assert here.society.agents.profile("bob").parent is None
        with pytest.raises(Refused) as refused:
            await here.society.retire_agent("bob")
        assert refused.value.code == "last_agent"
        Bell.may_end.set()
        (retired,) = await here.society.definitions.changes()
        await here.society.definitions.undo(retired.id)
        assert here.society.agents.profile("bob").parent == "ada"
        await here.say("are you back?", to="ada")

        async def answered() -> bool:
            return "ok" in [m.payload.get("text") for m in await here.society.store.thread("ada", limit=20)]

        await here.until(answered)


async def test_a_wrong_definition_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=OWNED.split("[mcp")[0]) as here:
        definitions, before = here.society.definitions, (tmp_path / "coterie.toml").read_text()
        for fields, message in (
            ({"colour": "plaid"}, "ada.colour: expected"),
            ({"role": "x" * 61}, "ada.role: expected a string of at most 60"),
            ({"parent": "bob"}, "cannot be below itself"),
        ):
            with pytest.raises(Refused, match=message):
                await definitions.change("ada", fields)
        for new, code in (
            (NewAgent(id="Ada!", fields={}), "agent_invalid"),
            (NewAgent(id="user", fields={}), "id_taken"),
            (NewAgent(id="bob", fields={}), "id_taken"),
            (NewAgent(fields={"name": "x", "parent": "nobody"}), "unknown_agent"),
        ):
            with pytest.raises(Refused) as refused:
                await definitions.create([NewAgent(fields={"name": "Fine"}), new])
            assert refused.value.code == code
        assert (tmp_path / "coterie.toml").read_text() == before and await definitions.changes() == []


async def test_nothing_is_written_while_another_file_cannot_be_read(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        agents, services = (tmp_path / "coterie.toml").read_text(), (tmp_path / "llmservices.json").read_text()
        (tmp_path / "llmservices.json").write_text('{"services": [')
        with pytest.raises(ConfigError, match=r"llmservices\.json: line 1"):
            await here.society.definitions.create([NewAgent(fields={"name": "Zoe"})])
        assert (tmp_path / "coterie.toml").read_text() == agents
        (tmp_path / "llmservices.json").write_text(services)
        assert await here.society.definitions.create([NewAgent(fields={"name": "Zoe"})]) == ["zoe"]


async def test_a_prompt_in_a_file_of_its_own_stays_there(tmp_path: Path) -> None:
    (tmp_path / "ada.md").write_text("You count.\n")
    async with stage(tmp_path, agents='[agents.ada]\nprompt_file = "ada.md"\n') as here:
        definitions = here.society.definitions
        assert (await definitions.read()).agents["ada"]["prompt"] == "You count.\n"
        await definitions.change("ada", {"prompt": "You multiply.\n"})
        assert (tmp_path / "ada.md").read_text() == "You multiply.\n"
        assert tomllib.loads((tmp_path / "coterie.toml").read_text()) == {"agents": {"ada": {"prompt_file": "ada.md"}}}
        assert here.society.agents.profile("ada").prompt == "You multiply.\n"
        seen = (await definitions.read()).version
        (tmp_path / "ada.md").write_text("By hand.\n")
        assert (await definitions.read()).version != seen


@pytest.mark.parametrize("by_hand", [b"By hand.\r\n", b"Gr\xfc\xdfe.\n"])
async def test_an_undo_of_a_retirement_keeps_a_prompt_file_that_changed(tmp_path: Path, by_hand: bytes) -> None:
    file = tmp_path / "ada.md"
    file.write_bytes(b"You count.\n")
    async with stage(tmp_path, agents='[agents.ada]\nprompt_file = "ada.md"\n[agents.bob]\n') as here:
        definitions = here.society.definitions
        await definitions.retire("ada")
        file.write_bytes(by_hand)
        await definitions.undo((await definitions.changes())[0].id)
        assert file.read_bytes() == by_hand
        assert here.society.agents.profile("ada").prompt == by_hand.decode(errors="replace").replace("\r\n", "\n")
        # The history has the agent as it came back, so this undo can be undone, too.
        await definitions.undo((await definitions.changes())[0].id)
        assert list((await definitions.read()).agents) == ["bob"] and file.read_bytes() == by_hand


async def test_an_undo_of_a_retirement_keeps_a_shared_prompt_file(tmp_path: Path) -> None:
    file = tmp_path / "team.md"
    file.write_bytes(b"You count.\n")
    agents = '[agents.ada]\nprompt_file = "team.md"\n[agents.bob]\nprompt_file = "team.md"\n'
    async with stage(tmp_path, agents=agents) as here:
        definitions = here.society.definitions
        await definitions.retire("ada")
        (retired,) = await definitions.changes()
        await definitions.change("bob", {"prompt": "You multiply.\n"})
        await definitions.undo(retired.id)
        assert file.read_bytes() == b"You multiply.\n"
        assert {one["prompt"] for one in (await definitions.read()).agents.values()} == {"You multiply.\n"}


async def test_a_retired_agent_whose_prompt_file_was_deleted_comes_back_with_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "ada.md").write_bytes(b"You count.\n")
    async with stage(tmp_path, agents='[agents.ada]\nprompt_file = "ada.md"\n[agents.bob]\n') as here:
        definitions = here.society.definitions
        await definitions.retire("ada")
        (tmp_path / "ada.md").unlink()
        await definitions.undo((await definitions.changes())[0].id)
        assert here.society.agents.profile("ada").prompt == "You count.\n"
        await definitions.undo((await definitions.changes())[0].id)
        assert list((await definitions.read()).agents) == ["bob"]


async def test_a_changed_prompt_file_keeps_its_line_ends(tmp_path: Path) -> None:
    (tmp_path / "ada.md").write_bytes(b"You count.\r\nSlowly.\r\n")
    async with stage(tmp_path, agents='[agents.ada]\nprompt_file = "ada.md"\n') as here:
        await here.society.definitions.change("ada", {"prompt": "You count.\nFast.\n"})
        assert (tmp_path / "ada.md").read_bytes() == b"You count.\r\nFast.\r\n"


async def test_a_failed_write_of_the_configuration_restores_the_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "ada.md").write_bytes(b"You count.\r\n")
    async with stage(tmp_path, agents='[agents.ada]\nprompt_file = "ada.md"\n') as here:
        # The name of the file is as long as possible, so there is no temporary file beside it.
        (tmp_path / "coterie.toml").rename(tmp_path / ("c" * 250))
        (tmp_path / "coterie.toml").symlink_to(tmp_path / ("c" * 250))
        before = (tmp_path / "coterie.toml").read_bytes()
        with pytest.raises(StoreUnavailable, match="nothing was changed"):
            await here.society.definitions.change("ada", {"prompt": "You multiply.", "role": "Counter"})
        assert (tmp_path / "ada.md").read_bytes() == b"You count.\r\n"
        assert (tmp_path / "coterie.toml").read_bytes() == before
        assert await here.society.definitions.changes() == []


async def test_a_failed_write_names_the_files_that_could_not_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ada.md").write_bytes(b"You count.\n")
    async with stage(tmp_path, agents='[agents.ada]\nprompt_file = "ada.md"\n') as here:

        def replace_once(path: Path, data: bytes) -> None:
            if path.read_bytes() != b"You count.\n":
                raise OSError(errno.ENOSPC, "No space left on device")
            path.write_bytes(data)

        monkeypatch.setattr("coterie.agent_definitions.replace_file", replace_once)
        with pytest.raises(StoreUnavailable, match=r"only ada\.md changed \(No space left on device\)"):
            await here.society.definitions.change("ada", {"prompt": "You multiply.\n", "role": "Counter"})
        assert (tmp_path / "ada.md").read_bytes() == b"You multiply.\n"
