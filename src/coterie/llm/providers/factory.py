"""Which provider speaks for an entry of llmservices.json."""

from __future__ import annotations

from coterie.clock import Clock
from coterie.llm.config import ServiceEntry
from coterie.llm.providers.any_llm import AnyLLMService
from coterie.llm.providers.deadlines import Deadlines
from coterie.llm.providers.openai import OpenAIService
from coterie.llm.service import Capabilities, LLMService
from coterie.tour.provider import Tour

TOUR = "tour"
TOUR_SEES = "tour-sees"
_CAN_READ = frozenset({"text"})
_CAN_SAY = frozenset({"text", "tool_calling"})

TOUR_ENTRIES = (
    ServiceEntry(
        id="tour",
        name="The tour (scripted)",
        provider=TOUR,
        base_url="",
        model="tour",
        capabilities=Capabilities(input=_CAN_READ, output=_CAN_SAY),
    ),
    ServiceEntry(
        id=TOUR_SEES,
        name="The tour, with eyes (scripted)",
        provider=TOUR,
        base_url="",
        model=TOUR_SEES,
        capabilities=Capabilities(input=_CAN_READ | {"vision"}, output=_CAN_SAY),
    ),
)
"""What there is before a real model is set up."""


def make_service(entry: ServiceEntry, clock: Clock) -> LLMService:
    key, key_name = (entry.api_key.reveal(), entry.api_key.name) if entry.api_key else ("", "")
    deadlines = Deadlines.within(entry.timeout)
    match entry.provider:
        case "tour":
            return Tour(id=entry.id, sees=entry.model == TOUR_SEES, clock=clock)
        case "openai":
            return OpenAIService(
                id=entry.id,
                base_url=entry.base_url,
                model=entry.model,
                api_key=key,
                key_name=key_name,
                deadlines=deadlines,
                max_tokens=entry.max_tokens,
                clock=clock,
            )
    return AnyLLMService(
        id=entry.id,
        provider=entry.provider,
        base_url=entry.base_url,
        model=entry.model,
        api_key=key,
        key_name=key_name,
        deadlines=deadlines,
        max_tokens=entry.max_tokens,
        clock=clock,
    )
