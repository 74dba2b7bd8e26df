"""`python -m bench` runs every benchmark, `python -m bench send timers` runs two."""

from __future__ import annotations

import sys
from importlib import import_module

NAMES = (
    "send",
    "delayed",
    "timers",
    "startup",
    "memory",
    "streams",
    "turns",
    "interruption",
    "http",
    "doors",
    "panel",
    "postgres",
    "big",
    "year",
)


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in NAMES]:
        sys.exit(f"there is no bench {unknown[0]!r}; there are: {', '.join(NAMES)}")
    for name in names or NAMES:
        import_module(f"bench.{name}").run()


if __name__ == "__main__":
    main(sys.argv[1:])
