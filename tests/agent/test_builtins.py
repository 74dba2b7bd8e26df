"""The built-in tools besides send_message, through the toolbox as an agent calls them."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from coterie.agent.builtins import MAX_READ_BYTES, built_in_tools
from coterie.agent.service import AgentDirectory
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext
from coterie.bus import MessageBus
from coterie.store import Store

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


@pytest.fixture
def box(directory: AgentDirectory, bus: MessageBus, store: Store) -> Toolbox:
    return Toolbox(built_in_tools(directory, bus, store))


async def ask(box: Toolbox, name: str, ctx: ToolContext, **arguments: Any) -> Any:
    """What the model reads, parsed."""
    result = await box.call(name, arguments, ctx, patterns=["*"])
    told = json.loads(result.text)
    assert result.ok == ("error" not in told)
    return told


def test_their_effects_are_what_a_repetition_after_a_crash_needs(box: Toolbox) -> None:
    effects = {spec.name: found.effect for spec in box.specs(["*"]) if (found := box.find(spec.name, ["*"]))}
    assert effects == {
        "list_agents": "pure",
        "find_agents": "pure",
        "list_delayed": "pure",
        "withdraw_message": "idempotent",
        "put_artifact": "idempotent",
        "read_artifact": "pure",
        "list_artifacts": "pure",
    }


async def test_agents_are_listed_with_what_they_take_in_and_give_out(box: Toolbox, ctx: ToolContext) -> None:
    assert (await ask(box, "list_agents", ctx))["agents"] == [
        {"id": "ada", "name": "Ada", "input": ["text"], "output": ["text"]},
        {"id": "bob", "name": "Bob", "input": ["text", "vision"], "output": ["text", "tool_calling"]},
    ]


async def test_agents_are_found_by_capability_in_either_direction(box: Toolbox, ctx: ToolContext) -> None:
    assert await ask(box, "find_agents", ctx, capability="vision") == {"agents": ["bob"]}
    assert await ask(box, "find_agents", ctx, capability="vision", direction="output") == {"agents": []}
    assert await ask(box, "find_agents", ctx, capability="telepathy") == {"agents": []}
    refused = await ask(box, "find_agents", ctx, capability="vision", direction="sideways")
    assert "direction: invalid enum value 'sideways' (one of: input, output)" in refused["message"]


async def test_an_agent_sees_and_withdraws_its_own_delayed_messages_only(
    box: Toolbox, ctx: ToolContext, bus: MessageBus
) -> None:
    later = await bus.send(sender="ada", to="bob", payload={"text": "later\nmuch"}, delay_ms=2_000)
    sooner = await bus.send(sender="ada", to="user", payload={"data": 1}, delay_ms=1_000)
    foreign = await bus.send(sender="bob", to="user", payload={"text": "bob's"}, delay_ms=500)

    listed = (await ask(box, "list_delayed", ctx))["messages"]
    assert listed == [
        {
            "messageId": sooner.message_id,
            "to": "user",
            "scheduledDeliveryTime": "2030-01-01T00:00:01.000Z",
            "text": "",
        },
        {
            "messageId": later.message_id,
            "to": "bob",
            "scheduledDeliveryTime": "2030-01-01T00:00:02.000Z",
            "text": "later much",
        },
    ]
    for _ in range(2):
        told = await ask(box, "withdraw_message", ctx, messageId=sooner.message_id)
        assert told == {"messageId": sooner.message_id, "state": "withdrawn"}
    assert (await ask(box, "withdraw_message", ctx, messageId=foreign.message_id))["error"] == "not_yours"
    assert (await ask(box, "withdraw_message", ctx, messageId="none"))["error"] == "unknown_message"
    assert [message["messageId"] for message in (await ask(box, "list_delayed", ctx))["messages"]] == [later.message_id]


async def test_a_file_is_put_as_text_or_as_base64_and_once_per_call(box: Toolbox, ctx: ToolContext) -> None:
    note = await ask(box, "put_artifact", ctx, filename="note.txt", text="grüße")
    assert (note["filename"], note["mimeType"], note["size"]) == ("note.txt", "text/plain", 7)
    assert await ask(box, "put_artifact", ctx, filename="note.txt", text="grüße") == note
    other = replace(ctx, idempotency_key="turn-1/1")
    picture = await ask(box, "put_artifact", other, filename="a.png", base64=base64.b64encode(PNG).decode())
    assert picture["type"] == "image" and await ctx.artifacts.read(picture["artifactRef"]) == PNG


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "give either text or base64"),
        ({"text": "a", "base64": "YQ=="}, "give either text or base64"),
        ({"base64": "not base64!"}, "base64: "),
    ],
)
async def test_a_file_without_one_clear_content_is_not_put(
    box: Toolbox, ctx: ToolContext, arguments: dict[str, str], words: str
) -> None:
    told = await ask(box, "put_artifact", ctx, filename="a", **arguments)
    assert told["error"] == "bad_arguments" and told["message"].startswith(words)


async def test_a_text_file_is_read_in_pieces_that_cut_no_character_in_two(box: Toolbox, ctx: ToolContext) -> None:
    text = "aaa" + "é\n\x01" * 60_000
    ref = (await ctx.artifacts.put(text.encode(), "long.txt")).ref
    told, pieces = {"nextOffset": 0}, list[str]()
    while "nextOffset" in told:
        told = await ask(box, "read_artifact", ctx, artifactRef=ref, offset=told["nextOffset"])
        pieces.append(told["text"])
    assert "".join(pieces) == text
    assert [len(piece.encode()) <= MAX_READ_BYTES for piece in pieces] == [True] * -(
        -len(text.encode()) // MAX_READ_BYTES
    )


async def test_an_empty_file_reads_as_nothing_and_a_broken_one_to_its_end(box: Toolbox, ctx: ToolContext) -> None:
    empty = (await ctx.artifacts.put(b"", "empty.txt")).ref
    assert (await ask(box, "read_artifact", ctx, artifactRef=empty))["text"] == ""
    broken = (await ctx.artifacts.put(b"a" * MAX_READ_BYTES + b"\xc3", "broken.txt")).ref
    told = await ask(box, "read_artifact", ctx, artifactRef=broken, offset=MAX_READ_BYTES)
    assert told["text"] == "\ufffd" and "nextOffset" not in told


async def test_what_cannot_be_read_as_text_is_refused_with_a_reason(box: Toolbox, ctx: ToolContext) -> None:
    picture = (await ctx.artifacts.put(PNG, "a.png")).ref
    note = (await ctx.artifacts.put(b"note", "a.txt")).ref
    assert (await ask(box, "read_artifact", ctx, artifactRef=picture))["error"] == "not_text"
    assert (await ask(box, "read_artifact", ctx, artifactRef="none"))["error"] == "unknown_artifact"
    for offset in (-1, 5):
        told = await ask(box, "read_artifact", ctx, artifactRef=note, offset=offset)
        assert told["message"].startswith("offset must be 0 to 4")


async def test_the_newest_files_are_listed_first(box: Toolbox, ctx: ToolContext) -> None:
    refs = [(await ctx.artifacts.put(name.encode(), name)).ref for name in ("a.txt", "b.txt")]
    told = await ask(box, "list_artifacts", ctx)
    assert {one["artifactRef"] for one in told["artifacts"]} == set(refs)
    assert {one["filename"] for one in told["artifacts"]} == {"a.txt", "b.txt"}
