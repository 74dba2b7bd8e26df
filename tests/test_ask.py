"""Asking an agent from Python: the answer, its stream, read marks, and the example in the README."""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coterie import Answer, AnswerDelta, NoAnswer, Refused, Society
from coterie.errors import StoreUnavailable
from coterie.testing import Calls, ModelServer, Says, Status
from coterie.testing.model_server import CustomReply, ServerConnection
from tests.agent.held_answer import HeldAnswer

ROOT = Path(__file__).parents[1]
AGENTS = '[agents.assistant]\nname = "Assistant"\n[agents.bob]\n'


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, model: ModelServer) -> Path:
    home = tmp_path / "coterie-home"
    home.mkdir()
    (home / "coterie.toml").write_text(AGENTS)
    capabilities = {"input": ["text"], "output": ["text", "tool_calling"]}
    service = {"id": "main", "baseURL": model.base_url, "model": "m", "capabilities": capabilities}
    (home / "llmservices.json").write_text(json.dumps({"services": [service]}))
    return home


@pytest.fixture
async def society(folder: Path) -> AsyncIterator[Society]:
    async with Society.open(folder) as society:
        yield society


def send_to_user(text: str, **more: Any) -> Calls:
    return Calls("send_message", {"to": "user", "payload": {"text": text}, **more})


async def test_ask_returns_the_answer_to_that_message(society: Society, model: ModelServer) -> None:
    model.default = lambda request: "about 2" if "question 2" in request.last_text else "about 1"

    assert (await society.ask("assistant", "question 1")).text == "about 1"
    assert (await society.ask("assistant", "question 2")).text == "about 2"


async def test_two_questions_at_the_same_time_are_both_answered(society: Society, model: ModelServer) -> None:
    answers = await asyncio.gather(*(society.ask("assistant", f"question {n}") for n in range(5)))

    assert [answer.text for answer in answers] == ["ok"] * 5


async def test_agents_are_asked_independently(society: Society, model: ModelServer) -> None:
    model.default = lambda request: "I am bob" if "(id: bob)" in str(request.messages[0]) else "I am the assistant"

    first, second = await asyncio.gather(society.ask("assistant", "Who?"), society.ask("bob", "Who?"))

    assert (first.text, second.text) == ("I am the assistant", "I am bob")


async def test_an_answer_has_the_quick_replies_of_a_message_that_ends_the_turn(
    society: Society, model: ModelServer
) -> None:
    model.script(Says(calls=(send_to_user("Tea?", quickReplies=["Yes", "No"]),)), "Tea?")

    answer = await society.ask("assistant", "Offer me something")

    assert (answer.text, answer.quick_replies, answer.attachments) == ("Tea?", ("Yes", "No"), ())
    chosen = await society.ask("assistant", "Yes", in_reply_to=answer.message.id, option=0)
    assert chosen.text == "ok"


async def test_an_answer_lists_what_the_agent_sent_before_it(society: Society, model: ModelServer) -> None:
    model.script(Says(calls=(send_to_user("One moment."),)), "Done.")

    answer = await society.ask("assistant", "Do it")

    assert answer.text == "Done."
    assert [message.payload["text"] for message in answer.messages] == ["One moment.", "Done."]


async def test_an_answer_has_the_files_of_the_agent(society: Society, model: ModelServer) -> None:
    artifact = await society.artifacts.put(b"hello", "hello.txt", maker="assistant")
    payload = {"text": "Here.", "attachments": [{"artifactRef": artifact.ref}]}
    model.script(Says(calls=(Calls("send_message", {"to": "user", "payload": payload}),)), "Here.")

    answer = await society.ask("assistant", "The file, please")

    assert [attachment["filename"] for attachment in answer.attachments] == ["hello.txt"]


async def test_no_answer_says_what_the_service_refused(society: Society, model: ModelServer) -> None:
    model.default = Status(401, "Incorrect API key")

    with pytest.raises(NoAnswer, match="key"):
        await society.ask("assistant", "Hello")


async def test_no_answer_of_a_paused_agent(society: Society) -> None:
    await society.pause("assistant")

    with pytest.raises(NoAnswer, match="assistant is paused: resume it"):
        await society.ask("assistant", "Hello")


async def test_no_answer_in_time_leaves_the_message_to_be_answered(society: Society, model: ModelServer) -> None:
    released = asyncio.Event()

    async def slow(connection: ServerConnection) -> None:
        await released.wait()
        await connection.respond(500, b"{}")

    model.script(CustomReply(slow))
    with pytest.raises(NoAnswer, match="has not answered within"):
        await society.ask("assistant", "Hello", timeout=0.2)
    released.set()


async def test_no_answer_of_an_agent_that_was_stopped_before_its_first_word(
    society: Society, model: ModelServer
) -> None:
    model.script(HeldAnswer(""))
    asking = asyncio.create_task(society.ask("assistant", "Hello"))
    await model.wait_for_request()
    society.stop_turn("assistant")
    with pytest.raises(NoAnswer, match="was stopped before it answered"):
        await asking


async def test_no_answer_when_the_society_stops(folder: Path, model: ModelServer) -> None:
    async with asyncio.timeout(180):
        society = await Society.start(folder)
        model.default = Status(503, "overloaded")
        asking = asyncio.create_task(society.ask("assistant", "Hello"))
        await model.wait_for_request()
        await society.stop(quick=True)

        with pytest.raises(NoAnswer, match="the society stopped"):
            await asking


