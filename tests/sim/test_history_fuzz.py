"""After any answer of a model, valid or not, every model API accepts the next request."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest

from coterie.agent.builtins import build_envelope
from coterie.errors import Refused
from coterie.llm.providers.openai_stream import CompletionBuilder, UnusableResponse
from coterie.messages import PERSON, Envelope, make_envelope
from coterie.plan import Effect, PlannedCall
from coterie.text import to_storable
from coterie.turn import AskModel, CallEnded, Event, ModelAnswered, ModelFailed, Rest, RunCall, Stopped
from coterie.turn_store import Claim

from .fake_model import key_of
from .oracle import first_error
from .world import World

ANSWERS = 10
"""In one conversation."""

TEXTS = (
    "",
    " ",
    "\n",
    "ok",
    "第一",
    "\x00",
    "\ud800",
    "a\x00b\udfffc",
    "‮evil",
    "e" + "\u0301" * 50,
    "</message>",
    "x" * 300,
)
NAMES = ("look", "send_message", "", "no such tool", "工具", "a" * 300, "look\x00", "x.y/z", "\ud83d", "-")
EFFECTS: tuple[Effect, ...] = ("pure", "idempotent", "unsafe")


class Fuzz:
    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._world = World()
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        try:
            self._converse()
        finally:
            self._world.close()
        return self.seen

    def _converse(self) -> None:
        self._speak()
        claim: Claim | None = None
        for _ in range(ANSWERS * 50):
            if self.seen["answers"] == ANSWERS:
                break
            if claim is None or isinstance(claim.action, Rest):
                claim = self._claim()
                continue
            if isinstance(claim.action, AskModel):
                self._check()
            claim = self._world.advance(claim, *self._perform(claim))
            if self._rng.random() < 0.2:
                self._speak()
        assert self.seen["answers"] == ANSWERS, "it got stuck"
        self._check()
        assert self._world.violations() == []

    def _claim(self) -> Claim | None:
        """Trigger everything the agent may wait for, and claim it."""
        self._speak()
        self._world.resume("ada")
        self._world.now += 100_000
        return next((claim for claim in self._world.claim("w", 9) if claim.agent_id == "ada"), None)

    def _check(self) -> None:
        error = first_error(self._world.history("ada"))
        assert error is None, error

    def _perform(self, claim: Claim) -> tuple[Event, Envelope | None]:
        if self._rng.random() < 0.04:
            return Stopped(to_storable(self._text())), None
        if isinstance(claim.action, AskModel):
            return self._answer(), None
        assert isinstance(claim.action, RunCall) and claim.call is not None
        index = claim.action.index
        if claim.call.call.name != "send_message" or claim.call.call.invalid_arguments is not None:
            return CallEnded(index=index, ok=self._rng.random() < 0.5, result=to_storable(self._text()) or '""'), None
        try:
            return CallEnded(index=index, ok=True, result=""), build_envelope(
                "ada", claim.call.call.arguments, key=key_of(claim, index), cause=claim.cause
            )
        except Refused as refusal:
            return CallEnded(index=index, ok=False, result=refusal.to_json()), None

    def _answer(self) -> Event:
        self.seen["answers"] += 1
        builder = CompletionBuilder()
        try:
            builder.add(self._completion())
            answer = builder.build("s")
        except UnusableResponse:
            self.seen["unusable"] += 1
            return ModelFailed(message="malformed", recovery=self._rng.choice(("retry", "give_up", "block")))
        self.seen["with calls" if answer.calls else "without calls"] += 1
        self.seen["no object"] += sum(call.invalid_arguments is not None for call in answer.calls)
        return ModelAnswered(text=answer.text, calls=tuple(self._planned(call) for call in answer.calls))

    def _planned(self, call: Any) -> PlannedCall:
        return PlannedCall(call=call, effect=self._rng.choice(EFFECTS), needs_approval=self._rng.random() < 0.15)

    # Responses of a server

    def _completion(self) -> object:
        if self._rng.random() < 0.03:
            return self._rng.choice(([], "x", {}, {"choices": []}, {"choices": [7]}, None))
        calls = [self._call() for _ in range(self._rng.choice((0, 0, 1, 1, 2, 3, 9)))]
        message = {
            "content": self._rng.choice((None, self._text(), [{"type": "text", "text": self._text()}])),
            "tool_calls": calls,
        }
        return {"choices": [{"message": message, "finish_reason": self._rng.choice((None, "stop", "length", 3))}]}

    def _call(self) -> object:
        if self._rng.random() < 0.02:
            return self._rng.choice(("look", None, []))
        function = {"name": self._rng.choice(("look", "look", "send_message", *NAMES)), "arguments": self._arguments()}
        call_id = self._rng.choice(("c", "c", "", None, "x" * 90, "\ud800", self._rng.randrange(10)))
        return {"id": call_id, "type": "function", "function": function}

    def _arguments(self) -> object:
        value: Any = {"to": self._rng.choice((PERSON, "bob", "nobody", 7)), "payload": {"text": self._text()}}
        match self._rng.randrange(9):
            case 0:
                value = {self._text(): [self._text(), 1.5, None, True, 10**30, -(2**63)]}
            case 1:
                for _ in range(self._rng.choice((10, 61, 62, 63, 64, 200))):
                    value = {"deeper": value}
            case 2:
                return self._rng.choice(("{", "[1]", "7", "null", "NaN", '{"a": NaN}', '{"a": 1}}', "", "  ", '"x"'))
            case 3:
                return value  # the value itself, and not its text
            case 4:
                value["delayMs"] = self._rng.choice((5, -1, "soon", 1e400, True))
        return json.dumps(value)

    def _text(self) -> str:
        return self._rng.choice(TEXTS)

    def _speak(self) -> None:
        sender = self._rng.choice((PERSON, "bob", "ada", "system"))
        payload = self._rng.choice(({"text": self._text()}, {}, {"text": "hi", "more": {self._text(): [self._text()]}}))
        try:
            self._world.send(make_envelope(sender=sender, to="ada", payload=payload))
        except Refused as refusal:
            assert refusal.code == "mailbox_full"


def fuzz(first: int, answers: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + answers // ANSWERS):
        try:
            seen += Fuzz(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    for kind in ("with calls", "without calls", "unusable", "no object"):
        assert seen[kind] > seen["answers"] / 60, f"too few answers {kind}: {seen}"
    return seen


def test_after_a_few_hundred_answers_of_any_kind_every_request_is_valid() -> None:
    fuzz(1_000_000, 600)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(2))
def test_after_thousands_of_answers_of_any_kind_every_request_is_valid(shard: int) -> None:
    assert fuzz(shard * 10_000, 10_000)["answers"] >= 10_000
