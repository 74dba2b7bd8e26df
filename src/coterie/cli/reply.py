"""An agent's answer on the way to standard output: as it grows on a terminal, as a whole elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from coterie.cli.conversation import Arrived, DraftOver, Line, News, Piece
from coterie.cli.lines import below, shown
from coterie.cli.screen import Screen


class Reply:
    """Shows each message once, whether it was seen growing or not."""

    def __init__(self, screen: Screen, *, speaker: str | None = None) -> None:
        """`speaker`: whose drafts are heard. None: nobody is named."""
        self._screen, self._speaker = screen, speaker
        self._draft: str | None = None
        self._said = ""
        """What was seen of that draft."""
        self._shown: set[str] = set()

    @classmethod
    def on_stdout(cls) -> Self:
        return cls(Screen(sys.stdout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.close()

    def hear(self, news: News) -> None:
        match news:
            case Piece() if self._screen.moves:
                self._grow(news)
            case DraftOver(draft, outcome) if draft == self._draft and outcome != "stored":
                self._end_draft()
                self._screen.say(self._screen.dim(f"  ({outcome})"))
            case Arrived(line) if line.state != "delayed":
                self.show([line])
            case _:
                pass

    def leave_out(self, message_id: str) -> None:
        """It needs no showing."""
        self._shown.add(message_id)

    def show(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if line.id not in self._shown:
                self._shown.add(line.id)
                self._show(line)

    def _show(self, line: Line) -> None:
        if self._draft is not None and line.text.startswith(self._said.strip()) and not line.is_trouble:
            rest = line.text[len(self._said.strip()) :]
            if rest.strip():
                self._screen.grow(rest)
            self._end_draft()
            self._screen.say(*below(line, self._screen))
            return
        self._screen.say(*shown(line, self._screen, named=self._speaker is not None))

    def _grow(self, piece: Piece) -> None:
        if piece.draft != self._draft:
            self._end_draft()
            self._draft = piece.draft
            if self._speaker is not None:
                self._screen.grow(f"{self._speaker}: ")
        new = piece.text[max(0, len(self._said) - piece.start) :]
        self._said += new
        self._screen.grow(new)

    def _end_draft(self) -> None:
        self._draft, self._said = None, ""
        self._screen.end_growing()
