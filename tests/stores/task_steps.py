"""Helpers for tests of tasks on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from coterie.agent.builtins import build_envelope
from coterie.llm.service import TokenUsage
from coterie.messages import Message, Receipt, make_envelope
from coterie.store import Overview, Store, TaskStore
from coterie.tasks import Budget, Task
from coterie.turn import Event, ModelAnswered, RunCall
from coterie.turn_store import Claim, TurnStore

from .steps import RULES, done


class Society(Store, TurnStore, TaskStore, Overview, Protocol):
    """A store with all ports that tasks need."""


def with_budget(**limits: Any) -> Any:
    return replace(RULES, budget=Budget(**limits))


def said(text: str = "done", tokens: int = 10, **more: Any) -> ModelAnswered:
    usage = {"input_tokens": tokens, "output_tokens": 1} | more
    return ModelAnswered(text=text, service="main", usage=TokenUsage(**usage))


async def send(store: Society, to: str = "ada", text: str = "hello", sender: str = "user", **more: Any) -> Receipt:
    return await store.send(make_envelope(sender=sender, to=to, payload={"text": text}, **more))


async def claim(store: Society, agent_id: str = "ada", worker: str = "w", rules: Any = RULES) -> Claim:
    """Claim one agent. Others that became ready in the same millisecond may be claimed first; they are released."""
    found: dict[str, Claim] = {}
    while agent_id not in found:
        (one,) = await store.claim_ready(worker, rules, 1)
        found[one.agent_id] = one
    others = {(name, one.epoch) for name, one in found.items() if name != agent_id}
    if others:
        await store.release_claims(worker, only=others, failed=False)
    return found[agent_id]


async def claims(store: Society, rules: Any = RULES, worker: str = "w") -> Mapping[str, Claim]:
    return {one.agent_id: one for one in await store.claim_ready(worker, rules, 10)}


async def step(store: Society, claimed: Claim, *events: Event, rules: Any = RULES) -> Claim:
    for event in events:
        claimed = await store.advance(claimed, event, rules)
    return claimed


async def run_send(store: Society, claimed: Claim, rules: Any = RULES) -> Claim:
    """Run the `send_message` call of the claim, as the handler does."""
    assert isinstance(claimed.action, RunCall) and claimed.call is not None
    key = claimed.call_key(claimed.action.index)
    envelope = build_envelope(claimed.agent_id, claimed.call.call.arguments, key=key, cause=claimed.cause)
    return await store.advance(claimed, done(claimed.action.index, ""), rules, sends=envelope)


async def task_of(store: Society, task_id: str) -> Task:
    found = await store.tasks_by_id([task_id])
    return found[task_id]


async def message(store: Society, message_id: str) -> Message:
    found = await store.message(message_id)
    assert found is not None
    return found


async def newest(store: Society, recipient: str) -> Message:
    """The newest message that waits for the recipient."""
    return (await store.waiting(recipient))[-1]


async def questions(store: Society) -> list[Message]:
    """Open questions, oldest first."""
    return list(reversed(await store.open_questions()))


async def press(store: Society, question: Message, option: int) -> Receipt:
    text = question.payload["quickReplies"][option]
    return await send(store, question.sender, text, in_reply_to=question.id, option=option)
