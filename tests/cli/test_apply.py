"""`coterie apply`, and a worker that has nothing but the address of the database and its keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from coterie.config import STORE_VARIABLE
from coterie.society import Society
from coterie.store import worker_name
from coterie.testing import ModelServer
from tests.engines import Postgres

from .commands import coterie

KEY = "sk-main-0123456789abcdef"


def make_home(folder: Path, url: str, agents: str, base_url: str = "http://127.0.0.1:9/v1") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "coterie.toml").write_text(f"{agents}\n[store]\nurl = {json.dumps(url)}\n[shutdown]\ndrain_seconds = 0\n")
    services = [{"id": "main", "baseURL": base_url, "model": "m", "apiKey": "${MAIN_KEY}"}]
    (folder / "llmservices.json").write_text(json.dumps({"services": services}))
    return folder


def test_apply_writes_the_files_and_says_what_differed(shared: Postgres, tmp_path: Path) -> None:
    url = shared.url(tmp_path)
    folder = make_home(tmp_path / "home", url, "[agents.ada]\nprompt = 'You count.'\n")
    first = coterie("apply", folder)
    assert first.code == 0 and f"The files in {folder} are version 1 of the configuration" in first.stdout

    make_home(folder, url, "[agents.ada]\nprompt = 'You sing.'\n[agents.bob]\n[limits]\nmailbox = 7\n")
    warning = coterie("check", "--dir", folder, "--json").json["warnings"]
    assert any("in 3 settings" in line and "coterie apply --dry-run" in line for line in warning)
    dry = coterie("apply", folder, "--dry-run", "--json").json
    assert dry == {
        "version": 1,
        "differences": [
            'agents.ada.prompt: "You count." in the database, "You sing." in the files',
            "agents.bob: only in the files",
            "limits.mailbox: only in the files 7",
        ],
        "applied": False,
    }
    assert coterie("apply", folder, "--json").json["version"] == 2
    assert coterie("apply", folder, "--json").json == {"version": 2, "differences": [], "applied": True}

    (folder / "coterie.toml").write_text((folder / "coterie.toml").read_text().replace("prompt", "max_tokens"))
    assert "agents.ada.max_tokens: expected a whole number" in coterie("apply", folder).failure
    assert coterie("apply", folder, "--dry-run").code == 1


def test_a_society_in_sqlite_has_nothing_to_apply(folder: Path) -> None:
    assert "is in SQLite, where its files count" in coterie("apply", folder).failure


async def test_a_worker_needs_only_the_address_of_the_database_and_its_keys(shared: Postgres, tmp_path: Path) -> None:
    async with ModelServer(api_key=KEY) as server, asyncio.timeout(120):
        url = shared.url(tmp_path)
        home = make_home(tmp_path / "home", url, "[agents.ada]\nprompt = 'You count.'\n", server.base_url)
        async with Society.open(home, work=False) as society:
            command = (sys.executable, "-m", "coterie", "worker", str(tmp_path / "nothing"))
            environment = os.environ | {STORE_VARIABLE: url, "MAIN_KEY": KEY}
            worker = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-3, env=environment, cwd=tmp_path)
            answer = await society.ask("ada", "How many?", timeout=100)
            assert answer.text == "ok" and "You count." in server.requests[0].body["messages"][0]["content"]
            assert worker_name(worker.pid) in {one.name for one in await society.shared_workers()}
            assert {agent.id for agent in await society.store.agents()} == {"ada", "user"}
            worker.send_signal(signal.SIGTERM)
            output, _ = await worker.communicate()
            assert worker.returncode == 0
            assert "agents   ada (configuration version 1)" in output.decode()
        assert not (tmp_path / "nothing").exists() and os.listdir(tmp_path) == ["home"]


@pytest.mark.parametrize("value", ["mysql://me:secret@there/it", "nowhere"])
def test_a_wrong_address_in_the_environment_is_refused(folder: Path, value: str) -> None:
    failure = coterie("agents", "--dir", folder, env={STORE_VARIABLE: value}).failure
    assert failure.startswith(f'{STORE_VARIABLE}: expected "sqlite" or "postgresql://user@host/name"')
    assert "secret" not in failure
