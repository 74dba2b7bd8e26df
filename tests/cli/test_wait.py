from __future__ import annotations

import pytest

from coterie.testing.replies import Calls, Says, Status

from .commands import coterie
from .environment import Environment, Terminal


def test_the_answer_is_written_when_it_is_there(either: Environment) -> None:
    either.script("The answer is 42.")

    done = coterie("send", "ada", "What is it?", "--wait", "--dir", either.folder)

    assert (done.code, done.stdout) == (0, "The answer is 42.\n")


def test_options_of_an_answer_are_numbered(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes", "No"), "")

    done = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder)

    assert done.stdout.splitlines() == ["Tea?", "  1) Yes", "  2) No"]


def test_a_program_gets_the_receipt_and_all_that_was_said(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes"), "I asked.")

    told = coterie("send", "ada", "Hello", "--wait", "--json", "--dir", either.folder).json

    assert told["state"] == "pending"
    assert [one["payload"]["text"] for one in told["answers"]] == ["Tea?", "I asked."]
    assert told["answers"][1]["inReplyTo"] == told["messageId"]
    assert "rendered" not in told["answers"][0]


def test_waiting_for_a_delayed_message_waits_for_its_answer(either: Environment) -> None:
    either.script("Later it is.")

    done = coterie("send", "ada", "Later", "--delay", "10ms", "--wait", "--dir", either.folder)

    assert done.stdout == "Later it is.\n"


def test_a_model_that_fails_is_a_failure_in_its_own_words(either: Environment) -> None:
    either.script(Status(401, "no such key"))

    failure = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder).failure

    assert (
        failure == 'service "main" wants a key (401): edit apiKey in llmservices.json. Fix it, then write to me again.'
    )


def test_an_agent_that_says_nothing_is_told_of(either: Environment) -> None:
    either.script("")

    failure = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder).failure

    assert failure == "ada has read it and said nothing: see what it did with coterie history ada"


def test_nobody_waits_for_an_agent_that_rests(either: Environment) -> None:
    assert coterie("pause", "ada", "--dir", either.folder).code == 0

    failure = coterie("send", "ada", "Hello", "--wait", "--dir", either.folder).failure

    assert failure == "ada is paused and reads it later: let it go on with coterie resume ada"


def test_a_timeout_ends_the_wait(either: Environment) -> None:
    answer, let_go = either.gated("Too late.")
    either.script(answer)

    done = coterie("send", "ada", "Hello", "--wait", "--timeout", "300ms", "--json", "--dir", either.folder)

    let_go()
    assert done.json["error"] == "no_answer"
    assert "has not answered in time" in done.failure


@pytest.mark.slow
def test_a_stop_of_the_server_ends_the_waiting(env: Environment) -> None:
    env.serve()
    with Terminal("send", "ada", "Hello", "--delay", "1d", "--wait", "--dir", env.folder) as terminal:
        env.until("delayed.scheduled")
        env.stop_serving()

        terminal.sees("Error: the society stopped before ada answered: start it again")
        assert terminal.ends() == 1


def test_waiting_delivers_nothing_else_early(env: Environment) -> None:
    coterie("send", "bob", "tomorrow", "--delay", "1d", "--dir", env.folder)
    env.script("Here.")

    assert coterie("send", "ada", "now", "--wait", "--dir", env.folder).code == 0

    assert coterie("delayed", "--dir", env.folder, "--json").json["count"] == 1


def _asks(text: str, *options: str) -> Says:
    arguments = {"to": "user", "payload": {"text": text}, "quickReplies": list(options)}
    return Says(calls=(Calls("send_message", arguments),))
