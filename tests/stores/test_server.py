"""A PostgreSQL that cannot be used is refused in one sentence with the cause and the remedy, without its password."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from coterie.clock import SystemClock
from coterie.errors import StoreBroken, StoreUnusable
from coterie.stores.postgres import PostgresStore
from coterie.stores.postgres.connection import PgConnection, owner_connection
from coterie.stores.sql.migrations import SchemaScripts, Script, migrate_postgres, schema_scripts
from tests.cli.commands import coterie
from tests.engines import Postgres

from .processes import Opener, envelope, texts

PASSWORD = "s3cret-of-the-owner"
SSL_REQUEST = 80877103


def refusal(code: str, message: str) -> bytes:
    """An ErrorResponse of the server's protocol."""
    fields = b"".join(kind + text.encode() + b"\0" for kind, text in ((b"S", "FATAL"), (b"C", code), (b"M", message)))
    return packet(b"E", fields + b"\0")


def greeting(**parameters: str) -> bytes:
    """The messages of a server that lets the client in."""
    statuses = b"".join(packet(b"S", f"{name}\0{value}\0".encode()) for name, value in parameters.items())
    return packet(b"R", struct.pack("!I", 0)) + statuses + packet(b"Z", b"I")


def packet(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """The port of a server without TLS that answers every start of a connection with `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                while head := client.recv(8):
                    size, code = struct.unpack("!II", head)
                    if code == SSL_REQUEST:
                        client.sendall(b"N")
                        continue
                    client.recv(size - 8)
                    client.sendall(answer)
                    client.recv(1 << 16)
                    break

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


WRONG_PASSWORD = refusal("28P01", 'password authentication failed for user "ada"')
NO_ENTRY = refusal("28000", 'no pg_hba.conf entry for host "10.0.0.7", user "ada", database "it", no encryption')


@pytest.mark.parametrize(
    ("answer", "options", "said"),
    [
        (WRONG_PASSWORD, "", ['(password authentication failed for user "ada")', "PGPASSWORD or ~/.pgpass"]),
        (WRONG_PASSWORD, "?sslmode=require", ["server does not support SSL", "turn on ssl at the server"]),
        (NO_ENTRY, "", ["only with TLS: add ?sslmode=require to store.url"]),
        (refusal("3D000", 'database "it" does not exist'), "", ["CREATE DATABASE name ENCODING 'UTF8'"]),
        (refusal("53300", "sorry, too many clients already"), "", ["raise max_connections"]),
        (greeting(server_version="12.9", server_encoding="UTF8"), "", ["is PostgreSQL 12.9", "needs 13 or newer"]),
        (
            greeting(server_version="16.4", server_encoding="SQL_ASCII"),
            "",
            ["the encoding SQL_ASCII", "ENCODING 'UTF8'"],
        ),
        (None, "", ["(Connection refused)", "no server listens there"]),
        (None, "?nonsense=1", ["nonsense", "correct store.url"]),
    ],
)
async def test_each_reason_has_its_own_sentence(
    answer: bytes | None, options: str, said: list[str], tmp_path: Path
) -> None:
    with answering(answer or b"") as port:
        url = f"postgresql://ada:{PASSWORD}@127.0.0.1:{port if answer else 1}/it{options}"
        with pytest.raises(StoreUnusable) as error:
            await PostgresStore.open(url, SystemClock())
        (tmp_path / "coterie.toml").write_text(f'[store]\nurl = "{url}"\n')
        found = coterie("check", "--dir", tmp_path)
    sentence = str(error.value)
    assert all(words in sentence for words in said), sentence
    assert "\n" not in sentence and PASSWORD not in sentence + found.stdout
    assert found.code == 1 and f"Problem: coterie.toml: store.url: {sentence}" in found.stdout


def test_a_wrong_address_does_not_show_its_password() -> None:
    with pytest.raises(StoreUnusable) as error, owner_connection("postgresql://ada:half%zz-secret@127.0.0.1/it"):
        pass
    assert "correct store.url" in str(error.value) and "secret" not in str(error.value)


async def test_an_upgrade_and_commands_of_the_owner_may_take_longer_than_other_statements(
    shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, clock = shared.url(tmp_path), SystemClock()
    timeouts: list[float | None] = []
    wait = psycopg.Connection.wait

    def recorded(raw: Any, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        timeouts.append(timeout)
        return wait(raw, gen, interval, timeout)

    def upgrade_alone(raw: Any) -> int:
        timeouts.clear()
        version = migrate_postgres(raw)
        assert set(timeouts) == {None}
        return version

    monkeypatch.setattr(psycopg.Connection, "wait", recorded)
    monkeypatch.setattr("coterie.stores.postgres.engine.migrate_postgres", upgrade_alone)
    store = await PostgresStore.open(url, clock)
    timeouts.clear()
    await store.agents()
    await store.close()
    assert timeouts and None not in timeouts

    with owner_connection(url) as db:
        timeouts.clear()
        db.execute("SELECT 1")
        assert timeouts == [None]

    reader = await PostgresStore.open_read_only(url, clock)
    timeouts.clear()
    assert [violation async for violation in reader.violations()] == []
    await reader.close()
    assert set(timeouts) == {None}


async def test_a_database_with_another_encoding_is_refused_unchanged(shared: Postgres) -> None:
    name = "latin_society"
    shared.execute(f"DROP DATABASE IF EXISTS {name}")
    shared.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    try:
        url = make_conninfo(shared.server, dbname=name)
        with pytest.raises(StoreUnusable, match="has the encoding LATIN1"):
            await PostgresStore.open(url, SystemClock())
        with psycopg.connect(url) as db:
            assert db.execute("SELECT to_regclass('meta')").fetchone() == (None,)
    finally:
        shared.execute(f"DROP DATABASE {name}")


async def test_a_role_that_may_only_read_and_write_rows_is_enough_for_a_process(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    owner = await process()
    schema = conninfo_to_dict(shared.url(tmp_path))["application_name"]  # as the engine of the tests names it
    role = f"reader_{schema}"
    shared.execute(
        f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role};"
        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};"
        f" GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO {role}"
    )
    try:
        store = await PostgresStore.open(make_conninfo(shared.url(tmp_path), user=role), SystemClock())
        await store.send(envelope("user", "ada", "from the other role"))
        await store.close()
        assert [message.payload["text"] for message in await owner.waiting("ada")] == ["from the other role"]
    finally:
        shared.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("target", ["mysql://me:secret@there/it", "sqlite:///tmp/x.db"])
def test_an_address_of_another_database_is_no_folder(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = coterie("copy", "home", target).failure
    assert failure.startswith(f"{target.partition('//')[0]}// is not an address of a store") and "secret" not in failure
    assert list(tmp_path.iterdir()) == []


# Two versions of the program on one database


def upgrade(db: PgConnection, monkeypatch: pytest.MonkeyPatch, version: int, first_line: str) -> None:
    """Bring the database to `version`, as a program of that version would."""
    scripts = schema_scripts("postgres")
    newer = Script(version, f"{first_line}CREATE TABLE version_{version} (id BIGINT)")
    future = SchemaScripts(newer, {**scripts.upgrades, version - 1: newer})
    with monkeypatch.context() as later:
        later.setattr("coterie.stores.sql.migrations.schema_scripts", lambda _: future)
        migrate_postgres(db.raw)


async def test_a_process_goes_on_beside_the_next_version_only_if_the_schema_is_compatible(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, newest = await process(), schema_scripts("postgres").newest
    with owner_connection(shared.url(tmp_path)) as db:
        try:
            upgrade(db, monkeypatch, newest + 1, "-- compatible\n")
            await store.send(envelope("user", "ada", "beside the next version"))
            another = await process()
            await another.send(envelope("user", "ada", "started after the upgrade"))

            upgrade(db, monkeypatch, newest + 2, "")
            for one in (store, another):
                with pytest.raises(StoreBroken, match="a newer Coterie upgraded the database"):
                    await one.send(envelope("user", "ada", "never written"))
                assert "install the newer version" in str(await one.broken)
            with pytest.raises(StoreUnusable, match="last run by a newer Coterie"):
                await process()
            assert await texts(store, "ada") == ["beside the next version", "started after the upgrade"]
        finally:
            db.execute("DROP TABLE IF EXISTS " + ", ".join(f"version_{newest + step}" for step in (1, 2)))
            keys = {"newest": str(newest)}
            db.execute("UPDATE meta SET value = :newest WHERE key IN ('schema', 'compatible_from')", keys)
