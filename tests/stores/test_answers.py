"""What every storage engine promises about answers: who gets them, once, and who does not."""

from __future__ import annotations

from coterie.store import Page

from .steps import (
    Society,
    ask,
    go_on,
    got,
    message_to,
    run_send,
    says,
    state,
    take,
    told,
)


async def test_an_answer_to_an_answer_unwinds_to_whoever_made_the_agent_ask(store: Society) -> None:
    asked = await ask(store, text="ask bob")
    claim = await run_send(store, await go_on(store, await take(store), says("", message_to("bob", "q?"))))
    await go_on(store, claim, says(""))
    await go_on(store, await take(store), says("bob's answer"))
    await go_on(store, await take(store), says("bob says so"))
    assert await got(store, "user") == [("ada", "bob says so", asked)]
    assert await store.waiting("bob") == []  # an answer is not answered
    assert [await state(store, name) for name in ("ada", "bob")] == ["idle", "idle"]


async def test_every_asker_gets_the_answer_once_as_the_reply_to_their_newest_message(store: Society) -> None:
    await ask(store, text="one")
    newest = await ask(store, text="two")
    bobs = await ask(store, text="me too", sender="bob")
    await go_on(store, await take(store), says("for all of you"))
    assert await got(store, "user") == [("ada", "for all of you", newest)]
    assert await got(store, "bob") == [("ada", "for all of you", bobs)]


async def test_what_the_turn_has_already_sent_word_for_word_is_not_sent_again(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", message_to("user", "the same words")))
    await go_on(store, await run_send(store, claim), says("the same words"))
    assert [text for _, text, _ in await got(store, "user")] == ["the same words"]


async def test_the_same_words_of_an_earlier_turn_are_sent_again(store: Society) -> None:
    for _ in range(2):
        await ask(store)
        await go_on(store, await take(store), says("yes"))
    assert [text for _, text, _ in await got(store, "user")] == ["yes", "yes"]


async def test_an_agent_does_not_answer_itself_or_the_runtime(store: Society) -> None:
    await ask(store, sender="ada")
    await ask(store, sender="system")
    await go_on(store, await take(store), says("who asked?"))
    assert await store.waiting("ada") == []
    assert await state(store) == "idle"


async def test_an_answer_beyond_the_hop_limit_is_a_dead_letter_and_its_sender_is_told(store: Society) -> None:
    cause = None
    for hop in range(4):
        cause = await ask(store, "ada", f"hop {hop}", sender="bob", cause=cause)
    await go_on(store, await take(store), says("too far"))
    (dead,) = await store.messages(Page(), state="dead")
    assert (dead.sender, dead.to, dead.reason, dead.in_reply_to) == ("ada", "bob", "hop_limit", cause)
    (notice,) = await store.waiting("ada")
    assert notice.sender == "system" and notice.payload["notice"]["messageIds"] == [dead.id]
    assert await state(store) == "ready"
    # The notice does not make a new beginning for the chain.
    claim = await run_send(store, await go_on(store, await take(store), says("", message_to("bob", "again"))))
    assert "hop_limit" in (await told(store))[-1]
    await go_on(store, claim, says("so be it"))
    assert await state(store) == "idle"


async def test_an_answer_to_somebody_terminated_is_a_dead_letter(store: Society) -> None:
    await ask(store, sender="bob")
    claim = await take(store)
    await store.terminate("bob")
    await go_on(store, claim, says("too late"))
    (dead,) = await store.messages(Page(), state="dead")
    assert (dead.payload["text"], dead.reason) == ("too late", "recipient_terminated")
