from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.harness import scaled_timeout

from .commands import ServeProcess, coterie, coterie_process
from .conftest import delayed, schedule, waiting


@pytest.mark.slow
def test_serve_prints_its_address_and_keeps_running(folder: Path) -> None:
    with ServeProcess(folder) as society:
        banner = "".join(society.banner)

        assert f"runs the society in {folder}" in banner
        assert "sqlite" in banner
        assert "agents   assistant, tour-seer" in banner
        assert f"kill {society.pid}" in banner
        assert coterie("check", "--dir", folder, "--json").json["runningPid"] == society.pid


@pytest.mark.slow
def test_serve_creates_a_missing_folder(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "new") as society:
        assert society.stop() == 0

    assert "Open this link in your browser" in society.banner[0]
    assert "commented templates" in "".join(society.banner)
    assert (tmp_path / "new" / "llmservices.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_graceful_stop_delivers_delayed_messages_marked_early(folder: Path, number: signal.Signals) -> None:
    schedule(folder, 3)

    with ServeProcess(folder) as society:
        assert society.stop(number) == 0

    assert "stopping: delivering 3 delayed messages early" in society.messages
    assert delayed(folder) == []
    assert [(m.payload["text"], m.early) for m in waiting(folder)] == [("0", True), ("1", True), ("2", True)]


@pytest.mark.slow
def test_messages_survive_a_graceful_stop(folder: Path) -> None:
    schedule(folder, 3)
    with ServeProcess(folder) as first:
        first.stop()
    assert [m.early for m in waiting(folder)] == [True] * 3

    with ServeProcess(folder) as second:
        assert coterie("verify", "--dir", folder).code == 0
        assert not [line for line in second.messages if "did not stop cleanly" in line]


@pytest.mark.slow
def test_a_graceful_stop_can_keep_the_schedule(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[shutdown]\ndelayed = "keep"\n')
    schedule(folder, 2)
    before = delayed(folder)

    with ServeProcess(folder) as society:
        assert society.stop() == 0

    assert delayed(folder) == before
    assert "stopping: 2 delayed messages stay scheduled" in society.messages


@pytest.mark.slow
def test_after_kill_9_every_delayed_message_is_still_there(folder: Path) -> None:
    schedule(folder, 5)
    before = delayed(folder)
    with ServeProcess(folder) as society:
        society.stop(signal.SIGKILL)

    with ServeProcess(folder) as again:
        assert delayed(folder) == before
        again.wait_for_log("did not stop cleanly")
        assert coterie("verify", "--dir", folder).code == 0


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once_and_logs_undelivered_messages(folder: Path) -> None:
    schedule(folder, 20_000)

    with ServeProcess(folder) as society:
        society.send_signal(signal.SIGTERM)
        society.wait_for_log("delivering 20000 delayed messages early")
        asked = time.monotonic()
        society.send_signal(signal.SIGTERM)
        assert society.wait() == 1
        assert time.monotonic() - asked < scaled_timeout(1)

    left = len(delayed(folder))
    assert left > 0
    # A loaded machine may not find the number in the short time that a forced exit has.
    numbers = (str(left), "an unknown number of")
    logged = [f"forced exit: {number} delayed messages were not delivered; they stay scheduled" for number in numbers]
    assert set(logged) & set(society.messages)
    assert left + len(waiting(folder)) == 20_000
    assert coterie("verify", "--dir", folder).code == 0


@pytest.mark.slow
def test_a_long_stop_logs_its_progress_every_second(folder: Path) -> None:
    schedule(folder, 100)

    with ServeProcess(folder) as society, closing(sqlite3.connect(folder / "data" / "coterie.db")) as other:
        other.execute("BEGIN IMMEDIATE")  # nothing can be delivered until this ends
        society.send_signal(signal.SIGTERM)
        society.wait_for_log("100 delayed messages left to deliver")
        other.rollback()
        assert society.wait() == 0

    assert len(waiting(folder)) == 100


@pytest.mark.slow
def test_a_second_server_in_the_same_folder_is_refused_and_the_first_continues(folder: Path) -> None:
    with ServeProcess(folder) as first:
        second = coterie_process("serve", folder)

        assert f"process {first.pid}" in second.failure
        assert second.stdout == ""
        assert first.process.poll() is None
        assert first.stop() == 0


@pytest.mark.slow
def test_a_fatal_configuration_problem_is_a_one_line_error(folder: Path) -> None:
    (folder / "coterie.toml").write_text('[server]\nport = "x"\n[agents.ada]\nnmae = "Ada"\n')

    assert "coterie.toml: server.port" in coterie("serve", folder).failure


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process can be set on Linux only")
def test_a_failed_flush_ends_the_server_at_once(folder: Path) -> None:
    with ServeProcess(folder):
        pass  # later starts only open existing files
    coterie("send", "assistant", "later", "--delay", "1d", "--dir", folder)

    with ServeProcess(folder) as society:
        resource.prlimit(society.pid, resource.RLIMIT_FSIZE, (0, 0))
        assert coterie("send", "assistant", "now", "--dir", folder).code == 1
        assert society.wait() == 1

    assert society.log[-1]["level"] == "critical"
    assert "check the disk, then start again" in society.log[-1]["message"]
    assert len(delayed(folder)) == 1


@pytest.mark.slow
def test_incomplete_requests_over_the_soft_file_limit_do_not_block_the_owner(folder: Path) -> None:
    soft = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh"]
    with ServeProcess(folder, prefix=soft) as society, contextlib.ExitStack() as half_sent:
        running = json.loads((folder / "data" / "server.json").read_text())
        port = int(running["url"].rpartition(":")[2])
        for _ in range(400):
            connection = half_sent.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.send(b"POST /session HTTP/1.1\r\nContent-Length: 9\r\n")
        began = time.monotonic()
        assert coterie("send", "assistant", "hello", "--dir", folder).code == 0
        print(f"owner served in {time.monotonic() - began:.2f} s")
        if hasattr(resource, "prlimit"):
            now, hard = resource.prlimit(society.pid, resource.RLIMIT_NOFILE)
            assert now == hard


@pytest.mark.slow
def test_the_log_on_a_terminal_is_text(folder: Path) -> None:
    keyboard, screen = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "coterie", "serve", str(folder)], stdout=subprocess.PIPE, stderr=screen, text=True
    ) as process:
        os.close(screen)
        assert process.stdout is not None
        while not process.stdout.readline().startswith("Ready"):
            pass
        process.terminate()
        assert process.wait() == 0
    log = os.read(keyboard, 100_000).decode()
    os.close(keyboard)

    assert "stopped" in log
    assert "{" not in log


