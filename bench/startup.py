"""Startup time of imports, of the command line and of a society."""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path

from bench import child, rows
from bench.report import Report, best

MESSAGES, AGENTS = 100_000, 100
TARGETS_MS = {"import coterie": 150, "coterie --help": 300}
READY_SECONDS = 1.5


def run() -> None:
    report = Report("startup")
    with tempfile.TemporaryDirectory() as folder:
        _imports(report, Path(folder))
        _societies(report, Path(folder))


def _imports(report: Report, folder: Path) -> None:
    compiled, fresh = child.with_bytecode(folder / "compiled"), child.without_bytecode(folder / "never")
    ways: dict[str, tuple[str, ...]] = {
        "limit: bare interpreter": ("-c", "pass"),
        "import coterie": ("-c", "import coterie"),
        "import coterie.society": ("-c", "import coterie.society"),
    }
    if (child.ROOT / "src/coterie/__main__.py").exists():
        ways["coterie --help"] = ("-m", "coterie", "--help")
    for arguments in ways.values():
        child.seconds(*arguments, env=compiled)  # writes the bytecode
    cached = best({name: partial(child.seconds, *way, env=compiled) for name, way in ways.items()}, pick=min)
    for name, took in cached.items():
        report.line(name, took * 1000, "ms", at_most=TARGETS_MS.get(name))
    uncached = best({name: partial(child.seconds, *way, env=fresh) for name, way in ways.items()}, 1)
    for name, took in uncached.items():
        report.line(f"{name}, no bytecode anywhere", took * 1000, "ms")


def _societies(report: Report, folder: Path) -> None:
    env, full, number = child.with_bytecode(folder / "compiled"), folder / "full", itertools.count()
    rows.make_society(full, AGENTS, rows.message_rows(MESSAGES, rows.agent_names(AGENTS)))

    def ready(place: Path) -> float:
        return child.seconds_to_first_line("-m", "bench.society", "open", str(place), env=env)

    def ready_after_kill() -> float:
        child.seconds_to_first_line("-m", "bench.society", "send", str(full), env=env, kill=True)
        return ready(full)

    def serving(place: Path) -> float:
        """Time until the server answers; the last announced line comes after that."""
        command = ("-m", "coterie", "serve", str(place), "--port", "0")
        return child.seconds_to_first_line(*command, env=env, kill=True)

    ready(full)  # writes the bytecode
    serving(full)
    ways = {
        "new folder": lambda: ready(folder / f"new-{next(number)}"),
        "100,000 messages stored": lambda: ready(full),
        "100,000 messages stored, after kill -9": ready_after_kill,
        "100,000 messages stored, answering HTTP": lambda: serving(full),
    }
    for name, took in best(ways, pick=min).items():
        at_most = READY_SECONDS if "stored" in name else None
        report.line(f"ready for messages, from the start of Python: {name}", took, "s", at_most=at_most)
