"""Answers that are too long for a message: the beginning as text, the whole as a file."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from coterie.artifacts import Artifact
from coterie.drafts import MAX_PAYLOAD_BYTES
from coterie.errors import CoterieError, StoreUnavailable

SHOWN = 32_000
"""Characters of a text that is too long, in its message and in the history."""
FILENAME = "answer.md"
_ROOM = 4_096
"""Bytes of a payload that are left for what stands beside the text."""
_MOST_BYTES_OF_ONE = 6
"""A control character in JSON, the longest there is."""
log = logging.getLogger(__name__)
Keep = Callable[[bytes, str], Awaitable[Artifact]]
"""Stores a file durably; what it is called comes second."""


def is_too_long(text: str) -> bool:
    """True if no message can carry `text`."""
    limit = MAX_PAYLOAD_BYTES - _ROOM
    return len(text) * _MOST_BYTES_OF_ONE > limit and len(msgspec.json.encode(text)) > limit


def shortened(text: str, note: str) -> str:
    """The beginning of `text`, with a note on how much is missing."""
    return f"{text[:SHOWN]}\n\n[Shortened: these are the first {SHOWN:,} of {len(text):,} characters. {note}]"


async def fit_answer(text: str, keep: Keep | None) -> tuple[str, tuple[dict[str, Any], ...]]:
    """`text` as a message can carry it, and the attachments that hold the whole, if that is too long.

    The file is durable before the message that names it. If it cannot be stored, the text says so.
    """
    if not is_too_long(text):
        return text, ()
    if keep is None:
        return shortened(text, "The rest was not kept."), ()
    try:
        artifact = await keep(text.encode(), FILENAME)
    except StoreUnavailable:
        raise  # it comes back, and is waited for
    except (CoterieError, OSError) as error:
        log.warning("an answer of %d characters cannot be kept whole: %s", len(text), error)
        return shortened(text, f"The rest could not be kept: {str(error)[:200]}"), ()
    return shortened(text, f"The whole is in the file {FILENAME}, artifactRef {artifact.ref}."), (artifact.to_wire(),)
