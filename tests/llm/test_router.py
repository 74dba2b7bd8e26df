"""Capability router: which parts are sent as bytes, which are described."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coterie.llm.config import SizeLimits
from coterie.llm.routing import TOOL_FILES_NOTE, required_capabilities
from coterie.llm.service import (
    AssistantMessage,
    Attachment,
    InlineFile,
    ModelRequest,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)

from .harness import PDF, PNG, WAV, Harness, description, parts_of, service, user_request

TOOL = ToolSpec(name="look_up", description="", parameters={"type": "object"})


def harness() -> Harness:
    return Harness(
        service("blind", []),
        service("seeing", ["vision"]),
        service("hearing", ["audio"]),
        service("reading", ["file"]),
        service("old"),
        agents={"ada": "blind", "viewer": "seeing", "listener": "hearing", "reader": "reading"},
    )


async def test_an_image_is_sent_as_bytes_to_a_model_with_vision() -> None:
    """003-2.1"""
    here = harness()
    picture = here.artifacts.keep(PNG, "chart.png")

    fitted = await here.fit(user_request(TextPart("what is this?"), picture), "seeing")

    assert parts_of(fitted) == [
        TextPart("what is this?"),
        InlineFile(type="image", filename="chart.png", mime_type="image/png", data=PNG),
    ]


@pytest.mark.parametrize("service_id", ["blind", "hearing", "reading", "old"])
async def test_an_image_is_described_to_a_model_without_vision(service_id: str) -> None:
    """003-2.2"""
    here = harness()
    picture = here.artifacts.keep(PNG, "chart.png")

    [text, part] = parts_of(await here.fit(user_request(TextPart("what is this?"), picture), service_id))

    assert text == TextPart("what is this?")
    content = description(part)
    assert content["artifactRef"] == picture.artifact_ref
    assert (content["filename"], content["mimeType"], content["size"]) == ("chart.png", "image/png", len(PNG))
    assert (content["contentType"], content["unsupported"], content["capableAgents"]) == ("image", "vision", ["viewer"])


async def test_audio_is_sent_as_bytes_to_a_model_with_audio() -> None:
    """003-2.3"""
    here = harness()

    [part] = parts_of(await here.fit(user_request(here.artifacts.keep(WAV, "note.wav")), "hearing"))

    assert part == InlineFile(type="audio", filename="note.wav", mime_type="audio/wav", data=WAV)


@pytest.mark.parametrize("service_id", ["blind", "seeing", "reading", "old"])
async def test_audio_is_described_to_a_model_without_audio(service_id: str) -> None:
    """003-2.4"""
    here = harness()
    sound = here.artifacts.keep(WAV, "note.wav")

    [part] = parts_of(await here.fit(user_request(sound), service_id))

    content = description(part)
    assert (content["artifactRef"], content["contentType"], content["unsupported"]) == (
        sound.artifact_ref,
        "audio",
        "audio",
    )
    assert (content["mimeType"], content["size"], content["capableAgents"]) == ("audio/wav", len(WAV), ["listener"])


async def test_a_file_is_sent_as_bytes_to_a_model_with_file() -> None:
    """003-2.5"""
    here = harness()

    [part] = parts_of(await here.fit(user_request(here.artifacts.keep(PDF, "report.pdf")), "reading"))

    assert part == InlineFile(type="file", filename="report.pdf", mime_type="application/pdf", data=PDF)


@pytest.mark.parametrize("data", [PDF, b"plain text, which could have been pasted"])
@pytest.mark.parametrize("service_id", ["blind", "seeing", "hearing", "old"])
async def test_a_file_is_described_to_a_model_without_file_even_when_it_is_text(service_id: str, data: bytes) -> None:
    """003-2.6"""
    here = harness()
    report = here.artifacts.keep(data, "report")

    [part] = parts_of(await here.fit(user_request(report), service_id))

    content = description(part)
    assert (content["artifactRef"], content["filename"], content["contentType"]) == (
        report.artifact_ref,
        "report",
        "file",
    )
    assert (content["mimeType"], content["unsupported"], content["capableAgents"]) == (
        report.mime_type,
        "file",
        ["reader"],
    )


async def test_vision_as_output_does_not_count_as_input() -> None:
    """003-6.4"""
    here = Harness(service("painter", [], gives=["text", "vision"]))

    [part] = parts_of(await here.fit(user_request(here.artifacts.keep(PNG, "a.png")), "painter"))

    assert description(part)["unsupported"] == "vision"


async def test_after_a_change_of_model_and_back_the_image_is_sent_unchanged() -> None:
    here = harness()
    history = user_request(TextPart("look"), here.artifacts.keep(PNG, "chart.png"))
    before = repr(history)

    first = parts_of(await here.fit(history, "seeing"))
    second = parts_of(await here.fit(history, "blind"))
    third = parts_of(await here.fit(history, "seeing"))

    assert isinstance(third[1], InlineFile)
    assert third[1].data == PNG
    assert third == first
    assert description(second[1])["capableAgents"] == ["viewer"]
    assert repr(history) == before


@pytest.mark.parametrize(
    ("name", "data", "kind"), [("a.png", PDF, "file"), ("a.pdf", PNG, "image"), ("a.txt", WAV, "audio")]
)
async def test_the_type_comes_from_the_bytes_not_from_the_name_or_the_message(
    name: str, data: bytes, kind: str
) -> None:
    here = harness()
    claimed = replace(here.artifacts.keep(data, name), type="image", mime_type="image/png", size=1)

    [part] = parts_of(await here.fit(user_request(claimed), "blind"))
    content = description(part)
    assert (content["contentType"], content["size"]) == (kind, len(data))

    [seen] = parts_of(await here.fit(user_request(claimed), "seeing"))
    assert isinstance(seen, InlineFile) == (kind == "image")


@pytest.mark.parametrize("margin", [0, 1])
async def test_a_file_above_the_size_limit_is_described(margin: int) -> None:
    limits = SizeLimits(image=len(PNG) - 1 + margin)
    here = Harness(
        service("small", ["vision"], limits=limits),
        service("large", ["vision"]),
        agents={"ada": "small", "tiny": "small", "viewer": "large"},
    )

    [part] = parts_of(await here.fit(user_request(here.artifacts.keep(PNG, "a.png")), "small"))

    if margin:
        assert isinstance(part, InlineFile)
    else:
        content = description(part)
        assert content["unsupported"] == "size"
        assert content["capableAgents"] == ["viewer"], "tiny could not read it either"


@pytest.mark.parametrize("fault", ["unknown", "deleted", "cut", "unreadable"])
async def test_an_attachment_whose_bytes_are_gone_is_described_and_breaks_nothing(fault: str) -> None:
    here = harness()
    picture, other = here.artifacts.keep(PNG, "a.png"), here.artifacts.keep(PNG + b"2", "b.png")
    digest = here.artifacts.known[picture.artifact_ref].sha256
    match fault:
        case "unknown":
            del here.artifacts.known[picture.artifact_ref]
        case "deleted":
            await here.artifacts.bytes.delete(digest)
        case "cut":
            here.artifacts.bytes.kept[digest] = PNG[:50]
        case "unreadable":
            here.artifacts.bytes.broken.add(digest)

    [part, whole] = parts_of(await here.fit(user_request(picture, other), "seeing"))

    assert description(part)["unsupported"] == "missing"
    assert description(part)["artifactRef"] == picture.artifact_ref
    assert isinstance(whole, InlineFile)


async def test_the_same_picture_ten_times_in_a_conversation_is_read_once() -> None:
    here = harness()
    picture = here.artifacts.keep(PNG, "a.png")

    fitted = await here.fit(ModelRequest(messages=(UserMessage((picture,)),) * 10), "seeing")

    assert len(parts_of(fitted)) == 10
    assert here.artifacts.bytes.reads == 1


async def test_no_attachment_is_left_in_a_fitted_request() -> None:
    here = harness()
    everything = user_request(*(here.artifacts.keep(data, "x") for data in (PNG, WAV, PDF, b"")))

    for entry in here.services:
        assert not any(isinstance(part, Attachment) for part in parts_of(await here.fit(everything, entry.id)))


# Tools

CALL = ToolCall(id="c1", name="look_up", arguments={})
WITH_TOOLS = ModelRequest(
    messages=(
        SystemMessage("s"),
        UserMessage((TextPart("u"),)),
        AssistantMessage("", (CALL,)),
        ToolMessage("c1", "sunny"),
    ),
    tools=(TOOL,),
)


@pytest.mark.parametrize(
    "entry",
    [service("old"), service("new", []), service("takes", ["tool_calling"], gives=["text"])],
    ids=["inferred", "declared as output", "declared as input"],
)
async def test_tools_are_offered_where_they_are_declared_and_where_nothing_is(entry: object) -> None:
    here = Harness(entry)  # type: ignore[arg-type]

    assert await here.fit(WITH_TOOLS, next(iter(here.services)).id) == WITH_TOOLS


async def test_a_service_that_declares_no_tool_calling_is_offered_no_tools_and_shown_no_calls() -> None:
    here = Harness(service("plain", [], gives=["text"]))

    fitted = await here.fit(WITH_TOOLS, "plain")

    assert fitted.tools == ()
    assert not any(isinstance(one, ToolMessage) for one in fitted.messages)
    assert not any(isinstance(one, AssistantMessage) and one.calls for one in fitted.messages)
    assert "sunny" in str(fitted.messages[-1])
    assert required_capabilities(fitted) == set()


def with_pictures(here: Harness) -> ModelRequest:
    """Two calls, each with a picture in its result, and a message after them."""
    other = ToolCall(id="c2", name="look_up", arguments={})
    pictures = [here.artifacts.keep(PNG, name) for name in ("a.png", "b.png")]
    return ModelRequest(
        messages=(
            UserMessage((TextPart("u"),)),
            AssistantMessage("", (CALL, other)),
            ToolMessage("c1", "one", (pictures[0],)),
            ToolMessage("c2", "two", (pictures[1],)),
            UserMessage((TextPart("next"),)),
        ),
        tools=(TOOL,),
    )


async def test_pictures_of_tool_results_follow_the_last_result_for_a_model_with_vision() -> None:
    here = harness()
    request = with_pictures(here)

    fitted = (await here.fit(request, "seeing")).messages

    assert fitted[:4] == (*request.messages[:2], ToolMessage("c1", "one"), ToolMessage("c2", "two"))
    note, first_label, first, second_label, second = parts_of(ModelRequest(messages=fitted[4:5]))
    assert note == TextPart(TOOL_FILES_NOTE)
    assert [part.filename for part in (first, second) if isinstance(part, InlineFile)] == ["a.png", "b.png"]
    assert "c1" in str(first_label) and "c2" in str(second_label)
    assert fitted[5:] == request.messages[4:]
    assert required_capabilities(ModelRequest(messages=fitted)) == {"vision", "tool_calling"}


async def test_pictures_of_the_newest_results_are_the_last_message() -> None:
    here = harness()
    request = with_pictures(here)

    last = (await here.fit(replace(request, messages=request.messages[:-1]), "seeing")).messages[-1]

    assert isinstance(last, UserMessage) and sum(isinstance(part, InlineFile) for part in last.parts) == 2


async def test_pictures_of_tool_results_are_described_in_the_result_for_a_model_without_vision() -> None:
    here = harness()
    request = with_pictures(here)

    fitted = (await here.fit(request, "blind")).messages

    assert len(fitted) == len(request.messages)
    for message, said, filename in zip(fitted[2:4], ("one", "two"), ("a.png", "b.png"), strict=True):
        assert isinstance(message, ToolMessage) and message.attachments == ()
        text, described = message.text.splitlines()
        content = description(TextPart(described))
        assert (text, content["filename"], content["unsupported"]) == (said, filename, "vision")
        assert content["capableAgents"] == ["viewer"]


async def test_a_refused_kind_of_content_is_not_sent_again() -> None:
    here = harness()
    picture = here.artifacts.keep(PNG, "a.png")
    for entry in here.services:
        here.learned_limits.record(entry, "vision", "no images here")
        here.learned_limits.record(entry, "tool_calling", "no tools here")

    [part] = parts_of(await here.fit(user_request(picture), "seeing"))
    assert description(part)["capableAgents"] == []
    assert (await here.fit(WITH_TOOLS, "old")).tools == ()


async def test_required_capabilities_are_derived_from_the_parts() -> None:
    here = Harness(service("all", ["vision", "audio", "file"]))
    parts = [here.artifacts.keep(data, "x") for data in (PNG, WAV, PDF)]

    assert required_capabilities(await here.fit(user_request(*parts), "all")) == {"vision", "audio", "file"}
    assert required_capabilities(user_request(TextPart("hi"))) == set()
    assert required_capabilities(WITH_TOOLS) == {"tool_calling"}
    assert required_capabilities(replace(WITH_TOOLS, tools=())) == {"tool_calling"}, "calls in the history count"
