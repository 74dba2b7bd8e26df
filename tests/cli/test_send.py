from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from coterie.admin.inspect import Inspection
from coterie.stores.blobs import blob_path
from coterie.stores.sqlite.connection import Durability, FolderLock, open_writer

from .commands import coterie, coterie_process
from .conftest import delayed, schedule, waiting


def test_a_message_is_stored_for_its_recipient(folder: Path) -> None:
    done = coterie("send", "assistant", "hello", "--dir", folder)

    (message,) = waiting(folder)
    assert done.code == 0
    assert message.id in done.stdout
    assert (message.sender, message.payload) == ("user", {"text": "hello"})


def test_send_prints_the_due_time_of_a_delayed_message(folder: Path) -> None:
    receipt = coterie("send", "assistant", "later", "--delay", "2h", "--dir", folder, "--json").json

    (message,) = delayed(folder)
    assert receipt == {
        "messageId": message.id,
        "state": "delayed",
        "task": message.id,
        "scheduledDeliveryTime": message.to_dict()["deliverAt"],
    }
    assert message.deliver_at is not None
    assert (message.deliver_at - message.created_at).total_seconds() == 7200


def test_send_does_not_deliver_other_delayed_messages(folder: Path) -> None:
    schedule(folder, 3)

    assert coterie("send", "assistant", "now", "--dir", folder).code == 0

    assert len(delayed(folder)) == 3
    assert [m.payload["text"] for m in waiting(folder)] == ["now"]


def test_a_typo_in_the_name_gets_a_hint(folder: Path) -> None:
    assert 'did you mean "assistant"?' in coterie("send", "asistant", "hi", "--dir", folder).failure
    assert "assistant, user" in coterie("send", "zork", "hi", "--dir", folder).failure


def test_json_output_of_a_refused_send_has_its_code(folder: Path) -> None:
    options = [f"--quick-reply={n}" for n in range(11)]

    done = coterie("send", "assistant", "pick", *options, "--dir", folder, "--json")

    assert done.json["error"] == "quickReplies_too_many"
    assert done.json["message"] == done.failure


def test_send_keeps_the_order_of_quick_replies(folder: Path) -> None:
    coterie("send", "assistant", "pick", "--quick-reply", "No", "--quick-reply", "Yes", "--dir", folder)

    assert waiting(folder)[0].payload["quickReplies"] == ["No", "Yes"]


def test_an_attached_file_is_stored_with_a_media_type_from_its_bytes(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "chart.txt"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))

    assert coterie("send", "assistant", "look", "--attach", picture, "--dir", folder).code == 0

    (attachment,) = waiting(folder)[0].payload["attachments"]
    assert (attachment["filename"], attachment["type"], attachment["size"]) == ("chart.txt", "image", 108)
    assert _bytes_of(folder, attachment["artifactRef"]) == picture.read_bytes()


def test_a_missing_attachment_sends_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("x")
    files = ("--attach", tmp_path / "here.txt", "--attach", tmp_path / "gone.txt")

    assert "gone.txt" in coterie("send", "assistant", "look", *files, "--dir", folder).failure

    assert not (folder / "data" / "coterie.db").exists()


@pytest.mark.parametrize("delay", ["10", "soon", "-5s"])
def test_an_invalid_delay_is_wrong_usage(folder: Path, delay: str) -> None:
    done = coterie("send", "assistant", "hi", f"--delay={delay}", "--dir", folder)

    assert done.code == 2
    assert "500ms, 10s, 5m, 2h or 1d" in done.stderr


@pytest.mark.parametrize("option", [("--timeout", "1s"), ("--time-zone", "Europe/Berlin")])
def test_an_option_without_the_one_that_it_belongs_to_is_wrong_usage(folder: Path, option: tuple[str, str]) -> None:
    done = coterie("send", "assistant", "hello", *option, "--dir", folder)

    assert done.code == 2 and f"{option[0]} needs" in done.stderr


def test_bytes_of_the_command_line_that_are_no_text_are_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.txt").write_text("menu")

    assert coterie("send", "assistant", "caf\udce9", "--attach", tmp_path / "caf\udce9.txt", "--dir", folder).code == 0
    (message,) = waiting(folder)
    assert message.payload["text"] == "caf\ufffd"
    assert message.payload["attachments"][0]["filename"] == "caf\ufffd.txt"


def test_a_missing_folder_is_reported_and_not_created(tmp_path: Path) -> None:
    assert "coterie init" in coterie("send", "assistant", "hi", "--dir", tmp_path / "typo").failure

    assert not (tmp_path / "typo").exists()


@pytest.mark.slow
def test_send_to_a_locked_society_reports_the_process_of_its_owner(folder: Path) -> None:
    lock = FolderLock(folder / "data")
    try:
        # Another process, because a lock does not exclude its own process.
        assert f"process {_own_pid()}" in coterie_process("send", "assistant", "hi", "--dir", folder).failure
    finally:
        lock.release()


@pytest.mark.slow
def test_a_crash_before_the_commit_stores_no_message(folder: Path) -> None:
    coterie("send", "assistant", "first", "--dir", folder)

    killed = coterie_process(
        "send", "assistant", "second", "--dir", folder, env={"COTERIE_FAILPOINTS": "commit.before:2:kill"}
    )

    assert killed.code == -9
    assert [m.payload["text"] for m in waiting(folder)] == ["first"]


def _own_pid() -> int:
    import os

    return os.getpid()


def _bytes_of(folder: Path, ref: str) -> bytes:
    async def read() -> bytes:
        async with Inspection.open(folder) as society:
            artifact = (await society.store.artifacts([ref]))[ref]
            return blob_path(society.folder.artifacts, artifact.sha256).read_bytes()

    return asyncio.run(read())


def test_send_on_a_full_disk_is_a_one_line_error_and_stores_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coterie("send", "assistant", "this fits", "--dir", folder)

    def full(path: Path, durability: Durability) -> sqlite3.Connection:
        db = open_writer(path, durability)
        db.execute("PRAGMA max_page_count = 1")  # no growth
        return db

    with monkeypatch.context() as patched:
        patched.setattr("coterie.stores.sqlite.engine.open_writer", full)
        failure = coterie("send", "assistant", "x" * 100_000, "--dir", folder).failure

    assert failure.startswith("the disk is full: free some space")
    assert [message.payload["text"] for message in waiting(folder)] == ["this fits"]
