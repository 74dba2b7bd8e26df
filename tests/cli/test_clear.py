from __future__ import annotations

from .commands import coterie
from .environment import Environment, Terminal


def roles(env: Environment) -> list[str]:
    """Roles of the rows in the history of the agent."""
    return [row["role"] for row in coterie("history", "ada", "--json", "--dir", env.folder).json["items"]]


def test_clear_deletes_the_conversation_and_what_the_agent_remembers(either: Environment) -> None:
    coterie("send", "ada", "my name is Kim", "--wait", "--dir", either.folder)

    done = coterie("clear", "ada", "--yes", "--dir", either.folder)

    assert done.code == 0
    assert done.stdout == "Cleared the conversation with ada: 2 messages deleted.\n"
    assert roles(either) == ["system"]
    again = coterie("clear", "ada", "--yes", "--dir", either.folder, "--json").json
    assert again == {"id": "ada", "messages": 0}


def test_clear_without_a_terminal_requires_yes(env: Environment) -> None:
    coterie("send", "ada", "keep this", "--wait", "--dir", env.folder)

    done = coterie("clear", "ada", "--dir", env.folder)

    assert done.code == 2
    assert "--yes" in done.stderr
    assert roles(env) == ["system", "user", "assistant"]


def test_clear_of_an_unknown_agent_suggests_one(env: Environment) -> None:
    assert 'did you mean "ada"?' in coterie("clear", "adda", "--yes", "--dir", env.folder).failure
    assert 'did you mean "ada"?' in coterie("clear", "adda", "--dir", env.folder).failure


def test_clear_asks_on_a_terminal(env: Environment) -> None:
    env.serve()
    coterie("send", "ada", "hello", "--wait", "--dir", env.folder)

    with Terminal("clear", "ada", "--dir", env.folder) as terminal:
        terminal.wait_for("This cannot be undone. [y/N]")
        terminal.type("n\r")
        assert terminal.wait_for_exit() == 1
    assert roles(env) == ["system", "user", "assistant"]

    with Terminal("clear", "ada", "--dir", env.folder) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("y\r")
        terminal.wait_for("2 messages deleted")
        assert terminal.wait_for_exit() == 0
