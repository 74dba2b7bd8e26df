"""`coterie send`: one message from the person."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import durations
from coterie.cli.options import HOME, Dir, Json
from coterie.cli.output import Progress, moment, say, say_json

if TYPE_CHECKING:
    from coterie.messages import Receipt

PIECE = 1 << 20


def _delay(text: str | None) -> str | None:
    try:
        if text is not None:
            durations.to_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def send(
    to: Annotated[str, typer.Argument(metavar="TO", help="The id of an agent.", show_default=False)],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to say.", show_default=False)],
    delay: Annotated[
        str | None,
        typer.Option(metavar="DURATION", callback=_delay, help="Deliver later: 500ms, 10s, 5m, 2h, 1d."),
    ] = None,
    quick_reply: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Offer an answer to pick; up to 10 times.")
    ] = None,
    attach: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Send a file along; repeatable.")] = None,
    dir: Dir = HOME,  # noqa: A002
    json: Json = False,
) -> None:
    """Send a message. It is stored durably when the command returns."""
    import asyncio

    from coterie.cli import logs

    logs.stay_quiet()
    wait = None if delay is None else durations.to_ms(delay)
    for file in attach or []:
        _check_file(file)
    with Progress.shown(f"Sending to {to}"):
        receipt = asyncio.run(_send(dir, to, text, wait, quick_reply or [], attach or []))
    if json:
        say_json(receipt.to_wire())
    elif receipt.scheduled_delivery_time:
        say(f"Scheduled for {to}, due {moment(receipt.scheduled_delivery_time)}: {receipt.message_id}")
    else:
        say(f"Sent to {to}: {receipt.message_id}")


async def _send(
    folder: Path, to: str, text: str, delay_ms: float | None, quick_replies: Sequence[str], files: Sequence[Path]
) -> Receipt:
    from coterie.cli.recipients import check_recipient
    from coterie.runtime import Society

    async with Society.visit(folder) as society:
        await check_recipient(society.store, to)
        kept = [await society.artifacts.put(_pieces(file), file.name) for file in files]
        return await society.send(
            to=to,
            text=text,
            delay_ms=delay_ms,
            quick_replies=quick_replies or None,
            attachments=[artifact.ref for artifact in kept],
        )


def _check_file(file: Path) -> None:
    """Before anything is written: a typo in the second name must not leave the first file behind."""
    with file.open("rb"):
        pass


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    import asyncio

    file = await asyncio.to_thread(path.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece
    finally:
        file.close()
