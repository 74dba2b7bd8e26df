"""`python -m bench` runs every benchmark, `python -m bench send timers` runs two.

`python -m bench panel --beside PATH` compares this checkout with another one, in its own .venv if it has one.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

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


BESIDE = ("panel",)
"""Benchmarks that can compare two checkouts."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all if none is given")
    parser.add_argument("--beside", type=Path, metavar="PATH", help="a checkout to compare with, e.g. a git worktree")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NAMES]:
        sys.exit(f"there is no bench {unknown[0]!r}; there are: {', '.join(NAMES)}")
    if options.beside is None:
        for name in options.names or NAMES:
            import_module(f"bench.{name}").run()
        return
    if not options.names or not set(options.names) <= set(BESIDE):
        sys.exit(f"--beside needs the name of a benchmark that compares checkouts: {', '.join(BESIDE)}")
    if not (options.beside / "src" / "coterie").is_dir():
        sys.exit(f"{options.beside} is no checkout of Coterie")
    for name in options.names:
        import_module(f"bench.{name}").run(options.beside.resolve())


if __name__ == "__main__":
    main(sys.argv[1:])
