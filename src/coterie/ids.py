"""Names for things that people and programs outside refer to."""

from __future__ import annotations

import hashlib
import os
import time

LENGTH = 44


def new_id() -> str:
    """A name nobody can guess: 128 random bits, behind the time, so that an index stays warm where it grows."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(16).hex()}"


def id_for(*names: str) -> str:
    """Always the same name for the same `names`: what is sent again under it is the same thing, not a second one."""
    digest = hashlib.blake2b(digest_size=LENGTH // 2)
    for name in names:
        data = name.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8) + data)
    return digest.hexdigest()
