"""`coterie chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.completion import agent_ids
from coterie.cli.options import HOME, Dir, Token


def chat(
    agent: Annotated[
        str | None,
        typer.Argument(
            metavar="[AGENT]",
            help="The id of an agent; the first of coterie.toml when not given.",
            show_default=False,
            autocompletion=agent_ids,
        ),
    ] = None,
    dir: Dir = HOME,  # noqa: A002
    token: Token = None,
) -> None:
    """Talk to an agent: replies as they come, numbered quick replies, interjections. /help lists what you can type."""
    import asyncio

    from coterie.cli import logs

    logs.stay_quiet()
    answered = asyncio.run(_chat(dir, agent or _first_agent(dir), token))
    raise typer.Exit(0 if answered else 1)


def _first_agent(folder: Path) -> str:
    from coterie.config import read_config
    from coterie.errors import ConfigError
    from coterie.stores.open import require_society

    config = read_config(require_society(folder).path)
    if not config.agents:  # all that the file describes were left out
        raise ConfigError(config.problems)
    return config.agents[0].id


async def _chat(folder: Path, agent_id: str, token: str | None) -> bool:
    """Whether everything that was to be answered was."""
    import sys

    from coterie.cli.chat_session import Session, take_lines, take_part
    from coterie.cli.screen import Screen
    from coterie.cli.talk import open_conversation

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(sys.stdout, typing=interactive)
    try:
        async with open_conversation(folder, agent_id, token) as conversation:
            session = Session(conversation, screen)
            return await (take_part(session) if interactive else take_lines(session))
    finally:
        screen.close()
