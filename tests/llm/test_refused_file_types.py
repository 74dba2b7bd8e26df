"""A service that refuses one type of file still gets the others."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.testing import Status
from coterie.testing.model_server import ReceivedRequest, Reply
from tests.agent.stage import Stage, stage
from tests.agent.tool_calls import HANG_SECONDS

CAPABILITIES = {"input": ["text", "vision", "file"], "output": ["text", "tool_calling"]}
AGENTS = "[agents.ada]\n[agents.bob]\n[agents.carol]\n"
PNG, GIF = b"\x89PNG\r\n\x1a\n" + bytes(40), b"GIF89a" + bytes(60)
PDF, TEXT = b"%PDF-1.7\n" + bytes(range(255, 0, -1)), b"a,b\n1,2\n"


def sent_types(here: Stage) -> list[str]:
    """The types of the files in the last request, in order."""
    body = json.dumps(here.server.requests[-1].body["messages"])
    return [piece.partition(";base64,")[0] for piece in body.split("data:")[1:] if ";base64," in piece]


def sent_digests(here: Stage) -> list[str]:
    """The SHA-256 of the pictures in the last request, in order."""
    body = json.dumps(here.server.requests[-1].body["messages"])
    return [hashlib.sha256(base64.b64decode(data)).hexdigest() for data in re.findall(r";base64,([\w+/=]+)", body)]


async def size_without_files(here: Stage) -> int:
    """Return the size of a first request in bytes."""
    await here.ended((await here.society.send(to="carol", text="hello")).task)
    return len(here.server.requests[-1].raw)


def refuse_larger_than(size: int) -> Callable[[ReceivedRequest], Reply]:
    """Answer as a service behind a proxy that limits the size of a request."""
    too_large = Status(413, b"<html><head><title>413 Request Entity Too Large</title></head></html>")
    return lambda request: too_large if len(request.raw) > size else "seen"


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


async def test_files_that_are_too_large_together_are_still_sent_alone(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=AGENTS, capabilities=CAPABILITIES) as here, asyncio.timeout(HANG_SECONDS):
        old, new = [await here.society.artifacts.put(PNG + bytes([n]) * 9_000, f"{n}.png") for n in range(2)]
        here.server.default = refuse_larger_than(15_000 + await size_without_files(here))

        await here.say("look", attachments=[old.ref])
        await here.heard(2)
        await here.say("and this", attachments=[new.ref])
        await here.heard(3)
        assert sent_digests(here) == [new.sha256]
        assert "too large together" in here.server.requests[-1].raw.decode()

        await here.say("look", to="bob", attachments=[old.ref])
        await here.heard(4)
        assert sent_digests(here) == [old.sha256]
        here.server.default = "seen"
        await here.say("look again")
        await here.heard(5)
        assert sent_digests(here) == [old.sha256, new.sha256]


async def test_a_file_that_is_too_large_alone_is_not_sent_again(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=AGENTS, capabilities=CAPABILITIES) as here, asyncio.timeout(HANG_SECONDS):
        small, large = [await here.society.artifacts.put(PNG + bytes(n), f"{n}.png") for n in (9_000, 20_000)]
        here.server.default = refuse_larger_than(15_000 + await size_without_files(here))

        await here.say("look", attachments=[small.ref])
        await here.heard(2)
        await here.say("and this", attachments=[large.ref])
        await here.heard(3)
        assert sent_digests(here) == [small.sha256]
        asked = len(here.server.requests)
        await here.say("and now")
        await here.heard(4)
        assert sent_digests(here) == [small.sha256]
        assert len(here.server.requests) == asked + 1
