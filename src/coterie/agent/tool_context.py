"""What a tool is given of the agent that calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coterie.library import AgentLibrary, Library
from coterie.llm.router import CapabilityRouter
from coterie.llm.service import Capabilities
from coterie.messages import Payload, Receipt


class Send(Protocol):
    async def __call__(
        self, to: str, payload: Payload, *, delay_ms: float | None = None, quick_replies: list[str] | None = None
    ) -> Receipt:
        """A message from the agent itself; `Refused` and nothing sent when something about it is wrong."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    agent_id: str
    capabilities: Capabilities
    """What the agent's model can take in and give out."""
    router: CapabilityRouter
    """How attachments would reach a service."""
    send: Send
    artifacts: Library | AgentLibrary
    """The files that the agent may read; what is put there is the agent's."""
    idempotency_key: str
    """The same when this very call runs again after a crash."""