def _fetch(url: str, token: str | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _url(society: ServeProcess) -> str:
    (line,) = [line for line in society.banner if line.startswith("  listens")]
    return line.split()[1]


@pytest.mark.slow
def test_the_printed_login_link_works_once(folder: Path) -> None:
    with ServeProcess(folder) as society:
        (line,) = [line for line in society.banner if "?code=" in line]
        link, url = line.strip(), _url(society)
        token = (folder / "data" / "token").read_text().strip()

        assert _fetch(f"{url}/readyz")[0] == 200
        assert _fetch(f"{url}/metrics")[0] == 401
        assert _fetch(f"{url}/metrics", token)[0] == 200
        assert _fetch(link)[0] == 200  # redirected to the shell
        assert _fetch(link)[0] == 401
        note = json.loads((folder / "data" / "server.json").read_text())
        assert (note["url"], note["pid"]) == (url, society.pid)
        assert society.stop() == 0

    assert not (folder / "data" / "server.json").exists()
    assert token not in "".join(society.banner) + json.dumps(society.log)
    for path in (folder / "data").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_requires_a_configured_token(folder: Path, host: str) -> None:
    assert "--token or COTERIE_TOKEN" in coterie("serve", folder, "--host", host).failure
    (folder / "coterie.toml").write_text(f'[server]\nhost = "{host}"\n')
    assert "--token or COTERIE_TOKEN" in coterie("serve", folder).failure


@pytest.mark.slow
def test_a_taken_port_is_a_one_line_error(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} is taken" in coterie("serve", folder, "--port", port).failure
    assert coterie("serve", folder, "--port", "99999").code == 2


@pytest.mark.slow
def test_a_file_in_place_of_the_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    failure = coterie_process("serve", tmp_path / "file", "--port", "0").failure
    assert failure.startswith(f"{tmp_path / 'file'} cannot be created or written")
    assert "choose another folder" in failure


def test_the_error_about_a_public_address_names_it(folder: Path) -> None:
    assert coterie("serve", folder, "--host", "").failure.startswith("every address can be reached")


def test_an_invalid_token_is_refused_before_the_society_starts(folder: Path) -> None:
    assert "without spaces" in coterie("serve", folder, "--token", "a b", "--port", "0").failure

    assert list((folder / "data").iterdir()) == []


def test_a_token_file_that_cannot_be_written_is_a_one_line_error(folder: Path) -> None:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "token").mkdir()
    result = coterie_process("serve", folder)
    assert result.code == 1
    assert "token cannot be used" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
