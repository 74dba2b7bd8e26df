"""Keyed message ids: stable for the same key, and unpredictable without the secret."""

from __future__ import annotations

import re
from pathlib import Path

from coterie.agents import Agent
from coterie.ids import ID_LENGTH, id_for
from coterie.messages import make_envelope
from coterie.testing import FakeClock
from tests.engines import Engine

from .processes import Opener
from .steps import advance, ask, claim_agent, message_to, run_send, says

PEOPLE = [Agent(id="user", name="You", kind="person"), Agent(id="ada", name="ada"), Agent(id="bob", name="bob")]


async def sent_by_tool(engine: Engine, folder: Path, clock: FakeClock) -> tuple[str, str]:
    """Return the id of the message that a `send_message` call stored, and the key of the call."""
    store = await engine.open(folder, clock)
    await store.add_agents(PEOPLE)
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", message_to("bob")))
    await run_send(store, claim)
    (message,) = await store.waiting("bob")
    await store.close()
    return message.id, claim.call_key(0)


async def test_the_id_of_a_message_sent_by_a_tool_cannot_be_computed_from_its_call(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    here, key = await sent_by_tool(engine, tmp_path / "one", clock)
    elsewhere, same_key = await sent_by_tool(engine, tmp_path / "two", clock)
    assert key == same_key
    assert here not in (elsewhere, id_for("message", "ada", key))
    assert all(re.fullmatch(rf"[0-9a-f]{{{ID_LENGTH}}}", one) for one in (here, elsewhere))


async def test_the_same_key_is_the_same_message_after_a_restart(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    ids = set()
    for _ in range(2):
        store = await engine.open(tmp_path / "data", clock)
        await store.add_agents(PEOPLE)
        for _ in range(2):
            ids.add(
                (
                    await store.send(make_envelope(sender="user", to="ada", payload={"text": "x"}, client_id="1"))
                ).message_id
            )
        assert len(await store.waiting("ada")) == 1
        await store.close()
    assert len(ids) == 1


async def test_a_message_of_version_0_1_is_known_by_its_old_id(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    again = make_envelope(sender="user", to="ada", payload={"text": "x"}, client_id="1")
    await store.send(again)
    await store.close()
    old = id_for("message", "user", "1")
    with engine.behind(tmp_path / "data") as db:
        db.execute("UPDATE messages SET id = ?", (old,))
    store = await engine.open(tmp_path / "data", clock)
    assert (await store.send(again)).message_id == old
    assert [message.id for message in await store.waiting("ada")] == [old]
    await store.close()


async def test_all_processes_of_a_society_give_a_key_the_same_id(process: Opener) -> None:
    draft = make_envelope(sender="user", to="ada", payload={"text": "x"}, client_id="1")
    receipts = [await (await process()).send(draft) for _ in range(2)]
    assert len({receipt.message_id for receipt in receipts}) == 1


async def test_a_row_has_one_mark_in_claims_views_and_after_a_restart(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    for text in ("same", "same"):
        await ask(store, text=text)
    claim = await claim_agent(store)
    claimed = [row.mark for row in claim.added_rows or ()]
    viewed = [row.mark for row in (await store.history_view("ada")).rows]
    await store.close()
    store = await engine.open(tmp_path / "data", clock)
    assert claimed == viewed == [row.mark for row in await store.history("ada")]
    assert len(set(claimed)) == 2
    await store.close()


async def test_the_secret_is_not_in_the_description_of_the_store(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    assert len(store.info.secret) == 64
    assert store.info.secret.decode() not in repr(store.info)
    await store.close()
