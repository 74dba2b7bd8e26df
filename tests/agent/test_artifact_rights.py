"""An agent may read the files it made and the files of messages it has read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import Refused
from coterie.testing import Calls, Says
from coterie.testing.model_server import ReceivedRequest
from tests.agent.stage import Stage, each, stage
from tests.engines import Engine, Postgres

AGENTS = "[agents.ada]\n[agents.bob]\n"
UNKNOWN_REF = "0" * 32


def config(engine: Engine, folder: Path, more: str = "") -> str:
    where = f"[store]\nurl = {json.dumps(engine.url(folder))}\n" if isinstance(engine, Postgres) else ""
    return f"{where}{more}{AGENTS}"


def last_results(here: Stage, agent: str) -> list[dict[str, Any]]:
    def is_by(request: ReceivedRequest) -> bool:
        return f"(id: {agent})" in request.body["messages"][0]["content"]

    body = [request for request in here.server.requests if is_by(request)][-1].body
    return [json.loads(one["content"]) for one in body["messages"] if one["role"] == "tool"]


def read(ref: str) -> Calls:
    return Calls("read_artifact", {"artifactRef": ref})


def send(ref: str, to: str) -> Calls:
    return Calls("send_message", {"to": to, "payload": {"text": "see", "attachments": [{"artifactRef": ref}]}})


async def test_an_agent_reads_lists_and_forwards_only_files_it_made_or_received(engine: Engine, tmp_path: Path) -> None:
    async with stage(tmp_path, agents=config(engine, tmp_path)) as here:
        secret = (await here.society.artifacts.put(b"restricted", "secret.txt")).ref
        mine = Calls("put_artifact", {"filename": "mine.txt", "text": "by bob"})
        tries = Says(calls=(read(secret), send(secret, "user"), read(UNKNOWN_REF), mine, Calls("list_artifacts")))
        here.server.default = each(bob=[tries, "done"], ada=[Says(calls=(read(secret),)), "read"])
        await here.say("look", to="bob")
        assert await here.texts() == ["done"], "the file was forwarded"
        hidden, sent, absent, made, listed = last_results(here, "bob")
        assert (hidden["error"], sent["error"]) == ("unknown_artifact", "attachment_unknown")
        assert hidden["message"].replace(secret, UNKNOWN_REF) == absent["message"], (
            "the error must not reveal that the file exists"
        )
        assert [one["artifactRef"] for one in listed["artifacts"]] == [made["artifactRef"]]

        await here.say("read this", to="ada", attachments=[secret])
        await here.texts(2)
        assert last_results(here, "ada")[0]["text"] == "restricted"


async def test_an_agent_forwards_a_file_and_the_recipient_reads_it(engine: Engine, tmp_path: Path) -> None:
    async with stage(tmp_path, agents=config(engine, tmp_path)) as here:
        plan = (await here.society.artifacts.put(b"the plan", "plan.txt")).ref
        here.server.default = each(
            ada=[Says(calls=(send(plan, "bob"), read(plan))), "forwarded", "heard"],
            bob=[Says(calls=(read(plan), Calls("list_artifacts"))), "got it"],
        )
        await here.say("pass it on", to="ada", attachments=[plan])
        await here.texts(2)
        got, listed = last_results(here, "bob")
        assert got["text"] == "the plan"
        assert [one["artifactRef"] for one in listed["artifacts"]] == [plan]


async def test_with_shared_artifacts_every_agent_reads_every_file(engine: Engine, tmp_path: Path) -> None:
    async with stage(tmp_path, agents=config(engine, tmp_path, "[artifacts]\nshared = true\n")) as here:
        note = (await here.society.artifacts.put(b"for all", "note.txt")).ref
        here.server.default = each(bob=[Says(calls=(read(note), send(note, "user"))), "done"])
        await here.say("look", to="bob")
        assert await here.texts(2) == ["see", "done"]
        assert last_results(here, "bob")[0]["text"] == "for all"


async def test_an_agent_cannot_read_a_file_of_a_message_that_it_has_not_read(engine: Engine, tmp_path: Path) -> None:
    async with stage(tmp_path, agents=config(engine, tmp_path)) as here:
        artifacts, store = here.society.artifacts, here.society.store
        note = (await artifacts.put(b"for bob", "note.txt")).ref
        own = await artifacts.put(b"bob's", "own.txt", maker="bob")
        await here.society.pause("bob")
        await here.say("read", to="bob", attachments=[note])
        with pytest.raises(Refused, match="there is no artifact"):
            await artifacts.describe(note, reader="bob")
        assert [one.ref for one in await store.latest_artifacts(reader="bob")] == [own.ref]
        assert await artifacts.read(note) == b"for bob" and await artifacts.read(own.ref) == b"bob's"
