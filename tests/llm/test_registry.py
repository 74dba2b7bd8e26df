"""Service registry: capabilities, loading, reloading, template."""

from __future__ import annotations

import json
import string
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.llm.config import Secret, ServiceRegistry, parse_services
from coterie.llm.service import STANDARD_CAPABILITIES, Capabilities, UnknownService

from .entries import KEY, entry, no_key, read

# Capabilities


def test_an_entry_declares_input_and_output_capabilities() -> None:
    """003-1.1, 003-5.1"""
    services = read(entry(capabilities={"input": ["text", "vision"], "output": ["text", "tool_calling"]}))

    assert services.get_capabilities("main") == Capabilities(
        input=frozenset({"text", "vision"}), output=frozenset({"text", "tool_calling"}), inferred=False
    )
    assert services.problems == ()


def test_a_capability_is_for_input_for_output_or_for_both() -> None:
    """003-1.2, 003-6.4"""
    services = read(entry(capabilities={"input": ["text", "vision", "audio"], "output": ["text", "audio", "file"]}))

    def directions(capability: str) -> tuple[bool, bool]:
        has = services.has_capability
        return has("main", capability, "input"), has("main", capability, "output")

    assert directions("vision") == (True, False)
    assert directions("file") == (False, True)
    assert directions("audio") == (True, True)
    assert directions("structured_output") == (False, False)


@pytest.mark.parametrize("capability", sorted(STANDARD_CAPABILITIES))
def test_every_standard_type_can_be_declared(capability: str) -> None:
    """003-1.3, 003-6.1"""
    services = read(entry(capabilities={"input": [capability], "output": [capability]}))

    assert services.has_capability("main", capability, "input")
    assert services.has_capability("main", capability, "output")
    assert services.problems == ()


def test_the_standard_types_are_those_of_the_requirements() -> None:
    """003-1.3"""
    assert sorted(STANDARD_CAPABILITIES) == ["audio", "file", "structured_output", "text", "tool_calling", "vision"]


@pytest.mark.parametrize("side", ["input", "output"])
def test_tool_calling_counts_in_either_list(side: str) -> None:
    services = read(entry(capabilities={side: ["text", "tool_calling"]}))

    assert services.has_capability("main", "tool_calling", "input")
    assert services.has_capability("main", "tool_calling", "output")


def test_an_invalid_direction_is_an_error() -> None:
    with pytest.raises(ValueError, match="sideways"):
        read(entry()).has_capability("main", "text", "sideways")  # type: ignore[arg-type]


@pytest.mark.parametrize("without", [{}, {"capabilities": None}, {"capabilities": {}}])
def test_without_capabilities_text_input_and_output_are_inferred(without: dict[str, Any]) -> None:
    """003-1.5, 003-5.3"""
    services = read(entry(**without))

    assert services.get_capabilities("main") == Capabilities(
        input=frozenset({"text"}), output=frozenset({"text"}), inferred=True
    )
    assert services.problems == ()


def test_a_list_that_is_left_out_means_text() -> None:
    services = read(entry(capabilities={"input": ["text", "vision"]}))

    assert services.get_capabilities("main").output == {"text"}
    assert not services.get_capabilities("main").inferred


def test_any_other_lower_case_name_is_a_custom_type() -> None:
    """003-5.4"""
    services = read(entry(capabilities={"input": ["text", "video", "theorem_proving", "语音"], "output": ["music.v2"]}))

    assert services.has_capability("main", "video", "input")
    assert services.has_capability("main", "theorem_proving", "input")
    assert services.has_capability("main", "语音", "input")
    assert services.has_capability("main", "music.v2", "output")
    assert not services.has_capability("main", "music.v2", "input")
    assert services.problems == ()


def test_an_unknown_id_is_an_error_that_names_the_known_ones() -> None:
    """003-6.1, 003-6.2"""
    services = read(entry("main"), entry("spare"))

    with pytest.raises(UnknownService, match=r'"man".*main, spare'):
        services.get_capabilities("man")
    with pytest.raises(UnknownService):
        services.has_capability("man", "text", "input")


NAMES = st.text(string.ascii_lowercase + "_", min_size=1, max_size=12)


@given(takes=st.frozensets(NAMES | st.sampled_from(sorted(STANDARD_CAPABILITIES))), gives=st.frozensets(NAMES))
def test_every_lower_case_name_is_kept_in_its_list(takes: frozenset[str], gives: frozenset[str]) -> None:
    """003-5.4, 003-6.2"""
    services = read(entry(capabilities={"input": sorted(takes), "output": sorted(gives)}))

    assert services.get_capabilities("main") == Capabilities(input=takes, output=gives)


# The configuration of a society


def test_an_old_file_without_the_new_keys_loads_unchanged() -> None:
    """003-5.2"""
    old = {
        "id": "default",
        "name": "Default",
        "baseURL": "http://127.0.0.1:1234/v1/",
        "model": "m",
        "apiKey": "NOT_NEEDED",
        "capabilityTags": ["chat", "coding"],
        "description": "an old one",
        "maxConcurrentRequests": 2,
    }
    services = read(old)

    found = services.get("default")
    assert services.problems == ()
    assert (found.base_url, found.model, found.provider) == ("http://127.0.0.1:1234/v1", "m", "openai")
    assert (found.name, found.capability_tags, found.max_concurrent_requests) == ("Default", ("chat", "coding"), 2)
    assert found.api_key == Secret("NOT_NEEDED")
    assert found.capabilities.inferred


def test_without_a_file_there_are_no_services_and_no_problems(tmp_path: Path) -> None:
    services = ServiceRegistry.load(tmp_path, {})

    assert list(services) == []
    assert services.problems == ()


def test_a_failed_reload_keeps_the_old_configuration_and_a_good_one_is_seen_by_all(tmp_path: Path) -> None:
    file = tmp_path / "llmservices.json"
    file.write_text(json.dumps({"services": [entry("old")]}))
    held = ServiceRegistry.load(tmp_path, {})

    file.write_text("{ not json")
    with pytest.raises(ConfigError):
        held.replace_with(ServiceRegistry.load(tmp_path, {}))
    assert "old" in held

    file.write_text(json.dumps({"services": [entry("new"), 7]}))
    held.replace_with(ServiceRegistry.load(tmp_path, {}))
    assert [one.id for one in held] == ["new"]
    assert len(held.problems) == 1


# The template


def template() -> dict[str, Any]:
    found = json.loads(files("coterie").joinpath("templates", "llmservices.json").read_text())
    assert isinstance(found, dict)
    return found


def test_the_template_loads_without_services_and_without_problems() -> None:
    assert parse_services(json.dumps(template()).encode(), no_key) == ([], [])


def test_the_template_shows_every_standard_capability_in_examples_that_work() -> None:
    """003-5.5"""
    examples = template()["examples"]
    services = read(*examples, OPENAI_API_KEY=KEY)

    assert services.problems == ()
    assert len(services) == len(examples)
    shown = {name for one in services for name in one.capabilities.input | one.capabilities.output}
    assert shown >= STANDARD_CAPABILITIES
    assert shown - STANDARD_CAPABILITIES, "a custom type is shown too"
    assert any(one.capabilities.inferred for one in services)
