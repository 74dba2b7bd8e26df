"""What a storage engine promises about turns: the part of the store that agents at work use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import msgspec

from coterie.errors import StoreError
from coterie.ids import MARK_BYTES
from coterie.llm.types import Answer, Call
from coterie.messages import Envelope, Message
from coterie.turn import Ask, Event, Plan, PlannedCall, Rest, Rules, Run


class StaleOwner(StoreError):
    """Somebody else has taken this agent over: whatever was decided here counts for nothing."""


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of an agent's history."""

    seq: int
    turn_no: int
    role: str
    message: Message | None = None
    """The message that a user row stands for."""
    text: str = ""
    calls: Sequence[Call] = ()
    call_id: str | None = None
    hidden: bool = False
    mark: str = msgspec.field(default_factory=lambda: os.urandom(MARK_BYTES).hex())
    """Encloses the message in a request. The store derives it from the society's secret, so it is always the same."""


class Asked(msgspec.Struct, frozen=True):
    """A message, as far as it matters for who is to be answered."""

    id: str
    sender: str
    automatic: int
    in_reply_to: str | None
    cause: str | None
    hops: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The right to work on one agent's turn. It holds for exactly one more step."""

    agent_id: str
    epoch: int
    step_no: int
    turn_no: int
    effect: Ask | Run | Rest
    """What is to be done."""
    plan: Plan | None = None
    """The open plan, as it is stored. The step that is decided with this claim counts only while that is so."""
    plan_key: tuple[int, int] = (0, 0)
    """The turn and step that name it. What its calls send or keep is named after them, so nothing is done twice."""
    call: PlannedCall | None = None
    """The call to run."""
    cause: str | None = None
    """The newest message of this turn."""
    person: bool = False
    """The person wrote one of the messages of this turn, or one that waits: its requests go first."""
    asked: Asked | None = None
    """The newest message of this turn, if the person sent all of them. None: who has asked is to be looked up."""
    spoke: bool = True
    """Calls of this turn may have sent something."""
    retries: int = 0
    """How often in a row the model has failed."""
    added: Sequence[HistoryRow] | None = ()
    """What this step has added to the history. None: earlier rows have changed, read it anew."""
    history_version: int = 0
    """The version of the history after this step. Each added row, hidden turn, summary and clear adds 1 to it, in the
    transaction that makes the change. A conversation kept in memory may be shown only if its version is equal."""
    replies: Sequence[str] = ()
    """The messages that the model's text was stored as."""
    withdrawn: int = 0
    """Calls that were not run because somebody spoke."""
    on_trial: bool = False
    """Two crashes found it at the same step. No other suspect works beside it, so that a third one tells who it is."""

    taken_over: bool = False
    """Somebody else was at work on it, and has not let go of it in order."""

    def key(self, index: int) -> str:
        """Names a call of the plan, for ever."""
        return f"{self.agent_id}/{self.plan_key[0]}/{self.plan_key[1]}/{index}"


@dataclass(frozen=True, slots=True)
class View:
    summary: str
    """What was said before `rows`; empty: nothing."""
    rows: Sequence[HistoryRow]
    version: int = 0
    """The `history_version` that the summary and the rows were read with."""


Admits = Callable[[str, bool], bool]
"""Whether a turn of this agent may begin; True as second argument: for a message of the person."""


class Admission(Protocol):
    """Decides which agents may be claimed."""

    def begin_round(self) -> Admits | None:
        """The rule for one look at all agents that have something to do. None: every agent may be claimed.

        Called in the transaction that claims, and again when that transaction is run again.
        """
        ...


class Taker(Protocol):
    """A worker that takes agents the moment they have something to do."""

    worker: str
    rules: Rules

    def reserve(self, agent_id: str, person: bool) -> bool:
        """Whether it takes this agent; one slot is then kept for it. Called from any thread.

        `person`: a message of the person waits for the agent.
        """
        ...

    def give_back(self, places: int) -> None:
        """Reserved, but nothing came of it. Called from any thread."""
        ...

    def take(self, claims: Sequence[Claim]) -> None:
        """These are its own now, on places reserved before. Called on the event loop."""
        ...

    def drop(self) -> None:
        """What it works on may soon be somebody else's: leave it as it is. Called on the event loop."""
        ...

    def look(self) -> None:
        """Somebody has something to do and was not claimed. Called on the event loop."""
        ...

    def check_claims(self) -> None:
        """Claims may be stored in its name that it was never given, after an error. Called on the event loop."""
        ...


class TurnStore(Protocol):
    def attend(self, taker: Taker) -> None:
        """From now on whoever gets mail is claimed for `taker`, while it has places, in the transaction of the mail."""
        ...

    async def claim(
        self, worker: str, rules: Rules, limit: int, *, others: int | None = None, admission: Admission | None = None
    ) -> Sequence[Claim]:
        """Take up to `limit` agents that have something to do; from now on nobody else's step for them counts.

        Agents with messages of the person come first, then those that waited longest. `others`: of all the rest, take
        no more than so many. `admission`: take only agents that it admits.

        A ready agent's waiting mail is in its history when this returns.
        """
        ...

    async def release(self, worker: str, *, busy: Sequence[str] = (), failed: bool) -> None:
        """What `worker` has claimed and does not work on any more, all but `busy`, can be claimed again at once.

        `failed`: it went wrong, which counts as a crash; otherwise it is no attempt, and the turn just goes on.
        """
        ...

    async def advance(self, claim: Claim, event: Event, rules: Rules, *, sends: Envelope | None = None) -> Claim:
        """Decide what follows from `event` with the mail that waits now, and write it, as one transaction.

        `sends` is the message that the call just run is to send: it exists exactly when the call's result does.
        `StaleOwner` when the claim no longer holds; then nothing was written.
        """
        ...

    async def history(self, agent_id: str, after: int = 0) -> Sequence[HistoryRow]:
        """All of it, from behind row `after`."""
        ...

    async def view(self, agent_id: str, claim: Claim | None = None) -> View:
        """What the model is shown: the rows behind the last summary, and their version, read in one snapshot.

        With `claim` the read is fenced: `StaleOwner` when the claim no longer holds in that snapshot.
        """
        ...

    async def summarise(self, claim: Claim, upto: int, text: str, answer: Answer | None = None) -> Claim:
        """From now on `text` stands for everything up to row `upto`, which stays stored. Fenced like a step.

        Returns `claim` with the new history version; it is still the claim of the same step.

        `answer`: what a model said when it was asked for the summary; it is counted with what the step costs.
        """
        ...

    async def set_aside(self, claim: Claim, service: str, tokens: int, *, since: datetime, limit: int) -> bool:
        """Whether fewer than `limit` tokens were spent since then. If so, `tokens` more are, for what `claim` asks now.

        The answer's own count takes their place; a failure gives them back. Fenced like a step.
        """
        ...

    async def tokens_since(self, start: datetime) -> int:
        """What all answers of models cost since `start`."""
        ...
