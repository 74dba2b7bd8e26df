"""Compaction: the older part of a long history is replaced by a summary in requests, but stays stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.agent.compaction import accept_summary, build_digest, find_cut, summary_request
from coterie.agent.context import QUARANTINED_NOTE
from coterie.agent.context_window import cut_text, estimate_tokens, summary_limit, text_tokens
from coterie.clock import UNIX_EPOCH
from coterie.errors import StoreUnavailable
from coterie.llm.service import Completion
from coterie.messages import Message
from coterie.testing.model_server import ReceivedRequest, Says, Status, count_tokens
from coterie.turn_store import Claim, HistoryRow, HistoryView
from tests.agent.stage import stage


def row(seq: int, role: str, size: int = 100) -> HistoryRow:
    if role == "user":
        message = Message(
            seq=seq, id="m", sender="user", to="ada", payload={"text": f"{seq} " + "x" * size}, state="taken",
            created_at=UNIX_EPOCH,
        )  # fmt: skip
        return HistoryRow(seq=seq, turn_no=seq, role=role, message=message)
    return HistoryRow(seq=seq, turn_no=seq, role=role, text=f"{seq} " + "x" * size)


GROUPS = [row(1, "user"), row(2, "assistant"), row(3, "tool"), row(4, "user"), row(5, "assistant"), row(6, "user")]


@pytest.mark.parametrize(("keep", "cut"), [(0, 5), (100, 5), (160, 3), (10_000, 3)])
def test_a_history_is_cut_before_a_message_so_that_the_rest_fits(keep: int, cut: int) -> None:
    assert find_cut(GROUPS, keep) == cut


def test_a_long_turn_is_cut_between_two_groups_of_calls() -> None:
    turn = [row(1, "user"), *(row(seq, "tool" if seq % 3 else "assistant") for seq in range(3, 30))]
    cuts = {find_cut(turn, keep) for keep in range(0, 2_000, 50)}
    assert len(cuts) > 3
    for cut in cuts:
        assert cut is not None and next(row.role for row in turn if row.seq > cut) == "assistant"
    assert find_cut(turn, 0) == 26  # the last calls are not summarised


def test_new_messages_are_never_summarised() -> None:
    assert find_cut([], 100) is None
    assert find_cut([row(1, "user", 10_000), row(2, "user")], 0) is None
    assert find_cut([row(1, "user"), row(2, "assistant"), row(3, "user", 10_000), row(4, "user")], 0) == 2


ROWS = [row(seq, "user" if seq % 2 else "assistant", 500) for seq in range(1, 200)]


@pytest.mark.parametrize("limit", [150, 400, 1_000])
@pytest.mark.parametrize("earlier", ["", "What was said. " * 1_000])
def test_a_digest_has_a_size_limit_and_the_newest_rows(limit: int, earlier: str) -> None:
    digest = build_digest(earlier, ROWS, limit)
    assert text_tokens(digest) <= limit
    assert "199 xxx" in digest and '"1 xxx' not in digest
    assert ("What was said." in digest) == bool(earlier)


@pytest.mark.parametrize("limit", [150, 400, 1_000])
@pytest.mark.parametrize(
    "answer",
    [
        Completion(text=""),
        Completion(text="Much was said. " * 5_000),
        Completion(text="他们说了很多。" * 5_000),
        Completion(text='"\n' * 5_000),
        Completion(text="It was cut off in the mid", finish_reason="length"),
    ],
)
def test_a_summary_that_is_empty_too_long_or_cut_off_gets_a_digest_within_the_limit(
    limit: int, answer: Completion
) -> None:
    text = accept_summary(answer, "the earlier one", ROWS, limit)
    assert text_tokens(text) <= limit
    assert "199 xxx" in text


def test_a_complete_summary_replaces_the_earlier_one() -> None:
    assert accept_summary(Completion(text=" All of it.\n"), "the earlier one", ROWS, 100) == "All of it."


@pytest.mark.parametrize("budget", [700, 2_000, 8_000, 100_000])
def test_a_request_for_a_summary_fits_and_contains_the_earlier_summary(budget: int) -> None:
    request = summary_request("the earlier one " * 3_000, ROWS, budget)
    assert estimate_tokens(request) <= budget
    shown = repr(request)
    assert "earlier one" in shown and "199 xxx" in shown
    assert f"at most {summary_limit(budget) * 3 // 7} words" in shown


def test_cut_text_keeps_the_beginning_or_the_end() -> None:
    assert cut_text("short", 10) == "short"
    assert cut_text("x" * 100 + "y" * 100, 10) == "x" * 27 + "…"
    assert cut_text("x" * 100 + "y" * 100, 10, keep_end=True) == "…" + "y" * 27


def test_a_quarantined_message_is_in_no_summary() -> None:
    message = Message(
        seq=1, id="m", sender="user", to="ada", payload={"text": "deadly"}, state="taken", created_at=UNIX_EPOCH
    )
    hidden = HistoryRow(seq=1, turn_no=1, role="user", message=message, hidden=True)
    digest, request = build_digest("", [hidden], 1_000), repr(summary_request("", [hidden], 1_000))
    assert "deadly" not in digest + request
    assert QUARANTINED_NOTE in digest and QUARANTINED_NOTE in request


def is_summary(request: ReceivedRequest) -> bool:
    return str(request.body["messages"][0]["content"]).startswith("Summarise")


async def test_a_history_larger_than_the_context_window_is_summarised(tmp_path: Path) -> None:
    async with stage(tmp_path, window=4_000) as here:
        here.server.default = lambda request: "a summary of x" if is_summary(request) else "yes"
        for n in range(1, 15):
            await here.say(f"{n} " + "x" * 1_500)
            await here.heard(n)
        summaries = [request for request in here.server.requests if is_summary(request)]
        last = here.server.requests[-1].body["messages"]
        assert 1 <= len(summaries) <= 6
        assert "a summary of x" in str(last[1]["content"])
        assert [role for role, _ in await here.history()] == ["user", "assistant"] * 14
        here.server.refused.clear()  # requests above the window were refused, as expected


async def test_no_request_exceeds_a_known_context_window(tmp_path: Path) -> None:
    async with stage(tmp_path, window=4_000, contextTokens=4_000) as here:
        here.server.default = lambda request: "a summary of x" if is_summary(request) else "yes"
        for n in range(1, 12):
            await here.say(f"{n} " + "x" * 1_500)
            await here.heard(n)
        assert here.server.refused == []
        assert any(is_summary(request) for request in here.server.requests)
        # Tokens of summaries count too.
        answers = [b"a summary of x" if is_summary(request) else b"yes" for request in here.server.requests]
        used = sum(
            count_tokens(one.raw) + count_tokens(answer)
            for one, answer in zip(here.server.requests, answers, strict=True)
        )
        await here.state("ada", "idle")
        assert await here.society.store.tokens_used_today() == used


async def test_a_store_that_fails_after_a_summary_does_not_bring_the_old_history_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, window=4_000, contextTokens=4_000) as here:
        store, failures = here.society.store, ["the store is unavailable"]
        read, summarise, summarised = store.history_view, store.summarise, list[int]()

        async def failing_once(*arguments: Any) -> HistoryView:
            if summarised and failures:
                raise StoreUnavailable(failures.pop())
            return await read(*arguments)

        async def noted(claim: Claim, upto: int, *rest: Any) -> Claim:
            summarised.append(upto)
            return await summarise(claim, upto, *rest)

        monkeypatch.setattr(store, "history_view", failing_once)
        monkeypatch.setattr(store, "summarise", noted)
        here.server.default = lambda request: "a summary of x" if is_summary(request) else "yes"
        sent = 0
        while not summarised:
            sent += 1
            await here.say(f"{sent} " + "x" * 1_500)
            await here.heard(sent)
        assert failures == [] and len(summarised) == 1
        assert [is_summary(request) for request in here.server.requests[-2:]] == [True, False]
        assert "a summary of x" in str(here.server.requests[-1].body["messages"][1]["content"])


async def test_a_new_summary_replaces_the_previous_one(tmp_path: Path) -> None:
    """Each summary has the same share of the window, however many there were before."""
    number = 0

    def answer(request: ReceivedRequest) -> str:
        nonlocal number
        if not is_summary(request):
            return "yes"
        number += 1
        return f"SUMMARY {number}: " + "fact " * 60

    async with stage(tmp_path, window=4_000, contextTokens=4_000) as here:
        here.server.default = answer
        for n in range(1, 40):
            await here.say(f"{n} " + "x" * 1_500)
            await here.heard(n)
        summaries = [request for request in here.server.requests if is_summary(request)]
        assert number >= 5
        for earlier, request in enumerate(summaries):
            material = str(request.body["messages"][1]["content"])
            assert [f"SUMMARY {n}:" in material for n in range(1, earlier + 1)] == [False] * (earlier - 1) + [True] * (
                earlier > 0
            )
        shown = (await here.society.store.history_view("ada")).summary
        assert shown.startswith(f"SUMMARY {number}:") and shown.count("SUMMARY") == 1
        assert here.server.refused == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    [Status(500, "broken"), Status(401, "no key"), "", Says("endless " * 20_000), Says("cut", finish="length")],
)
async def test_without_a_usable_summary_the_conversation_goes_on(tmp_path: Path, failure: Says | Status | str) -> None:
    async with stage(tmp_path, window=4_000, contextTokens=4_000) as here:
        here.server.default = lambda request: failure if is_summary(request) else "yes"
        for n in range(1, 15):
            await here.say(f"{n} " + "x" * 1_500)
            assert (await here.texts(n))[-1] == "yes"
        assert any(is_summary(request) for request in here.server.requests)
        assert text_tokens((await here.society.store.history_view("ada")).summary) <= summary_limit(5_000)
        assert here.server.refused == []


async def test_the_person_is_notified_when_the_daily_tokens_are_used_up(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[limits]\ntokens_per_day = 50\n[agents.ada]\n") as here:
        await here.say("first")
        assert await here.texts() == ["ok"]
        await here.say("second")
        assert "limits.tokens_per_day" in (await here.texts(2))[1]
        assert len(here.server.requests) == 1
