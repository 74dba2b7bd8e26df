"""The scripted tour."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from coterie.llm.providers.openai import Dialect
from coterie.llm.service import (
    AssistantMessage,
    ChatMessage,
    Completion,
    InlineFile,
    ModelRequest,
    SystemMessage,
    TextDelta,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from coterie.testing import FakeClock
from coterie.testing.dialects import check_openai_chat
from coterie.tour import script as script
from coterie.tour.provider import TourService
from coterie.tour.script import Scene

from .helpers import say, user

TOOLS = tuple(
    ToolSpec(name=name, description="", parameters={"type": "object"}) for name in ("send_message", "list_agents")
)
CANCELLED = '{"status":"cancelled","executed":false,"reason":"interrupted_by_new_message"}'
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8) + (640).to_bytes(4) + (480).to_bytes(4)


def tour(**more: Any) -> TourService:
    return TourService(pace=timedelta(0), **more)


class Talk:
    """A conversation with the guide in which every tool succeeds."""

    def __init__(self, tools: tuple[ToolSpec, ...] = TOOLS) -> None:
        self.tools = tools
        self.said: list[ChatMessage] = [SystemMessage("You are the guide.")]
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    async def hears(self, *parts: str) -> None:
        """One whole turn."""
        self.said.append(user(*parts))
        self.texts, self.calls = [], []
        while (answer := await self.asks()).calls:
            self.said += [ToolMessage(call.id, "{}") for call in answer.calls]

    async def asks(self) -> Completion:
        answer = await say(tour(), ModelRequest(messages=tuple(self.said), tools=self.tools))
        self.said.append(AssistantMessage(answer.text, answer.calls))
        self.texts.append(answer.text)
        self.calls += answer.calls
        assert len(self.said) < 100, "a turn ends"
        return answer

    @property
    def menu(self) -> dict[str, Any]:
        return dict(self.calls[-1].arguments)


def described(capable: list[str]) -> str:
    about = {"artifactRef": "ref", "contentType": "image", "filename": "a.png", "mimeType": "image/png", "size": 12}
    return json.dumps(
        {"attachment": {**about, "unsupported": "vision", "capableAgents": capable, "suggestion": "转发"}}
    )


def framed(text: str, **known: str) -> str:
    """Wrap a message in the frame that the runtime adds."""
    more = "".join(f" {key}:{value}" for key, value in known.items())
    return f"<abcdefgh user 2030-01-01T12:00Z{more}>\n{text}\n</abcdefgh>"


@pytest.mark.parametrize("words", ["Hi", "Hello!", "hey there"])
async def test_it_answers_a_hello_with_quick_replies_and_says_that_it_is_scripted(words: str) -> None:
    talk = Talk()

    await talk.hears(words)

    assert [call.name for call in talk.calls] == ["send_message"]
    assert talk.menu["to"] == "user"
    assert "script" in talk.menu["payload"]["text"] and "no real model" in talk.menu["payload"]["text"]
    assert talk.menu["quickReplies"] == [*(scene.option.en for scene in script.SCENES), "中文"]
    assert len(talk.menu["quickReplies"]) <= 10
    assert talk.texts[-1] == ""


@pytest.mark.parametrize(
    ("words", "scene"), [("你好", script.HELLO), ("看看", script.UNKNOWN), ("History?", script.UNKNOWN)]
)
async def test_the_welcome_is_not_repeated_for_the_first_message(words: str, scene: Scene) -> None:
    talk = Talk()

    await talk.hears(words)

    chinese = words != "History?"
    assert talk.menu["payload"]["text"] == scene.then.text(chinese) != script.WELCOME.then.text(chinese)
    assert len(talk.menu["quickReplies"]) == len(script.SCENES) + 1


@pytest.mark.parametrize("scene", script.SCENES, ids=lambda scene: scene.option.en)
@pytest.mark.parametrize("chinese", [False, True])
async def test_every_button_leads_to_its_scene_in_its_language(scene: Scene, chinese: bool) -> None:
    talk = Talk()
    await talk.hears("你好" if chinese else "Hi")

    await talk.hears(scene.option.text(chinese))

    if scene is not script.ASK:
        assert talk.menu["payload"]["text"] == scene.then.text(chinese)
    else:  # the second agent's answer brings the menu
        assert talk.texts[-1] == script.ASKED.text(chinese)
        await talk.hears(script.DOES.text(chinese))
        assert talk.menu["payload"]["text"].endswith(script.ANSWERED.then.text(chinese))
    assert scene.option.text(chinese) not in talk.menu["quickReplies"]
    assert check_openai_chat(Dialect().messages(_request(talk)), [_wire(tool) for tool in TOOLS]) is None


async def test_when_all_was_shown_there_are_no_more_buttons() -> None:
    talk = Talk()
    for scene in script.SCENES:
        await talk.hears(scene.option.en)

    assert "quickReplies" not in talk.menu


async def test_it_sends_a_message_that_comes_ten_seconds_later() -> None:
    talk = Talk()

    await talk.hears("Can you remind me later?")

    delayed = talk.calls[0]
    assert delayed.name == "send_message" and delayed.arguments["delayMs"] == 10_000
    assert delayed.arguments["to"] == "user"


async def test_it_runs_a_tool() -> None:
    talk = Talk()

    await talk.hears("用一个工具")

    assert talk.calls[0].name == "list_agents"


@pytest.mark.parametrize("chinese", [False, True])
async def test_it_asks_the_second_agent_and_passes_the_answer_to_the_person(chinese: bool) -> None:
    talk = Talk()
    await talk.hears(script.ASK.option.text(chinese))
    (call,) = talk.calls
    assert call.name == "send_message" and call.arguments["to"] == "tour-seer"

    said = await say(tour(has_vision=True), ModelRequest(messages=(user(call.arguments["payload"]["text"]),)))
    assert said.text == script.DOES.text(chinese)
    await talk.hears(said.text)

    told = talk.menu["payload"]["text"]
    assert told.startswith("回话来了：替看不见" if chinese else "Here is the answer: I look at pictures")
    assert script.ASK.option.text(chinese) not in talk.menu["quickReplies"]


async def test_it_says_if_there_is_no_second_agent_to_ask() -> None:
    talk = Talk()
    talk.said.append(user(script.ASK.option.en))
    plan = await talk.asks()
    talk.said += [ToolMessage(call.id, '{"error":"unknown_recipient","message":"x"}') for call in plan.calls]

    answer = await talk.asks()

    assert answer.calls[0].arguments["payload"]["text"] == script.ASK.then.en


async def test_it_leaves_time_to_interrupt_and_takes_an_interjection_before_the_tool_ran() -> None:
    talk = Talk()
    talk.said += [user(script.INTERJECTION.option.en), user("Stop counting!")]

    answer = await talk.asks()

    assert answer.calls[0].arguments["payload"]["text"] == script.INTERRUPTED.then.en
    assert script.INTERJECTION.says.en.count("…") >= 5


async def test_it_takes_an_interjection_after_the_tool_was_called() -> None:
    talk = Talk()
    talk.said.append(user(script.INTERJECTION.option.zh))
    plan = await talk.asks()
    talk.said += [*(ToolMessage(call.id, CANCELLED) for call in plan.calls), user("等等！")]

    answer = await talk.asks()

    assert answer.calls[0].arguments["payload"]["text"] == script.INTERRUPTED.then.zh


async def test_it_forwards_files_it_cannot_read() -> None:
    talk = Talk()

    await talk.hears("What is this?", described(["seer", "other"]))

    (call,) = talk.calls
    assert call.name == "send_message" and call.arguments["to"] == "seer"
    assert call.arguments["payload"]["attachments"] == [{"artifactRef": "ref"}]
    assert "a.png" in talk.texts[0] and talk.texts[-1] == "I will tell you what seer says."


async def test_it_says_if_no_agent_can_read_the_file() -> None:
    talk = Talk()

    await talk.hears(described([]))

    assert talk.calls == [] and "nobody here can" in talk.texts[0]


async def test_the_answer_of_the_seer_is_passed_to_the_person() -> None:
    picture = InlineFile(type="image", filename="a.png", mime_type="image/png", data=PNG)
    seen = await say(
        tour(has_vision=True), ModelRequest(messages=(UserMessage((TextPart("请告诉我这是什么。"), picture)),))
    )
    assert seen.text == "这是我看到的：a.png (image/png, 24 bytes, 640 × 480)。我只是脚本，只能说这么多。"
    talk = Talk()

    await talk.hears("看图", described(["seer"]))
    await talk.hears(seen.text)

    told = talk.menu["payload"]["text"]
    assert len(talk.calls) == 1 and "640 × 480" in told and told.startswith("回话来了") and talk.texts[-1] == ""
    assert script.ATTACHMENT.option.zh not in talk.menu["quickReplies"] and len(talk.menu["quickReplies"]) == 5


async def test_an_answer_and_a_button_in_one_turn_are_both_handled() -> None:
    talk = Talk()
    talk.said += [user(script.SEES.en.format("a.png")), user(script.SETUP.option.en)]

    answer = await talk.asks()

    told = answer.calls[0].arguments["payload"]["text"]
    assert "Here is the answer: a.png" in told and script.SETUP.then.en in told


@pytest.mark.parametrize("chinese", [False, True])
async def test_a_button_changes_the_language(chinese: bool) -> None:
    talk = Talk()
    await talk.hears("Hi" if chinese else "你好")

    await talk.hears(script.LANGUAGE.option.text(not chinese))

    assert talk.menu["payload"]["text"] == script.LANGUAGE.then.text(chinese)
    assert talk.menu["quickReplies"] == [scene.option.text(chinese) for scene in script.SCENES]


@pytest.mark.parametrize(("words", "first"), [("看看这个", "我读不了"), ("Look at this", "I cannot read")])
async def test_a_picture_without_text_does_not_change_the_language(words: str, first: str) -> None:
    talk = Talk()
    await talk.hears(words)

    await talk.hears(framed(""), described([]))

    assert talk.texts[0].startswith(first)


async def test_message_frames_are_not_part_of_the_text() -> None:
    talk = Talk()
    await talk.hears("Hi")

    await talk.hears(framed("hm", early="a reminder that comes later"))

    assert talk.menu["payload"]["text"] == script.UNKNOWN.then.en


async def test_the_seer_asks_for_a_picture() -> None:
    answer = await say(tour(has_vision=True), ModelRequest(messages=(user("Hi"),)))

    assert answer.text == script.NOTHING_TO_SEE.en


async def test_it_tells_how_to_set_up_a_real_model() -> None:
    talk = Talk()

    await talk.hears("How do I configure an API key?")

    assert "llmservices.json" in talk.menu["payload"]["text"] and "setup page" in talk.menu["payload"]["text"]


async def test_an_unknown_message_gets_a_hint() -> None:
    talk = Talk()
    await talk.hears("Hi")

    await talk.hears("What is the meaning of life?")

    assert talk.menu["payload"]["text"] == script.UNKNOWN.then.en


async def test_without_tools_it_speaks_in_plain_text() -> None:
    talk = Talk(tools=())

    await talk.hears(script.TOOL.option.en)

    assert talk.calls == [] and talk.texts[0].startswith(script.TOOL.then.en)


@pytest.mark.parametrize(
    "said", [(), (SystemMessage("x"),), (AssistantMessage("x"),), (user(),), (user('{"attachment": 7}'),)]
)
async def test_any_request_gets_an_answer(said: tuple[ChatMessage, ...]) -> None:
    for has_vision in (False, True):
        assert await say(tour(has_vision=has_vision), ModelRequest(messages=said, tools=TOOLS))


async def test_its_call_ids_never_repeat() -> None:
    ids = set()
    for _ in range(50):
        talk = Talk()
        await talk.hears("Hi")
        ids |= {call.id for call in talk.calls}

    assert len(ids) == 50


async def test_it_speaks_word_by_word_in_its_own_time() -> None:
    clock = FakeClock()
    pieces = TourService(clock=clock, pace=timedelta(seconds=1), has_vision=True).generate(
        ModelRequest(messages=(user("Hi"),))
    )

    first = await anext(pieces)

    assert isinstance(first, TextDelta) and first.text == "I"
    await pieces.aclose()  # type: ignore[attr-defined]


def _request(talk: Talk) -> ModelRequest:
    return ModelRequest(messages=tuple(talk.said), tools=TOOLS)


def _wire(tool: ToolSpec) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
