"""Reads the values of a JSON file. Each wrong value is reported with its path, and reading goes on."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeGuard

from coterie.errors import Problem
from coterie.problem_texts import ProblemText
from coterie.text import closest_match, one_line, to_storable

MAX_SAFE_INTEGER = 2**53 - 1
"""The largest integer that every JSON parser reads exactly."""
UNKNOWN_KEY = "unknown_field"
"""Code of the problem of an unknown key, which has no effect."""


@dataclass(frozen=True, slots=True)
class JsonNode:
    """A JSON value with its path. Invalid values are added to `problems`; null counts as absent."""

    value: object
    file: str
    path: str
    problems: list[Problem]

    def child(self, key: str) -> JsonNode:
        value = self.value.get(key) if isinstance(self.value, dict) else None
        return JsonNode(value, self.file, f"{self.path}.{key}" if self.path else key, self.problems)

    def items(self) -> list[JsonNode]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            self.report_expected("expected_array")
            return []
        return [JsonNode(item, self.file, f"{self.path}[{i}]", self.problems) for i, item in enumerate(self.value)]

    def is_object(self, known: Collection[str]) -> bool:
        """True for an object. Reports unknown keys, except notes of the owner: those begin with "_" or "$"."""
        if not isinstance(self.value, dict):
            self.report_expected("expected_object")
            return False
        missing = [key for key in known if key not in self.value]
        for key in self.value:
            if key not in known and not key.startswith(("_", "$")):
                suggestion = find_typo(key, missing) or closest_match(key, set(missing))
                self.child(one_line(key, 40)).report(ProblemText(UNKNOWN_KEY, meant=suggestion))
        return True

    def required_text(self) -> str | None:
        if isinstance(self.value, str) and (text := to_storable(self.value).strip()):
            return text
        self.report_expected("expected_text")
        return None

    def optional_text(self) -> str:
        """Return the text, empty if absent."""
        if self.value is None or isinstance(self.value, str):
            return to_storable(self.value or "").strip()
        self.report_expected("expected_string")
        return ""

    def text_items(self) -> tuple[str, ...]:
        return tuple(text for item in self.items() if (text := item.required_text()))

    def integer(self, default: int, *, least: int = 1) -> int:
        number = self.optional_integer(least)
        return default if number is None else number

    def optional_integer(self, least: int = 1) -> int | None:
        number = self.value
        if isinstance(number, int) and not isinstance(number, bool) and least <= number <= MAX_SAFE_INTEGER:
            return number
        if number is not None:
            self.report_expected("expected_integer_least", least=least)
        return None

    def optional_number(self, most: float) -> float | None:
        if is_number(self.value, most):
            return self.value
        if self.value is not None:
            self.report_expected("expected_number", most=f"{most:g}")
        return None

    def milliseconds(self) -> timedelta | None:
        number = self.optional_integer()
        return None if number is None else timedelta(milliseconds=number)

    def report_expected(self, code: str, **values: object) -> None:
        self.report(ProblemText(code, **values, got=describe_value(self.value)))

    def report(self, message: str) -> None:
        self.problems.append(Problem(f"{self.file}: {self.path}" if self.path else self.file, message))


def is_number(value: object, most: float) -> TypeGuard[float]:
    """True for a number from 0 to `most`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def describe_value(value: object) -> str:
    """Describe a value for an error message."""
    match value:
        case None:
            return ProblemText("got_nothing")
        case dict():
            return ProblemText("got_object")
        case list():
            return ProblemText("got_array")
        case int() if not isinstance(value, bool) and abs(value) > MAX_SAFE_INTEGER:
            return ProblemText("got_large_number")
    return one_line(json.dumps(value, ensure_ascii=False), 40)


def find_typo(word: str, known: Collection[str]) -> str | None:
    """Return the known word that differs from `word` by one edit or only in case."""
    return next((other for other in known if _is_one_edit(word.lower(), other.lower())), None)


def _is_one_edit(a: str, b: str) -> bool:
    """True for at most one letter added, removed or changed, or two neighbours swapped."""
    a, b = _without_common_prefix(a, b)
    a, b = _without_common_prefix(a[::-1], b[::-1])
    return max(len(a), len(b)) <= 1 or (len(a) == 2 and a == b[::-1])


def _without_common_prefix(a: str, b: str) -> tuple[str, str]:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[same:], b[same:]
