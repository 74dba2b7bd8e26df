"""A corrupt row affects no other message and no other agent."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import Refused
from coterie.messages import make_envelope
from coterie.store import Page
from coterie.stores.sql.quarantine import MAX_READ_ATTEMPTS, UnreadableMessage, quarantine
from coterie.turn import AskModel, CallEnded
from tests.engines import Engine

from .steps import (
    RULES,
    Society,
    advance,
    ask,
    call,
    claim_agent,
    done,
    history_lines,
    message_to,
    received,
    says,
    state,
    stored,
)


class Corruptor:
    """Another program that writes corrupt rows to the database."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder

    def execute(self, sql: str, *values: object) -> None:
        with self._engine.behind(self._folder) as db:
            assert db.execute(sql, values).rowcount == 1

    def corrupt_payload(self, message_id: str, payload: bytes = b'{"text": "bro', *, keeps_size: bool = False) -> None:
        """`keeps_size`: fill the payload up with spaces, so that the counted size stays right."""
        if keeps_size:
            with self._engine.behind(self._folder) as db:
                (size,) = db.execute("SELECT length(payload) FROM messages WHERE id = ?", (message_id,)).fetchone()
            payload = payload.ljust(size)
        if self._engine.name == "sqlite":
            self.execute("UPDATE messages SET payload = CAST(? AS TEXT) WHERE id = ?", payload, message_id)
        elif payload.isascii():
            self.execute("UPDATE messages SET payload = ? WHERE id = ?", payload.decode(), message_id)
        else:
            pytest.skip("PostgreSQL keeps no text that is none")

    def next_row(self) -> int:
        with self._engine.behind(self._folder) as db:
            return int(db.execute("SELECT next_hist_seq FROM agents WHERE id = 'ada'").fetchone()[0])


@pytest.fixture
def corruptor(engine: Engine, tmp_path: Path) -> Corruptor:
    return Corruptor(engine, tmp_path / "data")


BROKEN = [b"", b'{"text": "bro', b"[]", b'{"text": 1}', b'{"attachments": [{}]}', b'{"x": "\xff"}']


@pytest.mark.parametrize("payload", BROKEN)
async def test_an_unreadable_message_is_a_dead_letter_after_three_attempts_and_the_others_are_answered(
    store: Society, corruptor: Corruptor, payload: bytes
) -> None:
    before, bad, behind = [await ask(store, text=text) for text in ("before", "bad", "behind")]
    await ask(store, "bob", "elsewhere")
    corruptor.corrupt_payload(bad, payload)

    claims = await store.claim_ready("w", RULES, 5)
    for claim in claims:
        await advance(store, claim, says(f"read by {claim.agent_id}"))

    assert await history_lines(store) == ["user: before", "user: behind", "assistant: read by ada"]
    (notice, *answers) = await received(store, "user")
    assert notice[0] == "system" and "damaged" in notice[1]
    assert sorted((sender, asked) for sender, _, asked in answers) == [
        ("ada", behind),
        ("bob", (await store.history("bob"))[0].message.id),  # type: ignore[union-attr]
    ]
    (dead_letter,) = await store.messages(Page(), state="dead")
    assert (dead_letter.id, dead_letter.reason) == (bad, "poison")
    assert (await stored(store, before)).state == "taken"


async def test_each_attempt_to_read_a_message_is_a_transaction_of_its_own(
    store: Society, corruptor: Corruptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.stores.sql import claims

    tries: list[str] = []
    claim = claims.claim_agents

    def counted(*arguments: object, **more: object) -> object:
        tries.append("claim")
        return claim(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(claims, "claim_agents", counted)
    corruptor.corrupt_payload(await ask(store))
    assert await store.claim_ready("w", RULES, 5) == []
    assert len(tries) == 4  # three failed attempts, then one with an empty mailbox
    assert await state(store) == "idle"


async def test_a_message_that_two_processes_cannot_read_is_one_dead_letter(store: Any, corruptor: Corruptor) -> None:
    bad = await ask(store)
    await ask(store, text="behind")
    corruptor.corrupt_payload(bad)
    error = UnreadableMessage(bad, ValueError("bro"))
    for _ in range(MAX_READ_ATTEMPTS + 1):  # the last by a process that read it before it was a dead letter
        await store._transact(partial(quarantine, error=error))
    assert [message.id for message in await store.messages(Page(), state="dead")] == [bad]
    assert len(await received(store, "user")) == 1
    assert [message.payload["text"] for message in await store.waiting("ada")] == ["behind"]


async def test_a_corrupt_interjection_does_not_hold_up_the_turn_it_falls_into(
    store: Society, corruptor: Corruptor
) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call()))
    corruptor.corrupt_payload(await ask(store, text="bad", sender="bob"))
    claim = await advance(store, claim, done())
    assert claim.action == AskModel()
    await advance(store, claim, says("and so on"))
    assert (await history_lines(store))[-1] == "assistant: and so on"
    assert [row for row in await history_lines(store) if row.startswith("user")] == ["user: hello"]
    ((sender, text, _),) = await received(store, "bob")
    assert sender == "system" and "Not delivered" in text


