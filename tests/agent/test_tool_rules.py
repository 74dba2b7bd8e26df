"""Effect and approval of a tool are decided when a call runs, not when its plan is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.errors import Refused
from coterie.messages import Message
from coterie.plan import MAX_QUESTION_ARGUMENT_BYTES
from coterie.testing import Calls, Says
from coterie.turn import RunCall
from coterie.turn_store import Claim

from .stage import TOOLS, Bell, Stage, stage

QUICK_STOP = "[shutdown]\ndrain_seconds = 0\n[agents.ada]\n"
Change = Callable[[str], str]


def calls(*named: tuple[str, str]) -> tuple[Calls, ...]:
    return tuple(Calls(tool, {"name": name}) for tool, name in named)


def ring_needs_approval(source: str) -> str:
    return source.replace("@tool\nasync def ring", "@tool(approval=True)\nasync def ring")


def look_needs_approval(source: str) -> str:
    return source.replace('@tool(effect="pure")', '@tool(effect="pure", approval=True)')


def look_is_unsafe(source: str) -> str:
    return source.replace('@tool(effect="pure")', "@tool")


async def reload(here: Stage, folder: Path, change: Change) -> None:
    changed = change(TOOLS)
    assert changed != TOOLS
    (folder / "tools.py").write_text(changed)
    await here.society.reload()


def before_first_run(society: Society, do: Callable[[], Awaitable[None]]) -> None:
    """Run `do` once, after a call was marked as started and before it runs."""
    advance = society.store.advance
    pending = [do]

    async def advance_then_do(*args: Any, **named: Any) -> Claim:
        claim = await advance(*args, **named)
        if isinstance(claim.action, RunCall) and pending:
            await pending.pop()()
        return claim

    society.store.advance = advance_then_do  # type: ignore[method-assign]


async def press(here: Stage, question: Message, option: int) -> str:
    text = question.payload["quickReplies"][option]
    return await here.say(text, in_reply_to=question.id, option=option)


async def results(here: Stage) -> list[str]:
    return [text for role, text in await here.history() if role == "tool"]


@pytest.mark.parametrize(("option", "rings"), [(0, ["a", "b"]), (1, ["a"])], ids=["approved", "denied"])
async def test_a_tool_that_needs_approval_after_a_reload_asks_before_a_later_call(
    tmp_path: Path, option: int, rings: list[str]
) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=calls(("look", "a"), ("ring", "b"))), "done")
        await here.say("go")
        await Bell.rang.wait()
        await reload(here, tmp_path, ring_needs_approval)
        Bell.may_end.set()
        (question,) = await here.heard()
        assert (question.payload["approval"]["tool"], Bell.rings) == ("ring", ["a"])
        await press(here, question, option)
        assert (await here.texts(2))[1] == "done"
        assert Bell.rings == rings


async def test_a_tool_that_needs_approval_after_a_reload_asks_before_the_first_call(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        before_first_run(here.society, lambda: reload(here, tmp_path, ring_needs_approval))
        here.server.script(Says(calls=calls(("ring", "a"))), "rung")
        await here.say("go")
        (question,) = await here.heard()
        assert Bell.rings == []
        await press(here, question, 0)
        assert (await here.texts(2))[1] == "rung"
        assert Bell.rings == ["a"]


async def test_a_message_that_arrives_while_the_rules_change_cancels_the_call(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:

        async def reload_and_send() -> None:
            await reload(here, tmp_path, ring_needs_approval)
            await here.say("wait")

        before_first_run(here.society, reload_and_send)
        here.server.script(Says(calls=calls(("ring", "a"))), "I waited")
        await here.say("go")
        assert await here.texts() == ["I waited"]
        assert Bell.rings == []
        assert ['"executed":false' in result for result in await results(here)] == [True]


@pytest.mark.parametrize("change", [look_needs_approval, look_is_unsafe])
async def test_a_call_interrupted_by_a_crash_is_not_repeated_under_stricter_rules(
    tmp_path: Path, change: Change
) -> None:
    async with stage(tmp_path, agents=QUICK_STOP) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=calls(("look", "a"))))
        await here.say("go")
        await Bell.rang.wait()
        await here.society.abandon()
        Bell.reset()
        (tmp_path / "tools.py").write_text(change(TOOLS))
        here.server.script("continued")
        async with Society.open(tmp_path) as again:
            here.society = again
            assert await here.texts() == ["continued"]
            (result,) = await results(here)
            assert (json.loads(result)["status"], Bell.rings) == ("unknown", [])


async def test_a_call_that_ran_as_unsafe_is_not_repeated_after_a_restart(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=QUICK_STOP) as here:
        before_first_run(here.society, lambda: reload(here, tmp_path, look_is_unsafe))
        Bell.may_end.clear()
        here.server.script(Says(calls=calls(("look", "a"))))
        await here.say("go")
        await Bell.rang.wait()
        await here.society.abandon()
        Bell.reset()
        (tmp_path / "tools.py").write_text(TOOLS)  # the rule at the time of the run applies
        here.server.script("continued")
        async with Society.open(tmp_path) as again:
            here.society = again
            assert await here.texts() == ["continued"]
            assert Bell.rings == []


async def test_a_tool_removed_from_the_agent_during_its_plan_does_not_run(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=calls(("look", "a"), ("ring", "b"))), "done")
        await here.say("go")
        await Bell.rang.wait()
        (tmp_path / "coterie.toml").write_text('[agents.ada]\ntools = ["look"]\n')
        await here.society.reload()
        Bell.may_end.set()
        assert await here.texts() == ["done"]
        assert Bell.rings == ["a"]
        assert "unknown_tool" in (await results(here))[1]


async def test_arguments_too_long_for_the_question_are_attached_as_a_file(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        name = "x" * MAX_QUESTION_ARGUMENT_BYTES + " end of the name"
        here.server.script(Says(calls=calls(("dangerous", name))), "done")
        await here.say("go")
        (question,) = await here.heard()
        (attached,) = question.payload["attachments"]
        whole = await here.society.artifacts.read(attached["artifactRef"])
        assert json.loads(whole) == {"name": name} and Bell.rings == []
        assert f"{len(whole):,} bytes" in question.payload["text"] and attached["size"] == len(whole)
        assert question.payload["approval"]["argumentsSha256"] == hashlib.sha256(whole).hexdigest()
        await press(here, question, 0)
        assert (await here.texts(2))[1] == "done"
        assert Bell.rings == [name]


async def test_a_call_whose_long_arguments_cannot_be_stored_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as here:
        here.society.artifacts.set_max_file_bytes(1_000)
        here.server.script(Says(calls=calls(("dangerous", "x" * MAX_QUESTION_ARGUMENT_BYTES))), "I see")
        await here.say("go")
        assert await here.texts() == ["I see"]
        assert Bell.rings == [] and "approval_impossible" in (await results(here))[0]


async def test_an_approval_is_refused_after_a_stop_and_starts_no_turn(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says(calls=calls(("dangerous", "x"))))
        await here.say("go")
        (question,) = await here.heard()
        await here.state("ada", "wait_approval")
        assert await here.society.stop_waiting("ada")
        with pytest.raises(Refused) as late:
            await press(here, question, 0)
        assert (late.value.code, late.value.status) == ("already_answered", 409)
        await here.state("ada", "idle")
        assert len(here.server.requests) == 1 and Bell.rings == []


async def test_an_approval_cannot_be_withdrawn_while_its_call_runs(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=calls(("dangerous", "x"))), "done")
        await here.say("go")
        (question,) = await here.heard()
        pressed = await press(here, question, 0)
        await Bell.rang.wait()
        with pytest.raises(Refused) as late:
            await here.society.bus.withdraw(pressed)
        assert late.value.code == "already_taken"
        stored = await here.society.store.message(question.id)
        assert stored is not None and stored.answer is not None and stored.answer.message_id == pressed
        Bell.may_end.set()
        assert (await here.texts(2))[1] == "done"
        assert Bell.rings == ["x"]
