"""Learned limits: contents, file, and when they end."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.llm.config import Secret
from coterie.llm.learned_limits import MAX_LIMITS, LearnedLimit, LearnedLimits, content_limit
from coterie.testing.clock import START, FakeClock

from .harness import service

SEEING = service("main", ["vision", "audio"])


def test_only_the_refused_capability_is_removed() -> None:
    refusals = LearnedLimits(FakeClock())
    refusals.record(SEEING, "vision", "this model has no eyes")

    assert refusals.effective_capabilities(SEEING).input == {"text", "audio"}
    assert refusals.effective_capabilities(SEEING).output == SEEING.capabilities.output
    assert refusals.effective_capabilities(service("other", ["vision"])).input == {"text", "vision"}


def test_a_learned_limit_has_its_source_and_date() -> None:
    refusals = LearnedLimits(FakeClock())
    refusals.record(SEEING, "vision", "HTTP 400:\nno\x00 images")

    assert refusals.list_for(SEEING) == [
        LearnedLimit(capability="vision", source="HTTP 400: no\ufffd images", at=START)
    ]


def test_learned_limits_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "data" / "refusals.json"
    before = LearnedLimits(FakeClock(), file)
    before.record(SEEING, "vision", "no images")
    before.record(SEEING, "tool_calling", "no tools")

    after = LearnedLimits(FakeClock(), file)

    assert after.list_for(SEEING) == before.list_for(SEEING)
    assert after.is_refused(SEEING, "tool_calling")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_changed_entry_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "refusals.json"
    refusals = LearnedLimits(FakeClock(), file)
    refusals.record(SEEING, "vision", "no images")
    mended = replace(SEEING, model="one-that-sees")

    assert "vision" in refusals.effective_capabilities(mended).input
    assert "vision" in LearnedLimits(FakeClock(), file).effective_capabilities(mended).input


def test_a_changed_key_keeps_the_limits_and_is_not_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "refusals.json"
    refusals = LearnedLimits(FakeClock(), file)
    refusals.record(replace(SEEING, api_key=Secret("sk-canary-0123456789")), "vision", "no images")

    assert refusals.is_refused(replace(SEEING, api_key=Secret("sk-another-abcdefghi")), "vision")
    assert b"6789" not in file.read_bytes()


def test_the_file_does_not_grow_with_every_change_of_an_entry(tmp_path: Path) -> None:
    file = tmp_path / "refusals.json"
    refusals = LearnedLimits(FakeClock(), file)
    sizes = set()
    for number in range(10, 60):
        refusals.record(replace(SEEING, model=f"model-{number}"), "vision", "no images")
        sizes.add(file.stat().st_size)

    assert len(sizes) == 1


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"main": 7}', b"\xff", b"[" * 100_000])
def test_a_corrupt_file_starts_empty(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "refusals.json"
    file.write_bytes(data)
    refusals = LearnedLimits(FakeClock(), file)

    assert refusals.list_for(SEEING) == []
    refusals.record(SEEING, "vision", "no images")
    assert LearnedLimits(FakeClock(), file).is_refused(SEEING, "vision")


def test_a_file_that_cannot_be_written_costs_only_the_memory_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where a folder is wanted")
    refusals = LearnedLimits(FakeClock(), tmp_path / "taken" / "refusals.json")
    refusals.record(SEEING, "vision", "no images")

    assert refusals.is_refused(SEEING, "vision")


def test_the_oldest_of_many_refused_files_is_forgotten() -> None:
    refusals = LearnedLimits(FakeClock())
    for number in range(MAX_LIMITS + 1):
        refusals.record(SEEING, content_limit("vision", str(number)), "damaged")

    assert refusals.takes_file(SEEING, "vision", "image/png", "0")
    assert not refusals.takes_file(SEEING, "vision", "image/png", "1")
    assert not refusals.takes_file(SEEING, "vision", "image/png", str(MAX_LIMITS))
