"""Messages as a terminal shows them."""

from __future__ import annotations

from coterie.cli.conversation import Line
from coterie.cli.screen import Screen, plain
from coterie.messages import PERSON


def shown(line: Line, screen: Screen, *, named: bool = True) -> list[str]:
    """`named`: with who says it in front."""
    first, *more = plain(line.text)
    who = "You" if line.sender == PERSON else line.sender
    lines = [f"{screen.bold(f'{who}:')} {first}" if named else first, *more]
    return [*lines, *below(line, screen)]


def below(line: Line, screen: Screen) -> list[str]:
    """What belongs to a message besides its text: files, that it was cut short, numbered quick replies."""
    lines = [screen.dim(f"  [file {name}]") for name in line.files]
    if line.stopped:
        lines.append(screen.dim("  (stopped here)"))
    if line.options and line.to == PERSON:
        mark = " (answered)" if line.answered else ""
        lines += [f"  {screen.bold(f'{number})')} {plain(option)[0]}" for number, option in enumerate(line.options, 1)]
        lines[-1] += screen.dim(mark)
    return lines
