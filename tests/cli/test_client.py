from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from coterie.config import ADDRESS_FILE, ServerAddress, write_address
from coterie.society import Society
from coterie.stores.sqlite.connection import FolderLock

from .commands import coterie
from .environment import Environment


def test_a_wrong_token_is_reported_with_the_option_to_use(env: Environment) -> None:
    env.serve()

    failure = coterie("send", "ada", "x", "--token", "wrong", "--dir", env.folder).failure

    assert failure.startswith("the running server does not accept this token")


def test_commands_find_the_token_that_a_running_server_was_given(env: Environment) -> None:
    env.serve(token="given-by-hand")
    data = env.folder / "data"

    assert coterie("send", "ada", "x", "--dir", env.folder).code == 0
    assert (data / ADDRESS_FILE).stat().st_mode & 0o777 == 0o600
    env.stop_serving()

    assert not [file for file in data.iterdir() if file.is_file() and b"given-by-hand" in file.read_bytes()]


def test_without_a_token_file_the_token_must_be_given(env: Environment) -> None:
    env.serve()
    kept = (env.folder / "data" / "token").read_text().strip()
    (env.folder / "data" / "token").unlink()

    assert "give it with --token or COTERIE_TOKEN" in coterie("send", "ada", "x", "--dir", env.folder).failure
    assert coterie("send", "ada", "x", "--dir", env.folder, env={"COTERIE_TOKEN": kept}).code == 0


def test_a_server_of_another_version_is_refused(env: Environment) -> None:
    env.serve()
    _rewrite(env.folder, version="99.0.0")

    failure = coterie("send", "ada", "x", "--dir", env.folder).failure

    assert "the server is coterie 99.0.0" in failure
    assert "restart the server" in failure


def test_the_token_is_sent_to_loopback_only(env: Environment) -> None:
    env.serve()
    _rewrite(env.folder, url="http://192.0.2.1:8642")

    assert "listens on 192.0.2.1 only" in coterie("send", "ada", "x", "--dir", env.folder).failure


def test_an_unreachable_server_is_reported_with_its_process_id(folder: Path) -> None:
    coterie("send", "assistant", "x", "--dir", folder)
    (folder / "data" / "token").write_text("t")
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        lock = FolderLock(folder / "data")
        try:
            write_address(
                folder / "data", ServerAddress(url=f"http://127.0.0.1:{taken.getsockname()[1]}", pid=os.getpid())
            )
            failure = coterie("send", "assistant", "x", "--dir", folder).failure
        finally:
            lock.release()

    assert f"process {os.getpid()} runs this society" in failure
    assert "cannot be reached" in failure


def test_the_address_file_of_a_dead_server_is_ignored(folder: Path) -> None:
    (folder / "data").mkdir(exist_ok=True)
    write_address(folder / "data", ServerAddress(url="http://127.0.0.1:1", pid=1))

    assert coterie("send", "assistant", "x", "--dir", folder).code == 0


def test_a_typo_in_an_agent_id_gets_a_suggestion_from_the_server(env: Environment) -> None:
    env.serve()

    assert 'did you mean "ada"?' in coterie("send", "adda", "x", "--dir", env.folder).failure


def test_an_error_of_the_server_keeps_its_code(env: Environment) -> None:
    env.serve()
    options = [f"--quick-reply={n}" for n in range(11)]

    assert coterie("send", "ada", "x", *options, "--json", "--dir", env.folder).json["error"] == "quickReplies_too_many"


@pytest.mark.parametrize("command", ["stop", "pause", "resume"])
def test_stop_pause_and_resume_change_the_state_of_an_agent(either: Environment, command: str) -> None:
    expected = {"stop": "idle", "pause": "paused", "resume": "idle"}[command]

    assert coterie(command, "ada", "--json", "--dir", either.folder).json == {"id": "ada", "state": expected}
    assert 'did you mean "ada"?' in coterie(command, "adda", "--dir", either.folder).failure


def test_pause_and_resume_all_change_every_agent(either: Environment) -> None:
    paused = coterie("pause", "--all", "--json", "--dir", either.folder).json["items"]

    assert paused == [{"id": "ada", "state": "paused"}, {"id": "bob", "state": "paused"}]
    one = coterie("resume", "ada", "--dir", either.folder).stdout
    assert one == "ada stays paused: the whole society is paused, and coterie resume --all resumes it.\n"
    resumed = coterie("resume", "--all", "--dir", either.folder).stdout
    assert resumed.splitlines() == ["ada is resumed.", "bob is resumed."]
    assert coterie("pause", "--dir", either.folder).code == 2


