"""The texts of the page, in the language of a test."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "src" / "coterie" / "web" / "static" / "words"
LOCALES = ("en-US", "zh-CN")


class Words:
    """`words("unread", n=2)` is the text of the page with this name."""

    def __init__(self, locale: str) -> None:
        self.locale = locale

    def __call__(self, key: str, **values: object) -> str:
        return re.sub(r"\{(\w+)\}", lambda hole: str(values[hole[1]]), _texts(self.locale[:2])[key]).strip()


@cache
def _texts(language: str) -> dict[str, str]:
    return dict(json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8")))
