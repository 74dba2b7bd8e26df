"""Reading coterie.toml: every mistake is reported with its location; valid entries are still used."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.config import Config, read_config
from coterie.errors import ConfigError


def config(folder: Path, text: str) -> Config:
    (folder / "coterie.toml").write_text(text)
    return read_config(folder)


def problems(folder: Path, text: str) -> list[str]:
    """The problems of a configuration, fatal or not."""
    try:
        return [str(problem) for problem in config(folder, text).problems]
    except ConfigError as error:
        return [str(problem) for problem in error.problems]


def test_an_empty_file_means_the_documented_defaults_and_one_agent(tmp_path: Path) -> None:
    read = read_config(tmp_path)
    assert (read.server.host, read.server.port) == ("127.0.0.1", 8642)
    assert (read.store.url, read.store.durability, read.store.keep_days) == ("sqlite", "full", 0)
    assert (read.shutdown.delayed, read.shutdown.drain_seconds) == ("deliver", 25)
    assert (read.limits.max_hops, read.limits.mailbox, read.limits.upload_mb) == (256, 10_000, 100)
    assert [agent.id for agent in read.agents] == ["assistant"]
    assert read.problems == ()


def test_commented_lines_of_the_template_show_the_defaults(tmp_path: Path) -> None:
    template = (Path(__file__).parents[1] / "src/coterie/templates/coterie.toml").read_text()
    assert config(tmp_path, template) == Config()
    settings = [
        line[2:] for line in template.splitlines() if line.startswith("# ") and (" = " in line or line[2] == "[")
    ]
    spoken = config(tmp_path, "\n".join(settings).replace('parent = "grace"', ""))
    assert (spoken.server, spoken.store, spoken.shutdown) == (Config().server, Config().store, Config().shutdown)
    assert (spoken.limits, spoken.interruption, spoken.problems) == (Config().limits, Config().interruption, ())
    assert [agent.id for agent in spoken.agents] == ["ada"] and [server.id for server in spoken.mcp] == ["files"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1", 'coterie.toml: server.prot: unknown key, did you mean "port"?'),
        ("[sevrer]", 'coterie.toml: sevrer: unknown key, did you mean "server"?'),
        ('[server]\nport = "80"', 'coterie.toml: server.port: expected a whole number, 1 to 65535, got "80"'),
        ("[server]\nport = 70000", "coterie.toml: server.port: expected a whole number, 1 to 65535, got 70000"),
        ("[limits]\nmailbox = true", "coterie.toml: limits.mailbox: expected a whole number, 1 or more, got true"),
        ('[store]\ndurability = "fast"', 'coterie.toml: store.durability: expected "full" or "relaxed", got "fast"'),
        ('[store]\nurl = "mysql://x"', 'expected "sqlite" or "postgresql://user@host/name", got "mysql://x"'),
        ('[shutdown]\ndelayed = "drop"', 'coterie.toml: shutdown.delayed: expected "deliver" or "keep", got "drop"'),
        ("server = 7", "coterie.toml: server: expected a table [server], got 7"),
        ("[agents.Ada]", "coterie.toml: agents.Ada: an id is 1 to 64 of a-z, 0-9, _ and -"),
        ("[agents.user]", 'coterie.toml: agents.user: the id "user" is taken: choose another'),
        ("[agents.ada]\ndescription = 3", "agents.ada.description: expected a string of at most 500 characters, got 3"),
        ("[agents.ada]\ntools = 3", "coterie.toml: agents.ada.tools: expected a list of strings, got 3"),
        ('[agents.ada]\nprompt_file = "no.md"', "agents.ada.prompt_file: there is no file 'no.md' in the folder"),
        ('[agents.ada]\nparent = "bbo"\n[agents.bob]', "there is no agent 'bbo', did you mean \"bob\"?"),
        ("[mcp.files]", "coterie.toml: mcp.files: expected a command or a url, got neither"),
        ('[mcp.files]\ncommand = "x"\nurl = "http://y"', "mcp.files: expected a command or a url, got both"),
        ("[server\n", "coterie.toml: cannot be read: "),
    ],
)
def test_a_mistake_is_reported_with_its_location_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    (found,) = problems(tmp_path, text)
    assert said in found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[mcp.files]\ncommand = "x"\nheaders = { A = "canary" }',
            "coterie.toml: mcp.files.headers: only a server with a url has headers: use env",
        ),
        (
            '[mcp.files]\nurl = "example.org/mcp"',
            'mcp.files.url: expected an address such as "https://example.org/mcp"',
        ),
        ("[mcp.files]\nstart_seconds = 0", "coterie.toml: mcp.files.start_seconds: expected a whole number, 1 to 3600"),
        ('[mcp.files]\nenv = "canary"', "coterie.toml: mcp.files.env: expected a table of strings"),
        ('[mcp.files]\nargs = "--token canary"', "coterie.toml: mcp.files.args: expected a list of strings"),
        ('[mcp]\nfiles = "http://x?token=canary"', "coterie.toml: mcp.files: expected a table [mcp.files]"),
        ('mcp = "http://x?token=canary"', "coterie.toml: mcp: expected tables such as [mcp.name]"),
        ('[store]\nurl = "postgre://me:canary@x/y"', 'got "postgre://me:***@x/y"'),
        ('[store]\nurl = "postgre://me:a/b:c@canary@x/y"', 'got "postgre://me:***@x/y"'),
        ('[store]\nurl = "postgre://x/y?password=canary"', 'got "postgre://x/y"'),
    ],
)
def test_problems_do_not_show_possible_secrets(tmp_path: Path, text: str, sentence: str) -> None:
    reported = " ".join(problems(tmp_path, text))
    assert sentence in reported and "canary" not in reported


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = '[server]\nport = "x"\n[store]\nkeep_days = -1\n[agents.BAD]\n[agents.ada]\nname = 7\n'
    assert len(problems(tmp_path, text)) == 4


def test_a_wrong_agent_is_left_out_and_the_others_run(tmp_path: Path) -> None:
    read = config(tmp_path, '[agents.ada]\nname = "Ada"\nnmae = "x"\n[agents.bob]\nname = 7\n')
    assert [agent.id for agent in read.agents] == ["ada"]
    assert len(read.problems) == 2


def test_without_agents_in_the_file_there_is_the_assistant(tmp_path: Path) -> None:
    assert [agent.id for agent in config(tmp_path, "[agents]\n").agents] == ["assistant"]


def test_a_wrong_setting_of_the_society_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        config(tmp_path, "[server]\nport = 0")


def test_a_file_that_is_not_text_is_refused_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_config(tmp_path)


toml_value = st.one_of(
    st.integers(-5, 70_000).map(str),
    st.booleans().map(lambda value: str(value).lower()),
    st.sampled_from(['"x"', '""', "[]", '["a"]', "[1]", "{}", '{a="b"}', "1.5", "1979-05-27"]),
)
SECTIONS = ["server", "store", "shutdown", "limits", "agents", "mcp", "odd"]
KEYS = ["host", "port", "url", "durability", "keep_days", "delayed", "mailbox", "name", "tools", "env", "odd"]
toml_key = st.sampled_from(SECTIONS + KEYS)


@given(st.dictionaries(st.tuples(toml_key, toml_key), toml_value, max_size=8))
def test_any_text_gives_a_configuration_or_a_list_of_problems(
    tmp_path_factory: pytest.TempPathFactory, written: dict[tuple[str, str], str]
) -> None:
    text = "\n".join(f"{section}.{key} = {value}" for (section, key), value in written.items())
    for problem in problems(tmp_path_factory.mktemp("config"), text):
        assert problem.startswith("coterie.toml: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temperature = 3", "temperature: expected a number, 0 to 2, got 3"),
        ("temperature = nan", "temperature: expected a number, 0 to 2, got nan"),
        ("top_p = true", "top_p: expected a number, 0 to 1, got true"),
        ("max_tokens = 0", "max_tokens: expected a whole number, 1 or more, got 0"),
        ('reasoning_effort = "Very high"', "reasoning_effort: expected a word such as none, minimal"),
        ('extra_body = "x"', 'extra_body: expected a table, got "x"'),
        ("extra_body = {stream = false}", 'extra_body: expected no "stream", which the runtime sets itself'),
        ("extra_body = {at = 2026-01-01}", "extra_body: expected only values that JSON has"),
        ("topP = 0.5", 'topP: unknown key, did you mean "top_p"?'),
    ],
)
def test_a_wrong_sampling_value_of_an_agent_is_reported(tmp_path: Path, line: str, said: str) -> None:
    (problem,) = problems(tmp_path, f"[agents.ada]\n{line}\n")
    assert f"agents.ada.{said}" in problem
