"""A value in one of the owner's JSON files, with its place in it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from coterie.errors import Problem
from coterie.text import clean, one_line

LARGEST = 2**53 - 1
"""The largest whole number that every JSON reader understands alike."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is wrong with the value goes into `problems`, and reading goes on. null is the same as absent."""

    value: object
    file: str
    path: str
    problems: list[Problem]

    def at(self, key: str) -> Node:
        value = self.value.get(key) if isinstance(self.value, dict) else None
        return Node(value, self.file, f"{self.path}.{key}" if self.path else key, self.problems)

    def items(self) -> list[Node]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            self.expected("an array")
            return []
        return [Node(item, self.file, f"{self.path}[{i}]", self.problems) for i, item in enumerate(self.value)]

    def is_object(self, known: Collection[str]) -> bool:
        """Whether it is one. A key one slip of the pen away from a `known` one is reported, any other is let be."""
        if not isinstance(self.value, dict):
            self.expected("an object")
            return False
        missing = [key for key in known if key not in self.value]
        for key in self.value:
            if key not in known and (meant := slip_of(key, missing)):
                self.at(one_line(key, 40)).wrong(f'is not known; did you mean "{meant}"?')
        return True

    def text(self) -> str | None:
        """None when there is none, or none that can be used."""
        return None if self.value is None else self.needed_text()

    def needed_text(self) -> str | None:
        if isinstance(self.value, str) and (text := clean(self.value).strip()):
            return text
        self.expected("a non-empty string")
        return None

    def words(self) -> str:
        """Any text, also none."""
        if self.value is None or isinstance(self.value, str):
            return clean(self.value or "").strip()
        self.expected("a string")
        return ""

    def texts(self) -> tuple[str, ...]:
        return tuple(text for item in self.items() if (text := item.needed_text()))

    def whole(self, default: int, *, least: int = 1) -> int:
        number = self.maybe_whole(least)
        return default if number is None else number

    def maybe_whole(self, least: int = 1) -> int | None:
        number = self.value
        if isinstance(number, int) and not isinstance(number, bool) and least <= number <= LARGEST:
            return number
        if number is not None:
            self.expected(f"a whole number of at least {least}")
        return None

    def expected(self, what: str) -> None:
        self.wrong(f"expected {what}, got {shown(self.value)}")

    def wrong(self, message: str) -> None:
        self.problems.append(Problem(f"{self.file}: {self.path}" if self.path else self.file, message))


def shown(value: object) -> str:
    """A value from a file as an error message may quote it."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "an object"
        case list():
            return "an array"
        case int() if not isinstance(value, bool) and abs(value) > LARGEST:
            return "a number too large"
    return one_line(json.dumps(value, ensure_ascii=False), 40)


def slip_of(word: str, known: Collection[str]) -> str | None:
    """The known word that differs from `word` by one slip of the pen, or only in capitals."""
    return next((other for other in known if _one_slip(word.lower(), other.lower())), None)


def _one_slip(a: str, b: str) -> bool:
    """At most one letter added, left out or changed, or two neighbours swapped."""
    a, b = _without_common_start(a, b)
    a, b = _without_common_start(a[::-1], b[::-1])
    return max(len(a), len(b)) <= 1 or (len(a) == 2 and a == b[::-1])


def _without_common_start(a: str, b: str) -> tuple[str, str]:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[same:], b[same:]
