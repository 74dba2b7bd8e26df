from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.testing.replies import Calls, Says

from .commands import coterie
from .environment import TIMEOUT_SECONDS, Environment, Terminal

CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"
PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"
pytestmark = pytest.mark.slow


def test_words_go_out_and_the_answer_comes_back(either: Environment) -> None:
    either.script("Good morning!")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.sees("You talk to ada.")
        chat.enter("Hello")
        chat.sees("You:")
        chat.sees("Hello")
        chat.sees("Good morning!")
        chat.rests()  # it is said before it is stored
        chat.enter("/quit")

        assert chat.ends() == 0
    assert _said(either)[-2:] == [("user", "Hello"), ("ada", "Good morning!")]


def test_a_number_answers_the_open_question_with_that_option(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes", "No"), "", "Very well.")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("Hello")
        chat.sees("2)")
        chat.enter("2")
        chat.sees("Very well.")
        chat.type(CTRL_D)
        assert chat.ends() == 0

    messages = coterie_export(either.folder)
    question = next(one for one in messages if "quickReplies" in one["payload"])
    answer = next(one for one in messages if one["payload"].get("text") == "No")
    assert question["answer"] == {"messageId": answer["id"], "option": 1}
    assert answer["inReplyTo"] == question["id"]


def test_other_words_answer_it_too(either: Environment) -> None:
    either.script(_asks("Tea?", "Yes", "No"), "", "Coffee it is.")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("Hello")
        chat.sees("2)")
        chat.enter("Rather coffee")
        chat.sees("Coffee it is.")

    (question,) = [one for one in coterie_export(either.folder) if "quickReplies" in one["payload"]]
    assert question["answer"]["option"] is None


def test_what_is_said_to_a_working_agent_is_queued_until_it_is_read(either: Environment) -> None:
    first, let_go = either.gated("Working on it.")
    second, let_go_again = either.gated("And the second.")
    either.script(first, second)
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("one")
        either.asked(1)
        chat.shows("thinking")
        chat.enter("two")
        chat.sees("queued")
        let_go()
        chat.sees("ada has read: two")
        let_go_again()
        chat.sees("And the second.")
        chat.rests()  # it is said before it is stored

    said = [("user", "one"), ("user", "two"), ("ada", "Working on it."), ("ada", "And the second.")]
    assert _said(either) == said


def test_ctrl_c_stops_the_turn_first_and_leaves_only_then(either: Environment) -> None:
    first, _ = either.gated("Never said.")
    either.script(first)
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("one")
        either.asked(1)
        chat.shows("thinking")
        chat.type(CTRL_C)
        chat.sees("stopping")
        chat.enter("still here?")
        chat.sees("ok")  # what the model says when nothing is scripted
        chat.rests()
        chat.type(CTRL_C)

        assert chat.ends() == 0


def test_files_delays_and_withdrawals(either: Environment, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter(f"/attach {tmp_path / 'gone.txt'}")
        chat.sees("not done")
        chat.enter(f"/attach {tmp_path / 'a.txt'}")
        chat.sees("goes along")
        chat.enter("/delay 1h look at this")
        chat.sees("due")
        (message,) = coterie("delayed", "--json", "--dir", either.folder).json["items"]
        assert message["payload"]["attachments"][0]["filename"] == "a.txt"
        chat.enter("/withdraw")
        chat.sees("taken back")
        chat.enter("/delay soon x")
        chat.sees("expected a duration")
        chat.enter("/nonsense")
        chat.sees("there is no /nonsense")
        chat.enter("/help")
        chat.sees("/attach FILE")

    assert coterie("delayed", "--json", "--dir", either.folder).json["count"] == 0


def test_a_society_whose_agents_were_all_left_out_says_why(folder: Path) -> None:
    (folder / "coterie.toml").write_text("[agents.Ada]\n")

    assert "agents.Ada: an id is" in coterie("chat", "--dir", folder).failure


def test_the_end_of_the_conversation_is_shown_first(either: Environment) -> None:
    either.script("I remember.")
    coterie("send", "ada", "Do you?", "--wait", "--dir", either.folder)

    with Terminal("chat", "--dir", either.folder) as chat:
        chat.sees("You talk to ada.")

        assert chat.raw.index("Do you?") < chat.raw.index("I remember.") < chat.raw.index("You talk to ada.")


def test_a_reply_is_shown_while_it_is_said(env: Environment) -> None:
    env.serve()
    assert env.society
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.sees("You talk to ada.")
        env.call(env.society.live.append, "ada", "draft-1", "Once upon")
        chat.shows("ada: Once upon")
        env.call(env.society.live.append, "ada", "draft-1", " a time")
        chat.shows("ada: Once upon a time")
        env.call(env.society.live.finish, "draft-1", "withdrawn")
        chat.sees("(withdrawn)")


def test_what_is_being_typed_stays_below_what_arrives(env: Environment) -> None:
    env.serve()
    assert env.society
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.sees("You talk to ada.")
        chat.type("half of a")
        chat.shows("> half of a")
        env.call(env.society.live.append, "ada", "draft-1", "First line\nSecond")
        chat.shows("ada: First line")
        chat.shows("Second")
        assert chat.screen.rows[-1] == "> half of a"
        chat.enter(" sentence")
        chat.sees("You:")

    assert ("user", "half of a sentence") in _said(env)


def test_a_long_reply_is_wrapped_while_it_grows(env: Environment) -> None:
    env.serve()
    assert env.society
    words = " ".join(f"word{number}" for number in range(40))
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.sees("You talk to ada.")
        env.call(env.society.live.append, "ada", "draft-1", words)
        chat.shows("word39")

        start = next(number for number, row in enumerate(chat.screen.rows) if row.startswith("ada: word0"))
        assert " ".join(chat.screen.rows[start:-1]) == f"ada: {words}"


def test_earlier_lines_can_be_recalled(env: Environment) -> None:
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.enter("/help")
        chat.sees("/quit")
        chat.enter("/nonsense")
        chat.sees("there is no /nonsense")
        chat.type(UP + UP)
        chat.shows("> /help")


@pytest.mark.parametrize("keys", [f"one{ALT_ENTER}two", f"{PASTE_START}one\r\ntwo{PASTE_END}"])
def test_alt_enter_and_pasted_lines_make_one_message(env: Environment, keys: str) -> None:
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.sees("You talk to ada.")
        chat.type(keys)
        chat.shows("two")
        chat.enter("")
        chat.sees("You:")

    assert ("user", "one\ntwo") in _said(env)


def test_a_signal_stops_the_turn_like_ctrl_c(env: Environment) -> None:
    first, _ = env.gated("Never said.")
    env.script(first)
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.enter("one")
        env.asked(1)
        chat.shows("thinking")
        chat.process.send_signal(signal.SIGINT)
        chat.sees("stopping")
        chat.process.send_signal(signal.SIGINT)

        assert chat.ends() == 0


def test_a_stop_of_the_server_ends_the_chat(env: Environment) -> None:
    env.serve()
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.sees("You talk to ada.")
        env.stop_serving()
        chat.sees("The society was stopped.")

        assert chat.ends() == 0


def test_a_chat_that_begins_while_the_server_stops_ends_with_one_sentence(env: Environment) -> None:
    env.serve()
    env.refuse()

    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.sees("Error: the society is stopping: try again shortly")

        assert chat.ends() == 1


def test_the_terminal_is_left_as_it_was(env: Environment) -> None:
    with Terminal("chat", "ada", "--dir", env.folder) as chat:
        chat.sees("\x1b[?2004h")
        chat.type(CTRL_D)
        assert chat.ends() == 0

        assert "\x1b[?2004l" in chat.raw


def test_lines_of_a_pipe_are_answered_one_after_the_other(either: Environment) -> None:
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


def test_a_line_of_a_pipe_without_an_answer_is_a_failure(either: Environment) -> None:
    either.script("", "second answer")

    done = _piped("one\ntwo\n", either.folder)

    assert done.returncode == 1
    assert done.stderr == "Error: ada has read it and said nothing: see what it did with coterie history ada\n"
    assert done.stdout == "ada: second answer\n"


def test_a_typo_in_the_name_gets_a_hint(either: Environment) -> None:
    coterie("send", "ada", "x", "--dir", either.folder)

    assert 'did you mean "ada"?' in coterie("chat", "adda", "--dir", either.folder).failure


def coterie_export(folder: Path) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = coterie("export", "ada", "--format", "json", "--dir", folder).json["messages"]
    return messages


def _said(env: Environment) -> list[tuple[object, object]]:
    return [(one["from"], one["payload"]["text"]) for one in coterie_export(env.folder)]


def _piped(lines: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coterie", "chat", "ada", "--dir", str(folder)],
        input=lines,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def _asks(text: str, *options: str) -> Says:
    arguments = {"to": "user", "payload": {"text": text}, "quickReplies": list(options)}
    return Says(calls=(Calls("send_message", arguments),))