async def test_a_message_corrupt_after_it_was_read_hides_no_other_message(store: Society, corruptor: Corruptor) -> None:
    bad = await ask(store, text="will be lost")
    await advance(store, await claim_agent(store), says("yes"))
    await ask(store, text="still there")
    corruptor.corrupt_payload(bad)

    await claim_agent(store)

    rows = (await store.history_view("ada")).rows
    shown = [row.message.payload["text"] if row.message else row.text for row in rows]
    assert shown[1:] == ["yes", "still there"] and "damaged" in shown[0]
    assert len(await store.messages(Page())) == 3


@pytest.mark.parametrize(
    "corruption",
    [
        "UPDATE calls SET arguments = '{' WHERE agent_id = 'ada'",
        "UPDATE agents SET next_hist_seq = 1 WHERE id = 'ada'",
    ],
    ids=["an unreadable plan", "a duplicate row"],
)
async def test_an_agent_with_a_corrupt_turn_is_blocked_and_the_others_go_on(
    store: Society, corruptor: Corruptor, corruption: str
) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), says("", call()))
    before = corruptor.next_row()
    corruptor.execute(corruption)
    await ask(store, text="behind")
    await store.release_claims("w", failed=False)
    await ask(store, "bob")

    claims = await store.claim_ready("w", RULES, 5)

    assert [claim.agent_id for claim in claims] == ["bob"]
    assert await state(store) == "blocked"
    ((sender, text, _),) = await received(store, "user")
    assert sender == "system" and "damaged" in text
    assert await store.claim_ready("w", RULES, 5) == []
    # Mended and resumed, it goes on where it was.
    corruptor.execute("UPDATE calls SET arguments = '{}' WHERE agent_id = 'ada'")
    corruptor.execute("UPDATE agents SET next_hist_seq = ? WHERE id = 'ada'", before)
    await store.resume("ada")
    claim = await claim_agent(store)
    assert (await history_lines(store))[-1] == "user: behind"
    await advance(store, claim, says("thanks"))


NO_OPTIONS = [b'{"text": "bro', b'{"quickReplies": 7}', b'{"quickReplies": ["Yes\xff"]}']


@pytest.mark.parametrize("payload", NO_OPTIONS)
async def test_a_corrupt_question_offers_no_options_and_hides_no_other_question(
    store: Society, corruptor: Corruptor, payload: bytes
) -> None:
    bad, good = [
        (
            await store.send(make_envelope(sender="ada", to="user", payload={"text": text}, quick_replies=["Yes"]))
        ).message_id
        for text in ("bad", "good")
    ]
    corruptor.corrupt_payload(bad, payload, keeps_size=True)

    with pytest.raises(Refused) as refused:
        await ask(store, text="Yes", in_reply_to=bad, option=0)
    assert refused.value.code == "option_invalid"
    await ask(store, text="Yes", in_reply_to=good, option=0)

    assert [(await stored(store, one)).answer is None for one in (bad, good)] == [True, False]
    assert len(await store.messages(Page())) == 3


@pytest.mark.parametrize("payload", [b'{"text": "bro', b'{"text": "\xff"}'])
async def test_a_corrupt_sent_message_does_not_prevent_an_answer(
    store: Society, corruptor: Corruptor, payload: bytes
) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", message_to("user", "Look here.")))
    envelope = make_envelope(
        sender="ada", to="user", payload={"text": "Look here."}, client_id=claim.call_key(0), cause=claim.cause
    )
    claim = await store.advance(claim, CallEnded(index=0, ok=True, result=""), RULES, sends=envelope)
    corruptor.corrupt_payload((await store.waiting("user"))[0].id, payload, keeps_size=True)

    await advance(store, claim, says("Here is my answer."))

    assert [text for sender, text, _ in await received(store, "user")][-1] == "Here is my answer."


@pytest.mark.parametrize("wild", [-138_844_032_352_328, 2**62])
async def test_an_invalid_time_hides_no_other_message_and_is_reported(
    store: Society, corruptor: Corruptor, wild: int
) -> None:
    invalid, valid = await ask(store, text="invalid"), await ask(store, text="valid")
    corruptor.execute("UPDATE messages SET created_at = ? WHERE id = ?", wild, invalid)

    assert {message.id for message in await store.messages(Page())} == {invalid, valid}
    assert [invalid in one for one in [one async for one in store.violations()]] == [True]

    corruptor.execute(
        "UPDATE messages SET created_at = delivered_at WHERE id = ?", invalid
    )  # repaired, for the final check