async def test_a_question_is_not_sent_if_its_answer_could_not_be_followed(
    society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> int:
        raise StoreUnavailable("the database cannot be reached")

    monkeypatch.setattr(society.store, "last_event", fail)
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await society.ask("assistant", "anyone there?")

    assert await society.store.thread("assistant") == []


async def test_an_unknown_agent_is_refused(society: Society) -> None:
    with pytest.raises(Refused) as refusal:
        await society.ask("nobody", "Hello")
    assert refusal.value.code == "unknown_recipient"


async def test_stream_yields_the_text_as_it_is_written_and_then_the_answer(
    society: Society, model: ModelServer
) -> None:
    model.script("A rather long answer in several pieces.")

    pieces = [piece async for piece in society.stream("assistant", "Tell me")]

    *deltas, answer = pieces
    assert isinstance(answer, Answer)
    assert "".join(delta.text for delta in deltas if isinstance(delta, AnswerDelta)) == answer.text
    assert answer.text == "A rather long answer in several pieces."
    assert deltas


async def test_stream_yields_no_text_of_an_answer_to_something_else(society: Society, model: ModelServer) -> None:
    model.default = "later"
    model.script(Says("words of an earlier answer", token_delay=0.02))
    is_writing = asyncio.Event()
    society.live.subscribe(lambda _: is_writing.set())
    await society.send(to="assistant", text="first")
    await is_writing.wait()

    pieces = [piece async for piece in society.stream("assistant", "second")]

    assert "".join(piece.text for piece in pieces if isinstance(piece, AnswerDelta)) == "later"


async def test_the_answer_of_ask_is_read_and_that_of_stream_is_not(society: Society) -> None:
    await society.ask("assistant", "Hello")
    assert await society.waiting("user") == []

    async for piece in society.stream("assistant", "Hello"):
        if isinstance(piece, Answer):
            assert [message.id for message in await society.waiting("user")] == [piece.message.id]
            await society.mark_read(piece.message)
    assert await society.waiting("user") == []


async def test_only_messages_to_the_person_have_a_read_mark(society: Society) -> None:
    receipt = await society.send(to="assistant", text="Hello")
    message = await society.store.message(receipt.message_id)
    assert message

    with pytest.raises(Refused, match="only messages to user"):
        await society.mark_read(message)


async def read_inbox(society: Society, count: int, *, mark_read: bool = True) -> list[str]:
    """The texts of the next `count` messages; afterwards the inbox waits for another one."""
    texts: list[str] = []
    done = asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(society.inbox(mark_read=mark_read)) as inbox:
            async for message in inbox:
                texts.append(str(message.payload["text"]))
                if len(texts) == count:
                    done.set()

    task = asyncio.create_task(read())
    await done.wait()
    async with society.bus.watch() as watcher:
        while mark_read and await society.waiting("user"):
            await anext(watcher)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 450])
async def test_the_inbox_yields_each_message_once_over_restarts(folder: Path, count: int) -> None:
    async with asyncio.timeout(180):
        async with Society.open(folder, work=False) as society:
            for number in range(count):
                await society.bus.send(sender="bob", to="user", payload={"text": str(number)})
            assert await read_inbox(society, count) == [str(number) for number in range(count)]
        async with Society.open(folder, work=False) as society:
            await society.bus.send(sender="bob", to="user", payload={"text": "new"})
            assert await read_inbox(society, 1) == ["new"]


@pytest.mark.parametrize("count", [3, 450])
async def test_an_inbox_without_read_marks_yields_everything_again(folder: Path, count: int) -> None:
    async with asyncio.timeout(180), Society.open(folder, work=False) as society:
        for number in range(count):
            await society.bus.send(sender="bob", to="user", payload={"text": str(number)})
        expected = [str(number) for number in range(count)]

        assert await read_inbox(society, count, mark_read=False) == expected
        assert await read_inbox(society, count, mark_read=False) == expected


def python_example(page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "Society.open" in block]
    return str(example)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
async def test_the_readmes_example_prints_no_answer_twice(
    page: str, folder: Path, model: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    code = compile(python_example(page), page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def run(expected: list[str]) -> list[str]:
        """Run the example until it has printed `expected` and all of it is read; return what it printed."""
        printed: list[str] = []
        enough = asyncio.Event()

        def write(*words: object) -> None:
            printed.append(" ".join(map(str, words)))
            if printed[-1] == expected[-1]:
                enough.set()

        names: dict[str, Any] = {"__builtins__": vars(builtins) | {"print": write}}
        task = asyncio.create_task(eval(code, names))
        await asyncio.wait({task, asyncio.create_task(enough.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            society: Society = names["society"]
            async with society.bus.watch() as watcher:
                while await society.waiting("user"):
                    await anext(watcher)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return printed

    async with asyncio.timeout(180):
        model.script(Says(calls=(send_to_user("Tea!", delayMs=1500),)), "I will.")
        assert await run(["I will.", "assistant Tea!"]) == ["I will.", "assistant Tea!"]
        model.script("Again?")
        assert await run(["Again?"]) == ["Again?"]
