"""Check `docs/requirements.md`: every criterion of the requirement documents is listed with existing tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<id>\d{3}-[\w.]+) \| (?P<words>.+?) \| (?P<proof>.+?) \|$", re.M)

CRITERIA = {
    "000": {1: 6, 2: 3, 3: 6, 4: 4},
    "002": {1: 4, 2: 4, 3: 2, 4: 3},
    "003": {1: 5, 2: 6, 3: 6, 4: 4, 5: 5, 6: 4},
    "004": {1: 5, 2: 5, 3: 4, 4: 5, 5: 5, 6: 5},
}
OTHERS = {"001-P1", "001-P2", "001-P3", "004-N1.1", "004-N1.2", "004-N2.1", "004-N2.2", "004-N3.1", "004-N3.2"}
NOT_YET = "not yet"


def expected() -> set[str]:
    counted = {
        f"{document}-{requirement}.{criterion}"
        for document, requirements in CRITERIA.items()
        for requirement, count in requirements.items()
        for criterion in range(1, count + 1)
    }
    return counted | OTHERS


def rows() -> list[re.Match[str]]:
    return list(ROW.finditer((ROOT / "docs/requirements.md").read_text()))


def test_every_criterion_is_listed_once() -> None:
    listed = [row["id"] for row in rows()]
    assert sorted(listed) == sorted(expected())


def test_every_named_test_exists() -> None:
    for row in rows():
        if row["proof"] == NOT_YET:
            continue
        for proof in row["proof"].split(", "):
            path, _, name = proof.partition("::")
            assert name in functions_in(ROOT / path), f"{row['id']}: there is no {proof}"


@cache
def functions_in(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
