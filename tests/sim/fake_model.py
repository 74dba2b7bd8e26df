"""Answers of simulated models and effects of simulated tools, drawn from the seed."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from random import Random
from typing import Literal

from coterie.agent.builtins import build_envelope
from coterie.errors import Refused
from coterie.llm.service import TokenUsage, ToolCall, ToolSpec
from coterie.messages import PERSON, Envelope
from coterie.plan import Effect, PlannedCall
from coterie.turn import CallEnded, Event, Interrupted, ModelAnswered, ModelFailed
from coterie.turn_store import Claim

from .world import AGENTS

EFFECTS: dict[str, Effect] = {"look": "pure", "put": "idempotent", "fire": "unsafe", "send_message": "idempotent"}
TOOLS = tuple(ToolSpec(name=name, description=name, parameters={"type": "object"}) for name in EFFECTS)


class FakeModel:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._said = 0
        self.calm = False
        """Only answer, so that all turns end."""
        self.witness: Counter[str] = Counter()
        """How often each call really ran, independent of the database."""

    def answer(self) -> Event:
        self._said += 1
        text = f"t{self._said}"
        luck = self._rng.random()
        if self.calm or luck < 0.22:
            return ModelAnswered(text=text, usage=self.usage())
        if luck < 0.25:
            return ModelAnswered(text="  ", usage=self.usage())
        if luck < 0.31:
            return self._failure()
        count = self._rng.choice((1, 2, 2, 3, 3, 4))
        calls = tuple(self._call(n) for n in range(count))
        return ModelAnswered(text=self._rng.choice(("", text)), calls=calls, usage=self.usage())

    def usage(self) -> TokenUsage:
        used = self._rng.randrange(1, 30)
        cost = self._rng.choice((None, used * 1_000))
        return TokenUsage(
            input_tokens=used, output_tokens=self._rng.randrange(5), cached_tokens=used // 2, cost=cost, model_ms=used
        )

    def cut(self) -> Interrupted:
        """An answer that a person's message cut."""
        self._said += 1
        usage = self._rng.choice((TokenUsage(), self.usage()))
        return Interrupted(partial_text=f"cut{self._said}", service="main", usage=usage)

    def _failure(self) -> ModelFailed:
        fates: tuple[Literal["retry", "block", "give_up"], ...] = ("retry", "retry", "block", "give_up")
        then = self._rng.choice(fates)
        return ModelFailed(message="busy", recovery=then, delay=timedelta(milliseconds=self._rng.randrange(5_000)))

    def _call(self, n: int) -> PlannedCall:
        name = self._rng.choice(("look", "put", "fire", "fire", "send_message", "send_message"))
        arguments = self._message_arguments() if name == "send_message" else {"n": n}
        gated = name != "send_message" and self._rng.random() < 0.15
        # Every answer repeats the same ids, as some services do.
        return PlannedCall(
            call=ToolCall(id=f"c{n}", name=name, arguments=arguments), effect=EFFECTS[name], needs_approval=gated
        )

    def _message_arguments(self) -> dict[str, object]:
        to = self._rng.choice((*AGENTS, *AGENTS, PERSON, "nobody"))
        arguments: dict[str, object] = {"to": to, "payload": {"text": f"m{self._rng.randrange(1_000_000)}"}}
        if self._rng.random() < 0.2:
            arguments["delayMs"] = self._rng.choice((10, 1_000, 90_000))
        return arguments

    def run(self, claim: Claim, index: int) -> tuple[Event, Envelope | None]:
        assert claim.call is not None
        call, key = claim.call.call, key_of(claim, index)
        if call.name != "send_message":
            self.witness[key] += 1
            return CallEnded(index=index, ok=self._rng.random() < 0.9, result=f"did {key}"), None
        try:
            envelope = build_envelope(claim.agent_id, call.arguments, key=key, cause=claim.cause)
        except Refused as refusal:
            return CallEnded(index=index, ok=False, result=refusal.to_json()), None
        return CallEnded(index=index, ok=True, result=""), envelope


def key_of(claim: Claim, index: int) -> str:
    return claim.call_key(index)
