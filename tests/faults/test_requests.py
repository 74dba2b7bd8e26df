"""Tests of the comparison in `requests.py`: it finds wrong requests."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from coterie.llm.service import (
    AssistantMessage,
    ChatMessage,
    Completion,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from coterie.society import Society

from .fake_model import FakeModel, ToolEffects, fake_models
from .requests import Item, compared, conversation, count_requests, differences, wrong_requests
from .scenarios import make_home, wait_until_idle
from .witness import Note, Witness, read_notes

STORED: list[Item] = [
    ("user", "what was said before"),
    ("user", "L1.2.3"),
    ("assistant", "", [("call_1", "fire", {"n": 1})]),
    ("tool", "call_1", "fired"),
    ("user", "L1.2.30"),
]
SAID: list[ChatMessage] = [
    SystemMessage("You are ada."),
    UserMessage((TextPart("[summary]\nwhat was said before"),)),
    UserMessage((TextPart("<message>\nL1.2.3\n</message>"),)),
    AssistantMessage("", (ToolCall(id="call_1", name="fire", arguments={"n": 1}),)),
    ToolMessage("call_1", "fired"),
    UserMessage((TextPart("<message>\nL1.2.30\n</message>"),)),
]


def test_a_request_equal_to_the_rows_passes() -> None:
    assert differences(conversation(SAID), STORED) == []


@pytest.mark.parametrize("missing", range(1, len(SAID)))
def test_a_request_that_lacks_a_part_is_found(missing: int) -> None:
    assert differences(conversation(SAID[:missing] + SAID[missing + 1 :]), STORED)


def test_a_request_with_another_result_of_a_call_is_found() -> None:
    assert differences(conversation([*SAID[:4], ToolMessage("call_1", "unknown"), *SAID[5:]]), STORED)


def test_a_request_that_shows_more_than_is_stored_is_found() -> None:
    assert differences(conversation(SAID), STORED[:-1])


def test_a_request_with_an_older_message_in_place_of_a_newer_one_is_found() -> None:
    assert differences(conversation([*SAID[:-1], SAID[2]]), STORED)


def asked(pid: int, epoch: int, step: int, **more: Any) -> Note:
    return {"compared": "ada", "pid": pid, "turn": 1, "epoch": epoch, "step": step, "taken_over": False} | more


def test_two_processes_that_ask_in_the_same_step_are_found() -> None:
    assert wrong_requests([asked(1, 1, 1), asked(1, 1, 1), asked(2, 2, 1)]) == []
    assert wrong_requests([asked(1, 1, 1), asked(2, 1, 1)])


def test_a_process_that_an_agent_comes_back_to_is_counted() -> None:
    notes = [asked(1, 1, 1), asked(2, 2, 2), asked(1, 3, 3, taken_over=True)]
    seen = count_requests(notes)
    assert seen["requests compared"] == 3
    assert seen["requests compared of a process that an agent came back to"] == 1
    assert seen["requests compared after a takeover by a process that knew the agent"] == 1


async def test_a_row_missing_in_a_request_is_noted_by_the_witness(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "witness"
    make_home(home)
    ToolEffects.witness = witness = Witness(file)
    model = FakeModel("model", lambda _: Completion(text="yes"))
    with compared(home, witness) as comparing, fake_models(lambda _: comparing(model)):
        async with Society.open(home) as society:
            await society.send(to="ada", text="first")
            await wait_until_idle(society)
            assert (count_requests(read_notes(file))["requests compared"], wrong_requests(read_notes(file))) == (
                1,
                [],
            )
            with sqlite3.connect(home / "data" / "coterie.db") as db:
                db.execute("UPDATE history SET content = 'no' WHERE role = 'assistant'")
            await society.send(to="ada", text="second")
            await wait_until_idle(society)
    witness.close()
    (problem,) = wrong_requests(read_notes(file))
    assert "'yes'" in problem and "'no'" in problem
