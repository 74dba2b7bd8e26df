"""A turn in single steps, as the tests of every engine take them."""

from __future__ import annotations

from typing import Any, Protocol

from coterie.agent.builtins import seal_call
from coterie.llm.types import Call
from coterie.messages import Message, seal
from coterie.store import Store
from coterie.turn import Answered, Effect, Event, PlannedCall, Ran, Rest, Rules, Run
from coterie.turn_store import Claim, TurnStore

RULES = Rules(max_withdrawals=2, max_rounds=5)


class Society(Store, TurnStore, Protocol):
    """A store with everything in it."""


def call(name: str = "look", effect: Effect = "unsafe", **changed: Any) -> PlannedCall:
    arguments = changed.pop("arguments", {})
    return PlannedCall(call=Call(id="c", name=name, arguments=arguments), effect=effect, **changed)


def message_to(to: str, text: str = "hello", **more: Any) -> PlannedCall:
    arguments = {"to": to, "payload": {"text": text}} | more
    return call("send_message", "idempotent", arguments=arguments)


def says(text: str, *calls: PlannedCall) -> Answered:
    return Answered(text=text, calls=calls)


def done(index: int = 0, result: str = "ok") -> Ran:
    return Ran(index=index, ok=True, result=result)


async def ask(store: Society, to: str = "ada", text: str = "hello", sender: str = "user", **more: Any) -> str:
    receipt = await store.send(seal(sender=sender, to=to, payload={"text": text}, **more))
    return receipt.message_id


async def take(store: Society, worker: str = "w") -> Claim:
    (claim,) = await store.claim(worker, RULES, 1)
    return claim


async def go_on(store: Society, claim: Claim, *events: Event) -> Claim:
    for event in events:
        claim = await store.advance(claim, event, RULES)
    return claim


async def run_send(store: Society, claim: Claim) -> Claim:
    """The call that the claim says is to run, as the handler does it."""
    assert isinstance(claim.effect, Run) and claim.call is not None
    key = claim.key(claim.effect.index)
    envelope = seal_call(claim.agent_id, claim.call.call.arguments, key=key, cause=claim.cause)
    return await store.advance(claim, done(claim.effect.index, ""), RULES, sends=envelope)


async def told(store: Society, agent_id: str = "ada") -> list[str]:
    """The history, in short."""
    rows = await store.history(agent_id)
    return [f"{row.role}: {row.message.payload['text'] if row.message else row.text}" for row in rows]


async def got(store: Society, recipient: str) -> list[tuple[str, str, str | None]]:
    return [(m.sender, m.payload["text"], m.in_reply_to) for m in await store.waiting(recipient)]


async def state(store: Society, agent_id: str = "ada") -> str:
    agent = await store.agent(agent_id)
    assert agent is not None
    return agent.state


async def stored(store: Society, message_id: str) -> Message:
    message = await store.message(message_id)
    assert message is not None
    return message


async def asked_for_approval(store: Society, *calls: PlannedCall) -> Message:
    await ask(store)
    claim = await go_on(store, await take(store), says("", *calls))
    assert (claim.effect, await state(store)) == (Rest(), "wait_approval")
    (question,) = await store.waiting("user")
    return question


async def answer(store: Society, question: Message, option: int) -> str:
    text = question.payload["quickReplies"][option]
    return await ask(store, text=text, in_reply_to=question.id, option=option)
