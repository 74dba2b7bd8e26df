"""Commands find the server of a society in PostgreSQL, which locks no folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from coterie.config import ServerAddress, write_address
from tests.engines import Postgres

from .commands import coterie
from .environment import AGENTS, Environment


def use_postgres(env: Environment, url: str) -> Path:
    (env.folder / "coterie.toml").write_text(f"[store]\nurl = {json.dumps(url)}\n{AGENTS}")
    return env.folder


def test_a_command_uses_the_running_server_or_else_the_database(
    env: Environment, shared: Postgres, tmp_path: Path
) -> None:
    folder = use_postgres(env, shared.url(tmp_path))
    env.serve()

    assert coterie("open", "--print", "--json", "--dir", folder).json["url"].startswith("http://127.0.0.1:")
    env.script("hello back")
    assert "hello back" in coterie("send", "ada", "hello", "--wait", "--dir", folder).stdout

    env.stop_serving()
    assert "no process runs the society" in coterie("open", "--dir", folder).failure
    assert coterie("send", "bob", "hello", "--dir", folder).code == 0


def test_the_address_file_of_a_crashed_server_is_ignored(env: Environment, shared: Postgres, tmp_path: Path) -> None:
    folder = use_postgres(env, shared.url(tmp_path))
    (folder / "data").mkdir(mode=0o700)
    for pid in (os.getpid(), 2**30):  # the id of another process, and of none
        write_address(folder / "data", ServerAddress(url="http://127.0.0.1:9", pid=pid))
        assert "no process runs the society" in coterie("open", "--dir", folder).failure
        assert coterie("send", "ada", "hello", "--dir", folder).code == 0
