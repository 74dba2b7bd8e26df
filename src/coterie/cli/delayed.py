"""`coterie delayed`: what is still to be delivered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import durations
from coterie.cli.options import HOME, Dir, Json
from coterie.cli.output import moment, say, say_json, say_table, table_of

if TYPE_CHECKING:
    from coterie.messages import Message

PAGE = 500
TEXT_WIDTH = 60


def delayed(
    dir: Dir = HOME,  # noqa: A002
    recipient: Annotated[str | None, typer.Option(metavar="AGENT", help="Only messages to this agent.")] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="At most so many, the next due first.")] = 50,
    watch: Annotated[bool, typer.Option("--watch", help="Count down on the terminal until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """List delayed messages with their due times. Works beside a running society."""
    import asyncio
    import sys

    from coterie.clock import SystemClock, to_ms

    if watch and not json and sys.stdout.isatty():
        with suppress(KeyboardInterrupt):
            asyncio.run(_watch(dir, recipient, limit))
        return
    count, messages = asyncio.run(_read(dir, recipient, limit))
    now = SystemClock().now()
    waits = [(message.deliver_at or now) - now for message in messages]
    if json:
        items = [m.to_dict() | {"dueInMs": to_ms(m.deliver_at or now) - to_ms(now)} for m in messages]
        say_json({"count": count, "items": items})
        return
    if not messages:
        say(f"No delayed messages{f' to {recipient}' if recipient else ''}.")
        return
    rows = [_row(message, durations.shown(wait)) for message, wait in zip(messages, waits, strict=True)]
    say_table(("DUE", "IN", "FROM", "TO", "TEXT"), rows)
    if count > len(messages):
        say(f"{len(messages):,} of {count:,} shown: see more with --limit {count}")


async def _watch(folder: Path, recipient: str | None, limit: int) -> None:
    from datetime import timedelta

    from rich.live import Live

    from coterie.clock import SystemClock

    clock = SystemClock()
    with Live(auto_refresh=False, transient=True) as live:
        while True:
            _, messages = await _read(folder, recipient, limit)
            now = clock.now()
            rows = [_row(message, durations.shown((message.deliver_at or now) - now)) for message in messages]
            live.update(table_of(("DUE", "IN", "FROM", "TO", "TEXT"), rows), refresh=True)
            await clock.sleep(timedelta(seconds=1))


async def _read(folder: Path, recipient: str | None, limit: int) -> tuple[int, Sequence[Message]]:
    from coterie.admin.inspect import Inspection
    from coterie.cli.recipients import check_recipient

    async with Inspection.open(folder) as society:
        if recipient is not None:
            await check_recipient(society.store, recipient)
        found: list[Message] = []
        while page := await society.store.delayed(
            recipient, after=found[-1] if found else None, limit=min(PAGE, limit - len(found))
        ):
            found += page
            if len(found) >= limit:
                break
        return await society.store.delayed_count(recipient), found


def _row(message: Message, wait: str) -> tuple[str, ...]:
    from coterie.text import one_line

    text = one_line(str(message.payload.get("text", "")), TEXT_WIDTH)
    due = moment(message.deliver_at) if message.deliver_at else ""
    return due, wait, message.sender, message.to, text
