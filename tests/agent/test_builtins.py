"""Built-in tools except send_message, called through the toolbox."""

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
    """Call the tool and return its parsed result."""
    result = await box.call(name, arguments, ctx, patterns=["*"])
    content = json.loads(result.text)
    assert result.ok == ("error" not in content)
    return content


def test_the_effects_of_built_in_tools(box: Toolbox) -> None:
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


async def test_agents_are_listed_with_their_capabilities(box: Toolbox, ctx: ToolContext) -> None:
    assert (await ask(box, "list_agents", ctx))["agents"] == [
        {"id": "ada", "name": "Ada", "input": ["text"], "output": ["text"]},
        {"id": "bob", "name": "Bob", "input": ["text", "vision"], "output": ["text", "tool_calling"]},
    ]


async def test_agents_are_found_by_input_or_output_capability(box: Toolbox, ctx: ToolContext) -> None:
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
    of_bob = await bus.send(sender="bob", to="user", payload={"text": "bob's"}, delay_ms=500)

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
        result = await ask(box, "withdraw_message", ctx, messageId=sooner.message_id)
        assert result == {"messageId": sooner.message_id, "state": "withdrawn"}
    assert (await ask(box, "withdraw_message", ctx, messageId=of_bob.message_id))["error"] == "not_yours"
    assert (await ask(box, "withdraw_message", ctx, messageId="none"))["error"] == "unknown_message"
    assert [message["messageId"] for message in (await ask(box, "list_delayed", ctx))["messages"]] == [later.message_id]


async def test_a_file_is_stored_from_text_or_base64_and_once_per_call(box: Toolbox, ctx: ToolContext) -> None:
    note = await ask(box, "put_artifact", ctx, filename="note.txt", text="grüße")
    assert (note["filename"], note["mimeType"], note["size"]) == ("note.txt", "text/plain", 7)
    assert await ask(box, "put_artifact", ctx, filename="note.txt", text="grüße") == note
    other = replace(ctx, idempotency_key="turn-1/1")
    picture = await ask(box, "put_artifact", other, filename="a.png", base64=base64.b64encode(PNG).decode())
    assert picture["type"] == "image" and await ctx.artifacts.read(picture["artifactRef"]) == PNG


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either text or base64"),
        ({"text": "a", "base64": "YQ=="}, "give either text or base64"),
        ({"base64": "not base64!"}, "base64: "),
    ],
)
async def test_a_file_needs_either_text_or_valid_base64(
    box: Toolbox, ctx: ToolContext, arguments: dict[str, str], message: str
) -> None:
    result = await ask(box, "put_artifact", ctx, filename="a", **arguments)
    assert result["error"] == "bad_arguments" and result["message"].startswith(message)


async def test_a_text_file_is_read_in_chunks_that_split_no_character(box: Toolbox, ctx: ToolContext) -> None:
    text = "aaa" + "é\n\x01" * 60_000
    ref = (await ctx.artifacts.put(text.encode(), "long.txt")).ref
    result, chunks = {"nextOffset": 0}, list[str]()
    while "nextOffset" in result:
        result = await ask(box, "read_artifact", ctx, artifactRef=ref, offset=result["nextOffset"])
        chunks.append(result["text"])
    assert "".join(chunks) == text
    assert [len(chunk.encode()) <= MAX_READ_BYTES for chunk in chunks] == [True] * -(
        -len(text.encode()) // MAX_READ_BYTES
    )


async def test_empty_and_invalid_utf_8_files_are_read_to_their_end(box: Toolbox, ctx: ToolContext) -> None:
    empty = (await ctx.artifacts.put(b"", "empty.txt")).ref
    assert (await ask(box, "read_artifact", ctx, artifactRef=empty))["text"] == ""
    broken = (await ctx.artifacts.put(b"a" * MAX_READ_BYTES + b"\xc3", "broken.txt")).ref
    result = await ask(box, "read_artifact", ctx, artifactRef=broken, offset=MAX_READ_BYTES)
    assert result["text"] == "\ufffd" and "nextOffset" not in result


async def test_a_picture_that_is_read_is_attached_to_the_result(box: Toolbox, ctx: ToolContext) -> None:
    picture = await ctx.artifacts.put(PNG, "a.png")
    result = await box.call("read_artifact", {"artifactRef": picture.ref}, ctx, patterns=["*"])
    assert result.ok and result.attachments == (picture,)
    assert picture.ref in result.text


async def test_reading_a_file_that_is_not_text_is_refused(box: Toolbox, ctx: ToolContext) -> None:
    archive = (await ctx.artifacts.put(b"\x00\x01\x02\xff" * 9, "a.bin")).ref
    note = (await ctx.artifacts.put(b"note", "a.txt")).ref
    assert (await ask(box, "read_artifact", ctx, artifactRef=archive))["error"] == "not_text"
    assert (await ask(box, "read_artifact", ctx, artifactRef="none"))["error"] == "unknown_artifact"
    for offset in (-1, 5):
        result = await ask(box, "read_artifact", ctx, artifactRef=note, offset=offset)
        assert result["message"].startswith("offset must be 0 to 4")


async def test_artifacts_of_the_agent_are_listed(box: Toolbox, ctx: ToolContext) -> None:
    refs = [(await ctx.artifacts.put(name.encode(), name)).ref for name in ("a.txt", "b.txt")]
    result = await ask(box, "list_artifacts", ctx)
    assert {one["artifactRef"] for one in result["artifacts"]} == set(refs)
    assert {one["filename"] for one in result["artifacts"]} == {"a.txt", "b.txt"}


async def test_agents_are_listed_and_found_with_their_descriptions(
    box: Toolbox, ctx: ToolContext, directory: AgentDirectory
) -> None:
    directory.add(replace(directory.profile("bob"), description="Looks at\npictures."))
    ada, bob = (await ask(box, "list_agents", ctx))["agents"]
    assert ("description" in ada, bob["description"]) == (False, "Looks at pictures.")
    assert await ask(box, "find_agents", ctx, capability="text") == {
        "agents": ["ada", "bob"],
        "descriptions": {"bob": "Looks at pictures."},
    }


async def test_an_agent_sees_and_ends_its_recurring_messages(box: Toolbox, ctx: ToolContext, bus: MessageBus) -> None:
    sent = await bus.send(sender="ada", to="bob", payload={"text": "again"}, every="daily 08:00 UTC")
    of_bob = await bus.send(sender="bob", to="user", payload={"text": "bob's"}, every="1h")
    (listed,) = (await ask(box, "list_delayed", ctx))["messages"]
    assert (listed["every"], listed["scheduleId"]) == ("daily 08:00 UTC", sent.schedule_id)
    for _ in range(2):
        result = await ask(box, "withdraw_message", ctx, messageId=sent.schedule_id)
        assert result == {"scheduleId": sent.schedule_id, "state": "ended"}
    assert (await ask(box, "list_delayed", ctx))["messages"] == []
    assert (await ask(box, "withdraw_message", ctx, messageId=of_bob.schedule_id))["error"] == "not_yours"
