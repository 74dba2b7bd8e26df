from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coterie.testing.model_server import Calls, Says, Status

from .commands import coterie
from .environment import Environment, Terminal


def test_wait_prints_the_answer(either: Environment) -> None:
    either.script("The answer is 42.")

    done = coterie("send", "ada", "What is it?", "--wait", "--dir", either.folder)

    assert (done.code, done.stdout) == (0, "The answer is 42.\n")


def test_wait_numbers_the_quick_replies_of_the_answer(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes", "No"), "")

    done = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder)

    assert done.stdout.splitlines() == ["Tea?", "  1) Yes", "  2) No"]


def test_wait_with_json_prints_the_receipt_and_all_answers(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes"), "I asked.")

    printed = coterie("send", "ada", "Hello", "--wait", "--json", "--dir", either.folder).json

    assert printed["state"] == "pending"
    assert [message["payload"]["text"] for message in printed["answers"]] == ["Tea?", "I asked."]
    assert printed["answers"][1]["inReplyTo"] == printed["messageId"]
    assert "rendered" not in printed["answers"][0]


def test_wait_with_a_delay_waits_for_the_answer(either: Environment) -> None:
    either.script("Later it is.")

    done = coterie("send", "ada", "Later", "--delay", "10ms", "--wait", "--dir", either.folder)

    assert done.stdout == "Later it is.\n"


def test_wait_reports_the_error_of_the_model_service(either: Environment) -> None:
    either.script(Status(401, "no such key"))

    failure = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder).failure

    assert (
        failure == 'service "main" wants a key (401): edit apiKey in llmservices.json. Fix it, then write to me again.'
    )


def test_wait_reports_a_turn_that_ended_without_an_answer(either: Environment) -> None:
    either.script("")

    failure = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder).failure

    assert failure == "ada has read it and said nothing: see what it did with coterie history ada"


def test_wait_ends_at_once_for_a_paused_agent(either: Environment) -> None:
    assert coterie("pause", "ada", "--dir", either.folder).code == 0

    failure = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder).failure

    assert failure == "ada is paused and reads it later: let it go on with coterie resume ada, or with --all"


def test_wait_ends_if_only_a_paused_agent_has_mail_of_the_task(either: Environment) -> None:
    assert coterie("pause", "bob", "--dir", either.folder).code == 0
    question = Calls("send_message", {"to": "bob", "payload": {"text": "Really?"}})
    either.script(Says(calls=(question,)), "I ask Bob.")

    done = coterie("send", "ada", "What does Bob think?", "--wait", "--dir", either.folder)

    assert "I ask Bob." in done.stdout
    assert done.failure.startswith("the task waits for another agent: bob is paused and reads it later")


def test_a_timeout_ends_the_wait(either: Environment) -> None:
    answer, release = either.gated("Too late.")
    either.script(answer)

    done = coterie("send", "ada", "Hello", "--wait", "--timeout", "300ms", "--json", "--dir", either.folder)

    release()
    assert done.json["error"] == "no_answer"
    assert "has not answered in time" in done.failure


@pytest.mark.slow
def test_wait_ends_when_the_server_stops(env: Environment) -> None:
    env.serve()
    with Terminal("send", "ada", "Hello", "--delay", "1d", "--wait", "--dir", env.folder) as terminal:
        env.wait_for_event("delayed.scheduled")
        env.stop_serving()

        terminal.wait_for("Error: the society stopped before ada answered: start it again")
        assert terminal.wait_for_exit() == 1


def test_wait_does_not_deliver_other_delayed_messages(env: Environment) -> None:
    coterie("send", "bob", "tomorrow", "--delay", "1d", "--dir", env.folder)
    env.script("Here.")

    assert coterie("send", "ada", "now", "--wait", "--dir", env.folder).code == 0

    assert coterie("delayed", "--dir", env.folder, "--json").json["count"] == 1


def _asks(text: str, *options: str) -> Says:
    arguments = {"to": "user", "payload": {"text": text}, "quickReplies": list(options)}
    return Says(calls=(Calls("send_message", arguments),))


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_wait_says_on_standard_error_why_the_model_is_asked_again(either: Environment, json: tuple[str, ...]) -> None:
    either.script(Status(503, "the model is loading"), "Here I am.")

    done = coterie("send", "ada", "Hello", "--wait", *json, "--dir", either.folder)

    assert done.code == 0 and "Here I am." in done.stdout and "loading" not in done.stdout
    assert "the model is asked again" in done.stderr and "the model is loading" in done.stderr


COPY = """
import asyncio
from pathlib import Path
from coterie import ToolContext, tool


@tool
async def copy(*, ctx: ToolContext) -> str:
    "Copy files."
    await ctx.report_progress(2, 5, "the second file")
    while not Path(GO_ON).exists():
        await asyncio.sleep(0.02)
    return "copied"
"""


def test_wait_shows_the_progress_of_a_tool_call_on_standard_error(env: Environment, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    (env.folder / "tools.py").write_text(COPY.replace("GO_ON", repr(str(go_on))))
    env.serve()
    env.script(Says(calls=(Calls("copy", {}),)), "All copied.")
    command = [sys.executable, "-m", "coterie", "send", "ada", "Copy", "--wait", "--dir", str(env.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert any("(copy: 40%, the second file)" in line for line in iter(waiting.stderr.readline, ""))
        go_on.touch()
        assert waiting.communicate()[0] == "All copied.\n"


def test_chat_shows_the_progress_of_a_tool_call_in_its_status(env: Environment, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    (env.folder / "tools.py").write_text(COPY.replace("GO_ON", repr(str(go_on))))
    env.serve()
    env.script(Says(calls=(Calls("copy", {}),)), "All copied.")
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        chat.enter("Copy")
        chat.wait_for_screen("ada: active, tool copy, 40%, the second file")
        go_on.touch()
        chat.wait_for("All copied.")
        chat.wait_until_idle()


def test_wait_and_export_show_that_an_answer_was_cut_off(either: Environment) -> None:
    either.script(Says("Once upon a", finish="length"))

    done = coterie("send", "ada", "Tell me a story", "--wait", "--dir", either.folder)

    first, mark = done.stdout.splitlines()
    assert first == "Once upon a" and "cut off at the length limit" in mark
    exported = coterie("export", "ada", "--dir", either.folder).stdout
    assert "Once upon a\n\n*(cut off at the length limit)*" in exported
