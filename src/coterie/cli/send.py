"""`coterie send`: one message from the person."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import durations
from coterie.cli.completion import agent_ids
from coterie.cli.options import HOME, Dir, Json, Token, a_duration
from coterie.cli.output import Progress, moment, say, say_json

if TYPE_CHECKING:
    from coterie.cli.conversation import Line, News, Speech
    from coterie.messages import Receipt


def send(
    to: Annotated[
        str,
        typer.Argument(metavar="TO", help="The id of an agent.", show_default=False, autocompletion=agent_ids),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to say.", show_default=False)],
    delay: Annotated[
        str | None,
        typer.Option(metavar="DURATION", callback=a_duration, help="Deliver later: 500ms, 10s, 5m, 2h, 1d."),
    ] = None,
    quick_reply: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Offer an answer to pick; up to 10 times.")
    ] = None,
    attach: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Send a file along; repeatable.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answer, and write it.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", callback=a_duration, help="With --wait: give up after so long."),
    ] = None,
    dir: Dir = HOME,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """Send a message. It is stored durably when the command returns."""
    import asyncio

    from coterie.cli import logs
    from coterie.cli.conversation import Speech
    from coterie.cli.files import check_file

    logs.stay_quiet()
    files = attach or []
    for file in files:
        check_file(file)
    delay_ms = None if delay is None else durations.to_ms(delay)
    speech = Speech(text=text, delay_ms=delay_ms, quick_replies=quick_reply or ())
    if wait:
        seconds = None if timeout is None else durations.to_ms(timeout) / 1000
        receipt, answers = asyncio.run(_ask(dir, to, speech, files, token, seconds, quiet=json))
        if json:
            say_json(receipt.to_dict() | {"answers": [line.wire for line in answers]})
        return
    with Progress.shown(f"Sending to {to}"):
        receipt = asyncio.run(_send(dir, to, speech, files, token))
    if json:
        say_json(receipt.to_dict())
    else:
        say(_sent(to, receipt))


def _sent(to: str, receipt: Receipt) -> str:
    if receipt.scheduled_delivery_time:
        return f"Scheduled for {to}, due {moment(receipt.scheduled_delivery_time)}: {receipt.message_id}"
    return f"{'Queued' if receipt.state == 'queued' else 'Sent'} to {to}: {receipt.message_id}"


async def _send(folder: Path, to: str, speech: Speech, files: Sequence[Path], token: str | None) -> Receipt:
    from coterie.admin.inspect import Inspection
    from coterie.cli.finding import find_server
    from coterie.cli.recipients import check_recipient

    if client := find_server(folder, token):
        from coterie.cli import over_http

        async with client, Inspection.open(folder) as stored:
            await check_recipient(stored.store, to)
            refs = [await client.upload(file) for file in files]
            return await over_http.say(client, to, replace(speech, attachments=refs))
    from coterie.cli.files import pieces
    from coterie.cli.saying import say as say_here
    from coterie.society import Society

    async with Society.open_offline(folder) as society:
        await check_recipient(society.store, to)
        kept = [await society.artifacts.put(pieces(file), file.name) for file in files]
        return await say_here(society, to, replace(speech, attachments=[artifact.ref for artifact in kept]))


async def _ask(
    folder: Path, to: str, speech: Speech, files: Sequence[Path], token: str | None, seconds: float | None, quiet: bool
) -> tuple[Receipt, Sequence[Line]]:
    import asyncio

    from coterie.cli.reply import Reply
    from coterie.cli.talk import open_conversation
    from coterie.cli.waiting import answers_to
    from coterie.errors import NoAnswer

    reply = None if quiet else Reply.on_stdout()
    hear = reply.hear if reply else _ignore
    with reply or nullcontext():
        async with open_conversation(folder, to, token) as conversation:
            refs = [await conversation.attach(file) for file in files]
            receipt = await conversation.say(replace(speech, attachments=refs))
            if reply:
                reply.leave_out(receipt.message_id)
            try:
                async with asyncio.timeout(seconds):
                    answers = await answers_to(conversation, receipt.message_id, hear)
            except TimeoutError:
                raise NoAnswer(
                    f"{to} has not answered in time, but has the message: see the answer later with coterie chat {to}"
                ) from None
    if trouble := next((line for line in answers if line.is_trouble), None):
        raise NoAnswer(trouble.text)
    if reply:
        reply.show(answers)
    return receipt, answers


def _ignore(_: News) -> None:
    pass
