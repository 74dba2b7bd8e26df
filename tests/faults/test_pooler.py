"""A society behind PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from coterie.llm.service import Completion
from coterie.messages import PERSON
from coterie.society import Society
from tests.engines import Postgres

from .fake_model import FakeModel, agent_of, fake_models
from .scenarios import AGENTS
from .test_cluster import SOON, home

SETTINGS = """
[databases]
{database} = host={host} port={port} dbname={database} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
ignore_startup_parameters = extra_float_digits
logfile = {folder}/log
pidfile = {folder}/pid
"""


@pytest.fixture
def pooled(shared: Postgres) -> Iterator[str]:
    """A database behind PgBouncer with two server connections."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "these tests need a pooler: install pgbouncer"
    wanted = conninfo_to_dict(shared.server)
    folder = Path(tempfile.mkdtemp(prefix="coterie-pooler-"))
    database, own = f"pooled_{os.getpid()}", free_port()
    shared.execute(f"CREATE DATABASE {database}")
    known = {"host": wanted.get("host"), "port": wanted.get("port") or 5432, "user": wanted.get("user") or "postgres"}
    settings = folder / "pgbouncer.ini"
    settings.write_text(SETTINGS.format(database=database, own=own, folder=folder, **known))
    user = _prepare_user(str(known["host"])) if os.geteuid() == 0 else None
    if user:
        for place in (folder, settings):
            shutil.chown(place, user)
    pooler = subprocess.Popen([program, "-q", str(settings)], user=user, stderr=subprocess.DEVNULL)
    try:
        url = f"postgresql://{known['user']}@127.0.0.1:{own}/{database}"
        wait_until_listening(url)
        yield url
    finally:
        pooler.terminate()
        pooler.wait()
        shared.execute(f"DROP DATABASE {database} WITH (FORCE)")
        shutil.rmtree(folder)


def _prepare_user(host: str) -> str:
    """PgBouncer does not run as root, and other users cannot reach a socket in a private folder."""
    return Path(host).owner() if host.startswith("/") else "nobody"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def wait_until_listening(url: str) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=2):
            return
        time.sleep(0.05)  # PgBouncer does not signal when it is ready
    raise AssertionError("the pooler does not answer")


@pytest.mark.slow
async def test_two_processes_behind_a_transaction_pooler_answer_each_message_once(pooled: str, tmp_path: Path) -> None:
    with fake_models(lambda service: FakeModel(service, lambda request: Completion(text=f"yes, {agent_of(request)}"))):
        async with (
            Society.open(home(tmp_path / "a", pooled)) as one,
            Society.open(home(tmp_path / "b", pooled)) as other,
            asyncio.timeout(SOON * 3),
        ):
            for number in range(10):
                both = [society.send(to=name, text=str(number)) for society in (one, other) for name in AGENTS]
                await asyncio.gather(*both)
            kept = await one.artifacts.put(b"a few bytes", "note.txt")
            async with other.bus.watch() as watcher:
                while any(agent.state != "idle" for agent in await other.store.agents()):
                    await anext(watcher)
            assert (await other.store.artifacts([kept.ref]))[kept.ref].size == 11
            assert [violation async for violation in other.store.violations()] == []
            answers = await other.store.waiting(PERSON, 1_000)
            assert {message.sender for message in answers} == set(AGENTS)
            for name in AGENTS:
                asked = [row for row in await other.store.history(name) if row.role == "user"]
                assert len(asked) == 20
