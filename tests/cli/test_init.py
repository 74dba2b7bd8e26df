from __future__ import annotations

from pathlib import Path

import pytest

from coterie.agent.user_tools import load_user_tools

from .commands import coterie


def test_init_prints_the_written_files_and_the_next_command(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "society"

    done = coterie("init", folder)

    assert done.code == 0
    for name in ("coterie.toml", "llmservices.json", "tools.py"):
        assert f"wrote {folder / name}" in done.stdout
        assert (folder / name).is_file()
    assert f"coterie serve {folder}" in done.stdout


def test_init_with_json_prints_the_written_files(tmp_path: Path) -> None:
    folder = tmp_path / "society"

    done = coterie("init", folder, "--json")

    written = [str(folder / name) for name in ("coterie.toml", "llmservices.json", "tools.py")]
    assert (done.code, done.json) == (0, {"dir": str(folder), "written": written})
    again = coterie("init", folder, "--json")
    assert (again.code, again.json["error"]) == (1, "store_unusable")


def test_init_keeps_existing_tools(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("# mine")

    assert coterie("init", tmp_path).code == 0

    assert (tmp_path / "tools.py").read_text() == "# mine"


def test_the_commented_example_in_the_tools_template_is_valid(folder: Path) -> None:
    template = folder / "tools.py"
    lines = template.read_text().splitlines()
    template.write_text("\n".join(line.removeprefix("# ").removeprefix("#") for line in lines[3:]))

    owned = load_user_tools(folder, reserved_names=set())

    assert (owned.problems, [tool.name for tool in owned.tools]) == ((), ["look_up", "water_the_plants"])


def test_an_empty_folder_name_is_wrong_usage_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for args in (("init", ""), ("init", "--dir", ""), ("serve", ""), ("check", "--dir", "")):
        assert coterie(*args).code == 2

    assert list(tmp_path.iterdir()) == []


def test_init_leaves_an_existing_society_untouched(folder: Path) -> None:
    (folder / "coterie.toml").write_text("# mine")
    (folder / "llmservices.json").unlink()

    assert "already" in coterie("init", folder).failure

    assert (folder / "coterie.toml").read_text() == "# mine"
    assert not (folder / "llmservices.json").exists()


def test_the_files_of_init_pass_the_check(folder: Path) -> None:
    assert coterie("check", "--dir", folder, "--json").json["problems"] == []


def test_the_folder_comes_from_the_option_or_the_environment(tmp_path: Path) -> None:
    assert coterie("init", "--dir", tmp_path / "a").code == 0
    assert coterie("init", env={"COTERIE_DIR": str(tmp_path / "b")}).code == 0

    assert (tmp_path / "a" / "coterie.toml").exists()
    assert (tmp_path / "b" / "coterie.toml").exists()


def test_a_folder_that_cannot_be_created_is_a_one_line_error_of_init(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert "choose another folder" in coterie("init", tmp_path / "file" / "society").failure
