"""Names for things that people and programs outside refer to."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable

LENGTH = 44
MARK_BYTES = 8


def new_id() -> str:
    """A name nobody can guess: 128 random bits, behind the time, so that an index stays warm where it grows."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(16).hex()}"


def id_for(*names: str) -> str:
    """Always the same name for the same `names`: what is sent again under it is the same thing, not a second one."""
    return _hash(b"", names, LENGTH // 2)


def keyed_id(secret: bytes, *names: str) -> str:
    """The id for `names` in the society that owns `secret`: stable there, and unpredictable without the secret."""
    return _hash(secret, names, LENGTH // 2)


def frame_mark(secret: bytes, message_id: str, content: str) -> str:
    """The mark that encloses a message in a model's request: 64 bits that no author of `content` can know.

    The content is part of the hash. So a mark that was shown once never fits a text that quotes it.
    """
    return _hash(secret, ("frame", message_id, content), MARK_BYTES)


def new_secret() -> str:
    """256 random bits in hexadecimal digits."""
    return os.urandom(32).hex()


def _hash(key: bytes, names: Iterable[str], size: int) -> str:
    digest = hashlib.blake2b(digest_size=size, key=key)
    for name in names:
        data = name.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8) + data)
    return digest.hexdigest()
