"""List tasks and show one as a tree: `tasks`. And the stop of a task, for `coterie stop --task`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, Json, Token, complete_agent
from coterie.cli.output import (
    count_of,
    format_duration,
    local_time,
    print_json,
    print_line,
    print_table,
    run_quietly,
    sort_as_tree,
)

if TYPE_CHECKING:
    from coterie.cli.client import Client

COLUMNS = ("ID", "STATE", "AGENT", "STARTED", "TOOK", "MESSAGES", "TOKENS", "COST", "TEXT")
SHOWN_ID = 16
"""Characters of an id in the table. Commands accept the beginning of an id."""
SEARCHED = 1_000
"""Newest tasks among which the beginning of an id is searched."""
TEXT_WIDTH = 60
MAX_INDENT = 12
"""Levels of the tree that are indented. Two agents that answer each other make one level per message."""
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£"}


class TaskState(StrEnum):
    WORKING = "working"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


def tasks(
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Show this one; the beginning of an id is enough, or the id of a message.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[TaskState | None, typer.Option(help="Only those in this state.")] = None,
    agent: Annotated[
        str | None,
        typer.Option(metavar="AGENT", help="Only those that this agent worked on.", autocompletion=complete_agent),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most, the newest first.")] = 20,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:  # fmt: skip
    """List tasks: everything that one message set off. With ID: its messages and turns as a tree."""
    if task is not None:
        if state is not None or agent is not None:
            raise typer.BadParameter("--state and --agent are for the list: leave them out, or the ID")
        tree = run_quietly(_read_tree(dir, token, task))
        if json:
            print_json(tree)
        else:
            for line in format_tree(tree):
                print_line(line)
        return
    found = run_quietly(_read(dir, token, state, agent, limit))
    if json:
        print_json({"items": found})
    elif found:
        print_table(COLUMNS, [_row(one) for one in found])
    else:
        print_line("No tasks.")


async def _read(
    folder: Path, token: str | None, state: TaskState | None, agent: str | None, limit: int
) -> Sequence[Mapping[str, Any]]:
    from coterie.cli.client import connect

    async with connect(folder, token, private="read") as client:
        if agent is not None:
            await client.agent(agent)
        return await _list(client, limit, state=state and state.value, agent=agent)


async def _list(client: Client, limit: int, **filters: str | None) -> list[Mapping[str, Any]]:
    from coterie.cli.client import PAGE_SIZE

    found, cursor = list[Mapping[str, Any]](), None
    while len(found) < limit:
        page = await client.get("/tasks", limit=min(limit, PAGE_SIZE), cursor=cursor, **filters)
        found += page["items"]
        cursor = page["next"]
        if cursor is None:
            break
    return found[:limit]


async def _read_tree(folder: Path, token: str | None, name: str) -> Mapping[str, Any]:
    from coterie.cli.client import connect

    async with connect(folder, token, private="read") as client:
        return await find_task(client, name)


async def find_task(client: Client, name: str) -> Mapping[str, Any]:
    """The task with its tree, by its id, the id of one of its messages, or the beginning of its id."""
    from coterie.errors import Refused

    if name.isalnum():  # no other text is an id
        try:
            tree: Mapping[str, Any] = await client.get(f"/tasks/{quote(name)}")
            return tree
        except Refused as refused:
            if refused.code != "unknown_task":
                raise
    matches = [task["id"] for task in await _list(client, SEARCHED) if name and task["id"].startswith(name)]
    if len(matches) != 1:
        problem = f"{len(matches)} tasks have" if matches else "no task has"
        raise Refused("unknown_task", f"{problem} an id that begins with {name!r}: list them with coterie tasks")
    found: Mapping[str, Any] = await client.get(f"/tasks/{quote(matches[0])}")
    return found


async def stop_task(folder: Path, token: str | None, name: str) -> tuple[str, Mapping[str, int]]:
    """Stop the task; return its id and what was ended."""
    from coterie.cli.client import connect

    async with connect(folder, token) as client:
        task_id = str((await find_task(client, name))["id"])
        return task_id, await client.post(f"/tasks/{quote(task_id)}/stop")


def format_stopped(counts: Mapping[str, int]) -> str:
    if not any(counts.values()):
        return "Nothing of it was left to stop."
    ended = [count_of(counts[key], key.removesuffix("s")) for key in ("turns", "messages", "questions") if counts[key]]
    return f"Stopped: {', '.join(ended)}."


# Formatting


def _row(task: Mapping[str, Any]) -> tuple[str, ...]:
    from coterie.text import one_line

    return (
        task["id"][:SHOWN_ID],
        task["state"],
        ", ".join(task["activeAgents"]) or task["agent"],
        local_time(datetime.fromisoformat(task["createdAt"])),
        _took(task["createdAt"], task["lastAt"]),
        f"{task['messages']:,}",
        f"{task['inputTokens'] + task['outputTokens']:,}",
        format_cost(task),
        one_line(task["text"], TEXT_WIDTH),
    )


def _took(start: str, end: str | None) -> str:
    if end is None:
        return ""
    took = datetime.fromisoformat(end) - datetime.fromisoformat(start)
    return f"{took.total_seconds():.1f} s" if took < timedelta(seconds=10) else format_duration(took)


def format_cost(used: Mapping[str, Any], currency: str | None = None) -> str:
    """`$0.08`, `at least 1.20 CHF`, or `unknown` if no request has a price."""
    cost, currency = used.get("cost"), currency or used.get("currency")
    if cost is None:
        return "unknown" if used.get("requests") else ""
    amount = f"{cost:,.2f}" if cost >= 0.01 or not cost else f"{cost:.6f}".rstrip("0").rstrip(".")
    shown = f"{_SIGNS[currency]}{amount}" if currency in _SIGNS else f"{amount} {currency or ''}".strip()
    return f"at least {shown}" if used.get("unpricedRequests") else shown


def format_work(task: Mapping[str, Any]) -> str:
    """Who is at work: `ada, bob at work · 12 messages · $0.08`."""
    hidden = task["active"] - len(task["activeAgents"])
    names = [*task["activeAgents"], *([f"{hidden} more"] if hidden > 0 else [])]
    cost = format_cost(task)
    parts = [f"{', '.join(names)} at work", count_of(task["messages"], "message")]
    return " · ".join([*parts, cost] if cost not in ("", "unknown") else parts)


def format_tree(tree: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a task: a head, then each message with the turns that read it and the messages that it caused."""
    from coterie.text import one_line

    tokens = f"{tree['inputTokens']:,} tokens in, {tree['outputTokens']:,} out"
    yield f"{tree['id']}  {tree['state']}"
    cost = format_cost(tree)
    parts = [
        count_of(tree["agents"], "agent"),
        count_of(tree["messages"], "message"),
        count_of(tree["turns"], "turn"),
        count_of(tree["requests"], "model request"),
        tokens,
        *([f"cost {cost}"] if cost else []),
        f"took {_took(tree['createdAt'], tree['lastAt'])}",
    ]
    yield " · ".join(parts)
    if tree["activeAgents"]:
        yield format_work(tree)
    for node, depth in sort_as_tree(tree["nodes"]):
        indent = "  " * min(depth, MAX_INDENT)
        if node["kind"] == "message":
            at = datetime.fromisoformat(node["createdAt"]).astimezone().strftime("%H:%M:%S")
            state = "" if node["state"] in ("taken", "pending") and node["takenAt"] else f" ({node['state']})"
            sender = "you" if node["from"] == "user" else node["from"]
            to = "you" if node["to"] == "user" else node["to"]
            yield f"{at} {indent}{sender} → {to}: {one_line(node['text'], TEXT_WIDTH)}{state}"
        else:
            yield f"{' ' * 8} {indent}{_format_turn(node, tree['currency'])}"


def _format_turn(turn: Mapping[str, Any], currency: str | None) -> str:
    parts = [f"{turn['agent']} {turn['state']}"]
    if turn["endedAt"]:
        parts.append(_took(turn["startedAt"], turn["endedAt"]))
    if turn["requests"]:
        parts += [f"{turn['inputTokens']:,} in, {turn['outputTokens']:,} out"]
        parts += [cost] if (cost := format_cost(turn, currency)) and turn["cost"] is not None else []
    names = [call["name"] for call in turn["calls"]]
    return " · ".join([*parts, *([f"tools {', '.join(names)}"] if names else [])])
