"""Ids of messages, artifacts and other things that the outside refers to."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable

ID_LENGTH = 44
FRAME_MARK_BYTES = 8


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
    """The 64-bit mark that frames a message in a model request; its author cannot predict it.

    The content is hashed too, so a text that quotes a known mark gets a different one.
    """
    return _hash(secret, ("frame", message_id, content), FRAME_MARK_BYTES)


def new_secret() -> str:
    """256 random bits, hexadecimal."""
    return os.urandom(32).hex()


def _hash(key: bytes, names: Iterable[str], size: int) -> str:
    digest = hashlib.blake2b(digest_size=size, key=key)
    for name in names:
        data = name.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8) + data)
    return digest.hexdigest()
