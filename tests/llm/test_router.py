"""Which parts of a request go through as they are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coterie.llm.config import SizeLimits
from coterie.llm.routing import uses
from coterie.llm.types import (
    AssistantSaid,
    Attachment,
    Call,
    Inline,
    Request,
    SystemSaid,
    Text,
    ToolSaid,
    ToolSpec,
    UserSaid,
)

from .room import PDF, PNG, WAV, Room, description, parts_of, said, service

TOOL = ToolSpec(name="look_up", description="", parameters={"type": "object"})


def room() -> Room:
    return Room(
        service("blind", []),
        service("seeing", ["vision"]),
        service("hearing", ["audio"]),
        service("reading", ["file"]),
        service("old"),
        agents={"ada": "blind", "seer": "seeing", "ear": "hearing", "clerk": "reading"},
    )


async def test_an_image_goes_to_a_model_with_vision_as_it_is() -> None:
    """003-2.1"""
    here = room()
    picture = here.shelf.keep(PNG, "chart.png")

    fitted = await here.fit(said(Text("what is this?"), picture), "seeing")

    assert parts_of(fitted) == [
        Text("what is this?"),
        Inline(type="image", filename="chart.png", mime_type="image/png", data=PNG),
    ]


@pytest.mark.parametrize("service_id", ["blind", "hearing", "reading", "old"])
async def test_an_image_is_described_to_a_model_without_vision(service_id: str) -> None:
    """003-2.2"""
    here = room()
    picture = here.shelf.keep(PNG, "chart.png")

    [text, part] = parts_of(await here.fit(said(Text("what is this?"), picture), service_id))

    assert text == Text("what is this?")
    told = description(part)
    assert told["artifactRef"] == picture.artifact_ref
    assert (told["filename"], told["mimeType"], told["size"]) == ("chart.png", "image/png", len(PNG))
    assert (told["contentType"], told["unsupported"], told["capableAgents"]) == ("image", "vision", ["seer"])


async def test_audio_goes_to_a_model_with_audio_as_it_is() -> None:
    """003-2.3"""
    here = room()

    [part] = parts_of(await here.fit(said(here.shelf.keep(WAV, "note.wav")), "hearing"))

    assert part == Inline(type="audio", filename="note.wav", mime_type="audio/wav", data=WAV)


@pytest.mark.parametrize("service_id", ["blind", "seeing", "reading", "old"])
async def test_audio_is_described_to_a_model_without_audio(service_id: str) -> None:
    """003-2.4"""
    here = room()
    sound = here.shelf.keep(WAV, "note.wav")

    [part] = parts_of(await here.fit(said(sound), service_id))

    told = description(part)
    assert (told["artifactRef"], told["contentType"], told["unsupported"]) == (sound.artifact_ref, "audio", "audio")
    assert (told["mimeType"], told["size"], told["capableAgents"]) == ("audio/wav", len(WAV), ["ear"])


async def test_a_file_goes_to_a_model_with_file_as_it_is() -> None:
    """003-2.5"""
    here = room()

    [part] = parts_of(await here.fit(said(here.shelf.keep(PDF, "report.pdf")), "reading"))

    assert part == Inline(type="file", filename="report.pdf", mime_type="application/pdf", data=PDF)


@pytest.mark.parametrize("data", [PDF, b"plain text, which could have been pasted"])
@pytest.mark.parametrize("service_id", ["blind", "seeing", "hearing", "old"])
async def test_a_file_is_described_to_a_model_without_file_even_when_it_is_text(service_id: str, data: bytes) -> None:
    """003-2.6"""
    here = room()
    report = here.shelf.keep(data, "report")

    [part] = parts_of(await here.fit(said(report), service_id))

    told = description(part)
    assert (told["artifactRef"], told["filename"], told["contentType"]) == (report.artifact_ref, "report", "file")
    assert (told["mimeType"], told["unsupported"], told["capableAgents"]) == (report.mime_type, "file", ["clerk"])
    assert "read_artifact" in told["suggestion"]


async def test_vision_as_an_output_does_not_make_a_model_see() -> None:
    """003-6.4"""
    here = Room(service("painter", [], gives=["text", "vision"]))

    [part] = parts_of(await here.fit(said(here.shelf.keep(PNG, "a.png")), "painter"))

    assert description(part)["unsupported"] == "vision"


async def test_after_a_change_of_model_and_back_the_image_is_there_byte_for_byte() -> None:
    here = room()
    history = said(Text("look"), here.shelf.keep(PNG, "chart.png"))
    before = repr(history)

    first = parts_of(await here.fit(history, "seeing"))
    second = parts_of(await here.fit(history, "blind"))
    third = parts_of(await here.fit(history, "seeing"))

    assert isinstance(third[1], Inline)
    assert third[1].data == PNG
    assert third == first
    assert description(second[1])["capableAgents"] == ["seer"]
    assert repr(history) == before


@pytest.mark.parametrize(
    ("name", "data", "kind"), [("a.png", PDF, "file"), ("a.pdf", PNG, "image"), ("a.txt", WAV, "audio")]
)
async def test_the_type_is_told_by_the_bytes_and_not_by_the_name_or_the_message(
    name: str, data: bytes, kind: str
) -> None:
    here = room()
    claimed = replace(here.shelf.keep(data, name), type="image", mime_type="image/png", size=1)

    [part] = parts_of(await here.fit(said(claimed), "blind"))
    told = description(part)
    assert (told["contentType"], told["size"]) == (kind, len(data))

    [seen] = parts_of(await here.fit(said(claimed), "seeing"))
    assert isinstance(seen, Inline) == (kind == "image")


@pytest.mark.parametrize("spare", [0, 1])
async def test_what_exceeds_the_limit_of_a_service_is_described_and_not_sent_to_be_refused(spare: int) -> None:
    limits = SizeLimits(image=len(PNG) - 1 + spare)
    here = Room(
        service("small", ["vision"], limits=limits),
        service("large", ["vision"]),
        agents={"ada": "small", "tiny": "small", "seer": "large"},
    )

    [part] = parts_of(await here.fit(said(here.shelf.keep(PNG, "a.png")), "small"))

    if spare:
        assert isinstance(part, Inline)
    else:
        told = description(part)
        assert told["unsupported"] == "size"
        assert told["capableAgents"] == ["seer"], "tiny could not read it either"


@pytest.mark.parametrize("harm", ["unknown", "deleted", "cut", "unreadable"])
async def test_an_attachment_whose_bytes_are_gone_is_described_and_breaks_nothing(harm: str) -> None:
    here = room()
    picture, other = here.shelf.keep(PNG, "a.png"), here.shelf.keep(PNG + b"2", "b.png")
    digest = here.shelf.known[picture.artifact_ref].sha256
    match harm:
        case "unknown":
            del here.shelf.known[picture.artifact_ref]
        case "deleted":
            await here.shelf.bytes.delete(digest)
        case "cut":
            here.shelf.bytes.kept[digest] = PNG[:50]
        case "unreadable":
            here.shelf.bytes.broken.add(digest)

    [part, whole] = parts_of(await here.fit(said(picture, other), "seeing"))

    assert description(part)["unsupported"] == "missing"
    assert description(part)["artifactRef"] == picture.artifact_ref
    assert isinstance(whole, Inline)


async def test_the_same_picture_ten_times_in_a_conversation_is_read_once() -> None:
    here = room()
    picture = here.shelf.keep(PNG, "a.png")

    fitted = await here.fit(Request(said=(UserSaid((picture,)),) * 10), "seeing")

    assert len(parts_of(fitted)) == 10
    assert here.shelf.bytes.reads == 1


async def test_no_attachment_is_left_in_a_fitted_request() -> None:
    here = room()
    everything = said(*(here.shelf.keep(data, "x") for data in (PNG, WAV, PDF, b"")))

    for entry in here.services:
        assert not any(isinstance(part, Attachment) for part in parts_of(await here.fit(everything, entry.id)))


# Tools

CALL = Call(id="c1", name="look_up", arguments={})
WITH_TOOLS = Request(
    said=(SystemSaid("s"), UserSaid((Text("u"),)), AssistantSaid("", (CALL,)), ToolSaid("c1", "sunny")), tools=(TOOL,)
)


@pytest.mark.parametrize(
    "entry",
    [service("old"), service("new", []), service("takes", ["tool_calling"], gives=["text"])],
    ids=["inferred", "declared as output", "declared as input"],
)
async def test_tools_are_offered_where_they_are_declared_and_where_nothing_is(entry: object) -> None:
    here = Room(entry)  # type: ignore[arg-type]

    assert await here.fit(WITH_TOOLS, next(iter(here.services)).id) == WITH_TOOLS


async def test_a_service_that_declares_no_tool_calling_is_offered_no_tools_and_shown_no_calls() -> None:
    here = Room(service("plain", [], gives=["text"]))

    fitted = await here.fit(WITH_TOOLS, "plain")

    assert fitted.tools == ()
    assert not any(isinstance(one, ToolSaid) for one in fitted.said)
    assert not any(isinstance(one, AssistantSaid) and one.calls for one in fitted.said)
    assert "sunny" in str(fitted.said[-1])
    assert uses(fitted) == set()


async def test_what_a_provider_refused_is_not_sent_to_it_again() -> None:
    here = room()
    picture = here.shelf.keep(PNG, "a.png")
    for entry in here.services:
        here.refusals.note(entry, "vision", "no images here")
        here.refusals.note(entry, "tool_calling", "no tools here")

    [part] = parts_of(await here.fit(said(picture), "seeing"))
    assert description(part)["capableAgents"] == []
    assert (await here.fit(WITH_TOOLS, "old")).tools == ()


async def test_what_a_request_uses_is_told_from_its_parts() -> None:
    here = Room(service("all", ["vision", "audio", "file"]))
    parts = [here.shelf.keep(data, "x") for data in (PNG, WAV, PDF)]

    assert uses(await here.fit(said(*parts), "all")) == {"vision", "audio", "file"}
    assert uses(said(Text("hi"))) == set()
    assert uses(WITH_TOOLS) == {"tool_calling"}
    assert uses(replace(WITH_TOOLS, tools=())) == {"tool_calling"}, "calls in the history count"
