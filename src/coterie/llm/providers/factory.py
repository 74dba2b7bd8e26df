"""Creation of the service for an entry of llmservices.json, and the entries of the tour."""

from __future__ import annotations

from coterie.clock import Clock
from coterie.llm.config import ServiceEntry
from coterie.llm.providers.any_llm import AnyLLMService
from coterie.llm.providers.deadlines import Deadlines
from coterie.llm.providers.openai import OpenAIService
from coterie.llm.service import Capabilities, LLMService
from coterie.tour.provider import TOUR_VISION, TourService

TOUR = "tour"
_TOUR_INPUT = frozenset({"text"})
_TOUR_OUTPUT = frozenset({"text", "tool_calling"})

TOUR_ENTRIES = (
    ServiceEntry(
        id="tour",
        name="The tour (scripted)",
        provider=TOUR,
        base_url="",
        model="tour",
        capabilities=Capabilities(input=_TOUR_INPUT, output=_TOUR_OUTPUT),
    ),
    ServiceEntry(
        id=TOUR_VISION,
        name="The tour, with eyes (scripted)",
        provider=TOUR,
        base_url="",
        model=TOUR_VISION,
        capabilities=Capabilities(input=_TOUR_INPUT | {"vision"}, output=_TOUR_OUTPUT),
    ),
)
"""Used until a real service is configured."""


def make_service(entry: ServiceEntry, clock: Clock) -> LLMService:
    key, key_name = (entry.api_key.reveal(), entry.api_key.name) if entry.api_key else ("", "")
    deadlines = Deadlines.from_total(entry.timeout)
    match entry.provider:
        case "tour":
            return TourService(id=entry.id, has_vision=entry.model == TOUR_VISION, clock=clock)
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
