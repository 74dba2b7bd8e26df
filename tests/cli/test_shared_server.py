"""Commands find the server of a society that PostgreSQL keeps, though it owns no folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from coterie.config import ServerAddress, write_address
from tests.engines import Postgres

from .commands import coterie
from .environment import AGENTS, Environment


def share(env: Environment, url: str) -> Path:
    (env.folder / "coterie.toml").write_text(f"[store]\nurl = {json.dumps(url)}\n{AGENTS}")
    return env.folder


def test_a_command_talks_to_the_server_that_runs_and_without_one_to_the_database(
    env: Environment, shared: Postgres, tmp_path: Path
) -> None:
    folder = share(env, shared.url(tmp_path))
    env.serve()

    assert coterie("open", "--print", "--json", "--dir", folder).json["url"].startswith("http://127.0.0.1:")
    env.script("hello back")
    assert "hello back" in coterie("send", "ada", "hello", "--wait", "--dir", folder).stdout

    env.stop_serving()
    assert "nobody runs the society" in coterie("open", "--dir", folder).failure
    assert coterie("send", "bob", "hello", "--dir", folder).code == 0


def test_a_note_that_a_crash_left_behind_leads_nowhere(env: Environment, shared: Postgres, tmp_path: Path) -> None:
    folder = share(env, shared.url(tmp_path))
    (folder / "data").mkdir(mode=0o700)
    for pid in (os.getpid(), 2**30):  # another process has its number by now; nobody has
        write_address(folder / "data", ServerAddress(url="http://127.0.0.1:9", pid=pid))
        assert "nobody runs the society" in coterie("open", "--dir", folder).failure
        assert coterie("send", "ada", "hello", "--dir", folder).code == 0
