"""Keys of services: sources, masking, the secrets file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.llm.config import Secret, SecretsFile, ServiceRegistry

from .entries import KEY, entry, problems, read


def test_a_key_comes_from_the_environment_or_else_from_the_secrets_file(tmp_path: Path) -> None:
    references = [entry("a", apiKey="${A_KEY}"), entry("b", apiKey="${B_KEY}")]
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": references}))
    secrets = SecretsFile(tmp_path / "data" / "secrets.json")
    secrets.put("A_KEY", "kept")
    secrets.put("B_KEY", "also kept")

    services = ServiceRegistry.load(tmp_path, {"A_KEY": " from-the-environment\n"})

    assert services.problems == ()
    assert services.get("a").api_key == Secret("from-the-environment")
    assert services.get("b").api_key == Secret("also kept")


@pytest.mark.parametrize("value", [None, "", " "])
def test_a_missing_key_is_a_problem_of_that_service_alone(tmp_path: Path, value: str | None) -> None:
    both = [entry("main", apiKey="${MAIN_API_KEY}"), entry("spare")]
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": both}))

    services = ServiceRegistry.load(tmp_path, {} if value is None else {"MAIN_API_KEY": value})

    assert problems(services) == [
        "llmservices.json: services[0].apiKey: MAIN_API_KEY is set neither in the environment nor in data/secrets.json"
    ]
    assert services.get("main").missing_key == "MAIN_API_KEY"
    assert services.get("spare").missing_key is None


@pytest.mark.parametrize("value", [7, "${}", "${A B}", "Bearer ${KEY}", [KEY], "sk-\u2022\u2022"])
def test_a_key_that_cannot_be_one_is_reported_without_quoting_it(value: object) -> None:
    services = read(entry(apiKey=value), KEY="x")

    [problem] = problems(services)
    assert problem.startswith("llmservices.json: services[0].apiKey: ")
    assert "sk-" not in problem
    assert services.get("main").missing_key


def test_no_key_shows_in_any_form_of_an_entry() -> None:
    services = read(entry(apiKey="${MAIN}"), entry("literal", apiKey=KEY), MAIN=KEY)

    for one in services:
        assert one.api_key is not None
        assert one.api_key.reveal() == KEY
        assert one.to_dict()["apiKey"] == "…WXYZ"
        shown = f"{one!r} {one} {one.api_key!r} {one.api_key} {json.dumps(one.to_dict())} {one.digest}"
        assert "canary" not in shown
    assert "canary" not in repr(services) + repr(vars(services))


def test_a_password_or_key_in_an_address_is_refused_without_quoting_it() -> None:
    for address in (f"http://me:{KEY}@host/v1", f"http://host/v1?key={KEY}", f"http://host/v1#{KEY}"):
        services = read(entry(baseURL=address))

        assert len(services) == 0
        assert len(services.problems) == 1
        assert "canary" not in str(services.problems)


@pytest.mark.parametrize("key", ["", "abcd", "fifteen-letters"])
def test_a_short_key_is_masked_completely(key: str) -> None:
    assert Secret(key).masked == "…"


def test_the_secrets_file_is_for_its_owner_only_and_is_never_half_written(tmp_path: Path) -> None:
    secrets = SecretsFile(tmp_path / "data" / "secrets.json")
    secrets.put("A", "1")
    secrets.put("B", "2")
    secrets.remove("A")

    assert secrets.read() == ({"B": "2"}, [])
    assert stat.S_IMODE(secrets.path.stat().st_mode) == 0o600
    assert os.listdir(secrets.path.parent) == ["secrets.json"]


def test_a_secrets_file_that_others_can_read_is_reported(tmp_path: Path) -> None:
    secrets = SecretsFile(tmp_path / "data" / "secrets.json")
    secrets.put("A", KEY)
    secrets.path.chmod(0o644)

    keys, [problem] = secrets.read()
    assert keys == {"A": KEY}
    assert str(problem) == "data/secrets.json: others can read it; run: chmod 600 secrets.json"


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[]", b"[" * 100_000, b'"sk-canary"', b" " * (2 << 20)])
def test_a_corrupt_secrets_file_is_reported_and_not_overwritten(tmp_path: Path, data: bytes) -> None:
    secrets = SecretsFile(tmp_path / "data" / "secrets.json")
    secrets.path.parent.mkdir()
    secrets.path.write_bytes(data)

    keys, [problem] = secrets.read()
    assert keys == {}
    assert "canary" not in str(problem)
    with pytest.raises(ConfigError):
        secrets.put("B", "2")
    assert secrets.path.read_bytes() == data
