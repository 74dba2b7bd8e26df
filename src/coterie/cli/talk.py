"""Talk to agents: `send` and `chat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, Json, Token, complete_agent, duration_option
from coterie.cli.output import Progress, local_time, print_json, print_line, run_quietly

if TYPE_CHECKING:
    from coterie.cli.conversation import ChatMessage, OutgoingMessage
    from coterie.messages import Receipt


def send(
    to: Annotated[
        str, typer.Argument(metavar="TO", help="The id of an agent.", show_default=False, autocompletion=complete_agent)
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to say.", show_default=False)],
    delay: Annotated[float | None, duration_option("Deliver later: 500ms, 10s, 5m, 2h, 1d.")] = None,
    quick_reply: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Offer an answer to pick; up to 10 times.")
    ] = None,
    attach: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Send a file along; repeatable.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answer, and write it.")] = False,
    timeout: Annotated[float | None, duration_option("With --wait: give up after so long.")] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
    json: Json = False,
) -> None:
    """Send a message. It is stored durably when the command returns."""
    from coterie.cli.conversation import OutgoingMessage

    files = attach or []
    for file in files:
        file.open("rb").close()  # before anything is stored, so that a wrong name leaves nothing behind
    message = OutgoingMessage(text=text, delay_ms=delay, quick_replies=quick_reply or ())
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
    elif receipt.scheduled_delivery_time:
        print_line(f"Scheduled for {to}, due {local_time(receipt.scheduled_delivery_time)}: {receipt.message_id}")
    else:
        print_line(f"{'Queued' if receipt.state == 'queued' else 'Sent'} to {to}: {receipt.message_id}")


def chat(
    agent: Annotated[
        str | None,
        typer.Argument(
            metavar="[AGENT]",
            help="The id of an agent; the first of coterie.toml when not given.",
            show_default=False,
            autocompletion=complete_agent,
        ),
    ] = None,
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    token: Token = None,
) -> None:
    """Talk to an agent: replies as they come, numbered quick replies, interjections. /help lists what you can type."""
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

    from coterie.cli.conversation import open_conversation, wait_for_answers
    from coterie.cli.terminal import MessageView, Screen
    from coterie.errors import NoAnswer

    screen = Screen(sys.stdout)
    view = MessageView(screen)
    try:
        async with open_conversation(folder, to, token) as conversation:
            artifacts = [await conversation.upload(file) for file in files]
            receipt = await conversation.send(replace(message, attachments=artifacts))
            view.mark_shown(receipt.message_id)
            async with asyncio.timeout(seconds):
                answers = await wait_for_answers(
                    conversation, receipt.message_id, view.handle if show else lambda _: None
                )
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
