from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from tests.engines import Postgres

from .commands import coterie
from .environment import Environment

SERVICE = '{"id": "main", "baseURL": "http://127.0.0.1:1/v1", "model": "m"}'


def test_a_valid_folder_has_no_problems(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[agents.ada]\nservice = "main"\n')
    (folder / "llmservices.json").write_text(f'{{"services": [{SERVICE}]}}')

    done = coterie("check", "--dir", folder)

    assert done.code == 0
    assert f"sqlite {sqlite3.sqlite_version}" in done.stdout
    assert "agents: ada" in done.stdout
    assert "services: main" in done.stdout
    assert "No problems found." in done.stdout


def test_every_problem_is_reported_with_its_file_and_location(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[server]\nport = "x"\n[agents.ada]\nnmae = "Ada"\n')
    (folder / "llmservices.json").write_text('{"services": [{"id": "main", "model": 7}]}')

    done = coterie("check", "--dir", folder)

    assert done.code == 1
    for place in (
        "coterie.toml: server.port: expected a whole number",
        'coterie.toml: agents.ada.nmae: unknown key, did you mean "name"?',
        "llmservices.json: services[0].baseURL",
        "llmservices.json: services[0].model",
    ):
        assert f"Problem: {place}" in done.stdout


def test_a_problem_is_reported_once(folder: Path) -> None:
    (folder / "llmservices.json").write_text('{"services": {}}')

    (problem,) = coterie("check", "--dir", folder, "--json").json["problems"]
    assert problem["message"] == "expected an array, got an object"


def test_an_agent_whose_service_does_not_exist_is_a_problem(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[agents.ada]\nservice = "mian"\n')
    (folder / "llmservices.json").write_text(f'{{"services": [{SERVICE}]}}')

    (problem,) = coterie("check", "--dir", folder, "--json").json["problems"]

    assert problem["place"] == "coterie.toml: agents.ada.service"
    assert 'did you mean "main"?' in problem["message"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("coterie.toml", "[server"),
        ("llmservices.json", "{"),
        ("coterie.toml", '[store]\nurl = "mysql"'),
        ("coterie.toml", '[server]\npublic_url = "nowhere"'),
    ],
)
def test_a_problem_that_prevents_a_start_is_fatal(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)

    done = coterie("check", "--dir", folder, "--json")

    assert done.code == 1
    assert [(p["place"].split(":")[0], p["fatal"]) for p in done.json["problems"]] == [(name, True)]


def test_the_reported_engine_is_the_configured_one_and_its_version_that_of_the_server(
    folder: Path, shared: Postgres, tmp_path: Path
) -> None:
    (folder / "coterie.toml").write_text(f"[store]\nurl = {json.dumps(shared.url(tmp_path))}")

    checked = coterie("check", "--dir", folder, "--json").json

    version = shared.execute("SHOW server_version")[0][0]
    assert (checked["engine"], checked["engineVersion"], checked["problems"]) == ("postgresql", version, [])


def test_a_folder_without_a_society_is_an_error(tmp_path: Path) -> None:
    assert "there is no society" in coterie("check", "--dir", tmp_path).failure


def test_the_fixed_tokens_of_each_agent_are_estimated(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[agents.ada]\n[agents.bob]\ntools = []\nprompt = "You know a lot. "\n')
    (folder / "llmservices.json").write_text(f'{{"services": [{SERVICE}]}}')

    costs = coterie("check", "--dir", folder, "--json").json["fixedTokens"]

    assert 300 < costs["bob"] < costs["ada"] < 2_000
    tools = ["from coterie import tool", "@tool", "def look() -> str:", '    "Look."', '    return ""', ""]
    (folder / "tools.py").write_text("\n".join(tools))
    more = coterie("check", "--dir", folder, "--json").json["fixedTokens"]
    assert more["ada"] > costs["ada"] and more["bob"] == costs["bob"]
    expected = f"fixed tokens per request (prompt and tools, estimated): ada {more['ada']:,}, bob {more['bob']:,}"
    assert expected in coterie("check", "--dir", folder).stdout


def test_a_prompt_that_fills_the_context_window_is_a_warning(folder: Path) -> None:
    (folder / "coterie.toml").write_text(f'[agents.ada]\nprompt = "{"You know a lot. " * 500}"\n[agents.bob]\n')
    (folder / "llmservices.json").write_text(f'{{"services": [{SERVICE[:-1]}, "contextTokens": 4000}}]}}')

    done = coterie("check", "--dir", folder)

    assert done.code == 0
    assert "Warning: ada: prompt and tools take about" in done.stdout and "Warning: bob" not in done.stdout


def problems_of(folder: Path, *options: str) -> dict[str, str]:
    """The messages of all problems, by place."""
    done = coterie("check", "--dir", folder, "--json", *options)
    assert done.code == (1 if done.json["problems"] else 0)
    return {problem["place"]: problem["message"] for problem in done.json["problems"]}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("import nothing_of_that_name\n", 1, "ModuleNotFoundError"),
        ("x = 1\ndef broken(:\n", 2, "SyntaxError"),
        (
            "from coterie import tool\n\n\n@tool\ndef look_up(city) -> str:\n    return city\n",
            4,
            'tool look_up: parameter "city" needs a type',
        ),
        (
            "from coterie import tool\n\n\n@tool(effect='some')\ndef look_up(city: str) -> str:\n    return city\n",
            4,
            "effect is pure, idempotent, unsafe",
        ),
        ("raise SystemExit('no licence')\n", 1, "no licence"),
    ],
)
def test_an_error_in_a_tool_file_is_reported_with_its_line(folder: Path, text: str, line: int, message: str) -> None:
    (folder / "tools.py").write_text(text)

    ((found, reason),) = problems_of(folder).items()

    assert found == "tools.py"
    assert reason.startswith(f"line {line}: ") and message in reason


def test_what_a_tool_file_prints_does_not_mix_with_the_json(folder: Path) -> None:
    (folder / "tools.py").write_text("print('loaded')\n")

    assert problems_of(folder) == {}


def test_a_built_in_name_of_an_owners_tool_is_a_problem(folder: Path) -> None:
    (folder / "tools.py").write_text("from coterie import tool\n\n@tool\ndef list_agents() -> str:\n    return ''\n")

    assert "a built-in tool has that name" in problems_of(folder)["tools.py"]


LOOK_UP = "from coterie import tool\n\n@tool\ndef look_up(city: str) -> str:\n    return city\n"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("lok_up", '"lok_up" matches no tool, did you mean "look_up"?'),
        ("sendmessage", '"sendmessage" matches no tool, did you mean "send_message"?'),
        ("weather_*", '"weather_*" matches no tool'),
        ("flies__*", '"flies__*" matches no tool, did you mean "files__*"?'),
        ("web__search", '"web__search" matches no tool: there is no MCP server [mcp.web]'),
    ],
)
def test_a_tool_pattern_that_matches_nothing_is_a_problem(folder: Path, pattern: str, message: str) -> None:
    (folder / "tools.py").write_text(LOOK_UP)
    (folder / "coterie.toml").write_text(
        f"[agents.ada]\ntools = ['{pattern}']\n[mcp.files]\nurl = 'http://127.0.0.1:1/mcp'\n"
    )

    assert problems_of(folder) == {"coterie.toml: agents.ada.tools": message}


