"""A line as somebody types it: keys in, finished lines out. It knows no terminal."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.|[^\[O])", re.S)
_PASTE, _PASTE_END = "\x1b[200~", "\x1b[201~"


@dataclass(frozen=True, slots=True)
class Entered:
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Ctrl-D on an empty line."""


class Editor:
    def __init__(self) -> None:
        self.text, self.place = "", 0
        self._keys = ""
        self._past: list[str] = []
        self._at = 0
        """Which of `_past` is shown; its length: none of them."""

    def feed(self, keys: str) -> list[Entered | Closed]:
        """What these keys finish."""
        self._keys += keys
        done: list[Entered | Closed] = []
        while self._keys:
            key = self._next_key()
            if key is None:
                break  # the rest of it is still to come
            if (finished := self._press(key)) is not None:
                done.append(finished)
        return done

    def _next_key(self) -> str | None:
        keys = self._keys
        if keys[0] != "\x1b":
            self._keys = keys[1:]
            return keys[0]
        if keys.startswith(_PASTE):
            text, end, rest = keys[len(_PASTE) :].partition(_PASTE_END)
            if not end:
                return None
            self._keys = rest
            self._insert(text.replace("\r\n", "\n").replace("\r", "\n"))
            return ""
        if not (found := _SEQUENCE.match(keys)):
            return None
        self._keys = keys[found.end() :]
        return found[0]

    def _press(self, key: str) -> Entered | Closed | None:
        match key:
            case "\r" | "\n":
                return self._enter()
            case "\x04" if not self.text:
                return Closed()
            case "\x7f" | "\x08":
                self._delete(self.place - 1)
            case "\x04" | "\x1b[3~":
                self._delete(self.place)
            case "\x1b\r" | "\x1b\n":
                self._insert("\n")
            case "\x15":
                self.text, self.place = self.text[self.place :], 0
            case "\x0b":
                self.text = self.text[: self.place]
            case "\x17":
                start = _word_before(self.text[: self.place])
                self.text, self.place = self.text[:start] + self.text[self.place :], start
            case "\x1b[D" | "\x1bOD" | "\x02":
                self.place = max(0, self.place - 1)
            case "\x1b[C" | "\x1bOC" | "\x06":
                self.place = min(len(self.text), self.place + 1)
            case "\x1b[H" | "\x1bOH" | "\x1b[1~" | "\x01":
                self.place = 0
            case "\x1b[F" | "\x1bOF" | "\x1b[4~" | "\x05":
                self.place = len(self.text)
            case "\x1b[A" | "\x1bOA" | "\x10":
                self._recall(self._at - 1)
            case "\x1b[B" | "\x1bOB" | "\x0e":
                self._recall(self._at + 1)
            case _ if key.isprintable() or key == "\t":
                self._insert(key)
        return None

    def _enter(self) -> Entered:
        text, self.text, self.place = self.text, "", 0
        if text.strip() and self._past[-1:] != [text]:
            self._past.append(text)
        self._at = len(self._past)
        return Entered(text)

    def _insert(self, text: str) -> None:
        self.text = self.text[: self.place] + text + self.text[self.place :]
        self.place += len(text)

    def _delete(self, place: int) -> None:
        if 0 <= place < len(self.text):
            self.text, self.place = self.text[:place] + self.text[place + 1 :], place

    def _recall(self, at: int) -> None:
        if not 0 <= at <= len(self._past):
            return
        self._at = at
        self.text = self._past[at] if at < len(self._past) else ""
        self.place = len(self.text)


def _word_before(text: str) -> int:
    stripped = text.rstrip()
    return stripped.rfind(" ") + 1
