from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.testing import model_faults
from coterie.testing.model_server import Calls, Says
from tests.agent.held_answer import HeldAnswer

from .commands import coterie
from .environment import TIMEOUT_SECONDS, Environment, Terminal

CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"
PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"
pytestmark = pytest.mark.slow


@pytest.fixture(params=["with a server", pytest.param("without one", marks=pytest.mark.full)])
def either(request: pytest.FixtureRequest, env: Environment) -> Environment:
    """As for the other commands. That a command starts a server of its own is tested with those."""
    if request.param == "with a server":
        env.serve()
    return env


def test_a_typed_line_is_sent_and_the_answer_is_shown(either: Environment) -> None:
    either.script("Good morning!")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.wait_for("You talk to ada.")
        chat.enter("Hello")
        chat.wait_for("You:")
        chat.wait_for("Hello")
        chat.wait_for("Good morning!")
        chat.wait_until_idle()  # it is said before it is stored
        chat.enter("/quit")

        assert chat.wait_for_exit() == 0
    assert _said(either)[-2:] == [("user", "Hello"), ("ada", "Good morning!")]


def test_a_number_answers_the_open_question_with_that_option(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes", "No"), "", "Very well.")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("Hello")
        chat.wait_for("2)")
        chat.enter("2")
        chat.wait_for("Very well.")
        chat.type(CTRL_D)
        assert chat.wait_for_exit() == 0

    messages = coterie_export(either.folder)
    question = next(one for one in messages if "quickReplies" in one["payload"])
    answer = next(one for one in messages if one["payload"].get("text") == "No")
    assert question["answer"] == {"messageId": answer["id"], "option": 1}
    assert answer["inReplyTo"] == question["id"]


def test_a_typed_text_answers_the_open_question(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes", "No"), "", "Coffee it is.")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("Hello")
        chat.wait_for("2)")
        chat.enter("Rather coffee")
        chat.wait_for("Coffee it is.")

    (question,) = [one for one in coterie_export(either.folder) if "quickReplies" in one["payload"]]
    assert question["answer"]["option"] is None


def test_a_message_to_a_working_agent_is_shown_as_queued_until_it_is_read(either: Environment) -> None:
    first, let_go = either.gated("Working on it.")
    second, let_go_again = either.gated("And the second.")
    either.script(first, second)
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("one")
        either.wait_for_request(1)
        chat.wait_for_screen("thinking")
        chat.enter("two")
        chat.wait_for("queued")
        let_go()
        chat.wait_for("ada has read: two")
        let_go_again()
        chat.wait_for("And the second.")
        chat.wait_until_idle()  # it is said before it is stored

    said = [("user", "one"), ("user", "two"), ("ada", "Working on it."), ("ada", "And the second.")]
    assert _said(either) == said


def test_the_first_ctrl_c_stops_the_turn_and_the_second_leaves_the_chat(either: Environment) -> None:
    first, _ = either.gated("Never said.")
    either.script(first)
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("one")
        either.wait_for_request(1)
        chat.wait_for_screen("thinking")
        chat.type(CTRL_C)
        chat.wait_for("stopping")
        chat.enter("still here?")
        chat.wait_for("ok")  # what the model says when nothing is scripted
        chat.wait_until_idle()
        chat.type(CTRL_C)

        assert chat.wait_for_exit() == 0


def test_chat_commands_attach_delay_and_withdraw(either: Environment, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter(f"/attach {tmp_path / 'gone.txt'}")
        chat.wait_for("not done")
        chat.enter("/attach")
        chat.wait_for("expected a file")
        chat.enter("/attach ~no-such-user/a.txt")
        chat.wait_for("~no-such-user/a.txt cannot be read")
        chat.enter(f"/attach {tmp_path / 'a.txt'}")
        chat.wait_for("is sent with your next message")
        chat.enter("/delay 1h look at this")
        chat.wait_for("due")
        (message,) = coterie("delayed", "--json", "--dir", either.folder).json["items"]
        assert message["payload"]["attachments"][0]["filename"] == "a.txt"
        chat.enter("/withdraw")
        chat.wait_for("withdrawn")
        chat.enter("/delay soon x")
        chat.wait_for("expected a duration")
        chat.enter("/nonsense")
        chat.wait_for("there is no command /nonsense")
        chat.enter("/help")
        chat.wait_for("/attach FILE")

    assert coterie("delayed", "--json", "--dir", either.folder).json["count"] == 0


def test_a_society_without_valid_agents_reports_the_reason(folder: Path) -> None:
    (folder / "coterie.toml").write_text("[agents.Ada]\n")

    assert "agents.Ada: an id is" in coterie("chat", "--dir", folder).failure


def test_the_last_messages_of_the_thread_are_shown_at_the_start(either: Environment) -> None:
    either.script("I remember.")
    coterie("send", "ada", "Do you?", "--wait", "--dir", either.folder)

    with Terminal("chat", "--dir", either.folder) as chat:
        chat.wait_for("You talk to ada.")

        assert chat.raw.index("Do you?") < chat.raw.index("I remember.") < chat.raw.index("You talk to ada.")


def test_an_answer_is_shown_while_it_streams(env: Environment) -> None:
    env.serve()
    assert env.society
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        env.call(env.society.live.append, "ada", "draft-1", "Once upon")
        chat.wait_for_screen("ada: Once upon")
        env.call(env.society.live.append, "ada", "draft-1", " a time")
        chat.wait_for_screen("ada: Once upon a time")
        env.call(env.society.live.finish, "draft-1", "withdrawn")
        chat.wait_for("(the answer above was withdrawn)")


def test_an_answer_that_the_next_line_ends_is_marked_as_withdrawn(env: Environment) -> None:
    (env.folder / "coterie.toml").write_text('[agents.ada]\ninterrupt = "stream"\n')
    env.serve()
    env.model.script(HeldAnswer("Once upon"), "As you like.")
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        chat.enter("A story")
        chat.wait_for_screen("ada: Once upon")
        chat.enter("No, a poem")
        chat.wait_for("(the answer above was withdrawn)")
        chat.wait_for("As you like.")
        chat.wait_until_idle()

    assert _said(env) == [("user", "A story"), ("user", "No, a poem"), ("ada", "As you like.")]


def test_incoming_text_appears_above_the_line_being_typed(env: Environment) -> None:
    env.serve()
    assert env.society
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        chat.type("half of a")
        chat.wait_for_screen("> half of a")
        env.call(env.society.live.append, "ada", "draft-1", "First line\nSecond")
        chat.wait_for_screen("ada: First line")
        chat.wait_for_screen("Second")
        assert chat.screen.rows[-1] == "> half of a"
        chat.enter(" sentence")
        chat.wait_for("You:")

    assert ("user", "half of a sentence") in _said(env)


def test_a_long_streamed_answer_is_wrapped(env: Environment) -> None:
    env.serve()
    assert env.society
    words = " ".join(f"word{number}" for number in range(40))
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        env.call(env.society.live.append, "ada", "draft-1", words)
        chat.wait_for_screen("word39")

        start = next(number for number, row in enumerate(chat.screen.rows) if row.startswith("ada: word0"))
        assert " ".join(chat.screen.rows[start:-1]) == f"ada: {words}"


def test_earlier_input_lines_can_be_recalled(env: Environment) -> None:
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.enter("/help")
        chat.wait_for("/quit")
        chat.enter("/nonsense")
        chat.wait_for("there is no command /nonsense")
        chat.type(UP + UP)
        chat.wait_for_screen("> /help")


@pytest.mark.parametrize("keys", [f"one{ALT_ENTER}two", f"{PASTE_START}one\r\ntwo{PASTE_END}"])
def test_alt_enter_and_pasted_lines_make_one_message(env: Environment, keys: str) -> None:
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        chat.type(keys)
        chat.wait_for_screen("two")
        chat.enter("")
        chat.wait_for("You:")

    assert ("user", "one\ntwo") in _said(env)


def test_a_signal_stops_the_turn_like_ctrl_c(env: Environment) -> None:
    first, _ = env.gated("Never said.")
    env.script(first)
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.enter("one")
        env.wait_for_request(1)
        chat.wait_for_screen("thinking")
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for("stopping")
        chat.process.send_signal(signal.SIGINT)

        assert chat.wait_for_exit() == 0


def test_the_chat_ends_when_the_server_stops(env: Environment) -> None:
    env.serve()
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        env.stop_serving()
        chat.wait_for("The society was stopped.")

        assert chat.wait_for_exit() == 0


def test_a_chat_started_while_the_server_stops_ends_with_a_one_line_error(env: Environment) -> None:
    env.serve()
    env.refuse()

    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("Error: the society is stopping: try again shortly")

        assert chat.wait_for_exit() == 1


def test_the_terminal_settings_are_restored(env: Environment) -> None:
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("\x1b[?2004h")
        chat.type(CTRL_D)
        assert chat.wait_for_exit() == 0

        assert "\x1b[?2004l" in chat.raw


def test_lines_from_a_pipe_are_answered_in_order(either: Environment) -> None:
    either.script("first answer", _asks("Tea?", "Yes", "No"), "", "third answer")

    done = _piped("one\ntwo\n2\n", either.folder)

    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "ada: first answer",
        "ada: Tea?",
        "  1) Yes",
        "  2) No",
        "ada: third answer",
    ]
    assert ("user", "No") in _said(either)


def test_a_line_from_a_pipe_without_an_answer_is_an_error(either: Environment) -> None:
    either.script("", "second answer")

    done = _piped("one\ntwo\n", either.folder)

    assert done.returncode == 1
    assert done.stderr == "Error: ada has read it and said nothing: see what it did with coterie history ada\n"
    assert done.stdout == "ada: second answer\n"


def test_a_line_from_a_pipe_that_is_not_carried_out_is_an_error(env: Environment) -> None:
    env.serve()
    env.script("an answer")

    # As in a terminal of another encoding: the byte is no character. Python would end the reading with an error.
    done = _piped("caf\udce9\n/nonsense\n", env.folder, PYTHONIOENCODING="utf-8:strict")

    assert (done.returncode, done.stdout) == (1, "ada: an answer\n")
    assert done.stderr == "Error: there is no command /nonsense: /help lists the commands\n"
    assert _said(env)[0] == ("user", "caf\ufffd")


def test_a_typo_in_the_name_gets_a_hint(either: Environment) -> None:
    coterie("send", "ada", "x", "--dir", either.folder)

    assert 'did you mean "ada"?' in coterie("chat", "adda", "--dir", either.folder).failure


def coterie_export(folder: Path) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = coterie("export", "ada", "--format", "json", "--dir", folder).json["messages"]
    return messages


def _said(env: Environment) -> list[tuple[object, object]]:
    return [(one["from"], one["payload"]["text"]) for one in coterie_export(env.folder)]


def _piped(lines: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coterie", "chat", "ada", "--dir", str(folder)],
        input=lines,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        env=os.environ | env,
        timeout=TIMEOUT_SECONDS,
    )


def _asks(text: str, *options: str) -> Says:
    arguments = {"to": "user", "payload": {"text": text}, "quickReplies": list(options)}
    return Says(calls=(Calls("send_message", arguments),))


def test_a_broken_off_reply_stays_and_the_reason_of_the_retry_is_shown(env: Environment) -> None:
    env.serve()
    env.script(model_faults.cut(after=2), "Now I am done.")
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.wait_for("You talk to ada.")
        chat.enter("Hi")
        chat.wait_for("HelloHello")
        chat.wait_for("(broken off)")
        chat.wait_for("the model is asked again")
        chat.wait_for("Now I am done.")
