"""Send and read messages: `send`, `chat`, `delayed`, `history`, `export`.

They use the HTTP API, except `export`, which reads the store like other commands about files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.options import DEFAULT_FOLDER, AgentArgument, Dir, Json, Token, complete_agent, duration_option
from coterie.cli.output import (
    Progress,
    build_table,
    format_duration,
    local_time,
    no_such_agent,
    print_json,
    print_line,
    print_table,
    run_quietly,
)

if TYPE_CHECKING:
    from datetime import datetime

    from coterie.agents import Agent
    from coterie.cli.client import Client
    from coterie.cli.conversation import ChatMessage, OutgoingMessage
    from coterie.messages import Receipt
    from coterie.store import Store

DELAYED_TEXT_WIDTH = 60
DELAYED_COLUMNS = ("DUE", "IN", "FROM", "TO", "EVERY", "TEXT")


class Format(StrEnum):
    MD = "md"
    JSON = "json"


def send(
    to: Annotated[
        str, typer.Argument(metavar="TO", help="The id of an agent.", show_default=False, autocompletion=complete_agent)
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text of the message.", show_default=False)],
    delay: Annotated[float | None, duration_option("Deliver later: 500ms, 10s, 5m, 2h, 1d.")] = None,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Repeat it: 15m, "daily 08:00", "weekdays 08:00", "mon,thu 18:30", "monthly 1 09:00" or cron fields.',
        ),
    ] = None,
    time_zone: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --every: such as Europe/Berlin; the server's by default.")
    ] = None,
    quick_reply: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Offer an answer to pick; up to 10 times.")
    ] = None,
    attach: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Attach a file; repeatable.")] = None,
    unless_answered: Annotated[
        str | None,
        typer.Option(metavar="ID", help="With --delay: withdraw it if this message of yours is answered first."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until all that it sets off is done, and write the answers.")
    ] = False,
    timeout: Annotated[float | None, duration_option("With --wait: how long to wait at most.")] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """Send a message. It is stored durably when the command returns."""
    from coterie.cli.conversation import OutgoingMessage

    if every is not None and wait:
        raise typer.BadParameter("a recurring message has no single answer: leave out --wait or --every")
    if timeout is not None and not wait:
        raise typer.BadParameter("--timeout needs --wait: without it the command does not wait")
    if time_zone is not None and every is None:
        raise typer.BadParameter("--time-zone needs --every: it is the time zone of the recurrence")
    if unless_answered is not None and delay is None:
        raise typer.BadParameter("--unless-answered needs --delay: how long the answer may take")
    files = attach or []
    for file in files:
        file.open("rb").close()  # before anything is stored, so that a wrong name leaves nothing behind
    message = OutgoingMessage(
        text=text,
        delay_ms=delay,
        every=every,
        time_zone=time_zone,
        unless_answered=unless_answered,
        quick_replies=quick_reply or (),
    )
    if wait:
        seconds = None if timeout is None else timeout / 1000
        receipt, answers = run_quietly(_send_and_wait(dir, to, message, files, token, seconds, show=not json))
        if json:
            print_json(receipt.to_dict() | {"answers": [answer.json for answer in answers]})
        return
    with Progress.show(f"Sending to {to}"):
        receipt = run_quietly(_send(dir, to, message, files, token))
    if json:
        print_json(receipt.to_dict())
    else:
        print_line(_describe_receipt(receipt, to))


def _describe_receipt(receipt: Receipt, to: str) -> str:
    if receipt.state == "withdrawn":
        return f"Not sent to {to}, because the question is answered: {receipt.message_id}"
    if receipt.scheduled_delivery_time:
        due = local_time(receipt.scheduled_delivery_time)
        kind = f"Recurring for {to}, first due" if receipt.schedule_id else f"Scheduled for {to}, due"
        return f"{kind} {due}: {receipt.message_id}"
    return f"{'Queued' if receipt.state == 'queued' else 'Sent'} to {to}: {receipt.message_id}"


def chat(
    agent: Annotated[
        str | None,
        typer.Argument(
            metavar="[AGENT]",
            help="The id of an agent; the first of coterie.toml if not given.",
            show_default=False,
            autocompletion=complete_agent,
        ),
    ] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
) -> None:
    """Talk to an agent: replies as they come, numbered quick replies, queued mail. /help lists what you can type."""
    from coterie.cli.chat import run_chat

    all_answered = run_quietly(run_chat(dir, agent or _first_agent(dir), token))
    raise typer.Exit(0 if all_answered else 1)


def _first_agent(folder: Path) -> str:
    from coterie.config import read_config
    from coterie.errors import ConfigError
    from coterie.stores.open import require_society

    config = read_config(require_society(folder).path)
    if not config.agents:  # every agent of the file has a problem
        raise ConfigError(config.problems)
    return config.agents[0].id


async def _send(folder: Path, to: str, message: OutgoingMessage, files: Sequence[Path], token: str | None) -> Receipt:
    from coterie.cli.client import connect
    from coterie.cli.conversation import send_message

    async with connect(folder, token) as client:
        await client.check_recipient(to)
        artifacts = [await client.upload(file) for file in files]
        return await send_message(client, to, replace(message, attachments=artifacts))


async def _send_and_wait(
    folder: Path,
    to: str,
    message: OutgoingMessage,
    files: Sequence[Path],
    token: str | None,
    seconds: float | None,
    show: bool,
) -> tuple[Receipt, Sequence[ChatMessage]]:
    import asyncio
    import sys

    from coterie.cli.chat import MessageView, Screen
    from coterie.cli.conversation import open_conversation, wait_for_task
    from coterie.errors import NoAnswer

    screen = Screen(sys.stdout)
    view = MessageView(screen)
    try:
        async with open_conversation(folder, to, token) as conversation:
            artifacts = [await conversation.upload(file) for file in files]
            receipt = await conversation.send(replace(message, attachments=artifacts))
            view.mark_shown(receipt.message_id)
            view.followed_task = receipt.task
            async with asyncio.timeout(seconds):
                answers = await wait_for_task(conversation, receipt, view.handle if show else view.handle_status)
    except TimeoutError:
        raise NoAnswer(
            f"{to} has not answered in time, but has the message: see the answer later with coterie chat {to}"
        ) from None
    finally:
        screen.end_draft()
    if problem := next((answer for answer in answers if answer.is_problem), None):
        raise NoAnswer(problem.text)
    if show:
        view.show(answers)
    return receipt, answers


def delayed(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    recipient: Annotated[str | None, typer.Option(metavar="AGENT", help="Only messages to this agent.")] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most, the next due first.")] = 50,
    watch: Annotated[bool, typer.Option("--watch", help="Count down on the terminal until Ctrl-C.")] = False,
    token: Token = None,
    json: Json = False,
) -> None:
    """List delayed messages with their due times. Works beside a running society."""
    import sys

    from coterie.clock import SystemClock, to_ms

    if watch and not json and sys.stdout.isatty():
        with suppress(KeyboardInterrupt):
            run_quietly(_watch_delayed(dir, recipient, limit, token))
        return
    count, messages = run_quietly(_list_delayed(dir, recipient, limit, token))
    now = SystemClock().now()
    if json:
        items = [dict(message) | {"dueInMs": to_ms(_due(message)) - to_ms(now)} for message in messages]
        print_json({"count": count, "items": items})
    elif not messages:
        print_line(f"No delayed messages{f' to {recipient}' if recipient else ''}.")
    else:
        print_table(*_delayed_table(messages, now))
        if count > len(messages):
            print_line(f"{len(messages):,} of {count:,} shown: see more with --limit {count}")


async def _list_delayed(
    folder: Path, recipient: str | None, limit: int, token: str | None
) -> tuple[int, Sequence[Mapping[str, Any]]]:
    from coterie.cli.client import connect

    async with connect(folder, token, private="read") as client:
        return await _read_delayed(client, recipient, limit)


async def _read_delayed(client: Client, recipient: str | None, limit: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
    """The number of all delayed messages, and the first `limit` of them."""
    from coterie.cli.client import PAGE_SIZE

    if recipient is not None:
        await client.check_recipient(recipient)
    count, messages = 0, list[Mapping[str, Any]]()
    async with aclosing(client.pages("/delayed", recipient=recipient, limit=min(limit, PAGE_SIZE))) as pages:
        async for page in pages:
            count = page["count"]
            messages += [{key: value for key, value in item.items() if key != "rendered"} for item in page["items"]]
            if len(messages) >= limit:
                break
    return count, messages[:limit]


async def _watch_delayed(folder: Path, recipient: str | None, limit: int, token: str | None) -> None:
    from rich.live import Live

    from coterie.cli.client import connect
    from coterie.clock import SystemClock
    from coterie.errors import ServerStopping, ServerUnusable

    clock = SystemClock()
    with Live(auto_refresh=False, transient=True) as live:
        while True:
            has_answered = False
            try:
                async with connect(folder, token, private="read") as client:
                    while True:
                        _, messages = await _read_delayed(client, recipient, limit)
                        has_answered, now = True, clock.now()
                        live.update(build_table(*_delayed_table(messages, now)), refresh=True)
                        await clock.sleep(timedelta(seconds=1))
            except (ServerStopping, ServerUnusable):
                if not has_answered:
                    raise
                # The server has stopped meanwhile: the private one goes on.


def _due(message: Mapping[str, Any]) -> datetime:
    from datetime import datetime

    return datetime.fromisoformat(message["deliverAt"])


def _delayed_table(
    messages: Sequence[Mapping[str, Any]], now: datetime
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Columns and rows; without EVERY if no message recurs."""
    rows = [_delayed_row(message, now) for message in messages]
    shown = [n for n, name in enumerate(DELAYED_COLUMNS) if name != "EVERY" or any(row[n] for row in rows)]
    return [DELAYED_COLUMNS[n] for n in shown], [[row[n] for n in shown] for row in rows]