@pytest.mark.parametrize("pattern", ["*", "look_up", "look_*", "files__read", "files__*", "*__read", "list_agents"])
def test_a_tool_pattern_that_can_match_is_no_problem(folder: Path, pattern: str) -> None:
    (folder / "tools.py").write_text(LOOK_UP)
    (folder / "coterie.toml").write_text(
        f"[agents.ada]\ntools = ['{pattern}']\n[mcp.files]\nurl = 'http://127.0.0.1:1/mcp'\n"
    )

    assert problems_of(folder) == {}


def test_names_that_may_be_in_a_broken_tool_file_are_not_reported_as_well(folder: Path) -> None:
    (folder / "tools.py").write_text(LOOK_UP + "1 / 0\n")
    (folder / "coterie.toml").write_text("[agents.ada]\ntools = ['look_up']\n")

    [(place, message)] = problems_of(folder).items()
    assert place == "tools.py" and message.startswith("line 6: ")


def test_a_missing_mcp_program_is_a_problem(folder: Path) -> None:
    (folder / "coterie.toml").write_text("[mcp.files]\ncommand = 'no-such-program-here'\n")

    assert problems_of(folder) == {
        "coterie.toml: mcp.files.command": (
            'there is no program "no-such-program-here" on the PATH: install it, or write its whole path'
        )
    }


def test_keys_of_llmservices_json_without_effect_are_problems(folder: Path) -> None:
    (folder / "llmservices.json").write_text(
        """{"services": [{"id": "main", "baseURL": "http://127.0.0.1:1/v1", "model": "m", "_note": "mine",
            "colour": 1, "concurrentRequests": 2, "limits": {"videoMinutes": 3}}], "$schema": "x", "version": 1}"""
    )

    found = problems_of(folder)

    assert set(found) == {
        "llmservices.json: services[0].colour",
        "llmservices.json: services[0].concurrentRequests",
        "llmservices.json: services[0].limits.videoMinutes",
        "llmservices.json: version",
    }
    assert 'did you mean "maxConcurrentRequests"?' in found["llmservices.json: services[0].concurrentRequests"]


def test_a_wrong_price_is_a_problem_with_its_service_and_key(folder: Path) -> None:
    priced = [
        f'{SERVICE[:-1]}, "price": {{"input": 1, "output": 2}}}}',
        f'{SERVICE[:-1].replace("main", "b")}, "price": {{"input": "1", "output": 2, "outptu": 3}}}}',
        f'{SERVICE[:-1].replace("main", "c")}, "price": {{"input": 1, "output": 2, "currency": "EUR"}}}}',
    ]
    (folder / "llmservices.json").write_text(f'{{"services": [{", ".join(priced)}]}}')

    found = coterie("check", "--dir", folder, "--json").json

    assert [problem["place"] for problem in found["problems"]] == [
        "llmservices.json: services[1].price.outptu",
        "llmservices.json: services[1].price.input",
        "llmservices.json: services[2].price.currency",
    ]
    assert [warning for warning in found["warnings"] if "price" in warning] == [], "they are problems already"


