"""Tasks on the command line: list, tree, stop, and a wait that ends with the task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from coterie.testing.model_server import Calls, ReceivedRequest, Reply, Says

from .commands import coterie
from .environment import Environment, Terminal


def asks(to: str, text: str, **more: Any) -> Says:
    return Says(calls=(Calls("send_message", {"to": to, "payload": {"text": text}, **more}),))


def script_cascade(env: Environment, bob: Reply = "Yes.") -> None:
    """Ada asks Bob, says so, and reports Bob's answer."""
    replies: dict[str, Iterator[Reply]] = {
        "ada": iter([asks("bob", "Really?"), "I ask Bob.", "Bob says yes.", "ok", "ok"]),
        "bob": iter([bob, "ok"]),
    }

    def answer(request: ReceivedRequest) -> Reply:
        return next(replies["ada" if "(id: ada)" in request.body["messages"][0]["content"] else "bob"])

    env.model.default = answer


def test_wait_ends_with_the_task_and_writes_all_answers(either: Environment) -> None:
    script_cascade(either)

    done = coterie("send", "ada", "What does Bob think?", "--wait", "--dir", either.folder)

    assert (done.code, done.stdout.splitlines()) == (0, ["I ask Bob.", "Bob says yes."])


def test_tasks_lists_them_and_shows_one_as_a_tree(either: Environment) -> None:
    script_cascade(either)
    sent = coterie("send", "ada", "What does Bob think?", "--wait", "--json", "--dir", either.folder).json

    (listed,) = coterie("tasks", "--json", "--dir", either.folder).json["items"]
    assert (listed["id"], listed["state"], listed["agents"]) == (sent["task"], "done", 2)
    table = coterie("tasks", "--state", "done", "--agent", "bob", "--dir", either.folder).stdout
    assert sent["task"][:16] in table and "What does Bob think?" in table and "unknown" in table
    assert coterie("tasks", "--state", "failed", "--dir", either.folder).stdout == "No tasks.\n"

    shown = coterie("tasks", sent["task"][:20], "--dir", either.folder)
    head, totals, *lines = shown.stdout.splitlines()
    assert head == f"{sent['task']}  done"
    assert "2 agents" in totals and "cost unknown" in totals and f"{listed['inputTokens']:,} tokens in" in totals
    first, *rest = lines
    assert first.endswith(" you → ada: What does Bob think?")
    (question,) = (line for line in rest if "ada → bob: Really?" in line)
    assert question[8:].startswith("   ada")  # the message that caused it is its parent
    (answer,) = (line for line in rest if "bob → ada: Yes." in line)
    assert answer[8:].startswith("     bob")
    turns = [line.strip() for line in lines if line.startswith(" " * 8)]
    assert len(turns) == listed["turns"] and any("tools send_message" in turn for turn in turns)
    tree = coterie("tasks", sent["messageId"], "--json", "--dir", either.folder).json
    assert len(lines) == len(tree["nodes"])


def test_a_wrong_id_of_a_task_is_an_error(either: Environment) -> None:
    coterie("send", "bob", "Later", "--delay", "1d", "--dir", either.folder)
    for name in ("zzz", "", "a/b"):
        for command in (("tasks", name), ("stop", "--task", name)):
            failure = coterie(*command, "--dir", either.folder).failure
            assert failure == f"no task has an id that begins with {name!r}: list them with coterie tasks"
    assert coterie("stop", "--dir", either.folder).code == 2
    assert coterie("stop", "ada", "--task", "x", "--dir", either.folder).code == 2
    assert coterie("tasks", "x", "--state", "done", "--dir", either.folder).code == 2


def test_stop_ends_a_whole_task(env: Environment) -> None:
    env.serve()
    answer, release = env.gated("Too late.")
    env.script(asks("bob", "later", delayMs=3_600_000), answer)
    sent = coterie("send", "ada", "Remind Bob", "--json", "--dir", env.folder).json
    env.wait_for_request(2)

    stopped = coterie("stop", "--task", sent["task"], "--dir", env.folder)
    release()

    assert stopped.stdout == "Stopped: 1 turn, 1 message.\n"
    assert coterie("stop", "--task", sent["task"], "--dir", env.folder).stdout == "Nothing of it was left to stop.\n"
    again = coterie("stop", "--task", sent["task"], "--json", "--dir", env.folder).json
    assert again == {"id": sent["task"], "turns": 0, "messages": 0, "questions": 0}
    assert coterie("delayed", "--json", "--dir", env.folder).json["count"] == 0
    assert coterie("tasks", sent["task"], "--json", "--dir", env.folder).json["state"] == "stopped"


def test_a_waiting_command_ends_when_its_task_is_stopped(env: Environment) -> None:
    env.serve()
    answer, release = env.gated("Too late.")
    env.script(answer)
    with Terminal("send", "ada", "Hello", "--wait", "--dir", env.folder) as terminal:
        env.wait_for_request()
        (task,) = coterie("tasks", "--state", "working", "--json", "--dir", env.folder).json["items"]
        coterie("stop", "--task", task["id"], "--dir", env.folder)

        terminal.wait_for("Error: the task was stopped before ada answered")
        assert terminal.wait_for_exit() == 1
    release()


def test_wait_shows_who_is_at_work_on_a_terminal(env: Environment) -> None:
    env.serve()
    answer, release = env.gated("Yes.")
    script_cascade(env, bob=answer)
    with Terminal("send", "ada", "Ask Bob", "--wait", "--dir", env.folder) as terminal:
        terminal.wait_for("bob at work")
        release()
        terminal.wait_for("Bob says yes.")
        assert terminal.wait_for_exit() == 0


def test_a_message_is_not_sent_if_its_question_is_answered(either: Environment) -> None:
    either.script("Here.")
    asked = coterie("send", "ada", "Hello?", "--wait", "--json", "--dir", either.folder).json["messageId"]

    late = coterie("send", "bob", "Ada?", "--delay", "1h", "--unless-answered", asked, "--dir", either.folder)
    assert late.stdout.startswith("Not sent to bob, because the question is answered: ")
    unknown = coterie("send", "bob", "Ada?", "--delay", "1h", "--unless-answered", "x", "--dir", either.folder)
    assert "is no question of yours" in unknown.failure
    assert coterie("send", "bob", "Ada?", "--unless-answered", asked, "--dir", either.folder).code == 2
    assert json.loads(coterie("delayed", "--json", "--dir", either.folder).stdout)["count"] == 0
