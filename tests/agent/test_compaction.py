"""Long conversations go on: the older part is shown as a summary, and nothing of it is lost."""

from __future__ import annotations

from pathlib import Path

from coterie.agent.compaction import (
    MAX_DIGEST_CHARACTERS,
    build_digest,
    estimate_tokens,
    estimate_usage,
    find_cut,
    summary_request,
)
from coterie.agent.context import QUARANTINED_NOTE
from coterie.clock import UNIX_EPOCH
from coterie.llm.types import ModelRequest, SystemMessage
from coterie.messages import Message
from coterie.testing.replies import ReceivedRequest, count_tokens
from coterie.turn_store import HistoryRow
from tests.agent.stage import stage


def row(seq: int, role: str, size: int = 100) -> HistoryRow:
    return HistoryRow(seq=seq, turn_no=seq, role=role, text="x" * size)


def test_the_cut_falls_where_a_message_begins_and_never_inside_a_group() -> None:
    rows = [row(1, "user"), row(2, "assistant"), row(3, "tool"), row(4, "user"), row(5, "assistant"), row(6, "user")]
    assert find_cut(rows) == 3
    assert find_cut([row(1, "user"), row(2, "assistant", 10_000), row(3, "tool")]) is None
    assert find_cut([]) is None


def test_a_digest_is_bounded_and_keeps_the_newest() -> None:
    made = build_digest([row(seq, "user", 500) for seq in range(1, 200)])
    assert len(made) <= MAX_DIGEST_CHARACTERS + 1


def test_a_message_that_was_set_aside_is_in_no_summary() -> None:
    message = Message(
        seq=1, id="m", sender="user", to="ada", payload={"text": "deadly"}, state="taken", created_at=UNIX_EPOCH
    )
    hidden = HistoryRow(seq=1, turn_no=1, role="user", message=message, hidden=True)
    assert "deadly" not in build_digest([hidden]) + repr(summary_request([hidden]))
    assert QUARANTINED_NOTE in build_digest([hidden]) and QUARANTINED_NOTE in repr(summary_request([hidden]))


def test_an_estimate_grows_with_what_was_sent_and_said() -> None:
    short, long = (ModelRequest(messages=(SystemMessage("x" * size),)) for size in (30, 3_000))
    assert 0 < estimate_tokens(short) < estimate_tokens(long)
    assert estimate_usage(short, "four words of text").output_tokens > estimate_usage(short, "").output_tokens == 0


def is_summary(request: ReceivedRequest) -> bool:
    return str(request.body["messages"][0]["content"]).startswith("Summarise")


async def test_a_history_that_outgrows_the_window_is_summarised_once_and_the_talk_goes_on(tmp_path: Path) -> None:
    async with stage(tmp_path, window=4_000) as here:
        here.server.default = lambda request: "they spoke of x" if is_summary(request) else "yes"
        for n in range(1, 15):
            await here.say(f"{n} " + "x" * 1_500)
            await here.heard(n)
        summaries = [request for request in here.server.requests if is_summary(request)]
        last = here.server.requests[-1].body["messages"]
        assert 1 <= len(summaries) <= 4
        assert "they spoke of x" in str(last[1]["content"])
        assert [role for role, _ in await here.history()] == ["user", "assistant"] * 14
        here.server.refused.clear()  # the service's complaints about length were expected


async def test_where_the_window_is_known_nothing_too_long_is_ever_sent(tmp_path: Path) -> None:
    async with stage(tmp_path, window=4_000, contextTokens=4_000) as here:
        here.server.default = lambda request: "they spoke of x" if is_summary(request) else "yes"
        for n in range(1, 12):
            await here.say(f"{n} " + "x" * 1_500)
            await here.heard(n)
        assert here.server.refused == []
        assert any(is_summary(request) for request in here.server.requests)
        # Summaries cost tokens like everything else that is asked.
        said = [b"they spoke of x" if is_summary(request) else b"yes" for request in here.server.requests]
        used = sum(
            count_tokens(one.raw) + count_tokens(words) for one, words in zip(here.server.requests, said, strict=True)
        )
        await here.state("ada", "idle")
        assert await here.society.store.tokens_used_since(UNIX_EPOCH) == used


async def test_a_single_message_that_can_never_fit_is_told_to_the_person(tmp_path: Path) -> None:
    async with stage(tmp_path, window=2_000) as here:
        await here.say("x" * 60_000)
        (trouble,) = await here.heard()
        assert trouble.sender == "system" and "window" in trouble.payload["text"]
        await here.state("ada", "blocked")
        here.server.refused.clear()


async def test_the_days_tokens_are_counted_and_when_they_are_spent_the_person_is_told(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[limits]\ntokens_per_day = 50\n[agents.ada]\n") as here:
        await here.say("first")
        assert await here.texts() == ["ok"]
        await here.say("second")
        assert "limits.tokens_per_day" in (await here.texts(2))[1]
        assert len(here.server.requests) == 1
