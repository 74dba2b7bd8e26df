"""Contract of every storage engine: turns that a crash interrupted."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agents import Agent
from coterie.plan import INTERRUPTED_RESULT, UNKNOWN_RESULT, Effect
from coterie.store import Limits
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from coterie.turn import AskModel, ModelFailed, Rest, RunCall
from tests.engines import Engine

from .steps import (
    RULES,
    advance,
    answer,
    ask,
    asked_for_approval,
    call,
    claim_agent,
    done,
    history_lines,
    received,
    says,
    state,
)


class Restarted:
    """A society whose process is killed repeatedly."""

    def __init__(self, engine: Engine, path: Path, clock: FakeClock) -> None:
        self._engine, self._path, self._clock = engine, path, clock
        self.store: SqlStore

    async def __aenter__(self) -> Restarted:
        await self.again()
        await self.store.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
        await self.store.add_agents([Agent(id="bob", name="Bob")])
        return self

    async def again(self) -> None:
        if hasattr(self, "store"):
            assert [violation async for violation in self.store.violations()] == []
            await self.store.close()
        self.store = await self._engine.open(self._path, self._clock, Limits(max_hops=3))

    async def __aexit__(self, *_: object) -> None:
        assert [violation async for violation in self.store.violations()] == []
        await self.store.close()


@pytest.fixture
def restarted(engine: Engine, tmp_path: Path, clock: FakeClock) -> Restarted:
    return Restarted(engine, tmp_path / "restarted", clock)


async def test_a_turn_cut_off_in_the_model_call_asks_again(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        await claim_agent(it.store)
        await it.again()
        assert (await claim_agent(it.store)).action == AskModel()
        assert await history_lines(it.store) == ["user: hello"]


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
async def test_a_call_cut_off_is_run_again_under_the_same_key_when_it_may(restarted: Restarted, effect: Effect) -> None:
    async with restarted as it:
        await ask(it.store)
        before = await advance(it.store, await claim_agent(it.store), says("", call(effect=effect), call()))
        await it.again()
        after = await claim_agent(it.store)
        assert (after.action, after.plan_key) == (RunCall(0, is_retry=True), before.plan_key)


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
async def test_a_call_cut_off_is_not_run_again_if_a_message_came_meanwhile(
    restarted: Restarted, effect: Effect
) -> None:
    async with restarted as it:
        await ask(it.store)
        await advance(it.store, await claim_agent(it.store), says("", call(effect=effect), call()))
        await ask(it.store, text="stop")
        await it.again()
        assert (await claim_agent(it.store)).action == AskModel()
        results = [f"tool: {UNKNOWN_RESULT}", f"tool: {INTERRUPTED_RESULT}"]
        assert await history_lines(it.store) == ["user: hello", "assistant: ", *results, "user: stop"]


async def test_an_unsafe_call_cut_off_is_unknown_and_never_run_again(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        await advance(it.store, await claim_agent(it.store), says("", call("fire")))
        await it.again()
        assert (await claim_agent(it.store)).action == AskModel()
        assert (await history_lines(it.store))[-1] == f"tool: {UNKNOWN_RESULT}"


async def test_results_known_before_the_crash_stay(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        await advance(it.store, await claim_agent(it.store), says("", call("a"), call("b", "pure")), done(0, "known"))
        await it.again()
        claim = await claim_agent(it.store)
        assert claim.action == RunCall(1, is_retry=True)
        await advance(it.store, claim, done(1, "new"))
        assert (await history_lines(it.store))[2:] == ["tool: known", "tool: new"]


async def test_approvals_and_retries_still_wait_after_a_restart(restarted: Restarted, clock: FakeClock) -> None:
    async with restarted as it:
        question = await asked_for_approval(it.store, call("pay", needs_approval=True))
        await ask(it.store, "bob")
        await advance(
            it.store, await claim_agent(it.store), ModelFailed(message="", recovery="retry", delay=timedelta(seconds=9))
        )
        await it.again()
        assert await it.store.claim_ready("w", RULES, 5) == []
        await answer(it.store, question, 0)
        assert (await claim_agent(it.store)).agent_id == "ada"
        await clock.advance(seconds=9)
        assert (await claim_agent(it.store)).agent_id == "bob"


async def test_a_turn_that_crashes_the_runtime_repeatedly_is_quarantined(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store, text="poison")
        await claim_agent(it.store)
        for _ in range(2):
            await it.again()
            assert (await claim_agent(it.store)).action == AskModel()
        await it.again()
        assert (await claim_agent(it.store)).action == Rest()
        rows = await it.store.history("ada")
        assert rows[0].hidden and rows[1].text.startswith("[turn aborted")
        ((sender, _, _),) = await received(it.store, "user")
        assert (sender, await state(it.store)) == ("system", "idle")
        await ask(it.store, text="and now?")
        await advance(it.store, await claim_agent(it.store), says("fine again"))


async def test_progress_between_crashes_resets_the_crash_counter(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        claim = await claim_agent(it.store)
        for _ in range(4):
            await advance(it.store, claim, says("", call()), done())
            await it.again()
            claim = await claim_agent(it.store)
            assert claim.action == AskModel()


async def test_a_notice_about_a_quarantined_turn_reaches_an_agent_in_any_state(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store, "ada", "from bob", sender="bob")
        await ask(it.store, "bob", "from the person")
        for _ in range(8):
            await it.store.claim_ready("w", RULES, 2)
            await it.again()
        # Both were quarantined. Bob may get the notice about ada in the transaction that ends his own turn.
        while claims := await it.store.claim_ready("w", RULES, 2):
            for claim in claims:
                await advance(it.store, claim, says(""))
        assert any(
            "crashed the runtime" in row for row in await history_lines(it.store, "bob") if row.startswith("user")
        )
        assert [await state(it.store, name) for name in ("ada", "bob")] == ["idle", "idle"]
