"""Ids of messages, artifacts and other things that the outside refers to."""

from __future__ import annotations

import hashlib
import os
import time
from base64 import b32encode
from collections.abc import Iterable

ID_LENGTH = 44
FRAME_MARK_BYTES = 5
"""40 bits: a text of 1 MiB holds about 80,000 guesses, so 13 million such messages guess one mark."""


def new_id() -> str:
    """An id with 128 random bits after a timestamp; the timestamp keeps index inserts local."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(16).hex()}"


def id_for(*names: str) -> str:
    """The id derived from `names`: the same names give the same id, so a retry is recognised."""
    return _hash(b"", names, ID_LENGTH // 2)


def keyed_id(secret: bytes, *names: str) -> str:
    """The id derived from `names` and the society's `secret`; unpredictable without the secret."""
    return _hash(secret, names, ID_LENGTH // 2)


def frame_mark(secret: bytes, message_id: str, content: str) -> str:
    """The mark that frames a message in a model request, 8 of a-z and 2-7; its author cannot predict it.

    The content is hashed too, so a text that quotes a known mark gets a different one.
    """
    return _to_mark(_digest(secret, ("frame", message_id, content), FRAME_MARK_BYTES))


def random_mark() -> str:
    """A mark for a message that has none yet."""
    return _to_mark(os.urandom(FRAME_MARK_BYTES))


def _to_mark(data: bytes) -> str:
    return b32encode(data).decode().lower()


def new_secret() -> str:
    """256 random bits, hexadecimal."""
    return os.urandom(32).hex()


def _hash(key: bytes, names: Iterable[str], size: int) -> str:
    return _digest(key, names, size).hex()


def _digest(key: bytes, names: Iterable[str], size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=size, key=key)
    for name in names:
        data = name.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8) + data)
    return digest.digest()
