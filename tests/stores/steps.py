"""Helpers that run a turn step by step, for tests on every engine."""

from __future__ import annotations

from typing import Any, Protocol

from coterie.agent.builtins import build_envelope
from coterie.llm.service import ToolCall
from coterie.messages import Message, make_envelope
from coterie.plan import Effect, PlannedCall
from coterie.store import Store
from coterie.turn import CallEnded, Event, ModelAnswered, Rest, Rules, RunCall
from coterie.turn_store import Claim, TurnStore

RULES = Rules(max_withdrawals=2, max_rounds=5)


class Society(Store, TurnStore, Protocol):
    """A store with both ports."""


def call(name: str = "look", effect: Effect = "unsafe", **changed: Any) -> PlannedCall:
    arguments = changed.pop("arguments", {})
    return PlannedCall(call=ToolCall(id="c", name=name, arguments=arguments), effect=effect, **changed)


def message_to(to: str, text: str = "hello", **more: Any) -> PlannedCall:
    arguments = {"to": to, "payload": {"text": text}} | more
    return call("send_message", "idempotent", arguments=arguments)


def says(text: str, *calls: PlannedCall) -> ModelAnswered:
    return ModelAnswered(text=text, calls=calls)


def done(index: int = 0, result: str = "ok") -> CallEnded:
    return CallEnded(index=index, ok=True, result=result)


async def ask(store: Society, to: str = "ada", text: str = "hello", sender: str = "user", **more: Any) -> str:
    receipt = await store.send(make_envelope(sender=sender, to=to, payload={"text": text}, **more))
    return receipt.message_id


async def claim_agent(store: Society, worker: str = "w") -> Claim:
    (claim,) = await store.claim_ready(worker, RULES, 1)
    return claim


async def advance(store: Society, claim: Claim, *events: Event) -> Claim:
    for event in events:
        claim = await store.advance(claim, event, RULES)
    return claim


async def run_send(store: Society, claim: Claim) -> Claim:
    """Run the `send_message` call of the claim, as the handler does."""
    assert isinstance(claim.action, RunCall) and claim.call is not None
    key = claim.call_key(claim.action.index)
    envelope = build_envelope(claim.agent_id, claim.call.call.arguments, key=key, cause=claim.cause)
    return await store.advance(claim, done(claim.action.index, ""), RULES, sends=envelope)


async def history_lines(store: Society, agent_id: str = "ada") -> list[str]:
    """The history as lines of role and text."""
    rows = await store.history(agent_id)
    return [f"{row.role}: {row.message.payload['text'] if row.message else row.text}" for row in rows]


async def received(store: Society, recipient: str) -> list[tuple[str, str, str | None]]:
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
    claim = await advance(store, await claim_agent(store), says("", *calls))
    assert (claim.action, await state(store)) == (Rest(), "wait_approval")
    (question,) = await store.waiting("user")
    return question


async def answer(store: Society, question: Message, option: int) -> str:
    text = question.payload["quickReplies"][option]
    return await ask(store, text=text, in_reply_to=question.id, option=option)
