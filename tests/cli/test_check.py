from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from .commands import coterie

SERVICE = '{"id": "main", "baseURL": "http://127.0.0.1:1/v1", "model": "m"}'


def test_a_sound_folder_has_no_problems(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[agents.ada]\nservice = "main"\n')
    (folder / "llmservices.json").write_text(f'{{"services": [{SERVICE}]}}')

    done = coterie("check", "--dir", folder)

    assert done.code == 0
    assert f"sqlite {sqlite3.sqlite_version}" in done.stdout
    assert "agents: ada" in done.stdout
    assert "services: main" in done.stdout
    assert "No problems found." in done.stdout


def test_every_problem_of_every_file_is_named_with_its_place(folder: Path) -> None:
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
def test_what_stops_a_start_is_fatal(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)

    done = coterie("check", "--dir", folder, "--json")

    assert done.code == 1
    assert [(p["place"].split(":")[0], p["fatal"]) for p in done.json["problems"]] == [(name, True)]


def test_the_engine_is_the_one_the_file_names(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[store]\nurl = "postgresql://me@host/db"')

    checked = coterie("check", "--dir", folder, "--json").json

    assert (checked["engine"], checked["problems"]) == ("postgresql", [])


def test_a_folder_without_a_society_is_no_sound_one(tmp_path: Path) -> None:
    assert "there is no society" in coterie("check", "--dir", tmp_path).failure