def test_a_price_that_is_probably_a_mistake_and_a_missing_one_are_warnings(folder: Path) -> None:
    prices = {
        "good": {"input": 0.25, "cachedInput": 0.025, "output": 2},
        "free": {"input": 0, "output": 0},
        "high": {"input": 2500, "output": 2},
        "low": {"input": 0.25, "output": 0.000002},
        "cache": {"input": 1, "cachedInput": 2, "output": 2},
        "none": None,
    }
    services = [{**json.loads(SERVICE), "id": name, "price": price} for name, price in prices.items()]
    (folder / "llmservices.json").write_text(json.dumps({"services": services}))

    done = coterie("check", "--dir", folder)

    assert done.code == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("Warning: ") and "price" in line] == [
        "Warning: high: price.input is 2,500 USD for a million tokens: is it for more than a million tokens?",
        "Warning: low: price.output is 0.000002 USD for a million tokens: is it for a single token, or for a thousand?",
        "Warning: cache: price.cachedInput is higher than price.input; a cache usually makes input cheaper",
        "Warning: none: it has no price, so the cost of its requests is unknown",
    ]
    (folder / "llmservices.json").write_text(f'{{"services": [{SERVICE}]}}')
    assert not any("price" in warning for warning in coterie("check", "--dir", folder, "--json").json["warnings"])


def test_an_unknown_provider_is_a_problem(folder: Path) -> None:
    (folder / "llmservices.json").write_text(
        """{"services": [{"id": "a", "provider": "openai", "baseURL": "http://127.0.0.1:1/v1", "model": "m"},
            {"id": "b", "provider": "antropic", "baseURL": "http://127.0.0.1:1/v1", "model": "m"}]}"""
    )

    assert problems_of(folder) == {
        "llmservices.json: services[1].provider": 'there is no provider "antropic"; did you mean "anthropic"?'
    }


@pytest.mark.parametrize(
    ("given", "meant"), [("image", "vision"), ("tools", "tool_calling"), ("json_schema", "structured_output")]
)
def test_another_products_name_of_a_capability_is_a_problem(folder: Path, given: str, meant: str) -> None:
    (folder / "llmservices.json").write_text(
        f'{{"services": [{SERVICE[:-1]}, "capabilities": {{"input": ["text", "{given}"]}}}}]}}'
    )

    assert f'did you mean "{meant}"?' in problems_of(folder)["llmservices.json: services[0].capabilities.input[1]"]


def test_a_deep_check_starts_mcp_servers_and_asks_services(env: Environment, tmp_path: Path) -> None:
    server = shutil.copy(Path(__file__).parent.parent / "agent" / "stdio_server.py", tmp_path)
    good = f"command = '{sys.executable}'\nargs = ['{server}']\n"
    bad = f"command = '{sys.executable}'\nargs = ['-c', 'import sys; sys.exit(\"out of order\")']\n"
    toml = "[agents.ada]\ntools = ['good__add', 'good__subtract', 'bad__any']\n"
    (env.folder / "coterie.toml").write_text(f"{toml}[mcp.good]\n{good}[mcp.bad]\n{bad}")
    services = json.loads((env.folder / "llmservices.json").read_text())
    services["services"].append({"id": "gone", "baseURL": "http://127.0.0.1:1/v1", "model": "m"})
    (env.folder / "llmservices.json").write_text(json.dumps(services))

    done = coterie("check", "--dir", env.folder, "--deep", "--json")

    results = {(one["kind"], one["id"]): one for one in done.json["connections"]}
    assert {name: one["ok"] for name, one in results.items()} == {
        ("mcp", "good"): True,
        ("mcp", "bad"): False,
        ("service", "main"): True,
        ("service", "gone"): False,
    }
    assert "good__add" in results["mcp", "good"]["tools"]
    assert results["mcp", "good"]["notOffered"] == ["later"]
    assert "good: tools are not offered, because they must run as tasks: later" in done.json["warnings"]
    problems = {problem["place"]: problem["message"] for problem in done.json["problems"]}
    assert "out of order" in problems["coterie.toml: mcp.bad"]
    assert "No server answers at http://127.0.0.1:1/v1" in problems["llmservices.json: services[1]"]
    assert '"good__subtract" matches no tool' in problems["coterie.toml: agents.ada.tools"]
    assert (len(problems), done.code) == (3, 1)
    assert len(env.model.requests) == 1


def test_a_deep_check_prints_one_line_for_each_result(env: Environment) -> None:
    done = coterie("check", "--dir", env.folder, "--deep")

    assert "service main: ok, It answered in" in done.stdout
    assert done.code == 0


def test_a_check_without_deep_connects_to_nothing(env: Environment) -> None:
    assert "connections" not in coterie("check", "--dir", env.folder, "--json").json
    assert env.model.requests == []
