"""Long answers: one too long for a message is sent with a file, one that the service cut off is marked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from coterie.artifacts import Artifact
from coterie.messages import MAX_PAYLOAD_BYTES, fit_answer
from coterie.store_url import replace_store_url
from coterie.testing.model_server import Calls, CustomReply, ReceivedRequest, Says, ServerConnection, chunk
from tests.agent.stage import each, stage
from tests.engines import Engine, Postgres

LONG = "A whole book, 一本书, word for word. " * 60_000
"""More than two megabytes, with characters of one and of three bytes."""
TOKEN_SIZE = 100_000
"""Characters per streamed token: few tokens keep the test fast."""


def society(engine: Engine, folder: Path) -> str:
    """The configuration of a society with two agents on that engine."""
    agents = "[agents.ada]\n[agents.bob]\n"
    return replace_store_url(agents, engine.url(folder / "data")) if isinstance(engine, Postgres) else agents


async def test_the_person_gets_the_beginning_as_text_and_the_whole_answer_as_a_file(
    engine: Engine, tmp_path: Path
) -> None:
    async with stage(tmp_path, agents=society(engine, tmp_path)) as here:
        here.server.script(Says(LONG, token_size=TOKEN_SIZE), "short again")
        asked = await here.say("Write a book.")
        (answer,) = await here.heard(1)
        text = answer.payload["text"]
        assert (answer.sender, answer.in_reply_to) == ("ada", asked)
        assert text.startswith(LONG[:1_000]) and f"{len(LONG):,}" in text and len(text) < 100_000
        (file,) = answer.payload["attachments"]
        assert (file["filename"], file["size"]) == ("answer.md", len(LONG.encode()))
        assert file["artifactRef"] in text
        assert await here.society.artifacts.read(file["artifactRef"]) == LONG.encode()
        assert len(here.server.requests) == 1  # there was no retry
        # The next request contains only the text that was sent.
        await here.say("Thanks.")
        assert (await here.texts(2))[1] == "short again"
        assert len(here.server.requests[1].raw) < 200_000
        assert here.roles_asked(1) == ["user", "assistant", "user"]
        assert [role for role, _ in await here.history()] == ["user", "assistant", "user", "assistant"]


async def test_an_agent_that_asked_gets_the_file_too(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        ask = Says(calls=(Calls("send_message", {"to": "bob", "payload": {"text": "Write a book."}}),))
        here.server.default = each(ada=[ask, Says(""), Says("It is written.")], bob=[Says(LONG, token_size=TOKEN_SIZE)])
        await here.say("Ask bob for a book.")
        assert await here.texts(1) == ["It is written."]
        (answer,) = [row.message for row in await here.society.store.history("ada") if row.message][1:]
        assert answer.payload["attachments"][0]["filename"] == "answer.md"


async def test_a_long_answer_that_was_stopped_is_stored_whole(tmp_path: Path) -> None:
    never, all_streamed = asyncio.Event(), asyncio.Event()

    async def stalls(wire: ServerConnection) -> None:
        await wire.begin()
        await wire.event(chunk({"role": "assistant", "content": LONG}))
        await never.wait()

    async with stage(tmp_path) as here:
        here.server.script(CustomReply(stalls))
        here.society.live.subscribe(lambda draft: all_streamed.set() if len(draft.text) == len(LONG) else None)
        await here.say("Write a book.")
        await all_streamed.wait()
        assert here.society.stop_turn("ada")
        (answer,) = await here.heard(1)
        (file,) = answer.payload["attachments"]
        assert answer.stopped and file["size"] == len(LONG.encode())
        never.set()


async def test_if_the_file_cannot_be_stored_the_beginning_is_sent_with_a_note(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.society.artifacts.set_max_file_bytes(1_000)
        here.server.script(Says(LONG, token_size=TOKEN_SIZE))
        await here.say("Write a book.")
        (answer,) = await here.heard(1)
        assert "could not be kept" in answer.payload["text"] and "attachments" not in answer.payload
        assert len(here.server.requests) == 1


async def test_a_full_disk_does_not_prevent_the_answer() -> None:
    async def full(data: bytes, filename: str) -> Artifact:
        raise OSError(28, "No space left on device")

    text, attachments = await fit_answer(LONG, full)
    assert text.startswith(LONG[:1_000]) and "No space left" in text and attachments == ()


async def test_long_text_and_arguments_of_a_plan_are_stored_whole_and_shown_short(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        call = Calls("send_message", {"to": "bob", "payload": {"text": LONG}})
        here.server.script(Says(LONG, calls=(call,), token_size=TOKEN_SIZE), "that was too much")
        await here.say("Send bob a book.")
        assert await here.texts(1) == ["that was too much"]
        request = here.server.requests[1]
        assert len(request.raw) < 200_000
        _, _, assistant, result = request.body["messages"]
        arguments = json.loads(assistant["tool_calls"][0]["function"]["arguments"])
        assert arguments["shortened"] is True and arguments["size"] > MAX_PAYLOAD_BYTES
        assert "payload_too_large" in result["content"]
        (plan,) = [row for row in await here.society.store.history("ada") if row.calls]
        assert plan.text == LONG and plan.calls[0].arguments["payload"]["text"] == LONG


async def test_a_long_summary_is_cut(tmp_path: Path) -> None:
    def answer(request: ReceivedRequest) -> Says:
        summary = str(request.body["messages"][0]["content"]).startswith("Summarise")
        return Says(LONG, token_size=TOKEN_SIZE) if summary else Says("yes")

    async with stage(tmp_path, contextTokens=20_000) as here:
        here.server.default = answer
        for n in range(1, 6):
            await here.say(f"{n} " + "x" * 12_000)
            await here.heard(n)
        assert any("Summarise" in str(one.body["messages"][0]) for one in here.server.requests)
        assert len((await here.society.store.history_view("ada")).summary) < 40_000
        assert len(here.server.requests[-1].raw) < 200_000


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_an_answer_that_is_cut_off_is_marked_for_people_and_agents(tmp_path: Path, reason: str) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says("Once upon a", finish=reason))
        await here.say("Tell me a story")
        (answer,) = await here.heard()
        assert (answer.payload["text"], answer.cut_off) == ("Once upon a", reason)
        asks = Says(calls=(Calls("send_message", {"to": "bob", "payload": {"text": "A story?"}}),))
        here.server.default = each(ada=[asks, "", "Bob began one."], bob=[Says("There was", finish=reason)])
        await here.say("Ask bob")
        await here.heard(2)
        assert reason in here.server.requests[-1].last_text, "ada knows that the answer of bob is incomplete"


async def test_an_answer_that_is_cut_off_before_its_first_word_is_reported(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says("", finish="length"))
        await here.say("Think hard")
        (notice,) = await here.heard()
        assert notice.sender == "system" and "raise maxTokens" in notice.payload["text"]
