"""The tour: a small scripted model that shows what Coterie does before any real model is set up."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import Any

from coterie.clock import Clock, SystemClock
from coterie.ids import new_id
from coterie.llm.types import Answer, AssistantSaid, Call, Delta, Inline, Request, Text, ToolSaid, UserSaid
from coterie.tour import script as script
from coterie.tour.script import Scene, Words

_PACE = timedelta(milliseconds=30)
_LONG_PAUSE = 25
_CJK = re.compile("[\u3400-\u9fff\uf900-\ufaff]")
_LETTER = re.compile(r"[^\W\d_]")
_FRAME = re.compile(r"\A<message \S+ \{.*\}>\n?|\n?</message \S+>\Z")
_INTERRUPTED = "interrupted_by_new_message"


class Tour:
    """Looks at a request as a model would and answers from a script.

    The one that `sees` is for a second agent, to whom the guide passes on what it cannot read itself.
    """

    def __init__(
        self,
        *,
        id: str = "tour",  # noqa: A002
        sees: bool = False,
        pace: timedelta = _PACE,
        clock: Clock | None = None,
    ) -> None:
        """`pace` is the time from word to word; none at all suits tests."""
        self._id, self._sees, self._pace = id, sees, pace
        self._clock = clock or SystemClock()

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        heard = Heard.of(request)
        line = look(heard) if self._sees else guide(heard)
        for word in re.findall(r"\s*\S+", line.text):
            yield Delta(word)
            if self._pace:
                await self._clock.sleep(self._pace * (_LONG_PAUSE if word.endswith("…") else 1))
        calls = tuple(Call(id=f"call_{new_id()[-24:]}", name=name, arguments=what) for name, what in line.calls)
        yield Answer(text=line.text, calls=calls, service=self._id, finish="tool_calls" if calls else "stop")

    async def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A request as somebody takes it in who understands only cues."""

    new: tuple[UserSaid, ...]
    """The last that others said, without a word between."""
    step: int
    """How often the tour has spoken since."""
    first: bool
    """Nothing was answered before."""
    interrupted: bool
    texts: tuple[str, ...]
    """Everything that others ever said, the newest first."""
    has_got_files: bool
    tools: frozenset[str]

    @classmethod
    def of(cls, request: Request) -> Heard:
        back = [one for one in reversed(request.said) if isinstance(one, UserSaid | AssistantSaid | ToolSaid)]
        after = list(takewhile(lambda one: not isinstance(one, UserSaid), back))
        users = list(takewhile(lambda one: isinstance(one, UserSaid), back[len(after) :]))
        before = back[len(after) + len(users) :]
        stopped = bool(before) and isinstance(before[0], ToolSaid) and _INTERRUPTED in before[0].text
        new = tuple(one for one in reversed(users) if isinstance(one, UserSaid))
        return cls(
            new=new,
            step=sum(isinstance(one, AssistantSaid) for one in after),
            first=not any(isinstance(one, AssistantSaid) for one in before),
            interrupted=stopped or any(_scene(_text(one)) is script.INTERJECTION for one in new[:-1]),
            texts=tuple(_text(one) for one in back if isinstance(one, UserSaid)),
            has_got_files=any(_described(one) for one in back if isinstance(one, UserSaid)),
            tools=frozenset(tool.name for tool in request.tools),
        )

    @property
    def last(self) -> str:
        return _text(self.new[-1]) if self.new else ""

    @property
    def chinese(self) -> bool:
        """The language of the last words there were: a file that comes without any changes nothing."""
        words = next(filter(_LETTER.search, self.texts), "")
        return bool(_CJK.search(words))

    @property
    def described(self) -> dict[str, Any] | None:
        """An attachment that came as a description."""
        return next(filter(None, map(_described, self.new)), None)

    @property
    def seen(self) -> str | None:
        """What the one who sees made of it."""
        found = next(filter(None, (script.SEEN.search(_text(one)) for one in self.new)), None)
        return found[1].strip() if found else None

    def has_had(self, scene: Scene) -> bool:
        asked = any(scene.option.en in text or scene.option.zh in text for text in self.texts)
        return asked or (scene is script.ATTACHMENT and self.has_got_files)

    @property
    def inline(self) -> list[Inline]:
        return [part for one in self.new for part in one.parts if isinstance(part, Inline)]