def _delayed_row(message: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    from coterie.text import one_line

    due = _due(message)
    text = one_line(str(message["payload"].get("text", "")), DELAYED_TEXT_WIDTH)
    every = message.get("every", "")
    return local_time(due), format_duration(due - now), message["from"], message["to"], every, text


def history(
    agent: AgentArgument,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """Show what an agent remembers, in the roles that its model sees. Works beside a running society."""
    rows = run_quietly(_read_history(dir, agent, token))
    if json:
        print_json({"agent": agent, "items": rows})
        return
    for row in rows:
        _print_history_row(row)


async def _read_history(folder: Path, agent_id: str, token: str | None) -> Sequence[Mapping[str, Any]]:
    from urllib.parse import quote

    from coterie.cli.client import connect

    async with connect(folder, token, private="read") as client:
        await client.agent(agent_id)
        return [row async for page in client.pages(f"/agents/{quote(agent_id)}/history") for row in page["items"]]


def _print_history_row(row: Mapping[str, Any]) -> None:
    from json import dumps

    lines = str(row["content"]).split("\n") if row["content"] else []
    calls = [f"→ {call['name']} {dumps(call['arguments'], ensure_ascii=False)}" for call in row.get("calls", ())]
    print_line(f"[{row['role']} ({row['from']})]" if "from" in row else f"[{row['role']}]")
    for line in (*lines, *calls):
        print_line(f"  {line.expandtabs(4)}")


def export(
    agent: AgentArgument,
    format: Annotated[  # noqa: A002
        Format | None, typer.Option("--format", help="How to write it.", show_default="md, or json with --json")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; standard output if not given.")
    ] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    json: Json = False,
) -> None:
    """Write your whole conversation with an agent. Works beside a running society."""
    import sys

    if json and to is None and format is Format.MD:
        raise typer.BadParameter("--json cannot print Markdown: leave out one of them, or name a file with --to")
    chosen = format or (Format.JSON if json else Format.MD)
    text = run_quietly(_read_export(dir, agent, chosen))
    if to is not None:
        _write_whole(to, text.encode())
        if json:
            print_json({"agent": agent, "file": str(to), "format": chosen.value, "size": len(text.encode())})
        else:
            print_line(f"Wrote {to}.")
    elif sys.stdout.isatty():
        for line in text.splitlines():
            print_line(line)
    else:
        typer.echo(text, nl=False)  # unchanged: a file or a program is not controlled by escapes


def _write_whole(file: Path, data: bytes) -> None:
    """Write the file whole or not at all; a device or a pipe as it is."""
    from coterie.files import replace_file

    if file.is_file() or (not file.exists() and file.parent.is_dir()):
        replace_file(file, data)
    else:
        file.write_bytes(data)


async def _read_export(folder: Path, agent_id: str, chosen: Format) -> str:
    import json

    from coterie.admin.inspect import Inspection, read_thread, render_markdown
    from coterie.clock import SystemClock, to_rfc3339

    async with Inspection.open(folder) as stored:
        agent = await _find_agent(stored.store, agent_id)
        messages = await read_thread(stored.store, agent_id)
    if chosen is Format.MD:
        return render_markdown(agent, messages)
    document = {
        "agent": {"id": agent.id, "name": agent.name},
        "exportedAt": to_rfc3339(SystemClock().now()),
        "messages": [message.to_dict() for message in messages],
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


async def _find_agent(store: Store, name: str) -> Agent:
    """The stored agent; `Refused` with a suggestion if there is none of that name."""
    from coterie.errors import Refused
    from coterie.text import to_storable

    agent = await store.agent(to_storable(name))
    if agent and agent.kind == "agent":
        return agent
    known = [agent.id for agent in await store.agents() if agent.kind == "agent"]
    raise Refused("unknown_agent", no_such_agent(name, known))
