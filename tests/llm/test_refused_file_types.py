"""A service that refuses one type of file still gets the others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from coterie.testing import Status
from tests.agent.stage import Stage, stage
from tests.agent.tool_calls import HANG_SECONDS

CAPABILITIES = {"input": ["text", "vision", "file"], "output": ["text", "tool_calling"]}
PNG, GIF = b"\x89PNG\r\n\x1a\n" + bytes(40), b"GIF89a" + bytes(60)
PDF, TEXT = b"%PDF-1.7\n" + bytes(range(255, 0, -1)), b"a,b\n1,2\n"


def sent_types(here: Stage) -> list[str]:
    """The types of the files in the last request, in order."""
    body = json.dumps(here.server.requests[-1].body["messages"])
    return [piece.partition(";base64,")[0] for piece in body.split("data:")[1:] if ";base64," in piece]


@pytest.mark.parametrize(
    ("refused", "accepted", "error"),
    [
        (
            TEXT,
            PDF,
            "Invalid file data: 'file_data'. Expected a base64-encoded data URL with an application/pdf MIME type, "
            "but got unsupported MIME type '{0}'.",
        ),
        (GIF, PNG, "Unsupported MIME type: {0}"),
        (bytes(range(200)), PDF, "Unsupported MIME type: {0}."),
        (
            GIF,
            PNG,
            "You uploaded an unsupported image. Please make sure your image has of one the following formats: "
            "['png', 'jpeg', 'webp'].",
        ),
    ],
)
async def test_files_of_other_types_are_still_sent(tmp_path: Path, refused: bytes, accepted: bytes, error: str) -> None:
    async with stage(tmp_path, capabilities=CAPABILITIES) as here, asyncio.timeout(HANG_SECONDS):
        bad = await here.society.artifacts.put(refused, "bad")
        good = await here.society.artifacts.put(accepted, "good")
        here.server.script(Status(400, error.format(bad.mime_type)), "described", "seen")
        await here.say("look at both", attachments=[bad.ref, good.ref])

        assert await here.texts() == ["described"]
        assert sent_types(here) == [good.mime_type]
        await here.say("and again")
        await here.heard(2)
        assert sent_types(here) == [good.mime_type]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (
            400,
            "The image data you provided does not represent a valid image. Please check your input and try again "
            "with one of the following image formats: ['image/jpeg', 'image/png', 'image/gif', 'image/webp'].",
        ),
        (
            400,
            "You uploaded an unsupported image. Please make sure your image has of one the following formats: "
            "['png', 'jpeg', 'gif', 'webp'].",
        ),
        (400, "Could not process image"),
        (413, "<html><head><title>413 Request Entity Too Large</title></head></html>"),
        (400, "Unable to process input image. Please retry or report in a forum"),
        (500, "Failed to load image or audio file"),
        (400, "messages.0.content.1.image.source.base64: image exceeds 5 MB maximum: 6000000 bytes > 5242880 bytes"),
        (400, "At least one of the image dimensions exceed max allowed size: 8000 pixels"),
    ],
)
async def test_a_picture_that_the_service_cannot_use_breaks_no_later_request(
    tmp_path: Path, status: int, error: str
) -> None:
    async with stage(tmp_path, capabilities=CAPABILITIES) as here, asyncio.timeout(HANG_SECONDS):
        first, broken, later = [await here.society.artifacts.put(PNG + bytes([n]), f"{n}.png") for n in range(3)]
        here.server.script("seen", Status(status, error), "described", "seen again")
        await here.say("look", attachments=[first.ref])
        await here.heard(1)
        await here.say("and this", attachments=[broken.ref])
        assert (await here.texts(2))[1] == "described"
        assert len(sent_types(here)) == 1
        await here.say("and this one", attachments=[later.ref])
        assert (await here.texts(3))[2] == "seen again"
        assert len(sent_types(here)) == 2
