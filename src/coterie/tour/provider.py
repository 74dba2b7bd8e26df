"""The tour: a scripted model that demonstrates Coterie until a real model is set up.

`TOUR_ENTRIES` are its services, `TourService` answers their requests, and `TourSeer` is its second agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import Any

from coterie.agent.service import AgentDirectory, AgentService
from coterie.clock import Clock, SystemClock
from coterie.config import ASSISTANT, Config
from coterie.errors import Refused
from coterie.ids import new_id
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.service import (
    AssistantMessage,
    Capabilities,
    Completion,
    InlineFile,
    ModelRequest,
    SystemMessage,
    TextDelta,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from coterie.tour import script
from coterie.tour.script import Scene, Translated

_WORD_PAUSE = timedelta(milliseconds=30)
_LONG_PAUSE_FACTOR = 25
_CJK = re.compile("[\u3400-\u9fff\uf900-\ufaff]")
_LETTER = re.compile(r"[^\W\d_]")
_FRAME = re.compile(r"\A<[a-z2-7]{8} [^\n]*>\n?|\n?</[a-z2-7]{8}>\Z")
_INTERRUPTED = "interrupted_by_new_message"
_FAILED = '"error"'


TOUR_VISION = "tour-sees"
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


class TourService:
    """Answers requests from a script: as the guide, or with vision as the seer, to which the guide forwards files."""

    def __init__(
        self,
        *,
        id: str = "tour",  # noqa: A002
        has_vision: bool = False,
        pace: timedelta = _WORD_PAUSE,
        clock: Clock | None = None,
    ) -> None:
        """`pace`: pause between words; zero in tests."""
        self._id, self._has_vision, self._pace = id, has_vision, pace
        self._clock = clock or SystemClock()

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        cues = Cues.from_request(request)
        answer = answer_as_seer(cues) if self._has_vision else answer_as_guide(cues)
        for word in re.findall(r"\s*\S+", answer.text):
            yield TextDelta(word)
            if self._pace:
                await self._clock.sleep(self._pace * (_LONG_PAUSE_FACTOR if word.endswith("…") else 1))
        calls = tuple(
            ToolCall(id=f"call_{new_id()[-24:]}", name=name, arguments=arguments) for name, arguments in answer.calls
        )
        yield Completion(
            text=answer.text, calls=calls, service=self._id, finish_reason="tool_calls" if calls else "stop"
        )

    async def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cues:
    """The facts of a request that the script evaluates."""

    new: tuple[UserMessage, ...]
    """User messages since the last assistant message, oldest first."""
    step: int
    """Assistant messages since then."""
    first: bool
    """No assistant message precedes."""
    interrupted: bool
    texts: tuple[str, ...]
    """Texts of all user messages, newest first."""
    has_files: bool
    is_refused: bool
    """A tool call since the last user message failed."""
    tools: frozenset[str]

    @classmethod
    def from_request(cls, request: ModelRequest) -> Cues:
        newest_first = [message for message in reversed(request.messages) if not isinstance(message, SystemMessage)]
        after = list(takewhile(lambda message: not isinstance(message, UserMessage), newest_first))
        users = list(takewhile(lambda message: isinstance(message, UserMessage), newest_first[len(after) :]))
        before = newest_first[len(after) + len(users) :]
        stopped = bool(before) and isinstance(before[0], ToolMessage) and _INTERRUPTED in before[0].text
        new = tuple(message for message in reversed(users) if isinstance(message, UserMessage))
        all_users = [message for message in newest_first if isinstance(message, UserMessage)]
        return cls(
            new=new,
            step=sum(isinstance(message, AssistantMessage) for message in after),
            first=not any(isinstance(message, AssistantMessage) for message in before),
            interrupted=stopped or any(_scene(_text(message)) is script.INTERJECTION for message in new[:-1]),
            texts=tuple(map(_text, all_users)),
            has_files=any(map(_described, all_users)),
            is_refused=any(isinstance(message, ToolMessage) and _FAILED in message.text for message in after),
            tools=frozenset(tool.name for tool in request.tools),
        )

    @property
    def last(self) -> str:
        return _text(self.new[-1]) if self.new else ""

    @property
    def chinese(self) -> bool:
        """Language of the last message with letters; a file without text does not change it."""
        words = next(filter(_LETTER.search, self.texts), "")
        return bool(_CJK.search(words))

    @property
    def described(self) -> dict[str, Any] | None:
        """First attachment that was replaced by a description."""
        return next(filter(None, map(_described, self.new)), None)

    @property
    def seer_answer(self) -> str | None:
        """The seer's answer."""
        texts = [_text(message) for message in self.new]
        match = next(filter(None, (seen.search(text) for text in texts for seen in (script.SEEN, script.DONE))), None)
        return match[1].strip() if match else None

    def is_shown(self, scene: Scene) -> bool:
        was_requested = any(scene.option.en in text or scene.option.zh in text for text in self.texts)
        return was_requested or (scene is script.ATTACHMENT and self.has_files)

    @property
    def inline(self) -> list[InlineFile]:
        return [part for message in self.new for part in message.parts if isinstance(part, InlineFile)]


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """Text and tool calls of one answer."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


def answer_as_guide(cues: Cues) -> ScriptedAnswer:
    if cues.described:
        return _nth(cues.step, _forward(cues, cues.described))
    scene = _chosen(cues)
    answers = [_menu(cues, scene)]
    if scene.tool in cues.tools:
        call = (scene.tool, _translate(scene.arguments, cues.chinese))
        answers.insert(0, ScriptedAnswer(scene.says.text(cues.chinese), (call,)))
        if scene is script.ASK and not cues.is_refused:
            answers[1] = ScriptedAnswer(script.ASKED.text(cues.chinese))
    return _nth(cues.step, answers)


def answer_as_seer(cues: Cues) -> ScriptedAnswer:
    if not cues.inline:
        is_asked = script.ASKS.search(cues.last)
        return ScriptedAnswer((script.DOES if is_asked else script.NOTHING_TO_SEE).text(cues.chinese))
    return ScriptedAnswer(script.SEES.text(cues.chinese).format(", ".join(map(_describe_file, cues.inline))))


def _chosen(cues: Cues) -> Scene:
    if cues.interrupted:
        return script.INTERRUPTED
    if script.SEEN.search(cues.last):
        return script.SHOWN
    if script.DONE.search(cues.last):
        return script.ANSWERED
    return _scene(cues.last) or script.UNKNOWN


def _scene(text: str) -> Scene | None:
    """Return the scene that a text requests. Quick replies precede cues."""
    scenes = (*script.SCENES, script.LANGUAGE)
    options = (scene for scene in scenes if scene.option.en in text or scene.option.zh in text)
    by_cue = (scene for scene in (*scenes, script.HELLO) if scene.cue and scene.cue.search(text))
    return next(options, None) or next(by_cue, None)


def _menu(cues: Cues, scene: Scene) -> ScriptedAnswer:
    """Return the final message of the scene with the remaining scenes."""
    remaining = [other for other in script.SCENES if not cues.is_shown(other)]
    if cues.first and scene in (script.HELLO, script.UNKNOWN):
        remaining.append(script.LANGUAGE)
    text, options = scene.then.text(cues.chinese), [other.option.text(cues.chinese) for other in remaining]
    if cues.seer_answer:
        text = f"{script.RELAYS.text(cues.chinese).format(cues.seer_answer)}\n\n{text}"
    if "send_message" not in cues.tools:
        return ScriptedAnswer(" ".join([text, *options]))
    message: dict[str, Any] = {"to": "user", "payload": {"text": text}}
    return ScriptedAnswer("", (("send_message", message | ({"quickReplies": options} if options else {})),))


def _forward(cues: Cues, attachment: dict[str, Any]) -> list[ScriptedAnswer]:
    agents = attachment.get("capableAgents") or []
    facts = {key: attachment.get(key, "?") for key in ("filename", "mimeType", "size")}
    if not agents or "send_message" not in cues.tools:
        return [ScriptedAnswer(script.NO_READER.text(cues.chinese).format(**facts))]
    agent = str(agents[0])
    please = script.PLEASE_LOOK.text(cues.chinese)
    payload = {"text": please, "attachments": [{"artifactRef": attachment.get("artifactRef")}]}
    passes_on = script.PASSES_ON.text(cues.chinese).format(agent=agent, **facts)
    return [
        ScriptedAnswer(passes_on, (("send_message", {"to": agent, "payload": payload}),)),
        ScriptedAnswer(script.PASSED_ON.text(cues.chinese).format(agent=agent)),
    ]


def _nth(step: int, answers: list[ScriptedAnswer]) -> ScriptedAnswer:
    """Return the answer of this step; an empty one ends the turn."""
    return answers[step] if step < len(answers) else ScriptedAnswer("")


def _translate(value: Any, chinese: bool) -> Any:
    match value:
        case Translated():
            return value.text(chinese)
        case dict():
            return {key: _translate(item, chinese) for key, item in value.items()}
    return value


def _describe_file(part: InlineFile) -> str:
    size = f"{part.filename} ({part.mime_type}, {len(part.data)} bytes"
    if part.data[:8] == b"\x89PNG\r\n\x1a\n" and len(part.data) >= 24:
        width, height = int.from_bytes(part.data[16:20]), int.from_bytes(part.data[20:24])
        size += f", {width} × {height}"
    return size + ")"


def _attachment(text: str) -> dict[str, Any] | None:
    start = text.find('{"attachment"')
    if start < 0:
        return None
    try:
        decoded, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    attachment = decoded["attachment"]
    return attachment if isinstance(attachment, dict) else None


def _described(message: UserMessage) -> dict[str, Any] | None:
    texts = (part.text for part in message.parts if isinstance(part, TextPart))
    return next(filter(None, map(_attachment, texts)), None)


def _text(message: UserMessage) -> str:
    """Return the text without message frames and attachment descriptions."""
    texts = (part.text for part in message.parts if isinstance(part, TextPart) and not _attachment(part.text))
    return "\n".join(filter(None, (_FRAME.sub("", text) for text in texts)))


# An id that no owner would choose, because it stays taken after the agent is terminated.
SEER = "tour-seer"
NAME = "Seer (tour)"


class TourSeer:
    """The tour's second agent, which reads images. The first one forwards images to it.

    It exists while the tour's script is the only service and no agent is configured.
    """

    def __init__(self, agents: AgentService, directory: AgentDirectory, services: ServiceRegistry) -> None:
        self._agents, self._directory, self._services = agents, directory, services

    def is_needed(self, config: Config) -> bool:
        return config.agents == (ASSISTANT,) and TOUR_VISION in self._services

    @property
    def exists(self) -> bool:
        profile = self._directory.find(SEER)
        return profile is not None and profile.service == TOUR_VISION

    async def ensure_created(self) -> None:
        if self.exists:
            return
        # Refused if it was terminated, if another process created it first, or if the id is taken.
        with suppress(Refused):
            await self._agents.create(id=SEER, name=NAME, prompt="", service=TOUR_VISION, tools=(), parent=None)
