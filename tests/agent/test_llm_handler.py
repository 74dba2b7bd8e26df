"""Turns of agents: messages at any moment, tools, approvals, errors, stops and restarts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from coterie import Society, failpoints
from coterie.errors import Refused
from coterie.testing import Calls, Says, Status
from tests.agent.stage import Bell, each, stage
from tests.agent.tool_calls import HANG_SECONDS, wait_until


def calls(*names: str, tool: str = "ring") -> tuple[Calls, ...]:
    return tuple(Calls(tool, {"name": name}) for name in names)


async def test_an_agent_answers_a_message_and_becomes_idle(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script("Good morning!")
        asked = await here.say("hello")
        (answer,) = await here.heard()
        assert (answer.sender, answer.payload, answer.in_reply_to) == ("ada", {"text": "Good morning!"}, asked)
        await here.state("ada", "idle")
        assert await here.history() == [("user", "hello"), ("assistant", "Good morning!")]


async def test_two_messages_during_one_request_need_one_more_request(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        gate = asyncio.Event()
        here.server.script(Says("first", gate=gate), "to both")
        await here.say("one")
        await here.server.wait_for_request(1)
        receipt = await here.society.send(to="ada", text="two")
        await here.say("three")
        gate.set()
        assert receipt.state == "queued"
        assert await here.texts(2) == ["first", "to both"]
        assert len(here.server.requests) == 2
        assert await here.history() == [
            ("user", "one"), ("assistant", "first"), ("user", "two"), ("user", "three"), ("assistant", "to both"),
        ]  # fmt: skip


async def test_a_message_before_the_first_call_withdraws_the_plan(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        gate = asyncio.Event()
        here.server.script(Says("I will ring", calls=calls("a", "b"), gate=gate), "as you wish")
        await here.say("ring!")
        await here.server.wait_for_request(1)
        await here.say("no, do not")
        gate.set()
        assert await here.texts() == ["as you wish"]
        assert Bell.rings == []
        assert here.roles_asked(1) == ["user"]  # both messages as one; the plan is not shown
        assert await here.history() == [("user", "ring!"), ("user", "no, do not"), ("assistant", "as you wish")]


async def test_a_message_after_the_first_call_keeps_its_result_and_cancels_the_rest(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=calls("a", "b", "c")), "stopped in time")
        await here.say("ring them all")
        await Bell.rang.wait()
        await here.say("enough")
        Bell.may_end.set()
        assert await here.texts() == ["stopped in time"]
        assert Bell.rings == ["a"]
        roles = [role for role, _ in await here.history()]
        assert roles == ["user", "assistant", "tool", "tool", "tool", "user", "assistant"]
        results = [text for role, text in await here.history() if role == "tool"]
        assert results[0] == "a rang" and all('"executed":false' in text for text in results[1:])


async def test_a_delayed_message_that_falls_due_interrupts_like_any_other(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=calls("a", "b")), "heard")
        await here.say("ring")
        await Bell.rang.wait()
        await here.say("later", delay_ms=1)

        async def waits() -> bool:
            return len(await here.society.waiting("ada")) == 1

        await here.until(waits)
        Bell.may_end.set()
        assert await here.texts() == ["heard"]
        assert Bell.rings == ["a"]


async def test_an_answer_to_an_answer_goes_to_the_original_asker(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        to_bob = Calls("send_message", {"to": "bob", "payload": {"text": "what is the time?"}})
        here.server.default = each(ada=[Says(calls=(to_bob,)), "I asked bob", "it is noon"], bob=["noon"])
        asked = await here.say("what is the time?")
        first, second = await here.heard(2)
        assert (first.payload["text"], second.payload["text"]) == ("I asked bob", "it is noon")
        assert first.in_reply_to == second.in_reply_to == asked
        assert await here.history("bob") == [("user", "what is the time?"), ("assistant", "noon")]


async def test_a_plan_is_not_interrupted_by_the_answers_to_its_own_questions(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[agents.ada]\n[agents.bob]\n[agents.eve]\n") as here:
        asks = [Calls("send_message", {"to": who, "payload": {"text": "?"}}) for who in ("bob", "eve")]
        here.server.default = "fine"
        here.server.script(Says(calls=(asks[0], *calls("x"), asks[1])))
        Bell.may_end.clear()
        await here.say("ask around")
        await Bell.rang.wait()

        async def answered() -> bool:
            return len(await here.society.waiting("ada")) == 1

        await here.until(answered)
        Bell.may_end.set()
        await here.heard(1)
        await here.state("eve", "idle")
        assert await here.history("eve") == [("user", "?"), ("assistant", "fine")]


async def test_a_wrong_key_is_reported_to_the_person_and_the_next_message_retries(tmp_path: Path) -> None:
    async with stage(tmp_path, apiKey="wrong") as here:
        here.server.script(Status(401), "now it works")
        await here.say("hello")
        (notice,) = await here.heard()
        assert notice.sender == "system" and "llmservices.json" in notice.payload["text"]
        await here.state("ada", "blocked")
        await here.say("again?")
        assert (await here.texts(2))[1] == "now it works"
        assert len(here.server.requests) == 2


@pytest.mark.slow
async def test_a_transient_error_is_retried_without_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)
    async with stage(tmp_path) as here:
        here.server.script(Status(503), Status(429), "answered")
        await here.say("hello")
        assert await here.texts() == ["answered"]
        assert len(here.server.requests) == 3


async def test_an_invalid_call_is_an_error_result(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        wrong = (Calls("no_such_tool", {}), Calls("ring", {"nmae": "x"}), Calls("ring", "not json"))
        here.server.script(Says(calls=wrong), "sorry")
        await here.say("try")
        assert await here.texts() == ["sorry"]
        results = [text for role, text in await here.history() if role == "tool"]
        assert "no tool" in results[0] and "nmae" in results[1] and "JSON" in results[2]
        assert Bell.rings == []


async def test_after_a_stop_the_waiting_message_begins_the_next_turn(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        gate = asyncio.Event()
        here.server.script(Says("one two three", gate=gate), "next")
        await here.say("count")
        await here.server.wait_for_request(1)
        await here.say("and then?")
        assert here.society.stop_turn("ada") is True
        assert await here.texts(2) == ["", "next"]  # the first marks the stop
        gate.set()
        await here.state("ada", "idle")
        await wait_until(lambda: here.society.stop_turn("ada") is False)  # its task ends after its last write
        assert await here.history() == [("user", "count"), ("user", "and then?"), ("assistant", "next")]


async def test_a_stopped_call_has_an_unknown_outcome(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=calls("a", "b")))
        await here.say("ring")
        await Bell.rang.wait()
        here.society.stop_turn("ada")
        await here.state("ada", "idle")
        results = [text for role, text in await here.history() if role == "tool"]
        assert '"unknown"' in results[0] and '"stopped"' in results[1]


@pytest.mark.parametrize(("option", "rings"), [(0, ["x"]), (1, [])])
async def test_a_call_that_needs_approval_runs_only_after_approval(
    tmp_path: Path, option: int, rings: list[str]
) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says(calls=calls("x", tool="dangerous")), "that was that")
        await here.say("do it")
        (question,) = await here.heard()
        assert question.payload["approval"]["arguments"] == {"name": "x"}
        options = question.payload["quickReplies"]
        await here.say(options[option], in_reply_to=question.id, option=option)
        assert (await here.texts(2))[1] == "that was that"
        assert Bell.rings == rings
        assert [role for role, _ in await here.history()] == ["user", "assistant", "tool", "user", "assistant"]


async def test_a_question_before_the_decision_is_answered_with_the_call_in_view(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says(calls=calls("x", tool="dangerous")), "because", "that was that")
        await here.say("do it")
        (question,) = await here.heard()
        await here.say("why?", in_reply_to=question.id, asks_back=True)
        assert (await here.texts(2))[1] == "because"
        assert "dangerous" in str(here.server.requests[-1].body["messages"][-1]) and Bell.rings == []
        await here.say(question.payload["quickReplies"][0], in_reply_to=question.id, option=0)
        assert (await here.texts(3))[2] == "that was that"
        assert Bell.rings == ["x"]
        roles = [role for role, _ in await here.history()]
        assert roles == ["user", "user", "assistant", "assistant", "tool", "user", "assistant"]


async def test_any_other_message_closes_the_question_and_cancels_the_call(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says(calls=calls("x", tool="dangerous")), "I left it")
        await here.say("do it")
        (question,) = await here.heard()
        await here.say("wait, what is this?")
        assert (await here.texts(2))[1] == "I left it"
        with pytest.raises(Refused, match="answered already"):
            await here.say(question.payload["quickReplies"][0], in_reply_to=question.id, option=0)
        assert Bell.rings == []


async def test_the_type_of_a_forwarded_file_is_derived_from_its_bytes(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        kept = await here.society.artifacts.put(b"some notes", "notes.txt")
        attachment = {"artifactRef": kept.ref, "size": 7, "mimeType": "image/png"}
        unknown = {"attachments": [{"artifactRef": "nothing"}]}
        here.server.script(
            Says(
                calls=(
                    Calls("send_message", {"to": "user", "payload": {"attachments": [attachment]}}),
                    Calls("send_message", {"to": "user", "payload": unknown}),
                )
            ),
            "sent",
        )
        await here.say("Send me back my notes", attachments=[kept.ref])
        forwarded, _ = await here.heard(2)
        assert forwarded.payload["attachments"] == [kept.to_dict()]
        results = [text for role, text in await here.history() if role == "tool"]
        assert "attachment_unknown" in results[1]


@pytest.mark.slow
async def test_the_hop_limit_ends_a_conversation_of_two_agents(tmp_path: Path) -> None:
    agents = "[limits]\nmax_hops = 5\n[agents.ada]\n[agents.bob]\n"
    async with stage(tmp_path, agents=agents) as here:

        def pass_on(request: object) -> Says | str:
            body = request.body  # type: ignore[attr-defined]
            if body["messages"][-1]["role"] == "tool":
                return "" if "messageId" in body["messages"][-1]["content"] else "I give up"
            other = "bob" if "id: ada" in body["messages"][0]["content"] else "ada"
            return Says(calls=(Calls("send_message", {"to": other, "payload": {"text": "your turn"}}),))

        here.server.default = pass_on
        await here.say("play")
        await here.state("ada", "idle")

        async def quiet() -> bool:
            agents = await here.society.store.agents()
            return all(agent.state == "idle" for agent in agents)

        await here.until(quiet)
        assert len(here.server.requests) <= 2 * 7


async def test_a_turn_interrupted_by_a_restart_continues_and_repeats_pure_calls(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[shutdown]\ndrain_seconds = 0\n[agents.ada]\n") as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(*calls("a"), *calls("b", tool="look"))))
        await here.say("go")
        await Bell.rang.wait()
        await here.society.abandon()
        Bell.reset()
        here.server.script("done after all")
        async with Society.open(tmp_path) as again:
            here.society = again
            assert await here.texts() == ["done after all"]
            results = [text for role, text in await here.history() if role == "tool"]
            assert '"unknown"' in results[0] and results[1] == "b rang"
            assert Bell.rings == ["b"]


async def test_a_paused_agent_ends_its_turn_and_begins_no_other_until_it_is_resumed(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        gate = asyncio.Event()
        here.server.script(Says("first", gate=gate), "second")
        await here.say("one")
        await here.server.wait_for_request(1)
        await here.society.pause("ada")
        await here.say("two")
        gate.set()
        assert await here.texts() == ["first"]
        await here.state("ada", "paused")
        assert len(here.server.requests) == 1 and len(await here.society.waiting("ada")) == 1
        await here.society.resume("ada")
        assert (await here.texts(2))[1] == "second"


async def test_a_blocked_agent_retries_when_it_is_resumed(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(401), "mended")
        await here.say("hello")
        await here.state("ada", "blocked")
        await here.society.resume("ada")
        assert (await here.texts(2))[1] == "mended"


async def test_a_failure_while_an_interjection_is_read_is_logged_and_never_leaves_the_agent_stuck(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """004-N2.1, 004-6.4"""
    async with asyncio.timeout(180), stage(tmp_path) as here:
        held = asyncio.Event()
        here.server.script(Says(calls=(Calls("ring", {"name": "x"}),), gate=held), "read both")
        await here.say("hello")
        await here.server.wait_for_request()
        await here.say("wait")
        failpoints.arm("turn.before_save:1:raise")
        try:
            held.set()
            assert await here.texts() == ["read both"]
        finally:
            failpoints.arm("")
        await here.state("ada", "idle")
        assert Bell.rings == []
        assert await here.history() == [("user", "hello"), ("user", "wait"), ("assistant", "read both")]
    (error,) = [record for record in caplog.records if "unexpected error" in record.getMessage()]
    assert error.levelno == logging.ERROR and error.exc_info


async def test_a_failed_request_is_logged_with_its_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(401), Says(calls=(Calls("ring", {"name": "x"}),)), "done")
        await here.say("hello")
        await here.state("ada", "blocked")
    assert any("ada got no answer" in record.getMessage() for record in caplog.records)


async def test_an_agent_removed_from_the_configuration_is_blocked_until_it_is_back(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[shutdown]\ndrain_seconds = 0\n[agents.ada]\n[agents.bob]\n") as here:
        here.server.default = "here I am"
        await here.society.pause("bob")
        await here.say("are you there?", to="bob")
        await here.society.stop()
        (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
        async with Society.open(tmp_path) as without:
            here.society = without
            await without.resume("bob")
            assert "coterie.toml" in (await here.texts())[0]
            await here.state("bob", "blocked")
        (tmp_path / "coterie.toml").write_text("[agents.ada]\n[agents.bob]\n")
        async with Society.open(tmp_path) as again:
            here.society = again
            await again.resume("bob")
            assert (await here.texts(2))[1] == "here I am"


async def test_a_stop_during_the_write_of_an_answer_does_not_end_the_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as here, asyncio.timeout(HANG_SECONDS):
        writing, go_on = asyncio.Event(), asyncio.Event()
        advance = here.society.store.advance

        async def slow(*arguments: Any, **more: Any) -> Any:
            writing.set()
            await go_on.wait()
            return await advance(*arguments, **more)

        monkeypatch.setattr(here.society.store, "advance", slow)
        await here.say("one")
        await writing.wait()
        assert here.society.stop_turn("ada")
        await here.say("two")
        go_on.set()

        assert await here.texts(2) == ["ok", "ok"]


async def test_a_turn_that_waits_for_a_retry_can_be_stopped(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(503, headers={"Retry-After": "500"}), "answered at once")
        await here.say("one")
        await here.state("ada", "wait_retry")
        assert await here.society.stop_waiting("ada") is True
        await here.state("ada", "idle")
        assert await here.society.stop_waiting("ada") is False

        await here.say("two")
        assert await here.texts(2) == ["", "answered at once"]
        assert await here.history() == [("user", "one"), ("user", "two"), ("assistant", "answered at once")]


async def test_a_message_that_waits_during_a_retry_begins_a_turn_after_a_stop(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(503, headers={"Retry-After": "500"}), "answered at once")
        await here.say("one")
        await here.state("ada", "wait_retry")
        second = await here.say("two")
        await here.society.stop_waiting("ada")

        _, answer = await here.heard(2)
        assert (answer.payload["text"], answer.in_reply_to) == ("answered at once", second)
        assert await here.history() == [("user", "one"), ("user", "two"), ("assistant", "answered at once")]


async def test_a_turn_that_waits_for_approval_can_be_stopped_and_nothing_runs(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says(calls=calls("bell", tool="dangerous")), "as you wish")
        await here.say("one")
        await here.state("ada", "wait_approval")
        assert await here.society.stop_waiting("ada") is True
        await here.state("ada", "idle")
        (question,) = await here.heard()
        with pytest.raises(Refused, match="closed without an answer"):
            await here.say(question.payload["quickReplies"][0], in_reply_to=question.id, option=0)
        await here.say("never mind")

        assert (await here.texts(2))[1] == "as you wish"
        assert Bell.rings == []
