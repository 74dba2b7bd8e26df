"""Agents whose answers must follow a JSON schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.config import read_config
from coterie.testing import Calls, Says, Status
from tests.agent.stage import stage

AGENTS = '[agents.ada]\nanswer_schema = "schemas/figures.json"\n[agents.bob]\n'
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
STRUCTURED = {"input": ["text"], "output": ["text", "tool_calling", "structured_output"]}


@pytest.fixture(autouse=True)
def schema(tmp_path: Path) -> Path:
    file = tmp_path / "schemas" / "figures.json"
    file.parent.mkdir()
    file.write_text(json.dumps(SCHEMA))
    return file


async def test_the_schema_is_the_answer_format_of_a_service_that_declares_structured_output(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=AGENTS, capabilities=STRUCTURED) as here:
        here.server.script(Says(calls=(Calls("look", {"name": "x"}),)), '{"sum": 3}', "Hello")
        await here.say("1 + 2?")
        assert await here.texts() == ['{"sum": 3}']
        await here.say("Hello", to="bob")
        await here.heard(2)
        first, second, of_bob = (request.body for request in here.server.requests)
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert first["response_format"] == second["response_format"] == wanted
    assert "response_format" not in of_bob


async def test_a_service_without_structured_output_gets_the_schema_as_an_instruction(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=AGENTS) as here:
        here.server.script('```json\n{"sum": 3}\n```')
        await here.say("1 + 2?")
        assert await here.texts() == ['{"sum": 3}'], "the fence is removed"
        body = here.server.requests[0].body
    assert "response_format" not in body
    assert json.dumps(SCHEMA) in body["messages"][0]["content"]


@pytest.mark.slow
async def test_an_answer_that_does_not_follow_the_schema_is_asked_for_again(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=AGENTS, capabilities=STRUCTURED) as here:
        here.server.script('{"sum": "three"}', '{"sum": 3}')
        await here.say("1 + 2?")
        assert await here.texts() == ['{"sum": 3}']
        assert len(here.server.requests) == 2


async def test_an_agent_whose_model_never_follows_the_schema_is_blocked_with_the_reason(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=AGENTS, capabilities=STRUCTURED) as here:
        here.server.default = '{"total": 3}'
        await here.say("1 + 2?")
        (notice,) = await here.heard()
        assert notice.sender == "system" and "does not follow answer_schema" in notice.payload["text"]
        assert len(here.server.requests) == 3


@pytest.mark.parametrize(
    "error",
    [
        "This response_format type is unavailable now: json_schema is not supported",
        "Cannot use custom grammar constraints with tools.",
    ],
)
async def test_a_service_that_refuses_the_answer_format_gets_the_instruction_and_keeps_its_tools(
    tmp_path: Path, error: str
) -> None:
    async with stage(tmp_path, agents=AGENTS, capabilities=STRUCTURED) as here:
        here.server.script(Status(400, error), '{"sum": 3}')
        await here.say("1 + 2?")
        assert await here.texts() == ['{"sum": 3}']
        again = here.server.requests[1].body
    assert "response_format" not in again and again["tools"]
    assert json.dumps(SCHEMA) in again["messages"][0]["content"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", 'expected a JSON schema with "type": "object"'),
        ('{"type": "object", "properties": 7}', "is no JSON schema"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_schema_file_is_reported(tmp_path: Path, schema: Path, content: str | None, said: str) -> None:
    schema.unlink()
    if content is not None:
        schema.write_text(content)
    (tmp_path / "coterie.toml").write_text(AGENTS)
    config = read_config(tmp_path)
    (problem,) = map(str, config.problems)
    assert problem.startswith(f"coterie.toml: agents.ada.answer_schema: schemas/figures.json {said}")
    assert [agent.id for agent in config.agents] == ["bob"]