def test_an_unexpected_error_says_where_its_details_are(
    env: Environment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Society) -> None:
        raise RuntimeError("secret detail")

    coterie("pause", "ada", "--dir", env.folder)  # creates the database
    monkeypatch.setattr(Society, "worker_names", fail)

    failure = coterie("agents", "--dir", env.folder).failure
    assert failure == "an unexpected error in the server: run it again with COTERIE_DEBUG=1 to see where"

    env.serve()
    caplog.clear()
    *_, incident = coterie("agents", "--dir", env.folder).failure.split()
    assert f"incident {incident}" in caplog.text


def test_open_prints_a_login_link_without_a_display(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert "no process runs the society" in coterie("open", "--dir", env.folder).failure
    env.serve()

    assert "/?code=" in coterie("open", "--dir", env.folder).stdout


def test_agents_are_listed_below_their_parent(either: Environment) -> None:
    coterie("send", "bob", "x", "--delay", "1h", "--dir", either.folder)

    heading, ada, bob = coterie("agents", "--dir", either.folder).stdout.splitlines()

    assert heading.split() == ["AGENT", "NAME", "STATE", "SERVICE", "WAITING", "UNREAD"]
    assert ada.split() == ["ada", "Ada", "idle", "main", "0", "0"]
    assert bob.split() == ["└", "bob", "Bob", "idle", "main", "0", "0"]
    items = coterie("agents", "--json", "--dir", either.folder).json["items"]
    assert [(agent["id"], agent["parent"]) for agent in items] == [("ada", None), ("bob", "ada")]


def test_history_and_export_show_the_messages(either: Environment) -> None:
    either.script("Fine.")
    coterie("send", "ada", "How are you?", "--wait", "--dir", either.folder)

    roles = [row["role"] for row in coterie("history", "ada", "--json", "--dir", either.folder).json["items"]]
    exported = coterie("export", "ada", "--dir", either.folder).stdout

    assert roles == ["system", "user", "assistant"]
    assert "[user (user)]\n  How are you?" in coterie("history", "ada", "--dir", either.folder).stdout
    assert exported.startswith("# Ada\n")
    assert exported.index("How are you?") < exported.index("Fine.")
    assert 'did you mean "ada"?' in coterie("export", "adda", "--dir", either.folder).failure


def test_an_export_with_json_prints_the_messages_or_the_written_file(either: Environment, tmp_path: Path) -> None:
    coterie("send", "ada", "How are you?", "--wait", "--dir", either.folder)
    file = tmp_path / "ada.md"

    printed = coterie("export", "ada", "--json", "--dir", either.folder).json
    kept = coterie("export", "ada", "--json", "--to", file, "--format", "md", "--dir", either.folder).json

    assert [message["from"] for message in printed["messages"]] == ["user", "ada"]
    assert kept == {"agent": "ada", "file": str(file), "format": "md", "size": file.stat().st_size}
    assert file.read_text().startswith("# Ada\n")
    assert coterie("export", "ada", "--json", "--format", "md", "--dir", either.folder).code == 2
    assert coterie("export", "adda", "--json", "--dir", either.folder).json["error"] == "unknown_agent"


def test_an_export_that_fails_leaves_the_file_of_before(
    env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ada.md").write_text("before")
    coterie("send", "ada", "hello", "--dir", env.folder)
    with monkeypatch.context() as patched:
        patched.setattr("coterie.cli.messages.Path.write_text", _fill_disk)
        patched.setattr("coterie.files.os.fsync", _fill_disk)
        assert "No space left" in coterie("export", "ada", "--to", tmp_path / "ada.md", "--dir", env.folder).failure
    assert [(file.name, file.read_text()) for file in tmp_path.glob("*ada.md*")] == [("ada.md", "before")]


def _fill_disk(file: Path | int, *_: object, **__: object) -> None:
    """A write of which the disk takes only the first bytes."""
    if isinstance(file, Path):
        file.write_bytes(b"# A")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "args",
    [("send", "\udcff", "hi"), ("history", "\udcff"), ("export", "\udcff"), ("stop", "\udcff"),
     ("delayed", "--recipient", "\udcff")],
)  # fmt: skip
def test_an_agent_id_with_invalid_characters_is_unknown(either: Environment, args: tuple[str, ...]) -> None:
    coterie("pause", "ada", "--dir", either.folder)  # creates the database

    assert "there is no agent" in coterie(*args, "--dir", either.folder).failure


def test_the_shell_completes_agents_from_the_folder(either: Environment) -> None:
    words = {"_COTERIE_COMPLETE": "complete_bash", "COMP_WORDS": "coterie history a", "COMP_CWORD": "2"}

    done = coterie("history", env=words | {"COTERIE_DIR": str(either.folder)})

    assert done.stdout.split() == ["ada"]


def _rewrite(folder: Path, **other: str) -> None:
    note = folder / "data" / ADDRESS_FILE
    note.write_text(json.dumps(json.loads(note.read_text()) | other))
