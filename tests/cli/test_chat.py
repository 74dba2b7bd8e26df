from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.testing.replies import Calls, Says

from .door import coterie
from .stage import PATIENCE, Stage, Terminal

CTRL_C, CTRL_D = "\x03", "\x04"
pytestmark = pytest.mark.slow


def test_words_go_out_and_the_answer_comes_back(either: Stage) -> None:
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


def test_a_number_answers_the_open_question_with_that_option(either: Stage) -> None:
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


def test_other_words_answer_it_too(either: Stage) -> None:
    either.script(_asks("Tea?", "Yes", "No"), "", "Coffee it is.")
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("Hello")
        chat.sees("2)")
        chat.enter("Rather coffee")
        chat.sees("Coffee it is.")

    (question,) = [one for one in coterie_export(either.folder) if "quickReplies" in one["payload"]]
    assert question["answer"]["option"] is None


def test_what_is_said_to_a_working_agent_is_queued_until_it_is_read(either: Stage) -> None:
    first, let_go = either.gated("Working on it.")
    second, let_go_again = either.gated("And the second.")
    either.script(first, second)
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("one")
        either.asked(1)
        chat.sees("thinking")
        chat.enter("two")
        chat.sees("queued")
        let_go()
        chat.sees("ada has read: two")
        let_go_again()
        chat.sees("And the second.")
        chat.rests()  # it is said before it is stored

    said = [("user", "one"), ("user", "two"), ("ada", "Working on it."), ("ada", "And the second.")]
    assert _said(either) == said


def test_ctrl_c_stops_the_turn_first_and_leaves_only_then(either: Stage) -> None:
    first, _ = either.gated("Never said.")
    either.script(first)
    with Terminal("chat", "ada", "--dir", either.folder) as chat:
        chat.enter("one")
        either.asked(1)
        chat.sees("thinking")
        chat.type(CTRL_C)
        chat.sees("stopping")
        chat.enter("still here?")
        chat.sees("ok")  # what the model says when nothing is scripted
        chat.rests()
        chat.type(CTRL_C)

        assert chat.ends() == 0


def test_files_delays_and_withdrawals(either: Stage, tmp_path: Path) -> None:
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


def test_the_end_of_the_conversation_is_shown_first(either: Stage) -> None:
    either.script("I remember.")
    coterie("send", "ada", "Do you?", "--wait", "--dir", either.folder)

    with Terminal("chat", "--dir", either.folder) as chat:
        chat.sees("You talk to ada.")

        assert chat.raw.index("Do you?") < chat.raw.index("I remember.") < chat.raw.index("You talk to ada.")


def test_a_reply_is_shown_while_it_is_said(stage: Stage) -> None:
    stage.serve()
    assert stage.society
    with Terminal("chat", "ada", "--dir", stage.folder) as chat:
        chat.sees("You talk to ada.")
        stage.call(stage.society.live.append, "ada", "draft-1", "Once upon")
        chat.sees("ada: Once upon")
        stage.call(stage.society.live.append, "ada", "draft-1", " a time")
        chat.sees("ada: Once upon a time")
        stage.call(stage.society.live.finish, "draft-1", "withdrawn")
        chat.sees("(withdrawn)")


def test_a_stop_of_the_server_ends_the_chat(stage: Stage) -> None:
    stage.serve()
    with Terminal("chat", "ada", "--dir", stage.folder) as chat:
        chat.sees("You talk to ada.")
        stage.stop_serving()
        chat.sees("The society was stopped.")

        assert chat.ends() == 0


def test_a_chat_that_begins_while_the_server_stops_ends_with_one_sentence(stage: Stage) -> None:
    stage.serve()
    stage.refuse()

    with Terminal("chat", "ada", "--dir", stage.folder) as chat:
        chat.sees("Error: the society is stopping: try again shortly")

        assert chat.ends() == 1


def test_the_terminal_is_left_as_it_was(stage: Stage) -> None:
    with Terminal("chat", "ada", "--dir", stage.folder) as chat:
        chat.sees("\x1b[?2004h")
        chat.type(CTRL_D)
        assert chat.ends() == 0

        assert "\x1b[?2004l" in chat.raw


def test_lines_of_a_pipe_are_answered_one_after_the_other(either: Stage) -> None:
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


def test_a_line_of_a_pipe_without_an_answer_is_a_failure(either: Stage) -> None:
    either.script("", "second answer")

    done = _piped("one\ntwo\n", either.folder)

    assert done.returncode == 1
    assert done.stderr == "Error: ada has read it and said nothing: see what it did with coterie history ada\n"
    assert done.stdout == "ada: second answer\n"


def test_a_typo_in_the_name_gets_a_hint(either: Stage) -> None:
    coterie("send", "ada", "x", "--dir", either.folder)

    assert 'did you mean "ada"?' in coterie("chat", "adda", "--dir", either.folder).failure


def coterie_export(folder: Path) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = coterie("export", "ada", "--format", "json", "--dir", folder).json["messages"]
    return messages


def _said(stage: Stage) -> list[tuple[object, object]]:
    return [(one["from"], one["payload"]["text"]) for one in coterie_export(stage.folder)]


def _piped(lines: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coterie", "chat", "ada", "--dir", str(folder)],
        input=lines,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def _asks(text: str, *options: str) -> Says:
    arguments = {"to": "user", "payload": {"text": text}, "quickReplies": list(options)}
    return Says(calls=(Calls("send_message", arguments),))