@dataclass(frozen=True, slots=True)
class Line:
    """What the script has somebody say and do."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


def guide(heard: Heard) -> Line:
    if heard.described:
        return _nth(heard.step, _pass_on(heard, heard.described))
    scene = _chosen(heard)
    lines = [_menu(heard, scene)]
    if scene.tool in heard.tools:
        lines.insert(0, Line(scene.says.to(heard.chinese), ((scene.tool, _told(scene.arguments, heard.chinese)),)))
    return _nth(heard.step, lines)


def look(heard: Heard) -> Line:
    if not heard.inline:
        return Line(script.NOTHING_TO_SEE.to(heard.chinese))
    return Line(script.SEES.to(heard.chinese).format(", ".join(map(_looks, heard.inline))))


def _chosen(heard: Heard) -> Scene:
    if heard.interrupted:
        return script.INTERRUPTED
    if script.SEEN.search(heard.last):
        return script.SHOWN
    return _scene(heard.last) or script.UNKNOWN


def _scene(text: str) -> Scene | None:
    """The scene that a text asks for; what stands on a button counts before any cue."""
    scenes = (*script.SCENES, script.LANGUAGE)
    options = (scene for scene in scenes if scene.option.en in text or scene.option.zh in text)
    cues = (scene for scene in (*scenes, script.HELLO) if scene.cue and scene.cue.search(text))
    return next(options, None) or next(cues, None)


def _menu(heard: Heard, scene: Scene) -> Line:
    """The scene's last words with the scenes that are left to choose from."""
    left = [one for one in script.SCENES if not heard.has_had(one)]
    if heard.first and scene in (script.HELLO, script.UNKNOWN):
        left.append(script.LANGUAGE)
    text, options = scene.then.to(heard.chinese), [one.option.to(heard.chinese) for one in left]
    if heard.seen:
        text = f"{script.RELAYS.to(heard.chinese).format(heard.seen)}\n\n{text}"
    if "send_message" not in heard.tools:
        return Line(" ".join([text, *options]))
    message: dict[str, Any] = {"to": "user", "payload": {"text": text}}
    return Line("", (("send_message", message | ({"quickReplies": options} if options else {})),))


def _pass_on(heard: Heard, attachment: dict[str, Any]) -> list[Line]:
    agents = attachment.get("capableAgents") or []
    told = {key: attachment.get(key, "?") for key in ("filename", "mimeType", "size")}
    if not agents or "send_message" not in heard.tools:
        return [Line(script.NOBODY.to(heard.chinese).format(**told))]
    agent = str(agents[0])
    please = script.PLEASE_LOOK.to(heard.chinese)
    payload = {"text": please, "attachments": [{"artifactRef": attachment.get("artifactRef")}]}
    passes_on = script.PASSES_ON.to(heard.chinese).format(agent=agent, **told)
    return [
        Line(passes_on, (("send_message", {"to": agent, "payload": payload}),)),
        Line(script.PASSED_ON.to(heard.chinese).format(agent=agent)),
    ]


def _nth(step: int, lines: list[Line]) -> Line:
    """When all is said, the turn ends without a word."""
    return lines[step] if step < len(lines) else Line("")


def _told(value: Any, chinese: bool) -> Any:
    match value:
        case Words():
            return value.to(chinese)
        case dict():
            return {key: _told(item, chinese) for key, item in value.items()}
    return value


def _looks(part: Inline) -> str:
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
        found, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    attachment = found["attachment"]
    return attachment if isinstance(attachment, dict) else None


def _described(said: UserSaid) -> dict[str, Any] | None:
    texts = (part.text for part in said.parts if isinstance(part, Text))
    return next(filter(None, map(_attachment, texts)), None)


def _text(said: UserSaid) -> str:
    """What was said, without the runtime's frame and descriptions of what came with it."""
    texts = (part.text for part in said.parts if isinstance(part, Text) and not _attachment(part.text))
    return "\n".join(filter(None, (_FRAME.sub("", text) for text in texts)))
