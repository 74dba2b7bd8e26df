from __future__ import annotations

from pathlib import Path

from .door import coterie


def test_init_says_what_it_wrote_and_what_comes_next(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "society"

    done = coterie("init", folder)

    assert done.code == 0
    for name in ("coterie.toml", "llmservices.json"):
        assert f"wrote {folder / name}" in done.stdout
        assert (folder / name).is_file()
    assert f"coterie serve {folder}" in done.stdout


def test_init_leaves_an_existing_society_untouched(folder: Path) -> None:
    (folder / "coterie.toml").write_text("# mine")
    (folder / "llmservices.json").unlink()

    assert "already" in coterie("init", folder).failure

    assert (folder / "coterie.toml").read_text() == "# mine"
    assert not (folder / "llmservices.json").exists()


def test_what_init_wrote_passes_the_check(folder: Path) -> None:
    assert coterie("check", "--dir", folder, "--json").json["problems"] == []


def test_the_folder_can_come_from_the_option_or_the_environment(tmp_path: Path) -> None:
    assert coterie("init", "--dir", tmp_path / "a").code == 0
    assert coterie("init", env={"COTERIE_DIR": str(tmp_path / "b")}).code == 0

    assert (tmp_path / "a" / "coterie.toml").exists()
    assert (tmp_path / "b" / "coterie.toml").exists()


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert "choose another folder" in coterie("init", tmp_path / "file" / "society").failure
