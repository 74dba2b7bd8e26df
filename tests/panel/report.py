"""`python -m tests.panel.report`: prints every acceptance check of the panel with its results.

The figures of benchmarks are valid on an idle machine only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHECKS = {
    1: "1, 3 and 10 options stand below the bubble, in their order",
    2: "options that are none are not shown at all",
    3: "a click sends the option byte for byte and closes its set, no other",
    4: "double click, held key, two tabs: one reply, the same in both",
    5: "an option that was not sent can be chosen again at once",
    6: "a typed answer or a file closes the set, and opens it when it fails",
    7: "reloads end as the server has it",
    8: "options stay open while the agent works; a withdrawn choice opens them",
    9: "options are shown as they were written and never run",
    10: "ten options fit 360 and 320 px, 44 px high, readable",
    11: "quick replies by keyboard alone, focus never on the body",
    12: "interjections wait in the strip and are taken together",
    13: "waiting items survive; a late withdrawal says so",
    14: "the composer takes words in every state but the last",
    15: "Enter belongs to the input method while it composes",
    16: "Stop ends the turn and keeps what was said and what waits",
    17: "delayed messages: row, countdown, delivery, cancel, order",
    18: "a file becomes a chip however it comes, and never vanishes",
    19: "unread rises for hidden agents only and clears everywhere",
    20: "20 cuts in 1,000 messages lose and double nothing",
    21: "a reply cut in the middle ends as the server has it",
    22: "8 tabs: usable and up to date within the limits, at most 2 streams",
    23: "axe finds nothing in 37 states, light and dark, 2 widths",
    24: "a streaming reply is announced once",
    25: "the whole journey by keyboard, a ring of 3:1 at every stop",
    26: "320 px, 200 %, spaced text: no loss; targets of 24 px",
    27: "reduced motion: none; otherwise none longer than 5 s",
    28: "script <= 60 KB, styles <= 12 KB, no foreign requests, <= 25 requests",
    29: "first paint, composer usable, layout shift",
    30: "5,000 messages: few nodes, smooth, never blank",
    31: "20 agents at 50 tokens a second: smooth, and all of it arrives",
    32: "first start without a key; both languages; every screen fits",
}
MEASURED = (3, 4, 5, 12, 16, 17, 19, 22, 29, 30, 31, 32)
"""Checks with a time limit, which the benchmarks measure."""


@dataclass
class Found:
    """Results of one check."""

    passed: int = 0
    missed: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.missed and bool(self.passed)

    def line(self, number: int) -> str:
        word = "holds " if self.holds else "MISSES" if self.missed else "UNSEEN"
        said = "; ".join([*dict.fromkeys(self.missed), *dict.fromkeys(self.figures)]) or f"{self.passed} tests"
        return f"{number:>2}  {word}  {CHECKS[number]}: {said}"


def main() -> int:
    found: defaultdict[int, Found] = defaultdict(Found)
    with tempfile.TemporaryDirectory() as folder:
        _tests(found, Path(folder) / "tests.xml")
    _bench(found)
    print("\n".join(found[number].line(number) for number in CHECKS))
    return 0 if all(found[number].holds for number in CHECKS) else 1


def _tests(found: defaultdict[int, Found], results: Path) -> None:
    pytest = [sys.executable, "-m", "pytest", "tests/panel", "-q", "-n", "2", "--dist", "worksteal"]
    settings = ["-o", "junit_family=xunit1", f"--junitxml={results}"]
    subprocess.call([*pytest, *settings], cwd=ROOT, stdout=sys.stderr)
    for case in ElementTree.parse(results).iter("testcase"):
        properties = [(one.get("name"), one.get("value") or "") for one in case.iter("property")]
        name = case.get("name")
        bad = [f"{name} {kind}" for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        for number in (int(value) for name, value in properties if name == "check"):
            one = found[number]
            one.figures += [value for name, value in properties if name == "figure"]
            one.passed += not bad
            one.missed += bad


def _bench(found: defaultdict[int, Found]) -> None:
    bench = subprocess.run([sys.executable, "-m", "bench", "panel"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in bench.stdout.splitlines():
        print(line, file=sys.stderr)
        one: dict[str, Any] = json.loads(line)
        if "check" not in one:
            continue
        check = found[one["check"]]
        said = f"{one['metric']} {one['value']:,g} {one['unit']}".rstrip()
        if one.get("holds", True):
            check.passed += "holds" in one
            check.figures.append(said)
        else:
            check.missed.append(f"{said}, wanted {one['target']}")
    if bench.returncode:
        for number in MEASURED:
            found[number].missed.append("the bench did not end")


if __name__ == "__main__":
    sys.exit(main())
