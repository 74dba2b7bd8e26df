"""List delayed messages: `delayed`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.agents import find_agent
from coterie.cli.options import DEFAULT_FOLDER, Dir, Json
from coterie.cli.output import (
    build_table,
    format_duration,
    local_time,
    print_json,
    print_line,
    print_table,
    run_quietly,
)

if TYPE_CHECKING:
    from datetime import datetime

    from coterie.messages import Message

PAGE_SIZE = 500
TEXT_WIDTH = 60
COLUMNS = ("DUE", "IN", "FROM", "TO", "TEXT")


def delayed(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    recipient: Annotated[str | None, typer.Option(metavar="AGENT", help="Only messages to this agent.")] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="At most so many, the next due first.")] = 50,
    watch: Annotated[bool, typer.Option("--watch", help="Count down on the terminal until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """List delayed messages with their due times. Works beside a running society."""
    import sys

    from coterie.clock import SystemClock, to_ms

    if watch and not json and sys.stdout.isatty():
        with suppress(KeyboardInterrupt):
            run_quietly(_watch(dir, recipient, limit))
        return
    count, messages = run_quietly(_read_delayed(dir, recipient, limit))
    now = SystemClock().now()
    if json:
        items = [m.to_dict() | {"dueInMs": to_ms(m.deliver_at or now) - to_ms(now)} for m in messages]
        print_json({"count": count, "items": items})
    elif not messages:
        print_line(f"No delayed messages{f' to {recipient}' if recipient else ''}.")
    else:
        print_table(COLUMNS, [_row(message, now) for message in messages])
        if count > len(messages):
            print_line(f"{len(messages):,} of {count:,} shown: see more with --limit {count}")


async def _watch(folder: Path, recipient: str | None, limit: int) -> None:
    from rich.live import Live

    from coterie.clock import SystemClock

    clock = SystemClock()
    with Live(auto_refresh=False, transient=True) as live:
        while True:
            _, messages = await _read_delayed(folder, recipient, limit)
            now = clock.now()
            live.update(build_table(COLUMNS, [_row(message, now) for message in messages]), refresh=True)
            await clock.sleep(timedelta(seconds=1))


async def _read_delayed(folder: Path, recipient: str | None, limit: int) -> tuple[int, Sequence[Message]]:
    """The number of all delayed messages, and the first `limit` of them."""
    from coterie.admin.inspect import Inspection

    async with Inspection.open(folder) as stored:
        if recipient is not None:
            await find_agent(stored.store, recipient, or_person=True)
        messages: list[Message] = []
        while len(messages) < limit:
            size = min(PAGE_SIZE, limit - len(messages))
            page = await stored.store.delayed(recipient, after=messages[-1] if messages else None, limit=size)
            if not page:
                break
            messages += page
        return await stored.store.delayed_count(recipient), messages


def _row(message: Message, now: datetime) -> tuple[str, ...]:
    from coterie.text import one_line

    due = message.deliver_at or now
    text = one_line(str(message.payload.get("text", "")), TEXT_WIDTH)
    return local_time(due), format_duration(due - now), message.sender, message.to, text
