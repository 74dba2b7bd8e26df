"""Model-based test of the router: files are added and lost, capabilities refused, entries changed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from coterie.llm.config import ServiceEntry, SizeLimits
from coterie.llm.routing import required_capabilities
from coterie.llm.service import CAPABILITY_BY_TYPE, Attachment, InlineFile, TextPart, ToolSpec
from tests.test_bus_model import machine_settings

from .harness import PDF, PNG, WAV, Harness, parts_of, service, user_request

LIMIT = 1_000
TOOL = ToolSpec(name="look_up", description="", parameters={"type": "object"})
SERVICES = ("one", "two", "old")
ABILITIES = ("vision", "audio", "file", "tool_calling")


def entry(name: str, takes: frozenset[str] | None, key: str = "") -> ServiceEntry:
    gives = ("text", "tool_calling") if takes and "tool_calling" in takes else ("text",)
    small = SizeLimits(image=LIMIT, audio=LIMIT, file=LIMIT)
    return service(name, None if takes is None else sorted(takes), gives, limits=small, max_tokens=len(key) + 1)


class CapabilityMachine(RuleBasedStateMachine):
    files = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.takes: dict[str, frozenset[str] | None] = {
            "one": frozenset({"vision"}),
            "two": frozenset({"audio", "file", "tool_calling"}),
            "old": None,
        }
        self.entries = {name: entry(name, self.takes[name]) for name in SERVICES}
        self.harness = Harness(*self.entries.values(), agents={"ada": "one", "bob": "two"})
        self.refused: dict[str, set[str]] = {name: set() for name in SERVICES}
        self.originals: dict[str, bytes] = {}
        self.gone: set[str] = set()
        self.mended = 0

    @rule(target=files, head=st.sampled_from([PNG, WAV, PDF]), size=st.sampled_from([0, 0, LIMIT]))
    def upload(self, head: bytes, size: int) -> Attachment:
        data = head + bytes([len(self.originals) % 256]) + bytes(size)
        kept = self.harness.artifacts.keep(data, "it")
        self.originals[kept.artifact_ref] = data
        return kept

    @rule(one=files)
    def lose(self, one: Attachment) -> None:
        self.harness.artifacts.bytes.broken.add(self.harness.artifacts.known[one.artifact_ref].sha256)
        self.gone.add(one.artifact_ref)

    @rule(name=st.sampled_from(SERVICES), ability=st.sampled_from(ABILITIES))
    def refuse(self, name: str, ability: str) -> None:
        self.harness.learned_limits.record(self.entries[name], ability, "no")
        self.refused[name].add(ability)

    @rule(name=st.sampled_from(SERVICES), takes=st.none() | st.frozensets(st.sampled_from(ABILITIES)))
    def mend(self, name: str, takes: frozenset[str] | None) -> None:
        """Change an entry: learned limits of the old one no longer apply."""
        self.mended += 1
        self.takes[name], self.refused[name] = takes, set()
        self.entries[name] = entry(name, takes, "x" * self.mended)

    @rule(name=st.sampled_from(SERVICES), shown=st.lists(files, max_size=4), tools=st.booleans())
    def ask(self, name: str, shown: list[Attachment], tools: bool) -> None:
        request = user_request(TextPart("look"), *shown)
        if tools:
            request = type(request)(messages=request.messages, tools=(TOOL,))
        before = repr(request)
        fitted = self.runner.run(self.harness.router.fit(request, self.entries[name], agent_id="ada"))

        text, *parts = parts_of(fitted)
        assert text == TextPart("look") and len(parts) == len(shown)
        for attachment, part in zip(shown, parts, strict=True):
            assert isinstance(part, InlineFile) == self.goes_through(name, attachment), (name, attachment)
            if isinstance(part, InlineFile):
                assert part.data == self.originals[attachment.artifact_ref]
        assert bool(fitted.tools) == (tools and self.has_tools(name))
        assert required_capabilities(fitted) <= self.abilities(name) | (
            {"tool_calling"} if self.has_tools(name) else set()
        )
        assert repr(request) == before

    def abilities(self, name: str) -> frozenset[str]:
        return frozenset((self.takes[name] or frozenset()) - self.refused[name])

    def has_tools(self, name: str) -> bool:
        """Without declared capabilities, tool calling is assumed."""
        inferred = self.takes[name] is None
        return "tool_calling" not in self.refused[name] and (inferred or "tool_calling" in self.abilities(name))

    def goes_through(self, name: str, attachment: Attachment) -> bool:
        able = CAPABILITY_BY_TYPE[attachment.type] in self.abilities(name)
        return able and attachment.size <= LIMIT and attachment.artifact_ref not in self.gone

    @invariant()
    def what_is_left_is_what_was_declared_less_what_was_refused(self) -> None:
        for name in SERVICES:
            left = self.harness.learned_limits.effective_capabilities(self.entries[name]).input - {"text"}
            assert left - {"tool_calling"} == self.abilities(name) - {"tool_calling"}

    def teardown(self) -> None:
        self.runner.close()


def test_models_are_sent_only_content_they_can_read() -> None:
    run_state_machine_as_test(CapabilityMachine, settings=machine_settings(20, 30))


@pytest.mark.full
def test_models_are_sent_only_content_they_can_read_over_many_long_histories() -> None:
    run_state_machine_as_test(CapabilityMachine, settings=machine_settings(300, 50))
