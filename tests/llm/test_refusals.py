"""What providers refused, and for how long that counts."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.llm.config import Secret
from coterie.llm.learned_limits import Refusal, Refusals
from coterie.testing.clock import START, FakeClock

from .room import service

SEEING = service("main", ["vision", "audio"])


def test_a_refusal_is_taken_from_what_the_entry_says_and_nothing_else_is() -> None:
    refusals = Refusals(FakeClock())
    refusals.note(SEEING, "vision", "this model has no eyes")

    assert refusals.left(SEEING).input == {"text", "audio"}
    assert refusals.left(SEEING).output == SEEING.capabilities.output
    assert refusals.left(service("other", ["vision"])).input == {"text", "vision"}


def test_a_refusal_is_remembered_with_its_source_and_date() -> None:
    refusals = Refusals(FakeClock())
    refusals.note(SEEING, "vision", "HTTP 400:\nno\x00 images")

    assert refusals.of(SEEING) == [Refusal(capability="vision", source="HTTP 400: no\ufffd images", at=START)]


def test_refusals_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "data" / "refusals.json"
    before = Refusals(FakeClock(), file)
    before.note(SEEING, "vision", "no images")
    before.note(SEEING, "tool_calling", "no tools")

    after = Refusals(FakeClock(), file)

    assert after.of(SEEING) == before.of(SEEING)
    assert after.refuses(SEEING, "tool_calling")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_changed_entry_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "refusals.json"
    refusals = Refusals(FakeClock(), file)
    refusals.note(SEEING, "vision", "no images")
    mended = replace(SEEING, model="one-that-sees")

    assert "vision" in refusals.left(mended).input
    assert "vision" in Refusals(FakeClock(), file).left(mended).input


def test_another_key_is_no_change_and_leaves_no_trace_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "refusals.json"
    refusals = Refusals(FakeClock(), file)
    refusals.note(replace(SEEING, api_key=Secret("sk-canary-0123456789")), "vision", "no images")

    assert refusals.refuses(replace(SEEING, api_key=Secret("sk-another-abcdefghi")), "vision")
    assert b"6789" not in file.read_bytes()


def test_the_file_does_not_grow_with_every_change_of_an_entry(tmp_path: Path) -> None:
    file = tmp_path / "refusals.json"
    refusals = Refusals(FakeClock(), file)
    sizes = set()
    for number in range(10, 60):
        refusals.note(replace(SEEING, model=f"model-{number}"), "vision", "no images")
        sizes.add(file.stat().st_size)

    assert len(sizes) == 1


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"main": 7}', b"\xff", b"[" * 100_000])
def test_a_damaged_file_begins_anew(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "refusals.json"
    file.write_bytes(data)
    refusals = Refusals(FakeClock(), file)

    assert refusals.of(SEEING) == []
    refusals.note(SEEING, "vision", "no images")
    assert Refusals(FakeClock(), file).refuses(SEEING, "vision")


def test_a_file_that_cannot_be_written_costs_only_the_memory_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where a folder is wanted")
    refusals = Refusals(FakeClock(), tmp_path / "taken" / "refusals.json")
    refusals.note(SEEING, "vision", "no images")

    assert refusals.refuses(SEEING, "vision")
